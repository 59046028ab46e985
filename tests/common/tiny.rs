//! Tiny random checkpoints as Hugging Face folders: whole models that need no download.

use super::golden::floats;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use spec_build::tokenizer::GgufTokenizer;
use spec_core::model::LayerSkip;
use std::fs;
use std::path::Path;

/// Tokens of every tiny model; the last one ends texts.
pub(crate) const VOCAB: usize = 64;
/// The token that ends texts.
pub(crate) const END: u32 = VOCAB as u32 - 1;

/// Sizes of a tiny model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) hidden: usize,
    pub(crate) head_dim: usize,
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) ff: usize,
    /// Qwen3: norms of the heads.
    pub(crate) qk_norm: bool,
}

/// As small as the CPU executor takes.
pub(crate) const SMALLEST: Sizes =
    Sizes { hidden: 64, head_dim: 16, num_heads: 4, num_kv_heads: 2, ff: 128, qk_norm: false };

/// Standard deviation of the logits: far from flat, and far from certain.
const SPREAD: f64 = 1.5;

/// Writes a model whose weights follow from `seed`.
pub(crate) fn write(dir: &Path, num_layers: usize, seed: u64) {
    write_sized(dir, num_layers, seed, &SMALLEST);
}

/// The same of other sizes.
pub(crate) fn write_sized(dir: &Path, num_layers: usize, seed: u64, sizes: &Sizes) {
    fs::create_dir_all(dir).expect("a new folder");
    let (architecture, model_type) = match sizes.qk_norm {
        true => ("Qwen3ForCausalLM", "qwen3"),
        false => ("LlamaForCausalLM", "llama"),
    };
    let config = json!({
        "architectures": [architecture], "model_type": model_type, "vocab_size": VOCAB,
        "hidden_size": sizes.hidden, "intermediate_size": sizes.ff, "num_hidden_layers": num_layers,
        "num_attention_heads": sizes.num_heads, "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 1024,
        "rope_theta": 10000.0, "tie_word_embeddings": false, "bos_token_id": null, "eos_token_id": END,
    });
    write_random(dir, &config, shapes(num_layers, sizes), seed);
    tokenizer().build().expect("builds").write(dir).expect("writes");
}

/// Makes a written model one whose rows of a token say what comes at their positions: PARD.
pub(crate) fn mask_with(dir: &Path, token: u32) {
    let path = dir.join("config.json");
    let text = fs::read_to_string(&path).expect("a config");
    let mut config: Value = serde_json::from_str(&text).expect("JSON");
    config["pard_token"] = token.into();
    fs::write(&path, config.to_string()).expect("writes");
}

/// A model without what some of its parts add to the residual stream.
pub(crate) fn write_silent(
    dir: &Path,
    num_layers: usize,
    seed: u64,
    sizes: &Sizes,
    silent: &LayerSkip,
) {
    write_sized(dir, num_layers, seed, sizes);
    let config = fs::read_to_string(dir.join("config.json")).expect("a config");
    let attention = silent.attention.iter().map(|layer| (layer, "self_attn.o_proj"));
    let parts = attention.chain(silent.mlp.iter().map(|layer| (layer, "mlp.down_proj")));
    let names: Vec<String> =
        parts.map(|(layer, part)| format!("model.layers.{layer}.{part}.weight")).collect();
    let mut tensors = random(shapes(num_layers, sizes), seed);
    for (name, _, _, bytes) in &mut tensors {
        if names.contains(name) {
            bytes.fill(0);
        }
    }
    write_folder(dir, &serde_json::from_str(&config).expect("JSON"), &tensors);
}

/// What an EAGLE head has besides the sizes of its layers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HeadKind {
    /// EAGLE-1: it has a bias of `fc`, and no norms but in its MLP and in later layers.
    pub(crate) is_eagle1: bool,
    /// Layers behind the first one.
    pub(crate) more_layers: usize,
    /// It drafts so many tokens, every second one, by a head of its own; else all, by the target's.
    pub(crate) draft_vocab: Option<usize>,
    /// It has token vectors of its own.
    pub(crate) own_embed: bool,
    /// Positions that a row sees.
    pub(crate) window: Option<usize>,
    /// One norm over all hidden states.
    pub(crate) norm_before_fc: bool,
    /// A norm for each.
    pub(crate) fc_norm: bool,
    pub(crate) norm_before_residual: bool,
    pub(crate) norm_output: bool,
    /// How far weights of norms are from 1.
    pub(crate) norm_spread: f64,
    /// All drafts come from one pass: what stands in the rows behind the first one.
    pub(crate) mask_token: Option<u32>,
}

/// An EAGLE-3 head for a model of these sizes whose last layers it reads. It drafts every token.
pub(crate) fn write_head(dir: &Path, num_layers: usize, seed: u64, sizes: &Sizes) {
    write_head_of(dir, num_layers, seed, sizes, &HeadKind::default());
}

/// The same of another kind.
pub(crate) fn write_head_of(
    dir: &Path,
    num_layers: usize,
    seed: u64,
    sizes: &Sizes,
    kind: &HeadKind,
) {
    fs::create_dir_all(dir).expect("a new folder");
    let Sizes { hidden, head_dim, num_heads, num_kv_heads, ff, qk_norm } = *sizes;
    let model_type = if qk_norm { "qwen3" } else { "llama" };
    let mut config = json!({
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": model_type, "vocab_size": VOCAB,
        "hidden_size": hidden, "intermediate_size": ff, "num_hidden_layers": 1 + kind.more_layers,
        "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 1024,
        "rope_theta": 10000.0, "eagle_aux_hidden_state_layer_ids": [0, num_layers - 1, num_layers],
        "norm_before_fc": kind.norm_before_fc, "fc_norm": kind.fc_norm,
        "norm_before_residual": kind.norm_before_residual, "norm_output": kind.norm_output,
    });
    if let Some(window) = kind.window {
        config["sliding_window"] = window.into();
        config["layer_types"] = vec!["sliding_attention"; 1 + kind.more_layers].into();
    }
    let by_inputs = |inputs: usize| 1.0 / (inputs as f64).sqrt();
    let wide =
        |name: &str, shape: [usize; 2]| (name.to_string(), shape.to_vec(), by_inputs(shape[1]));
    let norm_of = |name: &str, len: usize| (name.to_string(), vec![len], kind.norm_spread);
    let norm = |name: &str| norm_of(name, hidden);
    let (q, kv) = (num_heads * head_dim, num_kv_heads * head_dim);
    let (fused, inputs) =
        if kind.is_eagle1 { (2 * hidden, hidden) } else { (3 * hidden, 2 * hidden) };
    let mut shapes = vec![
        wide("fc.weight", [hidden, fused]),
        wide("midlayer.self_attn.q_proj.weight", [q, inputs]),
        wide("midlayer.self_attn.k_proj.weight", [kv, inputs]),
        wide("midlayer.self_attn.v_proj.weight", [kv, inputs]),
        wide("midlayer.self_attn.o_proj.weight", [hidden, q]),
        norm("midlayer.post_attention_layernorm.weight"),
        wide("midlayer.mlp.gate_proj.weight", [ff, hidden]),
        wide("midlayer.mlp.up_proj.weight", [ff, hidden]),
        wide("midlayer.mlp.down_proj.weight", [hidden, ff]),
    ];
    match kind.is_eagle1 {
        true => shapes.push(norm("fc.bias")),
        false => shapes.extend(
            ["midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight", "norm.weight"]
                .map(norm),
        ),
    }
    for layer in 1..=kind.more_layers {
        shapes.extend(layer_shapes(layer, sizes).into_iter().map(|(name, shape, deviation)| {
            let deviation = if shape.len() == 1 { kind.norm_spread } else { deviation };
            (name, shape, deviation)
        }));
    }
    if qk_norm {
        let norms = ["q_norm", "k_norm"].map(|name| format!("midlayer.self_attn.{name}.weight"));
        shapes.extend(norms.map(|name| norm_of(&name, head_dim)));
    }
    if kind.norm_before_fc {
        shapes.push(norm_of("input_norm.weight", 3 * hidden));
    }
    if kind.fc_norm {
        shapes.extend((0..3).map(|tap| norm(&format!("fc_norm.{tap}.weight"))));
    }
    if kind.own_embed {
        shapes.push(("embed_tokens.weight".into(), vec![VOCAB, hidden], 1.0));
    }
    if let Some(token) = kind.mask_token {
        config["mask_token_id"] = token.into();
        shapes.push(("mask_hidden".into(), vec![1, 1, 3 * hidden], 1.0));
    }
    let mut tensors = random(shapes, seed);
    if let Some(drafted) = kind.draft_vocab {
        config["draft_vocab_size"] = drafted.into();
        let head =
            ("lm_head.weight".to_string(), vec![drafted, hidden], SPREAD * by_inputs(hidden));
        tensors.extend(random(vec![head], seed + 1));
        // How far each row's token is behind the row's number.
        let offsets = (0..drafted as i64).flat_map(i64::to_le_bytes).collect();
        tensors.push(("d2t".into(), Dtype::I64, vec![drafted], offsets));
    }
    write_folder(dir, &config, &tensors);
}

/// Medusa heads of one block each, for a model of these sizes.
pub(crate) fn write_medusa(dir: &Path, num_heads: usize, seed: u64, sizes: &Sizes) {
    fs::create_dir_all(dir).expect("a new folder");
    let hidden = sizes.hidden;
    let config = json!({ "medusa_num_heads": num_heads, "medusa_num_layers": 1 });
    let by_inputs = 1.0 / (hidden as f64).sqrt();
    let head = |head: usize| {
        let block = (format!("{head}.0.linear.weight"), vec![hidden, hidden], by_inputs);
        [block, (format!("{head}.1.weight"), vec![VOCAB, hidden], SPREAD * by_inputs)]
    };
    write_random(dir, &config, (0..num_heads).flat_map(head).collect(), seed);
}

/// Changes the weights of a written model: of each tensor its name, the length of a row and its values.
pub(crate) fn edit(dir: &Path, change: impl Fn(&str, usize, &mut [f32])) {
    let bytes = fs::read(dir.join("model.safetensors")).expect("weights");
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let edited = tensors.iter().map(|(name, tensor)| {
        let shape = tensor.shape().to_vec();
        let mut values = floats(&tensor);
        change(name, shape[shape.len() - 1], &mut values);
        let bytes = values.into_iter().flat_map(f32::to_le_bytes).collect();
        (name.to_string(), tensor.dtype(), shape, bytes)
    });
    write_tensors(dir, &edited.collect::<Vec<Tensor>>());
}

/// Name, type, shape and bytes.
type Tensor = (String, Dtype, Vec<usize>, Vec<u8>);

/// A folder of random weights. Of each tensor name, shape and standard deviation; norms are ones.
fn write_random(dir: &Path, config: &Value, shapes: Vec<(String, Vec<usize>, f64)>, seed: u64) {
    write_folder(dir, config, &random(shapes, seed));
}

/// Random tensors, norms around one.
fn random(shapes: Vec<(String, Vec<usize>, f64)>, seed: u64) -> Vec<Tensor> {
    let mut normal = Normal(seed);
    let tensor = |(name, shape, deviation): (String, Vec<usize>, f64)| {
        let num: usize = shape.iter().product();
        let value = |_| match shape.len() {
            1 if deviation == 0.0 => 1.0,
            1 => (1.0 + normal.next() * deviation) as f32,
            _ => (normal.next() * deviation) as f32,
        };
        let bytes = (0..num).map(value).flat_map(f32::to_le_bytes).collect();
        (name, Dtype::F32, shape, bytes)
    };
    shapes.into_iter().map(tensor).collect()
}

fn write_folder(dir: &Path, config: &Value, tensors: &[Tensor]) {
    fs::write(dir.join("config.json"), config.to_string()).expect("writes");
    write_tensors(dir, tensors);
}

fn write_tensors(dir: &Path, tensors: &[Tensor]) {
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).expect("the sizes fit"))
    });
    safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).expect("writes");
}

/// Name, shape and standard deviation of every tensor; norms are ones.
fn shapes(num_layers: usize, sizes: &Sizes) -> Vec<(String, Vec<usize>, f64)> {
    let hidden = sizes.hidden;
    let mut shapes = vec![
        ("model.embed_tokens.weight".into(), vec![VOCAB, hidden], 1.0),
        ("model.norm.weight".into(), vec![hidden], 0.0),
        ("lm_head.weight".into(), vec![VOCAB, hidden], SPREAD / (hidden as f64).sqrt()),
    ];
    shapes.extend((0..num_layers).flat_map(|layer| layer_shapes(layer, sizes)));
    shapes
}

/// Those of a layer.
fn layer_shapes(layer: usize, sizes: &Sizes) -> Vec<(String, Vec<usize>, f64)> {
    let Sizes { hidden, head_dim, num_heads, num_kv_heads, ff, qk_norm } = *sizes;
    let (q, kv) = (num_heads * head_dim, num_kv_heads * head_dim);
    let mut shapes = Vec::new();
    let mut add = |name: &str, shape: &[usize]| {
        let name = format!("model.layers.{layer}.{name}.weight");
        let deviation = match shape {
            [_] => 0.0,
            _ => 1.0 / (shape[shape.len() - 1] as f64).sqrt(),
        };
        shapes.push((name, shape.to_vec(), deviation));
    };
    add("input_layernorm", &[hidden]);
    add("self_attn.q_proj", &[q, hidden]);
    add("self_attn.k_proj", &[kv, hidden]);
    add("self_attn.v_proj", &[kv, hidden]);
    if qk_norm {
        add("self_attn.q_norm", &[head_dim]);
        add("self_attn.k_norm", &[head_dim]);
    }
    add("self_attn.o_proj", &[hidden, q]);
    add("post_attention_layernorm", &[hidden]);
    add("mlp.gate_proj", &[ff, hidden]);
    add("mlp.up_proj", &[ff, hidden]);
    add("mlp.down_proj", &[hidden, ff]);
    shapes
}

/// One token a character, one of two characters, and one that ends texts.
pub(crate) fn tokenizer() -> GgufTokenizer {
    let chars = (b'!'..).take(VOCAB - 2).map(|byte| char::from(byte).to_string());
    let mut token_types = vec![1; VOCAB - 1];
    token_types.push(3);
    GgufTokenizer {
        model: "gpt2".into(),
        pre: "gpt-2".into(),
        tokens: chars.chain(["AB", "<end>"].map(String::from)).collect(),
        token_types,
        merges: vec!["A B".into()],
        eos: Some(END),
        ..GgufTokenizer::default()
    }
}

/// Normal variates from SplitMix64, by Box and Muller.
struct Normal(u64);

impl Normal {
    fn next(&mut self) -> f64 {
        let radius = (-2.0 * self.uniform().ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// Above 0, at most 1.
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64 + f64::EPSILON / 2.0
    }
}
