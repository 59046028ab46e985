//! A `libcuda.so` for tests: what this project calls of the CUDA driver's interface, over the emulated machine. Found
//! by the loader under the driver's name, it lets a whole process run as if there were a GPU.
//!
//! It is stricter than a driver. What a driver may let pass, such as the use of what was destroyed, or leaves
//! undefined, is an error here with a line on stderr that begins `emulated libcuda:`. Work waits as long as the
//! interface allows, so that nobody can rely on its being done. See `config` for what is set by variables.

mod api;
mod code;
mod config;
mod context;
mod cubin;
mod fault;
mod machine;
mod memory;
mod stream;
mod table;
