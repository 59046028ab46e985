//! Loaded code: modules, their functions, and what a launch of one must keep to.

use crate::config::Config;
use crate::cubin::{Cubin, Kernel};
use crate::fault::{
    Fault, INVALID_IMAGE, INVALID_VALUE, NO_BINARY_FOR_GPU, NOT_FOUND, NOT_SUPPORTED, Outcome,
};
use crate::table::Handle;

/// Dynamic shared memory that a function may use without asking.
const DEFAULT_SHARED_BYTES: u32 = 48 << 10;

/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES` and `CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT`.
const MAX_DYNAMIC_SHARED: u32 = 8;
const CARVEOUT: u32 = 9;

/// A loaded cubin.
pub(crate) struct Module {
    kernels: Vec<Kernel>,
    /// What the emulator runs for it.
    variant: String,
}

/// A kernel of a module.
#[derive(Clone)]
pub(crate) struct Function {
    pub(crate) module: Handle,
    pub(crate) variant: String,
    pub(crate) kernel: Kernel,
    max_dynamic_shared: u32,
}

impl Module {
    /// Refuses code that this GPU would, and code that the table does not know.
    pub(crate) fn new(cubin: Cubin, capability: (u32, u32), config: &Config) -> Outcome<Self> {
        let (major, minor) = (cubin.sm / 10, cubin.sm % 10);
        let suits = match cubin.is_for_one {
            true => (major, minor) == capability,
            false => major == capability.0 && minor <= capability.1,
        };
        if !suits {
            return Err(Fault::plain(NO_BINARY_FOR_GPU));
        }
        let variant = config.variant_of(&cubin.hash);
        let variant = variant.and_then(|variant| spec_emu::variant_for(&variant, capability));
        let variant = variant.map_err(|message| Fault::wrong(INVALID_IMAGE, message))?;
        Ok(Self { kernels: cubin.kernels, variant })
    }

    /// The kernel of this name in the module that `own` stands for.
    pub(crate) fn function(&self, own: Handle, name: &str) -> Outcome<Function> {
        let found = self.kernels.iter().find(|kernel| kernel.name == name);
        let kernel = found.ok_or(Fault::plain(NOT_FOUND))?.clone();
        let max_dynamic_shared = DEFAULT_SHARED_BYTES.saturating_sub(kernel.shared_bytes);
        Ok(Function { module: own, variant: self.variant.clone(), kernel, max_dynamic_shared })
    }
}

impl Function {
    /// Sets one of the attributes that are known here.
    pub(crate) fn set(&mut self, attribute: u32, value: i32, capability: (u32, u32)) -> Outcome {
        let most = most_shared_bytes(capability) - self.kernel.shared_bytes;
        match (attribute, u32::try_from(value)) {
            (MAX_DYNAMIC_SHARED, Ok(bytes)) if bytes <= most => self.max_dynamic_shared = bytes,
            (CARVEOUT, Ok(0..=100)) => (),
            (MAX_DYNAMIC_SHARED | CARVEOUT, _) => {
                let name = &self.kernel.name;
                let message = format!("{value} for attribute {attribute} of {name}");
                return Err(Fault::wrong(INVALID_VALUE, message));
            }
            _ => {
                let message = format!("attribute {attribute} of functions is not emulated");
                return Err(Fault::wrong(NOT_SUPPORTED, message));
            }
        }
        Ok(())
    }

    /// Whether a block of these sizes can be launched.
    pub(crate) fn check(&self, threads: u32, dynamic_shared: u32) -> Outcome {
        let Kernel { name, max_threads, .. } = &self.kernel;
        if threads > *max_threads {
            let message = format!("{name} has up to {max_threads} threads, not {threads}");
            return Err(Fault::wrong(INVALID_VALUE, message));
        }
        if dynamic_shared > self.max_dynamic_shared {
            let max = self.max_dynamic_shared;
            let message =
                format!("{name} has up to {max} bytes of shared memory, not {dynamic_shared}");
            return Err(Fault::wrong(INVALID_VALUE, message));
        }
        Ok(())
    }
}

/// Shared memory that a block can have at most.
fn most_shared_bytes(capability: (u32, u32)) -> u32 {
    let kib = match capability {
        (8, 0) => 163,
        (8, _) | (12, _) => 99,
        _ => 227,
    };
    kib << 10
}
