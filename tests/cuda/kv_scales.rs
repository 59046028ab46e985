//! Scales of keys and values in FP8: a model whose keys and values are far larger than FP8 goes gives the same logits with
//! them as one whose are not.

use super::common::golden;
use super::common::models::Recipe;
use super::common::small::{SMALL, in_parts, tokens};
use super::common::tiny;
use super::{FP8_TOLERANCE, assert_close, on_emulator, open};
use spec_build::calibrate::Calibration;
use spec_core::engine::Engine;
use spec_core::model::Dtype;
use tempfile::TempDir;

/// By how much keys and values are larger: without scales many are cut to 448.
const FACTOR: f32 = 512.0;

/// Each device rounds its own keys and values to 4 bits: some go the other way.
const TOLERANCE: f32 = 2.0 * FP8_TOLERANCE;

/// A model, and one that computes the same in larger numbers: queries as much smaller as keys are larger, and as much less of
/// the values behind them.
fn models() -> TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    for (name, factor) in [("model", 1.0), ("larger", FACTOR)] {
        let folder = dir.path().join(name);
        tiny::write_sized(&folder, 2, 3, &SMALL);
        for (part, factor) in [
            ("q_proj", 1.0 / factor),
            ("k_proj", factor),
            ("v_proj", factor),
            ("o_proj", 1.0 / factor),
        ] {
            tiny::edit(&folder, |name, _, values| {
                let factor = if name.contains(part) { factor } else { 1.0 };
                values.iter_mut().for_each(|value| *value *= factor);
            });
        }
    }
    dir
}

fn engine(dir: &TempDir, model: &str, dtype: Dtype, device: &str, calibrated: bool) -> Engine {
    let name = format!("{model}-{dtype}-{calibrated}-{}", &device[..3]);
    let recipe = Recipe {
        kv_calibration: (!calibrated).then_some(Calibration::None),
        ..Recipe::plain(dir.path().join(model), dtype).with_kv(Dtype::Fp8).on(device)
    };
    recipe.build(&dir.path().join(&name));
    open(dir.path(), &name)
}

fn off((a, b): (&f32, &f32)) -> f32 {
    (a - b).abs()
}

#[test]
fn larger_keys_and_values_change_no_bit_on_a_cpu() {
    let dir = models();
    let tokens = tokens(50);
    let logits = |model, calibrated| {
        let engine = engine(&dir, model, Dtype::Fp32, "cpu", calibrated);
        golden::all_logits(&mut golden::model(&engine, 8), &tokens).values
    };
    let (plain, larger, cut) =
        (logits("model", true), logits("larger", true), logits("larger", false));
    assert!(plain == larger, "scales lose bits");
    let worst = plain.iter().zip(&cut).map(off).fold(0.0, f32::max);
    assert!(worst > 0.5, "keys that are cut off change logits by {worst}: nothing was shown");
}

#[test]
fn larger_keys_and_values_are_read_as_such_on_a_gpu() {
    let dir = models();
    let tokens = tokens(50);
    let cpu = engine(&dir, "larger", Dtype::Fp8, "cpu", true);
    let expected = golden::all_logits(&mut golden::model(&cpu, 8), &tokens);
    let found = |calibrated| {
        let cuda = engine(&dir, "larger", Dtype::Fp8, "cuda:sm_90a", calibrated);
        in_parts(&mut on_emulator(&cuda, 8), &tokens, &[37, 1, 5, 7])
    };
    assert_close(&found(true), &expected, TOLERANCE, "larger keys and values");
    let cut = found(false).concat();
    let worst = cut.iter().zip(&expected.values).map(off).fold(0.0, f32::max);
    assert!(worst > 3.0 * TOLERANCE, "without scales logits are off by {worst} alone");
}

#[test]
fn engines_say_what_their_scales_are() {
    let dir = models();
    let scales = |model| {
        let engine = engine(&dir, model, Dtype::Fp32, "cpu", true);
        engine.manifest().kv_scales.clone().expect("an FP8 cache has some")
    };
    let (plain, larger) = (scales("model"), scales("larger"));
    let raised: Vec<Vec<i8>> = plain
        .keys
        .iter()
        .map(|heads| heads.iter().map(|exponent| exponent + 9).collect())
        .collect();
    assert_eq!(larger.keys, raised);
    assert_eq!(engine(&dir, "model", Dtype::Fp32, "cpu", false).manifest().kv_scales, None);
}
