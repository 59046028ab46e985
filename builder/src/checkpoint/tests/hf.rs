//! Hugging Face folders: families, shards, spellings of the configuration, and refusals.

use super::super::testing::{Blob, Folder, safetensors, tiny_config, value};
use super::super::{Checkpoint, TokenizerSource};
use super::{open, read, refused};
use serde_json::json;
use spec_core::model::{Family, RopeScaling};
use std::fs;

const Q: &str = "model.layers.1.self_attn.q_proj.weight";

#[test]
fn every_family_opens_and_reads_back() {
    for (model_type, class, family) in [
        ("llama", "LlamaForCausalLM", Family::Llama),
        ("mistral", "MistralForCausalLM", Family::Mistral),
        ("qwen2", "Qwen2ForCausalLM", Family::Qwen2),
        ("qwen3", "Qwen3ForCausalLM", Family::Qwen3),
    ] {
        let folder = Folder::new(tiny_config(model_type, class));
        let checkpoint = open(&folder).unwrap();
        assert_eq!(checkpoint.config.family, family);
        assert_eq!(checkpoint.config.qkv_bias, family == Family::Qwen2);
        assert_eq!(checkpoint.config.qk_norm, family == Family::Qwen3);
        assert_eq!(checkpoint.tensors().count(), folder.blobs.len());
        for blob in &folder.blobs {
            let got = read(&checkpoint, &blob.name);
            assert!((0..got.len()).all(|idx| got[idx] == value(&blob.name, idx)), "{}", blob.name);
        }
    }
}

#[test]
fn tensors_in_one_come_apart() {
    let folder = Folder::new(tiny_config("phi3", "Phi3ForCausalLM"));
    let checkpoint = open(&folder).unwrap();
    let config = &checkpoint.config;
    assert_eq!(config.family, Family::Phi3);
    let (q, kv, wide) = (config.q_size(), config.kv_size(), config.intermediate_size);
    for (part, stored, first, rows) in [
        ("self_attn.q_proj", "self_attn.qkv_proj", 0, q),
        ("self_attn.k_proj", "self_attn.qkv_proj", q, kv),
        ("self_attn.v_proj", "self_attn.qkv_proj", q + kv, kv),
        ("mlp.gate_proj", "mlp.gate_up_proj", 0, wide),
        ("mlp.up_proj", "mlp.gate_up_proj", wide, wide),
    ] {
        let got = read(&checkpoint, &format!("model.layers.1.{part}.weight"));
        assert_eq!(got.len(), rows * config.hidden_size);
        let stored = format!("model.layers.1.{stored}.weight");
        let want = (0..got.len()).map(|idx| value(&stored, first * config.hidden_size + idx));
        assert!(got.iter().copied().eq(want), "{part}");
    }
    let mut apart = folder.clone();
    apart.blob("model.layers.1.mlp.gate_up_proj.weight").name =
        "model.layers.1.mlp.up_proj.weight".into();
    refused(open(&apart), &["`model.layers.1.mlp.gate_up_proj.weight`: missing"]);
}

#[test]
fn a_llama_has_exactly_these_tensors() {
    let mut config = tiny_config("llama", "LlamaForCausalLM");
    config["num_hidden_layers"] = json!(1);
    let checkpoint = open(&Folder::new(config)).unwrap();
    let names: Vec<&str> = checkpoint.tensors().map(|(name, _)| name).collect();
    assert_eq!(
        names,
        [
            "lm_head.weight",
            "model.embed_tokens.weight",
            "model.layers.0.input_layernorm.weight",
            "model.layers.0.mlp.down_proj.weight",
            "model.layers.0.mlp.gate_proj.weight",
            "model.layers.0.mlp.up_proj.weight",
            "model.layers.0.post_attention_layernorm.weight",
            "model.layers.0.self_attn.k_proj.weight",
            "model.layers.0.self_attn.o_proj.weight",
            "model.layers.0.self_attn.q_proj.weight",
            "model.layers.0.self_attn.v_proj.weight",
            "model.norm.weight",
        ]
    );
}

#[test]
fn biases_are_expected_where_the_config_says_so() {
    let mut config = tiny_config("llama", "LlamaForCausalLM");
    config["attention_bias"] = json!(true);
    config["mlp_bias"] = json!(true);
    let checkpoint = open(&Folder::new(config)).unwrap();
    let model = &checkpoint.config;
    assert!(model.qkv_bias && model.out_bias && model.mlp_bias);
    let name = "model.layers.1.mlp.down_proj.bias";
    let mut out = [0.0; 5];
    checkpoint.read_rows(name, 3..8, &mut out).unwrap();
    assert!((0..5).all(|idx| out[idx] == value(name, 3 + idx)), "a vector has a value a row");
}

#[test]
fn any_range_of_rows_can_be_read() {
    let checkpoint = open(&Folder::llama()).unwrap();
    for (start, end) in [(0, 1), (5, 9), (31, 32), (0, 32), (7, 7), (32, 32)] {
        let mut out = vec![0.0; (end - start) * 32];
        checkpoint.read_rows(Q, start..end, &mut out).unwrap();
        assert!((0..out.len()).all(|idx| out[idx] == value(Q, start * 32 + idx)));
    }
    for (rows, len) in [(31..33, 64), (0..1, 31), (0..usize::MAX, 32)] {
        assert!(checkpoint.read_rows(Q, rows, &mut vec![0.0; len]).is_err());
    }
    assert!(checkpoint.read_rows("model.nothing", 0..1, &mut [0.0]).is_err());
}

#[test]
fn sixteen_bit_values_are_widened() {
    let mut folder = Folder::llama();
    for (name, dtype) in [(Q, "BF16"), ("lm_head.weight", "F16")] {
        let blob = folder.blob(name);
        blob.dtype = dtype;
        blob.bytes = (0..blob.bytes.len() / 4)
            .flat_map(|idx| match dtype {
                "F16" => half::f16::from_f32(value(name, idx)).to_le_bytes(),
                _ => half::bf16::from_f32(value(name, idx)).to_le_bytes(),
            })
            .collect();
    }
    let checkpoint = open(&folder).unwrap();
    for (idx, got) in read(&checkpoint, Q).into_iter().enumerate() {
        assert_eq!(got, half::bf16::from_f32(value(Q, idx)).to_f32());
    }
    for (idx, got) in read(&checkpoint, "lm_head.weight").into_iter().enumerate() {
        assert_eq!(got, value("lm_head.weight", idx));
    }
}

#[test]
fn a_tied_head_is_not_read_even_if_stored() {
    let mut folder = Folder::llama();
    folder.config["tie_word_embeddings"] = json!(true);
    let checkpoint = open(&folder).unwrap();
    assert!(checkpoint.config.tied_head);
    assert!(checkpoint.tensor("lm_head.weight").is_err());

    folder.remove("lm_head.weight");
    folder.config.as_object_mut().unwrap().remove("tie_word_embeddings");
    assert!(open(&folder).unwrap().config.tied_head, "no head is stored");

    folder.config["tie_word_embeddings"] = json!(false);
    refused(open(&folder), &["`lm_head.weight`: missing, expected [48, 32]"]);
}

#[test]
fn rope_is_read_in_both_spellings() {
    let llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192
    });
    let want = Some(RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position: 8192,
    });
    let mut folder = Folder::llama();
    folder.config["rope_theta"] = json!(500000);
    folder.config["rope_scaling"] = llama3.clone();
    let old = open(&folder).unwrap().config;
    assert_eq!((old.rope_theta, &old.rope_scaling), (500_000.0, &want));

    let fields = folder.config.as_object_mut().unwrap();
    fields.remove("rope_theta");
    fields.remove("rope_scaling");
    fields.insert("dtype".into(), json!("bfloat16"));
    fields.insert("rope_parameters".into(), llama3);
    folder.config["rope_parameters"]["rope_theta"] = json!(500000.0);
    assert_eq!(open(&folder).unwrap().config, old);

    folder.config["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 1e6});
    let plain = open(&folder).unwrap().config;
    assert_eq!((plain.rope_theta, plain.rope_scaling), (1e6, None));

    folder.config["rope_parameters"] = json!(null);
    folder.config["rope_scaling"] = json!({"type": "linear", "factor": 2});
    let linear = open(&folder).unwrap().config;
    assert_eq!(linear.rope_scaling, Some(RopeScaling::Linear { factor: 2.0 }));
}

#[test]
fn the_sliding_window_is_reported_where_it_is_used() {
    for (model_type, class, uses, want) in [
        ("mistral", "MistralForCausalLM", json!(null), Some(64)),
        ("llama", "LlamaForCausalLM", json!(null), None),
        ("qwen2", "Qwen2ForCausalLM", json!(false), None),
        ("qwen2", "Qwen2ForCausalLM", json!(true), Some(64)),
    ] {
        let mut config = tiny_config(model_type, class);
        config["sliding_window"] = json!(64);
        config["use_sliding_window"] = uses;
        assert_eq!(open(&Folder::new(config)).unwrap().sliding_window, want, "{model_type}");
    }
}

#[test]
fn the_generation_config_goes_before_the_config() {
    let dir = tempfile::tempdir().unwrap();
    Folder::llama().write(dir.path());
    assert_eq!(Checkpoint::open(dir.path()).unwrap().generation.end_tokens, [2]);
    let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
    write("generation_config.json", r#"{"eos_token_id": [7, 2]}"#);
    write("tokenizer_config.json", r#"{"add_bos_token": true}"#);
    write("tokenizer.json", "{}");
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.generation.end_tokens, [7, 2]);
    assert_eq!(checkpoint.generation.bos_token, Some(1));
    assert_eq!(checkpoint.generation.add_bos, Some(true));
    let TokenizerSource::Files(files) = checkpoint.tokenizer else { panic!("no files") };
    assert!(files.tokenizer.is_some() && files.config.is_some());
    assert!(files.chat_template.is_none() && files.special_tokens.is_none());
}

#[test]
fn carried_along_tensors_are_ignored() {
    let mut folder = Folder::llama();
    folder.blobs.push(Blob::f32("model.layers.0.self_attn.rotary_emb.inv_freq", &[4], &[0.0; 4]));
    folder.blobs.push(Blob::f32("model.layers.0.self_attn.k_proj.input_scale", &[], &[1.0]));
    assert_eq!(open(&folder).unwrap().tensors().count(), folder.blobs.len() - 2);
}

/// A checkpoint with scalars of these names behind those of the layers' attention.
fn with_scales(scales: &[(usize, &str, f32)]) -> Folder {
    let mut folder = Folder::llama();
    for &(layer, name, value) in scales {
        let name = format!("model.layers.{layer}.self_attn.{name}");
        folder.blobs.push(Blob::f32(&name, &[], &[value]));
    }
    folder
}

#[test]
fn scales_of_keys_and_values_go_by_several_names() {
    let read =
        |scales: &[(usize, &str, f32)]| open(&with_scales(scales)).unwrap().kv_scales.unwrap();
    let expected = Some(vec![(0.5, 2.0), (0.25, 3.0)]);
    for (key, value) in [
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
    ] {
        let scales = [(0, key, 0.5), (0, value, 2.0), (1, key, 0.25), (1, value, 3.0)];
        assert_eq!(read(&scales), expected, "{key}");
    }
    let one = [(0, "kv_scale", 0.5), (1, "kv_scale", 2.0)];
    assert_eq!(read(&one), Some(vec![(0.5, 0.5), (2.0, 2.0)]));
    assert_eq!(read(&[]), None);
}

#[test]
fn scales_that_are_not_whole_are_refused() {
    let refusal_of = |folder: &Folder, parts: &[&str]| {
        let message = format!("{:#}", open(folder).unwrap().kv_scales.unwrap_err());
        parts.iter().for_each(|part| assert!(message.contains(part), "`{part}`: {message}"));
    };
    let refusal = |scales: &[(usize, &str, f32)], parts: &[&str]| {
        refusal_of(&with_scales(scales), parts);
    };
    let (key, value) = ("k_scale", "v_scale");
    refusal(&[(0, key, 1.0)], &["layers.0.self_attn.k_scale` is there without", "v_scale"]);
    refusal(&[(1, value, 1.0)], &["layers.1.self_attn.v_scale` is there without", "k_scale"]);
    let one_layer = [(1, key, 1.0), (1, value, 1.0)];
    refusal(&one_layer, &["layer 0 has no scales of keys and values, layer 1 has some"]);
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let scales = [(0, key, 1.0), (0, value, bad)];
        refusal(&scales, &["layers.0.self_attn.v_scale", &format!("it is {bad}, expected more")]);
    }
    let mut folder = with_scales(&[(0, key, 1.0), (0, value, 1.0)]);
    folder.blobs.push(Blob::f32("model.layers.1.self_attn.k_scale", &[2], &[1.0, 1.0]));
    folder.blobs.push(Blob::f32("model.layers.1.self_attn.v_scale", &[], &[1.0]));
    refusal_of(&folder, &["layers.1.self_attn.k_scale", "its shape is [2], expected one number"]);
}

/// Writes the tensors alternately to two shards, with an index.
fn write_shards(folder: &Folder, dir: &std::path::Path) -> serde_json::Value {
    folder.write(dir);
    fs::remove_file(dir.join("model.safetensors")).unwrap();
    let mut map = json!({});
    for part in 0..2 {
        let file = format!("model-{}-of-2.safetensors", part + 1);
        let blobs: Vec<Blob> = folder.blobs.iter().skip(part).step_by(2).cloned().collect();
        blobs.iter().for_each(|blob| map[&blob.name] = json!(file));
        fs::write(dir.join(file), safetensors(&blobs)).unwrap();
    }
    let index = json!({"metadata": {"total_size": 1}, "weight_map": map});
    fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
    index
}

#[test]
fn shards_are_found_through_the_index() {
    let dir = tempfile::tempdir().unwrap();
    let folder = Folder::llama();
    write_shards(&folder, dir.path());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.tensors().count(), folder.blobs.len());
    assert!(read(&checkpoint, Q).iter().enumerate().all(|(idx, v)| *v == value(Q, idx)));
}

/// As `transformers` does: what wrote the file anew may have left the index behind.
#[test]
fn a_whole_file_goes_before_an_index_of_shards() {
    let dir = tempfile::tempdir().unwrap();
    write_shards(&Folder::llama(), dir.path());
    Folder::llama().write(dir.path());
    for entry in fs::read_dir(dir.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.to_string_lossy().contains("-of-") {
            fs::remove_file(path).unwrap();
        }
    }
    assert!(dir.path().join("model.safetensors.index.json").exists());
    Checkpoint::open(dir.path()).unwrap();
}

#[test]
fn an_index_that_is_wrong_is_refused() {
    for (name, file, parts) in [
        (Q, "../secret.safetensors", &["`../secret.safetensors`", "beside it"][..]),
        (Q, "weights.ckpt", &["`weights.ckpt`", "expected a .safetensors, .bin or .pt file"]),
        ("extra.weight", "model-3-of-2.safetensors", &["reading", "model-3-of-2.safetensors"]),
        ("extra.weight", "model-1-of-2.safetensors", &["`extra.weight` is not in model-1"]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let mut index = write_shards(&Folder::llama(), dir.path());
        index["weight_map"][name] = json!(file);
        fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
        refused(Checkpoint::open(dir.path()), parts);
    }
    let dir = tempfile::tempdir().unwrap();
    let mut index = write_shards(&Folder::llama(), dir.path());
    let other = ["model-1-of-2.safetensors", "model-2-of-2.safetensors"];
    let swapped = other.iter().find(|file| index["weight_map"][Q] != **file).unwrap();
    index["weight_map"][Q] = json!(swapped);
    fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    refused(Checkpoint::open(dir.path()), &[Q, "the index says"]);
}

#[test]
fn tensors_that_do_not_fit_the_model_are_refused_by_name() {
    let mut missing = Folder::llama();
    missing.remove(Q);
    refused(open(&missing), &[Q, "missing, expected [32, 32]"]);

    let mut shape = Folder::llama();
    shape.blob(Q).shape = vec![64, 16];
    refused(open(&shape), &[Q, "[64, 16], expected [32, 32]"]);

    let mut extra = Folder::llama();
    extra.blobs.push(Blob::f32("model.layers.1.self_attn.q_proj.bias", &[1], &[0.0]));
    refused(open(&extra), &["`model.layers.1.self_attn.q_proj.bias` is unexpected", "Llama"]);

    let mut double = Folder::llama();
    double.blob("model.norm.weight").dtype = "F64";
    double.blob("model.norm.weight").bytes = vec![0; 32 * 8];
    refused(open(&double), &["`model.norm.weight`", "dtype F64 is not supported"]);
}

#[test]
fn what_the_executors_cannot_do_is_refused_by_name() {
    for (key, found, parts) in [
        ("model_type", json!("gemma3"), &["`gemma3` is not supported", "llama, mistral"][..]),
        ("model_type", json!(null), &["config.json: `model_type` is missing"]),
        ("architectures", json!(["LlamaForTokenClassification"]), &["LlamaForTokenClass"]),
        ("hidden_act", json!("gelu"), &["hidden_act `gelu`"]),
        ("rope_scaling", json!({"rope_type": "yarn", "factor": 4.0}), &["`yarn`"]),
        ("rope_scaling", json!({"type": "dynamic", "factor": 4.0}), &["`dynamic`"]),
        ("rope_scaling", json!({"type": "longrope"}), &["`longrope`"]),
        ("rope_scaling", json!({"type": "linear"}), &["rope_scaling: `factor` is missing"]),
        ("rope_scaling", json!({"type": "linear", "factor": 0.5}), &["out of range"]),
        ("partial_rotary_factor", json!(0.5), &["partial_rotary_factor 0.5"]),
        ("hidden_size", json!("wide"), &["`hidden_size` is \"wide\", expected a whole number"]),
        ("hidden_size", json!(-32), &["`hidden_size` is -32"]),
        ("num_hidden_layers", json!(1u64 << 40), &["num_layers", "expected 1 to 1024"]),
        ("num_attention_heads", json!(0), &["num_heads is 0"]),
        ("num_key_value_heads", json!(3), &["4 is no multiple of num_kv_heads 3"]),
        ("head_dim", json!(7), &["head_dim 7 is odd"]),
        ("eos_token_id", json!([1, -2]), &["`eos_token_id`"]),
        ("eos_token_id", json!(48), &["eos_token_id is 48, the vocabulary has 48 tokens"]),
    ] {
        let mut folder = Folder::llama();
        folder.config[key] = found;
        refused(open(&folder), parts);
    }
}

#[test]
fn broken_pickles_and_empty_folders_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    refused(Checkpoint::open(dir.path()), &["config.json"]);
    Folder::llama().write(dir.path());
    fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    refused(Checkpoint::open(dir.path()), &["there is no model.safetensors, no pytorch_model.bin"]);
    fs::write(dir.path().join("pytorch_model.bin"), b"\x80\x02").unwrap();
    refused(Checkpoint::open(dir.path()), &["pytorch_model.bin", "no ZIP archive"]);
    refused(Checkpoint::open(&dir.path().join("pytorch_model.bin")), &["neither"]);
    refused(Checkpoint::open(&dir.path().join("nothing")), &["nothing"]);
}

#[test]
fn values_that_are_not_finite_are_named() {
    let checkpoint = open(&Folder::llama()).unwrap();
    let mut values = vec![1.0; 3 * 32];
    checkpoint.check_finite(Q, 10, &values).unwrap();
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        values[70] = bad;
        let message = checkpoint.check_finite(Q, 10, &values).unwrap_err().to_string();
        assert!(message.contains(Q) && message.contains("row 12"), "{message}");
    }
}

#[test]
fn a_model_made_to_draft_in_one_pass_is_known_by_its_mask() {
    assert_eq!(open(&Folder::llama()).unwrap().config.mask_token, None);
    for key in ["pard_token", "ptd_token_id"] {
        let mut folder = Folder::llama();
        folder.config[key] = json!(47);
        assert_eq!(open(&folder).unwrap().config.mask_token, Some(47));
        folder.config[key] = json!(48);
        refused(open(&folder), &["mask token is 48", "48"]);
        folder.config[key] = json!(1u64 << 32);
        refused(open(&folder), &[key, "4294967296"]);
    }
}
