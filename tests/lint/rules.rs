//! What the machine code of a kernel must and must not be.

use super::code::Listing;
use spec_build::cuda::Kernel;
use spec_kernels::{Epilogue, Format, Variant};

/// Registers of a thread at most. A multiprocessor has 65536 of them: two products, of 320 threads, or two attentions, of
/// 128, must fit, so that one kernel starts under the one before it. A quarter of it has as many warps as five of two
/// products.
const REGISTERS: [(&str, u32); 14] = [
    ("accept", 64),
    ("attention", 216),
    ("embed", 64),
    ("finish", 64),
    ("gemm", 96),
    ("join", 64),
    // Alone in a multiprocessor, of 384 threads, which share them anew when they have begun.
    ("multiply", 168),
    ("normalise", 64),
    ("quantise", 64),
    ("rope", 64),
    ("rows", 64),
    ("sample", 128),
    ("spread", 64),
    ("unpack", 64),
];

/// Operations on the thread's own memory, which is the GPU's: spilled registers.
const SPILLS: [&str; 2] = ["LDL", "STL"];

/// Operations that add to memory from any thread, and the number formats in which the result depends on their order.
const ATOMICS: [&str; 5] = ["RED", "REDG", "ATOM", "ATOMG", "ATOMS"];
const FLOATS: [&str; 6] = ["F32", "F64", "F16", "F16x2", "BF16", "BF16x2"];

/// Waiting for the kernel before, and letting the next one start.
const OVERLAP: [&str; 2] = ["ACQBULK", "PREEXIT"];

/// Unpacks two e4m3 values.
const UNPACK: &str = "F2FP.F16.E4M3.UNPACK_B";

/// Of attention in wide tiles, which has 16 rows a warp: two blocks fit, and prompts leave no room for a third kernel.
const WIDE_ATTENTION: u32 = 255;

/// Of attention on Hopper: one, in units of 8 a thread, and a product of up to 8 rows, of 352 threads with 120.
const HOPPER_ATTENTION: u32 = 176;

/// Of products whose shared memory leaves no room for a second: one fits, of 384 threads. So are those of warpgroups, and
/// of more rows than so many.
const PRODUCT_ALONE: u32 = 168;
const FEW_ROWS: usize = 16;
/// Rows of a product on Hopper whose warps all have as many registers, at most.
const MOST_ROWS_OF_EQUALS: usize = 192;
/// Rows that a block fetches for itself, at most: more come to two blocks at once.
const ROWS_OF_ONE_BLOCK: usize = 64;

pub(crate) fn registers(kernel: &str) -> Option<u32> {
    REGISTERS.iter().find(|(name, _)| *name == kernel).map(|(_, registers)| *registers)
}

pub(crate) fn check_resources(
    variant: &Variant,
    arch: &str,
    kernel: &Kernel,
) -> Result<(), String> {
    let is_wide = is_defined(variant, "TILE_ROWS", "64");
    let budget = registers(variant.kernel).expect("every kernel has a budget");
    let is_alone = variant.kernel == "gemm" && (arch == "sm_90a" || !has_few_rows(variant));
    let most = match (is_wide, is_alone) {
        (true, _) => WIDE_ATTENTION,
        (_, true) => PRODUCT_ALONE,
        _ if variant.kernel == "attention" && arch == "sm_90a" => HOPPER_ATTENTION,
        _ => budget,
    };
    if kernel.registers > most {
        return Err(format!("takes {} registers, at most {most}", kernel.registers));
    }
    // With fewer, warps would wait without end for what the block does not have.
    if shares_registers(variant, arch) && kernel.registers != PRODUCT_ALONE {
        let registers = kernel.registers;
        return Err(format!(
            "takes {registers} registers, and shares out those of {PRODUCT_ALONE}"
        ));
    }
    if kernel.stack > 0 {
        return Err(format!("takes {} bytes of stack, expected none", kernel.stack));
    }
    Ok(())
}

/// Whether warps that multiply take registers over from the others once they run.
fn shares_registers(variant: &Variant, arch: &str) -> bool {
    let has_most_rows = rows(variant) > Some(MOST_ROWS_OF_EQUALS);
    variant.kernel == "multiply" || (variant.kernel == "gemm" && arch == "sm_90a" && has_most_rows)
}

/// Operations that a kernel must have, and those that it must not.
struct Expected {
    present: Vec<&'static str>,
    absent: Vec<&'static str>,
}

impl Expected {
    fn of(variant: &Variant, arch: &str) -> Self {
        let is_hopper_or_later = !matches!(arch, "sm_80" | "sm_89");
        let mut expected = Self { present: Vec::new(), absent: SPILLS.into() };
        expected.list(is_hopper_or_later, &OVERLAP);
        match variant.kernel {
            "gemm" => {
                let has_warpgroups = arch == "sm_90a";
                expected.list(!has_warpgroups, &["HMMA"]);
                expected.list(has_warpgroups, &["HGMMA", "WARPGROUP"]);
                // Warpgroups read halves where they are.
                expected.list(!has_warpgroups || is_defined(variant, "WEIGHT", "FP8"), &["LDSM"]);
                expected.list(is_hopper_or_later, &["UBLKCP", "SYNCS"]);
                let shares = has_warpgroups && rows(variant) > Some(ROWS_OF_ONE_BLOCK);
                expected.list(shares, &["UBLKCP.S.G.MULTICAST", "UCGABAR_ARV"]);
                expected.list(!shares && (!is_hopper_or_later || has_warpgroups), &["LDGSTS"]);
            }
            "multiply" => {
                let product = if is_defined(variant, "WEIGHT", "FP8") { "QGMMA" } else { "HGMMA" };
                expected.list(true, &[product, "WARPGROUP", "UBLKCP.S.G.MULTICAST", "SYNCS"]);
                expected.list(true, &["USETMAXREG", "UCGABAR_ARV"]);
                // An arrival at another block's barrier that orders stores too waits for all of them, in every stage.
                expected.list(false, &["LDGSTS", "LDSM", "MEMBAR.ALL.GPU"]);
            }
            "attention" => expected.list(true, &["HMMA", "LDGSTS", "MUFU"]),
            // The host draws in double precision, and the device must draw the same.
            "sample" => expected.list(true, &["DFMA", "DADD"]),
            _ => {}
        }
        expected
    }

    fn list(&mut self, present: bool, operations: &[&'static str]) {
        let list = if present { &mut self.present } else { &mut self.absent };
        list.extend(operations);
    }
}

pub(crate) fn check_instructions(variant: &Variant, arch: &str, listing: &Listing) -> Vec<String> {
    let Expected { present, absent } = Expected::of(variant, arch);
    let missing = present.into_iter().filter(|operation| listing.count(operation) == 0);
    let surplus = absent.into_iter().filter(|operation| listing.count(operation) > 0);
    let mut complaints: Vec<String> = missing.map(|operation| format!("no {operation}")).collect();
    complaints.extend(surplus.map(String::from));
    complaints.extend(listing.names().filter(|name| adds_floats(name)).map(String::from));
    let is_fp8 = ["WEIGHT", "KV"].iter().any(|name| is_defined(variant, name, "FP8"));
    if is_fp8
        && arch != "sm_80"
        && has_e4m3_tiles(variant)
        && !listing.names().any(|n| n.starts_with(UNPACK))
    {
        complaints.push(format!("no {UNPACK}"));
    }
    complaints
}

/// Whether a product is one of a few rows.
fn has_few_rows(variant: &Variant) -> bool {
    rows(variant).is_some_and(|rows| rows <= FEW_ROWS)
}

/// Rows of a product.
fn rows(variant: &Variant) -> Option<usize> {
    let rows = variant.defines.iter().find(|(name, _)| *name == "ROWS");
    rows.and_then(|(_, rows)| rows.parse().ok())
}

/// Kernels whose inner loop unpacks e4m3.
fn has_e4m3_tiles(variant: &Variant) -> bool {
    matches!(variant.kernel, "gemm" | "attention")
}

fn is_defined(variant: &Variant, name: &str, value: &str) -> bool {
    variant.defines.iter().any(|(define, found)| *define == name && found == value)
}

fn adds_floats(instruction: &str) -> bool {
    let mut parts = instruction.split('.');
    parts.next().is_some_and(|operation| ATOMICS.contains(&operation))
        && parts.any(|part| FLOATS.contains(&part))
}

#[test]
fn only_atomic_additions_of_floats_are_told() {
    for name in ["RED.E.ADD.F32.FTZ.RN.STRONG.GPU", "ATOMG.E.ADD.F16x2.RN", "ATOM.E.ADD.F64"] {
        assert!(adds_floats(name), "{name}");
    }
    for name in ["ATOMG.E.ADD.STRONG.GPU", "RED.E.ADD.S64", "FADD.F32", "ATOMS.POPC.INC.32"] {
        assert!(!adds_floats(name), "{name}");
    }
}

#[test]
fn resources_over_the_budget_are_told() {
    let kernel = |registers, stack| Kernel { registers, stack, shared: 0, params: 0 };
    let gemm = Variant::gemm(Format::Fp8, 8, Epilogue::Raw);
    assert_eq!(check_resources(&gemm, "sm_80", &kernel(96, 0)), Ok(()));
    let many = check_resources(&gemm, "sm_80", &kernel(97, 0)).unwrap_err();
    assert_eq!(many, "takes 97 registers, at most 96");
    let spilled = check_resources(&gemm, "sm_80", &kernel(80, 8)).unwrap_err();
    assert_eq!(spilled, "takes 8 bytes of stack, expected none");
    let most = Variant::gemm(Format::Fp8, 320, Epilogue::Raw);
    assert_eq!(check_resources(&most, "sm_90a", &kernel(168, 0)), Ok(()));
    let few = check_resources(&most, "sm_90a", &kernel(160, 0)).unwrap_err();
    assert_eq!(few, "takes 160 registers, and shares out those of 168");
}
