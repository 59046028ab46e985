//! Launches on the emulated machine.

#![allow(unsafe_code)]

#[cxx::bridge(namespace = "emu")]
#[allow(unreachable_pub, missing_docs)]
mod ffi {
    struct RawLaunch<'a> {
        variant: &'a str,
        grid: u32,
        block: u32,
        shared_bytes: u32,
        params: &'a [u8],
        overlap: bool,
        max_resident: u32,
    }

    struct RawSchedule {
        seed: u64,
        landing: u8,
        disturbed: bool,
    }

    // SAFETY: both functions keep no reference; params are read as the kernel reads them (see `run`).
    unsafe extern "C++" {
        include!("bridge.h");
        fn run_launches(launches: &[RawLaunch], schedule: &RawSchedule) -> Result<()>;
        fn has_variant(name: &str) -> bool;
    }
}

/// One launch of a kernel.
#[derive(Clone, Copy, Debug, Default)]
pub struct Launch<'a> {
    /// Name of the variant, as `Variant` spells it; `@sm_80` or `@sm_100` at its end asks for another architecture's code.
    pub variant: &'a str,
    /// Blocks.
    pub grid: u32,
    /// Threads of a block: what the kernel says.
    pub block: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// The kernel's params struct.
    pub params: &'a [u8],
    /// May begin before the launch before it has ended (programmatic dependent launch).
    pub overlap: bool,
    /// Blocks in flight at once; 0 is all of them. Kernels whose blocks wait for each other need all.
    pub max_resident: u32,
}

/// When asynchronous copies land.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Landing {
    /// As they are issued.
    AtOnce,
    /// Whenever the schedule wants, in any order.
    AnyTime,
    /// When nothing else can go on, or their own thread waits for them.
    AtTheEnd,
}

/// How the machine behaves where a GPU is free to choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Of all random choices.
    pub seed: u64,
    /// When asynchronous copies land.
    pub landing: Landing,
    /// Warps run in random order, are interrupted, and stand still for a while.
    pub disturbed: bool,
}

impl Schedule {
    /// The fastest schedule: nothing is random.
    pub const PLAIN: Self = Self { seed: 0, landing: Landing::AtOnce, disturbed: false };

    /// A disturbed schedule; consecutive seeds take turns with when copies land.
    pub fn seeded(seed: u64) -> Self {
        let landing = match seed % 3 {
            0 => Landing::AtTheEnd,
            1 => Landing::AnyTime,
            _ => Landing::AtOnce,
        };
        Self { seed, landing, disturbed: true }
    }
}

/// Runs one kernel. The error says which thread did what, or which wait for ever.
pub fn launch(launch: &Launch, schedule: &Schedule) -> Result<(), String> {
    run(&[*launch], schedule)
}

/// Runs kernels one after the other; one that overlaps may begin before the one before it has ended.
///
/// Kernels read and write the addresses in their params: it is for the caller to see that these lie in
/// memory that lives, as it is with a GPU.
pub fn run(launches: &[Launch], schedule: &Schedule) -> Result<(), String> {
    let raw: Vec<_> = launches
        .iter()
        .map(|launch| ffi::RawLaunch {
            variant: launch.variant,
            grid: launch.grid,
            block: launch.block,
            shared_bytes: launch.shared_bytes,
            params: launch.params,
            overlap: launch.overlap,
            max_resident: launch.max_resident,
        })
        .collect();
    let schedule = ffi::RawSchedule {
        seed: schedule.seed,
        landing: schedule.landing as u8,
        disturbed: schedule.disturbed,
    };
    ffi::run_launches(&raw, &schedule).map_err(|e| e.what().to_owned())
}

/// Whether the emulator was built with a variant.
pub fn has_variant(name: &str) -> bool {
    ffi::has_variant(name)
}

/// What runs for a kernel variant of an engine on a GPU of this compute capability: the shape of its matrix is a
/// parameter here, and other GPUs than Hopper's may have code of their own.
pub fn variant_for(variant: &str, capability: (u32, u32)) -> Result<String, String> {
    let name = variant.split(".SHAPE_").next().unwrap_or(variant);
    let other = match capability {
        (9, 0) => String::new(),
        (10, _) => format!("{name}@sm_100"),
        _ => format!("{name}@sm_80"),
    };
    let name = if has_variant(&other) { other } else { name.to_string() };
    if has_variant(&name) {
        Ok(name)
    } else {
        Err(format!("the emulator was built without {name}"))
    }
}
