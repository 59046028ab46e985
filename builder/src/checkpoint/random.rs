//! `random:NAME` or `random:PATH/config.json`, with `@SEED` behind it for other weights: a checkpoint that is nowhere.
//! It has the shape of a real model and made-up weights: for measuring speed, memory and builds without the model.
//!
//! Matrices and biases hold e4m3 values, uniform, of standard deviation 0.02, as a function of seed, tensor and place;
//! norms are 1. The tokenizer knows the bytes, one pair of letters and one end token.

use super::bounded::Object;
use super::encoding::Encoding;
use super::gguf_metadata::GgufMetadata;
use super::names;
use super::tensor::{RowOrder, Scale, ScaleForm, Source, Tensor};
use super::{Checkpoint, TokenizerSource, hf_config};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use spec_core::model::panel::{E4M3_MAX, f32_to_e4m3};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::LazyLock;

/// What a path begins with that names such a checkpoint.
const PREFIX: &str = "random:";

/// Standard deviation of the weights.
const DEVIATION: f32 = 0.02;

/// GGUF's number for a token that is looked for before anything else.
const CONTROL: i32 = 3;
const NORMAL: i32 = 1;

/// The models that have names: hidden, MLP, layers, query heads, elements of a head, tied, stretch of the rotation.
/// All of them have 8 key heads.
const NAMED: [(&str, [usize; 5], bool, f64); 4] = [
    ("llama-3.2-1b", [2048, 8192, 16, 32, 64], true, 32.0),
    ("llama-3.2-3b", [3072, 8192, 28, 24, 128], true, 32.0),
    ("llama-3.1-8b", [4096, 14336, 32, 32, 128], false, 8.0),
    ("llama-3.1-70b", [8192, 28672, 80, 64, 128], false, 8.0),
];

/// The name behind the prefix, if it is there.
pub(super) fn name(path: &Path) -> Option<&str> {
    path.to_str()?.strip_prefix(PREFIX)
}

pub(super) fn open(name: &str) -> Result<Checkpoint> {
    let (shape, seed) = match name.rsplit_once('@') {
        Some((shape, seed)) => {
            let seed: u64 = seed.parse().with_context(|| format!("`{seed}` is no seed"))?;
            (shape, seed)
        }
        None => (name, 0),
    };
    let config = hf_config::model_config(&config(shape)?, |_| true)?;
    let tokenizer = tokenizer(config.max_position);
    let tensors = names::expected(&config, false)
        .into_iter()
        .map(|expected| (expected.name.clone(), tensor(&expected.name, expected.shape, seed)));
    Ok(Checkpoint {
        generation: tokenizer.generation(),
        sliding_window: None,
        kv_scales: Ok(None),
        tokenizer: TokenizerSource::Gguf(Box::new(tokenizer)),
        tensors: tensors.collect::<BTreeMap<_, _>>(),
        config,
    })
}

fn config(name: &str) -> Result<Object> {
    if let Some((_, sizes, tied, factor)) = NAMED.iter().find(|(known, ..)| *known == name) {
        let Value::Object(fields) = llama(*sizes, *tied, *factor) else {
            unreachable!("an object")
        };
        return Ok(Object::new(name, fields));
    }
    let path = Path::new(name);
    let path = if path.is_dir() { path.join("config.json") } else { path.into() };
    if !path.is_file() {
        let known = NAMED.map(|(known, ..)| known).join(", ");
        bail!("`{name}` is neither one of {known} nor a config.json");
    }
    Object::open(&path)
}

fn llama([hidden, mlp, layers, heads, head_dim]: [usize; 5], tied: bool, factor: f64) -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256,
        "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": head_dim,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0, "tie_word_embeddings": tied,
        "rope_scaling": { "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192 },
    })
}

fn tensor(name: &str, shape: Vec<usize>, seed: u64) -> Tensor {
    if name.ends_with("norm.weight") {
        return constant(shape, 1.0);
    }
    // A uniform variable up to 1 has this deviation.
    let largest = DEVIATION * 3f32.sqrt();
    let scale = constant(vec![1], largest / E4M3_MAX);
    let name_hash = blake3::hash(name.as_bytes());
    let words = name_hash.as_bytes().first_chunk::<8>().expect("a hash has 32 bytes");
    Tensor {
        source: Source::Random(mix(u64::from_le_bytes(*words) ^ mix(seed))),
        shape,
        encoding: Encoding::Fp8,
        order: RowOrder::Plain,
        scale: Some(Scale { form: ScaleForm::Tensor, values: Box::new(scale) }),
    }
}

fn constant(shape: Vec<usize>, value: f32) -> Tensor {
    Tensor::of_values(Source::Constant(value), shape)
}

/// The random e4m3 bytes of a tensor from `start` on.
pub(super) fn fill(seed: u64, start: u64, out: &mut [u8]) {
    let codes = &*CODES;
    let word =
        |idx: u64| mix(seed.wrapping_add(idx)).to_le_bytes().map(|byte| codes[usize::from(byte)]);
    let skip = (start % 8) as usize;
    let (head, rest) = out.split_at_mut(out.len().min((8 - skip) % 8));
    head.copy_from_slice(&word(start / 8)[skip..][..head.len()]);
    let first = start.div_ceil(8);
    let (words, tail) = rest.as_chunks_mut::<8>();
    for (idx, out) in words.iter_mut().enumerate() {
        *out = word(first + idx as u64);
    }
    tail.copy_from_slice(&word(first + words.len() as u64)[..tail.len()]);
}

/// The e4m3 codes of 256 values that are evenly spread over its range.
static CODES: LazyLock<[u8; 256]> = LazyLock::new(|| {
    std::array::from_fn(|idx| f32_to_e4m3((idx as f32 - 127.5) / 127.5 * E4M3_MAX))
});

/// A permutation of the 64-bit numbers that leaves no pattern: the finaliser of SplitMix64.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The bytes, as byte-level vocabularies write them, one merge, and an end token.
fn tokenizer(max_position: usize) -> GgufMetadata {
    let mut unprintable = 256..;
    let letter = |byte: u8| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        _ => unprintable.next().and_then(char::from_u32).expect("68 letters follow 256"),
    };
    let mut tokens: Vec<String> = (0..=u8::MAX).map(letter).map(String::from).collect();
    // Files without any merge are refused.
    tokens.push("th".into());
    let end = tokens.len();
    tokens.push("<|end|>".into());
    let mut token_types = vec![NORMAL; end];
    token_types.push(CONTROL);
    GgufMetadata {
        model: "gpt2".into(),
        pre: Some("gpt-2".into()),
        tokens,
        token_types,
        scores: Vec::new(),
        merges: vec!["t h".into()],
        bos: None,
        eos: Some(end as u32),
        eot: None,
        eom: None,
        unknown: None,
        padding: None,
        add_bos: Some(false),
        add_eos: None,
        add_space_prefix: None,
        strips_behind: false,
        chat_template: Some("{% for m in messages %}{{ m.content }}\n{% endfor %}".into()),
        max_position,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::names::{EMBED, FINAL_NORM};

    fn values(checkpoint: &Checkpoint, name: &str, rows: std::ops::Range<usize>) -> Vec<f32> {
        let row_len = checkpoint.tensor(name).unwrap().row_len();
        let mut values = vec![0.0; rows.len() * row_len];
        checkpoint.read_rows(name, rows, &mut values).unwrap();
        values
    }

    #[test]
    fn named_models_have_the_shapes_of_real_ones() {
        for (name, parameters) in [
            ("llama-3.2-1b", 1_235_814_400_usize),
            ("llama-3.2-3b", 3_212_749_824),
            ("llama-3.1-8b", 8_030_261_248),
            ("llama-3.1-70b", 70_553_706_496),
        ] {
            let checkpoint = open(name).unwrap();
            let sizes = checkpoint.tensors().map(|(_, t)| t.shape().iter().product::<usize>());
            assert_eq!(sizes.sum::<usize>(), parameters, "{name}");
        }
    }

    #[test]
    fn weights_have_their_deviation_and_norms_are_one() {
        let checkpoint = open("llama-3.2-1b").unwrap();
        let sample = values(&checkpoint, EMBED, 5..105);
        let sum: f64 = sample.iter().map(|&v| f64::from(v)).sum();
        let squares: f64 = sample.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
        let len = sample.len() as f64;
        assert!((sum / len).abs() < 2e-4, "mean {}", sum / len);
        // e4m3 rounds by up to a sixteenth, evenly in both directions.
        assert!(((squares / len).sqrt() / 0.02 - 1.0).abs() < 0.02, "{}", (squares / len).sqrt());
        assert!(values(&checkpoint, FINAL_NORM, 0..2048).iter().all(|&v| v == 1.0));
    }

    #[test]
    fn a_value_depends_on_seed_tensor_and_place_alone() {
        let (one, same, other) = (
            open("llama-3.2-1b").unwrap(),
            open("llama-3.2-1b@0").unwrap(),
            open("llama-3.2-1b@1"),
        );
        let name = "model.layers.3.mlp.down_proj.weight";
        let rows = values(&one, name, 7..12);
        assert_eq!(rows, values(&same, name, 7..12));
        assert_eq!(rows[2 * 8192..3 * 8192], values(&one, name, 9..10));
        assert_ne!(rows, values(&other.unwrap(), name, 7..12));
        assert_ne!(rows, values(&one, "model.layers.4.mlp.down_proj.weight", 7..12));
    }

    #[test]
    fn bytes_do_not_depend_on_where_a_read_starts() {
        let mut whole = [0; 100];
        fill(7, 0, &mut whole);
        for start in 0..20 {
            for len in 0..30 {
                let mut part = vec![0; len];
                fill(7, start as u64, &mut part);
                assert_eq!(part, whole[start..start + len], "{len} from {start}");
            }
        }
        assert!(whole.iter().all(|byte| byte & 0x7f != 0x7f), "there is no NaN");
    }

    #[test]
    fn unknown_names_and_seeds_are_refused() {
        let text = |name| format!("{:#}", open(name).unwrap_err());
        assert!(text("llama-9").contains("`llama-9` is neither one of llama-3.2-1b"));
        assert!(text("llama-3.2-1b@x").contains("`x` is no seed"));
    }
}
