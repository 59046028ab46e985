//! Checkpoints whose attention heads have 32 values, as ones with heads of 64 that compute the same: CUDA kernels take no
//! narrower ones.
//!
//! Value `i` of each half of a head becomes value `2 i` of the wide half, and the others are 0. A rotation turns pair `2 i` of
//! 64 as fast as pair `i` of 32. A score of 64 is divided by the root of 2 more, for which queries make up, and a norm over 64
//! values, half of which are 0, gives the root of 2 more than one over 32.

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::f32::consts::SQRT_2;
use std::fs;
use std::path::Path;

const NARROW: usize = 32;
const WIDE: usize = 64;

/// Where a value of all heads goes.
fn wide(idx: usize) -> usize {
    let (head, value) = (idx / NARROW, idx % NARROW);
    let (half, place) = (value / (NARROW / 2), value % (NARROW / 2));
    head * WIDE + half * (WIDE / 2) + 2 * place
}

fn floats(tensor: &TensorView<'_>) -> Vec<f32> {
    match tensor.dtype() {
        Dtype::BF16 => {
            let (halves, _) = tensor.data().as_chunks();
            halves
                .iter()
                .map(|&half| f32::from_bits(u32::from(u16::from_le_bytes(half)) << 16))
                .collect()
        }
        Dtype::F32 => {
            let (words, _) = tensor.data().as_chunks();
            words.iter().map(|&word| f32::from_le_bytes(word)).collect()
        }
        other => panic!("{other:?}"),
    }
}

/// Spreads what has one entry a value of a head, each of `len` floats.
fn spread(values: &[f32], len: usize, factor: f32) -> Vec<f32> {
    let mut spread = vec![0.0; 2 * values.len()];
    for (idx, entry) in values.chunks_exact(len).enumerate() {
        for (to, from) in spread[wide(idx) * len..][..len].iter_mut().zip(entry) {
            *to = factor * from;
        }
    }
    spread
}

/// The same of the columns of a matrix.
fn spread_columns(values: &[f32], columns: usize) -> Vec<f32> {
    values.chunks_exact(columns).flat_map(|row| spread(row, 1, 1.0)).collect()
}

/// Rewrites a checkpoint.
pub(crate) fn widen(folder: &Path) {
    let config = folder.join("config.json");
    let text = fs::read_to_string(&config).unwrap();
    assert!(text.contains("\"head_dim\": 32"), "{}", folder.display());
    fs::write(&config, text.replace("\"head_dim\": 32", "\"head_dim\": 64")).unwrap();
    let file = folder.join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let has_norms = |name: &str| {
        let (layer, _) = name.split_once("self_attn").unwrap();
        tensors.tensor(&format!("{layer}self_attn.q_norm.weight")).is_ok()
    };
    let mut written = Vec::new();
    for (name, tensor) in tensors.iter() {
        let mut shape = tensor.shape().to_vec();
        let columns = *shape.last().unwrap();
        let values = match name.rsplit('.').nth(1) {
            Some("q_proj") if !has_norms(name) => spread(&floats(&tensor), columns, SQRT_2),
            Some("q_proj" | "k_proj" | "v_proj") => spread(&floats(&tensor), columns, 1.0),
            Some("o_proj") => spread_columns(&floats(&tensor), columns),
            // What a norm over more values gives too much is what scores lack.
            Some("q_norm") => spread(&floats(&tensor), 1, 1.0),
            Some("k_norm") => spread(&floats(&tensor), 1, 1.0 / SQRT_2),
            _ => {
                written.push((name, shape, tensor.dtype(), tensor.data().to_vec()));
                continue;
            }
        };
        match name.contains("o_proj") {
            true => shape[1] *= 2,
            false => shape[0] *= 2,
        }
        let bytes = values.into_iter().flat_map(f32::to_le_bytes).collect();
        written.push((name, shape, Dtype::F32, bytes));
    }
    let views = written.iter().map(|(name, shape, dtype, bytes)| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &file).unwrap();
}
