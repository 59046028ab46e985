//! Checkpoints in FP8 and INT8: each flavour and form of scale, and what is refused.

use super::super::Checkpoint;
use super::super::testing::{Blob, Folder, tiny_config};
use super::{open, read, refused};
use serde_json::{Value, json};
use std::fs;

const UP: &str = "model.layers.0.mlp.up_proj.weight";
const ROWS: usize = 64;
const COLS: usize = 32;

/// Bytes of the quantised matrix; no NaN among them.
fn byte(idx: usize) -> u8 {
    let byte = (idx * 37 % 251) as u8;
    if byte & 0x7f == 0x7f { 0x38 } else { byte }
}

fn fp8_value(byte: u8) -> f32 {
    let (sign, exponent, mantissa) = (byte >> 7, i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let magnitude =
        if exponent == 0 { mantissa / 512.0 } else { (8.0 + mantissa) * 2f32.powi(exponent - 10) };
    if sign == 1 { -magnitude } else { magnitude }
}

/// A llama whose `UP` is quantised with scales 0.5, 0.75, 1.0, ... in `shape`.
fn quantised(config: Value, dtype: &'static str, suffix: &str, shape: &[usize]) -> Folder {
    let mut folder = Folder::llama();
    folder.config["quantization_config"] = config;
    let blob = folder.blob(UP);
    blob.dtype = dtype;
    blob.bytes = (0..ROWS * COLS).map(byte).collect();
    let scales: Vec<f32> = (0..shape.iter().product()).map(scale).collect();
    folder.blobs.push(Blob::f32(&format!("{UP}{suffix}"), shape, &scales));
    folder
}

fn scale(idx: usize) -> f32 {
    0.5 + idx as f32 / 4.0
}

fn native(block: Value) -> Value {
    json!({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block})
}

fn compressed(format: &str, kind: &str, strategy: &str) -> Value {
    json!({
        "quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 8, "type": kind, "strategy": strategy, "symmetric": true,
            "group_size": if strategy == "group" { json!(8) } else { json!(null) }
        }}}
    })
}

/// Flavour, dtype, suffix of the scales, their shape, and the scale of an element.
type Case = (Value, &'static str, &'static str, Vec<usize>, fn(usize, usize) -> usize);

fn cases() -> Vec<Case> {
    let float = |strategy| compressed("float-quantized", "float", strategy);
    vec![
        (native(json!(null)), "F8_E4M3", "_scale", vec![], |_, _| 0),
        (native(json!(null)), "F8_E4M3", "_scale_inv", vec![1], |_, _| 0),
        (native(json!(null)), "F8_E4M3", "_scale", vec![ROWS, 1], |r, _| r),
        // 64 x 32 in tiles of 24 x 20: the last ones are cut off.
        (native(json!([24, 20])), "F8_E4M3", "_scale_inv", vec![3, 2], |r, c| r / 24 * 2 + c / 20),
        (float("tensor"), "F8_E4M3", "_scale", vec![1], |_, _| 0),
        (float("channel"), "F8_E4M3", "_scale", vec![ROWS, 1], |r, _| r),
        (float("group"), "F8_E4M3", "_scale", vec![ROWS, 4], |r, c| r * 4 + c / 8),
        (compressed("int-quantized", "int", "channel"), "I8", "_scale", vec![ROWS], |r, _| r),
        (
            json!({"quant_method": "modelopt", "quant_algo": "FP8"}),
            "F8_E4M3",
            "_scale",
            vec![],
            |_, _| 0,
        ),
    ]
}

#[test]
fn every_form_of_scale_is_applied() {
    for (config, dtype, suffix, shape, scale_idx) in cases() {
        let what = format!("{config} {shape:?}");
        let checkpoint = open(&quantised(config, dtype, suffix, &shape)).expect(&what);
        let base = |idx| match dtype {
            "I8" => f32::from(byte(idx) as i8),
            _ => fp8_value(byte(idx)),
        };
        let expected = |row: usize, col: usize| base(row * COLS + col) * scale(scale_idx(row, col));
        for (start, end) in [(0, ROWS), (1, 2), (23, 25), (47, 49), (63, 64)] {
            let mut out = vec![0.0; (end - start) * COLS];
            checkpoint.read_rows(UP, start..end, &mut out).unwrap();
            for (idx, got) in out.iter().enumerate() {
                assert_eq!(*got, expected(start + idx / COLS, idx % COLS), "{what} {idx}");
            }
        }
    }
}

#[test]
fn fp8_rows_keep_their_bytes_where_scales_are_by_row() {
    for (config, dtype, suffix, shape, scale_idx) in cases() {
        let by_row = dtype == "F8_E4M3" && (0..COLS).all(|c| scale_idx(5, c) == scale_idx(5, 0));
        let checkpoint = open(&quantised(config, dtype, suffix, &shape)).unwrap();
        let (mut bytes, mut scales) = (vec![0; 3 * COLS], [0.0; 3]);
        let done = checkpoint.read_fp8_rows(UP, 5..8, &mut bytes, &mut scales).unwrap();
        assert_eq!(done, by_row, "{shape:?}");
        if done {
            assert!((0..bytes.len()).all(|idx| bytes[idx] == byte(5 * COLS + idx)));
            assert_eq!(scales, [5, 6, 7].map(|row| scale(scale_idx(row, 0))));
        } else {
            assert!(bytes.iter().all(|b| *b == 0) && scales == [0.0; 3], "left alone");
        }
    }
    let plain = open(&Folder::llama()).unwrap();
    let (mut bytes, mut scales) = (vec![0; COLS], [0.0]);
    assert!(!plain.read_fp8_rows(UP, 0..1, &mut bytes, &mut scales).unwrap());
    assert!(plain.read_fp8_rows(UP, 0..1, &mut bytes, &mut [0.0; 2]).is_err());
}

#[test]
fn modelopt_may_say_it_in_a_file_of_its_own() {
    let mut folder = quantised(json!(null), "F8_E4M3", "_scale", &[]);
    folder.blobs.push(Blob::f32(&UP.replace("weight", "input_scale"), &[], &[3.0]));
    for layer in 0..2 {
        for part in ["k_proj.k_scale", "v_proj.v_scale"] {
            let name = format!("model.layers.{layer}.self_attn.{part}");
            folder.blobs.push(Blob::f32(&name, &[], &[3.0]));
        }
    }
    let dir = tempfile::tempdir().unwrap();
    folder.write(dir.path());
    let path = dir.path().join("hf_quant_config.json");
    let write = |algorithm: Value| {
        let quantization = json!({"quant_algo": algorithm, "kv_cache_quant_algo": "FP8"});
        let file = json!({"producer": {"name": "modelopt"}, "quantization": quantization});
        fs::write(&path, file.to_string()).unwrap();
        Checkpoint::open(dir.path())
    };
    let checkpoint = write(json!("FP8")).unwrap();
    assert_eq!(read(&checkpoint, UP)[0], fp8_value(byte(0)) * 0.5);
    assert_eq!(checkpoint.kv_scales.unwrap(), Some(vec![(3.0, 3.0); 2]));
    refused(write(json!("NVFP4")), &["modelopt `NVFP4` is not supported"]);
    refused(write(json!(null)), &[UP, "F8_E4M3", "declares no such"]);
}

#[test]
fn a_nan_byte_or_a_bad_scale_is_named() {
    let mut folder = quantised(native(json!(null)), "F8_E4M3", "_scale", &[ROWS, 1]);
    folder.blob(UP).bytes[6 * COLS + 3] = 0xff;
    let scales = folder.blob(&format!("{UP}_scale"));
    scales.bytes[4 * 40..4 * 41].copy_from_slice(&f32::NAN.to_le_bytes());
    let checkpoint = open(&folder).unwrap();
    let (mut bytes, mut scales) = (vec![0; 4 * COLS], [0.0; 4]);
    for (first, part) in [(4, "row 6 holds NaN"), (38, "the scale of row 40 is NaN")] {
        let result = checkpoint.read_fp8_rows(UP, first..first + 4, &mut bytes, &mut scales);
        let message = format!("{:#}", result.unwrap_err());
        assert!(message.contains(part) && message.contains(UP), "{message}");
    }
}

#[test]
fn other_quantisations_are_refused_by_name() {
    let with = |change: fn(&mut Value)| {
        let mut config = compressed("float-quantized", "float", "channel");
        change(&mut config);
        config
    };
    for (config, part) in [
        (json!({"quant_method": "gptq", "bits": 4}), "quantisation `gptq` is not supported"),
        (json!({"quant_method": "awq", "bits": 4}), "quantisation `awq`"),
        (json!({"quant_method": "bitsandbytes"}), "quantisation `bitsandbytes`"),
        (compressed("pack-quantized", "int", "group"), "format `pack-quantized`"),
        (compressed("nvfp4-pack-quantized", "float", "group"), "format `nvfp4-pack-quantized`"),
        (with(|c| c["config_groups"]["group_0"]["weights"]["num_bits"] = json!(4)), "4-bit float"),
        (
            with(|c| c["config_groups"]["group_0"]["weights"]["symmetric"] = json!(false)),
            "asymmetric",
        ),
        (
            with(|c| c["sparsity_config"] = json!({"format": "sparse-24-bitmask"})),
            "sparsity_config",
        ),
        (with(|c| c["transform_config"] = json!({"config_groups": {}})), "transform_config"),
        (
            with(|c| {
                let mut other = c["config_groups"]["group_0"].clone();
                other["weights"]["type"] = json!("int");
                c["config_groups"]["group_1"] = other;
            }),
            "groups differ",
        ),
        (json!({"quant_method": "fp8", "fmt": "e5m2"}), "format `e5m2`"),
        (native(json!([0, 128])), "weight_block_size"),
        (native(json!([128])), "expected two sizes"),
        (json!({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}), "modelopt `W4A8_AWQ`"),
    ] {
        refused(open(&quantised(config, "F8_E4M3", "_scale", &[ROWS, 1])), &[part]);
    }
}

#[test]
fn scales_that_do_not_fit_are_refused() {
    let fp8 = |shape: &[usize]| quantised(native(json!([128, 128])), "F8_E4M3", "_scale", shape);
    refused(open(&fp8(&[COLS, 1])), &[UP, "shape [32, 1], expected [1], [64, 1] or [1, 1]"]);

    let mut none = fp8(&[1]);
    none.remove(&format!("{UP}_scale"));
    refused(open(&none), &[UP, "F8_E4M3 without a weight_scale"]);

    let mut both = fp8(&[1]);
    both.blobs.push(Blob::f32(&format!("{UP}_scale_inv"), &[1], &[1.0]));
    refused(open(&both), &[UP, "both"]);

    let mut stray = fp8(&[1]);
    stray.blobs.push(Blob::f32("lm_head.weight_scale", &[1], &[1.0]));
    refused(open(&stray), &["`lm_head.weight_scale` is unexpected"]);

    let int8 = quantised(native(json!(null)), "I8", "_scale", &[1]);
    refused(open(&int8), &[UP, "it is I8, but config.json declares F8_E4M3"]);

    let mut undeclared = fp8(&[1]);
    undeclared.config["quantization_config"] = json!(null);
    refused(open(&undeclared), &[UP, "declares no such"]);
}

/// Rows of gate, then of up, as one matrix; the scales in tiles of `tile` rows.
fn phi(tile: Option<usize>) -> Folder {
    let mut folder = Folder::new(tiny_config("phi3", "Phi3ForCausalLM"));
    folder.config["quantization_config"] = native(match tile {
        Some(rows) => json!([rows, COLS]),
        None => json!(null),
    });
    let name = "model.layers.0.mlp.gate_up_proj.weight";
    let blob = folder.blob(name);
    blob.dtype = "F8_E4M3";
    blob.bytes = (0..2 * ROWS * COLS).map(byte).collect();
    let scales: Vec<f32> = (0..(2 * ROWS).div_ceil(tile.unwrap_or(1))).map(scale).collect();
    folder.blobs.push(Blob::f32(&format!("{name}_scale"), &[scales.len(), 1], &scales));
    folder
}

#[test]
fn tensors_in_one_take_their_scales_with_them() {
    for tile in [None, Some(16), Some(ROWS)] {
        let checkpoint = open(&phi(tile)).unwrap();
        for (name, first) in [("model.layers.0.mlp.gate_proj.weight", 0), (UP, ROWS)] {
            let got = read(&checkpoint, name);
            assert_eq!(got.len(), ROWS * COLS);
            for (idx, got) in got.iter().enumerate() {
                let row = first + idx / COLS;
                let value = fp8_value(byte(first * COLS + idx));
                assert_eq!(*got, value * scale(row / tile.unwrap_or(1)), "{tile:?} {name} {idx}");
            }
        }
    }
    // Rows 48 to 95 have one scale.
    refused(open(&phi(Some(48))), &["row 64 is inside of a tile of 48 rows"]);
}
