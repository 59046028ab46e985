//! Prints what the emulated driver is told about the kernels of engines, by the variable `EMU_DRIVER_CODE`.
//!
//!     code_table FILE.engine...

use std::process::ExitCode;

use spec_core::engine::Engine;

fn main() -> ExitCode {
    for path in std::env::args().skip(1) {
        match Engine::open(&path) {
            Ok(engine) => print!("{}", spec_emu::code_table(&engine)),
            Err(error) => {
                eprintln!("code_table: {error}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}
