//! GGUF files: families, interleaved rows, quantised tensors, the tokenizer, and refusals.

use super::super::testing::{GgufFile, value};
use super::super::{Checkpoint, Encoding, TokenizerSource};
use super::{open_bytes, open_gguf, read, refused};
use serde_json::json;
use spec_core::model::{Family, RopeScaling};
use std::fs;

#[test]
fn every_architecture_opens_under_canonical_names() {
    for (arch, family) in
        [("llama", Family::Llama), ("qwen2", Family::Qwen2), ("qwen3", Family::Qwen3)]
    {
        for version in [2, 3] {
            let mut file = GgufFile::tiny(arch);
            file.version = version;
            let checkpoint = open_gguf(&file).unwrap();
            let config = &checkpoint.config;
            assert_eq!((config.family, config.vocab_size, config.num_layers), (family, 48, 2));
            assert_eq!((config.num_heads, config.num_kv_heads, config.head_dim), (4, 2, 8));
            assert_eq!(config.rms_norm_eps, 1e-5);
            assert!(config.tied_head && config.rope_scaling.is_none());
            assert_eq!(checkpoint.tensors().count(), file.tensors.len());
            let up = read(&checkpoint, "model.layers.1.mlp.up_proj.weight");
            assert_eq!(up[77], value("blk.1.ffn_up.weight", 77));
        }
    }
}

#[test]
fn tensors_in_one_come_apart() {
    let checkpoint = open_gguf(&GgufFile::tiny("phi3")).unwrap();
    assert_eq!(checkpoint.config.family, Family::Phi3);
    for (part, stored, first) in [
        ("self_attn.q_proj", "attn_qkv", 0),
        ("self_attn.k_proj", "attn_qkv", 32),
        ("self_attn.v_proj", "attn_qkv", 48),
        ("mlp.gate_proj", "ffn_up", 0),
        ("mlp.up_proj", "ffn_up", 64),
    ] {
        let got = read(&checkpoint, &format!("model.layers.1.{part}.weight"));
        let stored = format!("blk.1.{stored}.weight");
        let want = (0..got.len()).map(|idx| value(&stored, first * 32 + idx));
        assert!(got.iter().copied().eq(want), "{part}");
    }
    let both = GgufFile::tiny("qwen3").tensors.len();
    assert_eq!(checkpoint.tensors().count(), both - 2 * 2, "as any, but for the norms of heads");
}

#[test]
fn llama_rows_of_q_and_k_come_out_in_half_split_order() {
    // Row 2 i + j of a head (i < 4, j < 2) is row 4 j + i of the checkpoint that was converted.
    for (arch, interleaved) in [("llama", true), ("qwen2", false)] {
        let checkpoint = open_gguf(&GgufFile::tiny(arch)).unwrap();
        for (hf, gguf, heads) in [("q_proj", "attn_q", 4), ("k_proj", "attn_k", 2)] {
            let got = read(&checkpoint, &format!("model.layers.0.self_attn.{hf}.weight"));
            for head in 0..heads {
                for i in 0..4 {
                    for j in 0..2 {
                        let stored = head * 8 + 2 * i + j;
                        let row = if interleaved { head * 8 + 4 * j + i } else { stored };
                        let want = value(&format!("blk.0.{gguf}.weight"), stored * 32);
                        assert_eq!(got[row * 32], want, "{arch} {hf} row {row}");
                    }
                }
            }
        }
        let v = read(&checkpoint, "model.layers.0.self_attn.v_proj.weight");
        assert_eq!(v[3 * 32], value("blk.0.attn_v.weight", 3 * 32));
    }
}

#[test]
fn llama_biases_of_q_and_k_are_reordered_with_their_rows() {
    let mut file = GgufFile::tiny("llama");
    for layer in 0..2 {
        for (part, rows) in [("attn_q", 32), ("attn_k", 16), ("attn_v", 16)] {
            file.tensor(&format!("blk.{layer}.{part}.bias"), &[rows]);
        }
    }
    let checkpoint = open_gguf(&file).unwrap();
    let k = read(&checkpoint, "model.layers.0.self_attn.k_proj.bias");
    let stored = [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15];
    assert_eq!(k, stored.map(|idx| value("blk.0.attn_k.bias", idx)));
}

#[test]
fn ranges_of_quantised_interleaved_rows_equal_the_whole() {
    let mut file = GgufFile::tiny("llama");
    let q = file.tensor_mut("blk.0.attn_q.weight");
    q.2 = 8;
    q.3 = (0..32 * 34).map(|at| if at % 34 == 1 { 0x30 } else { (at * 13 % 256) as u8 }).collect();
    let checkpoint = open_gguf(&file).unwrap();
    let name = "model.layers.0.self_attn.q_proj.weight";
    assert_eq!(checkpoint.tensor(name).unwrap().encoding(), Encoding::Q8_0);
    let whole = read(&checkpoint, name);
    for (start, end) in [(0, 5), (3, 4), (6, 19), (31, 32)] {
        let mut part = vec![0.0; (end - start) * 32];
        checkpoint.read_rows(name, start..end, &mut part).unwrap();
        assert_eq!(part, whole[start * 32..end * 32]);
    }
}

#[test]
fn the_tokenizer_is_the_files_own_unless_one_stands_beside_it() {
    let mut file = GgufFile::tiny("llama");
    file.u32("tokenizer.ggml.eot_token_id", 5);
    file.text("tokenizer.chat_template", "{{ messages }}");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    fs::write(&path, file.bytes()).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert_eq!(checkpoint.generation.end_tokens, [2, 5]);
    assert_eq!(checkpoint.generation.add_bos, Some(false));
    let TokenizerSource::Gguf(metadata) = checkpoint.tokenizer else { panic!("not the file's") };
    assert_eq!((metadata.tokens.len(), metadata.tokens[39].as_str()), (40, "t39"));
    assert_eq!(metadata.token_types, [1; 40]);
    assert_eq!(metadata.merges, ["t 1", "t 2"]);
    assert_eq!((metadata.model.as_str(), metadata.pre.as_deref()), ("gpt2", Some("smollm")));
    assert_eq!((metadata.bos, metadata.eos, metadata.eot), (Some(1), Some(2), Some(5)));
    assert_eq!(metadata.chat_template.as_deref(), Some("{{ messages }}"));

    let beside = |name: &str| {
        let vocab: serde_json::Map<_, _> =
            (0..40).map(|id| (format!("{name}{id}"), id.into())).collect();
        let json = json!({ "version": "1.0", "added_tokens": [],
            "decoder": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
            "model": { "type": "WordLevel", "vocab": vocab, "unk_token": format!("{name}0") } });
        fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
        Checkpoint::open(&path)
    };
    assert!(matches!(beside("t").unwrap().tokenizer, TokenizerSource::Files(_)));
    let error = format!("{:#}", beside("s").unwrap_err());
    assert!(error.contains("another model's: token 0 is \"s0\" there and \"t0\""), "{error}");
}

#[test]
fn control_tokens_known_to_end_a_text_do() {
    let mut file = GgufFile::tiny("llama");
    file.texts("tokenizer.ggml.tokens", &["<|endoftext|>", "<s>", "</s>", "<|eot_id|>"]);
    let types: Vec<u8> = [3i32, 3, 3, 1].iter().flat_map(|t| t.to_le_bytes()).collect();
    file.list("tokenizer.ggml.token_type", 5, 4, &types);
    let checkpoint = open_gguf(&file).unwrap();
    assert_eq!(checkpoint.generation.end_tokens, [2, 0], "its own first; 3 is a normal token");
}

/// The divisors that llama.cpp's converter writes for Llama 3.x.
fn divisors(factor: f64, head_dim: usize, theta: f64) -> Vec<f32> {
    (0..head_dim / 2)
        .map(|pair| {
            let freq = theta.powf(-((2 * pair) as f64) / head_dim as f64);
            let wavelength = std::f64::consts::TAU / freq;
            if wavelength < 8192.0 / 4.0 {
                1.0
            } else if wavelength > 8192.0 {
                factor as f32
            } else {
                let smooth = (8192.0 / wavelength - 1.0) / (4.0 - 1.0);
                (1.0 / ((1.0 - smooth) / factor + smooth)) as f32
            }
        })
        .collect()
}

#[test]
fn llama3_scaling_is_recognised_by_its_divisors() {
    for factor in [8.0, 32.0, 1.0, 5.0] {
        let mut file = GgufFile::tiny("llama");
        file.f32("llama.rope.freq_base", 500_000.0);
        let values = divisors(factor, 8, 500_000.0);
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        file.tensors.push(("rope_freqs.weight".into(), vec![4], 0, bytes));
        let opened = open_gguf(&file);
        if factor == 5.0 {
            refused(opened, &["`rope_freqs.weight`", "not supported"]);
            continue;
        }
        let want = (factor > 1.0).then_some(RopeScaling::Llama3 {
            factor,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position: 8192,
        });
        assert_eq!(opened.unwrap().config.rope_scaling, want);
    }
}

#[test]
fn linear_scaling_is_read_and_others_are_refused() {
    let mut file = GgufFile::tiny("qwen2");
    file.text("qwen2.rope.scaling.type", "linear");
    refused(open_gguf(&file), &["rope.scaling.factor is missing"]);
    file.f32("qwen2.rope.scaling.factor", 2.0);
    let scaling = open_gguf(&file).unwrap().config.rope_scaling;
    assert_eq!(scaling, Some(RopeScaling::Linear { factor: 2.0 }));
    file.text("qwen2.rope.scaling.type", "yarn");
    refused(open_gguf(&file), &["rope scaling `yarn`"]);
}

type Change = fn(&mut GgufFile);

#[test]
fn metadata_that_cannot_be_used_is_refused_by_key() {
    let cases: [(Change, &str); 13] = [
        (|f| f.text("general.architecture", "mamba"), "architecture `mamba` is not supported"),
        (|f| f.u32("general.architecture", 1), "general.architecture"),
        (|f| f.u32("general.alignment", 24), "general.alignment"),
        (|f| f.u32("split.count", 3), "split.count is 3"),
        (|f| f.u32("llama.expert_count", 8), "8 experts"),
        (|f| f.u32("llama.attention.value_length", 16), "attention.value_length is 16"),
        (|f| f.u32("llama.rope.dimension_count", 4), "rope.dimension_count is 4"),
        (|f| f.f32("llama.block_count", 2.0), "llama.block_count is Float(2.0)"),
        (|f| f.values.retain(|v| v.0 != "llama.block_count"), "llama.block_count is missing"),
        (|f| f.u32("llama.block_count", 3), "`model.layers.2.input_layernorm.weight`: missing"),
        (|f| f.u32("tokenizer.ggml.eos_token_id", 40), "is 40, there are 40 tokens"),
        (|f| f.texts("tokenizer.ggml.tokens", &["t"; 49]), "there are 49 tokens"),
        (|f| f.values.retain(|v| v.0 != "tokenizer.ggml.tokens"), "tokens is missing"),
    ];
    for (change, part) in cases {
        let mut file = GgufFile::tiny("llama");
        change(&mut file);
        refused(open_gguf(&file), &[part]);
    }
}

#[test]
fn tensors_that_cannot_be_used_are_refused_by_name() {
    let cases: [(Change, &str); 9] = [
        (|f| f.tensor_mut("blk.1.attn_q.weight").2 = 23, "type IQ4_XS is not supported"),
        (|f| f.tensor_mut("blk.1.attn_q.weight").2 = 28, "type F64 is not supported"),
        (|f| f.tensor_mut("blk.1.attn_q.weight").2 = 99, "type number 99 is not supported"),
        (|f| f.tensor_mut("blk.1.attn_q.weight").2 = 12, "32 are no multiple of 256"),
        (|f| f.tensor_mut("output_norm.weight").2 = 8, "a vector in Q8_0"),
        (|f| f.tensor_mut("blk.1.attn_q.weight").1 = vec![32, 16], "[16, 32], expected [32, 32]"),
        (|f| f.tensor_mut("blk.1.attn_q.weight").0 = "blk.1.ssm_a".into(), "`blk.1.ssm_a`"),
        (|f| f.tensor("blk.2.attn_norm.weight", &[32]), "blk.2.attn_norm.weight"),
        (|f| f.tensors.retain(|t| t.0 != "token_embd.weight"), "token_embd.weight`: missing"),
    ];
    for (change, part) in cases {
        let mut file = GgufFile::tiny("llama");
        change(&mut file);
        refused(open_gguf(&file), &[part]);
    }
}

#[test]
fn files_of_another_version_or_byte_order_are_refused() {
    let mut file = GgufFile::tiny("llama");
    for (version, part) in
        [(1, "GGUF version 1, expected 2 or 3"), (4, "version 4"), (3 << 24, "big-endian")]
    {
        file.version = version;
        refused(open_bytes(&file.bytes()), &[part]);
    }
}
