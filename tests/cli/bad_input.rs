//! Checkpoints, arguments and requests that are wrong: refused by name with both values, and a build that
//! is refused leaves nothing behind.

use super::support::{
    Checkpoint, MAX_POSITION, NUM_TOKENS, Tensor, VOCAB_SIZE, build_args, built, misused, names_in,
    refused, tokenizer,
};
use serde_json::json;
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;

/// Builds what must be refused; not even the model folder may be left.
fn build_refused(checkpoint: &Checkpoint, options: &[&str], parts: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    checkpoint.write(&dir.path().join("checkpoint"));
    build_folder_refused(dir.path(), options, parts);
}

fn build_folder_refused(dir: &Path, options: &[&str], parts: &[&str]) {
    let before = names_in(dir);
    refused(&build_args(&dir.join("checkpoint"), &dir.join("model"), options), parts);
    assert_eq!(names_in(dir), before);
}

fn altered(change: impl FnOnce(&mut Checkpoint)) -> Checkpoint {
    let mut checkpoint = Checkpoint::tiny(1);
    change(&mut checkpoint);
    checkpoint
}

#[test]
fn tensors_that_are_missing_too_many_or_of_another_shape_are_named() {
    let down = "model.layers.1.mlp.down_proj.weight";
    let missing = altered(|c| c.tensors.retain(|tensor| tensor.name != down));
    build_refused(&missing, &[], &[down, "missing, expected [32, 64]"]);
    let extra = altered(|c| {
        let name = "model.layers.1.mlp.experts.weight".to_string();
        c.tensors.push(Tensor { name, shape: vec![2], values: vec![0.0; 2] });
    });
    build_refused(&extra, &[], &["model.layers.1.mlp.experts.weight", "unexpected"]);
    let turned = altered(|c| c.tensor(down).shape = vec![64, 32]);
    build_refused(&turned, &[], &[down, "its shape is [64, 32], expected [32, 64]"]);
}

#[test]
fn weights_that_are_no_finite_numbers_are_named_with_their_row() {
    for (value, shown) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf")] {
        for dtype in ["bf16", "fp8", "int8", "int4", "fp32"] {
            let name = "model.layers.0.self_attn.k_proj.weight";
            let broken = altered(|c| c.tensor(name).values[3 * 32 + 1] = value);
            build_refused(&broken, &["--dtype", dtype], &[name, "row 3", shown, "finite"]);
        }
        let norm = altered(|c| c.tensor("model.norm.weight").values[7] = value);
        build_refused(&norm, &[], &["model.norm.weight", "row 7", shown]);
    }
}

#[test]
fn weights_beyond_half_precision_are_refused_in_it_alone() {
    let name = "model.layers.0.mlp.up_proj.weight";
    let large = altered(|c| c.tensor(name).values[0] = 70_000.0);
    build_refused(&large, &["--dtype", "fp16"], &[name, "70000", "65504", "bf16"]);
    built(&large, &["--dtype", "bf16"]);
}

#[test]
fn unknown_models_and_broken_configurations_are_refused() {
    let mamba = altered(|c| {
        c.config["model_type"] = json!("mamba");
        c.config["architectures"] = json!(["MambaForCausalLM"]);
    });
    build_refused(&mamba, &[], &["model type `mamba`", "expected one of llama"]);
    let huge = altered(|c| c.config["num_hidden_layers"] = json!(1_000_000));
    build_refused(&huge, &[], &["num_layers is 1000000, expected 1 to 1024"]);
    let text = altered(|c| c.config["hidden_size"] = json!("32"));
    build_refused(&text, &[], &["config.json: `hidden_size` is \"32\""]);
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("checkpoint");
    Checkpoint::tiny(1).write(&folder);
    fs::write(folder.join("config.json"), "{\"a\n\x1b[31m").unwrap();
    build_folder_refused(dir.path(), &[], &["config.json is no JSON object"]);
    fs::remove_dir_all(&folder).unwrap();
    build_folder_refused(dir.path(), &[], &["checkpoint", "No such file"]);
}

#[test]
fn checkpoints_that_were_cut_or_claim_too_much_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("checkpoint");
    Checkpoint::tiny(1).write(&folder);
    let file = folder.join("model.safetensors");
    let whole = fs::read(&file).unwrap();
    fs::write(&file, &whole[..whole.len() - 10]).unwrap();
    build_folder_refused(dir.path(), &[], &["model.safetensors"]);
    fs::write(&file, [&u64::MAX.to_le_bytes(), &whole[8..]].concat()).unwrap();
    build_folder_refused(dir.path(), &[], &["its header claims 18446744073709551615 bytes"]);
    fs::write(&file, &whole).unwrap();
    fs::remove_file(folder.join("tokenizer.json")).unwrap();
    build_folder_refused(dir.path(), &[], &["tokenizer.json"]);
    fs::write(folder.join("tokenizer.json"), "{}").unwrap();
    build_folder_refused(dir.path(), &[], &["tokenizer.json"]);
}

#[test]
fn a_draft_with_other_tokens_is_refused_at_the_first() {
    let dir = tempfile::tempdir().unwrap();
    let draft = dir.path().join("draft");
    Checkpoint::tiny(1).write(&dir.path().join("checkpoint"));
    altered(|c| c.tokenizer = tokenizer("<|stop|>")).write(&draft);
    let options = ["--draft", draft.to_str().unwrap()];
    build_folder_refused(dir.path(), &options, &["token 256", "<|end|>", "<|stop|>"]);
    let short = altered(|c| {
        c.config["vocab_size"] = json!(200);
        let embed = c.tensor("model.embed_tokens.weight");
        embed.shape[0] = 200;
        embed.values.truncate(200 * 32);
        c.config["eos_token_id"] = json!(7);
        c.config["bos_token_id"] = json!(7);
    });
    short.write(&draft);
    build_folder_refused(dir.path(), &options, &["draft", "257 ids", "200 rows"]);
}

#[test]
fn options_that_contradict_each_other_or_the_model_are_refused() {
    let tiny = Checkpoint::tiny(1);
    for (options, parts) in [
        (&["--max-draft-len", "4"][..], &["--max-draft-len 4 without a drafter"][..]),
        (&["--draft", "ngram", "--max-draft-len", "0"], &["--max-draft-len 0 with a drafter"]),
        (&["--draft", "ngram", "--max-draft-len", "129"], &["max_draft_len is 129", "0 to 128"]),
        (&["--draft", "ngram", "--max-num-tokens", "4"], &["max_draft_len 8", "max_num_tokens 4"]),
        (&["--max-seq-len", "129"], &["--max-seq-len 129", "128 positions"]),
        (&["--max-seq-len", "0"], &["max_seq_len is 0", "1 to 128"]),
        (&["--max-batch-size", "0"], &["max_batch_size is 0", "1 to 65536"]),
        (&["--kv-dtype", "bf16"], &["--kv-dtype bf16", "fp32, fp16 or fp8"]),
        (&["--device", "cuda:sm_90"], &["--device cuda:sm_90", "not one of sm_80, sm_89, sm_90a"]),
        (&["--device", "cuda:sm_90a"], &["target: head_dim is 8", "64 or 128", "--device cpu"]),
        (&["--device", "tpu"], &["--device tpu", "cuda:ARCH"]),
        (&["--draft", "/nonexistent"], &["draft", "/nonexistent", "No such file"]),
    ] {
        build_refused(&tiny, options, parts);
    }
}

#[test]
fn arguments_of_the_wrong_form_are_misuse() {
    misused::<&str>(&[], &["Usage"]);
    misused(&["frobnicate"], &["frobnicate"]);
    misused(&["--target", "x"], &["--output"]);
    misused(
        &["--target", "x", "--output", "y", "--dtype", "fp4"],
        &["fp4", "fp32, fp16, bf16, fp8, int8, int4"],
    );
    misused(&["--target", "x", "--output", "y", "--max-draft-len", "-1"], &["-1"]);
    for (draft, parts) in [
        ("ngram:max=2,min=3", &["max=2 and min=3", "1 <= min <= max <= 16"][..]),
        ("ngram:max=17", &["max=17 and min=2"]),
        ("ngram:min=0", &["max=3 and min=0"]),
        ("ngram:max=x", &["'max=x' has no number"]),
        ("ngram:max=3,max=4", &["'max=4' is not known"]),
        ("ngram:", &["'' is not known: expected max=N or min=N"]),
        ("suffix:", &["'': expected tokens=N, from 1 to 67108864"]),
        ("suffix:tokens=0", &["'tokens=0': expected tokens=N"]),
        ("suffix:max=3", &["'max=3': expected tokens=N"]),
    ] {
        misused(&["--target", "x", "--output", "y", "--draft", draft], parts);
    }
    misused(&["try", "m", "--prompt", "x", "--temperature", "hot"], &["hot"]);
    misused(
        &["try", "m", "--prompt", "x", "--lookup", "x"],
        &["expected one of off, ngram, suffix"],
    );
    misused(&["try", "m", "--prompt", "x", "--draft-len", "many"], &["many", "auto"]);
    misused(&["try", "m", "--prompt-ids", "1,-2"], &["-2"]);
    misused(&["try", "m", "--prompt", "x", "--logit-bias", "7"], &["ID:VALUE"]);
    misused(&["try", "m"], &["--prompt"]);
}

#[test]
fn arguments_that_are_no_utf8_do_not_panic() {
    let odd = |text: &[u8]| OsString::from_vec(text.to_vec());
    misused(&[odd(b"\xff")], &["unrecognized"]);
    misused(&[odd(b"try"), odd(b"m"), odd(b"--prompt"), odd(b"\xff")], &["UTF-8"]);
    refused(&[odd(b"inspect"), odd(b"/nonexistent/\xff")], &["No such file"]);
    let dir = tempfile::tempdir().unwrap();
    Checkpoint::tiny(1).write(dir.path());
    let output = [dir.path().as_os_str().as_encoded_bytes(), b"/\xff"].concat();
    let args = [odd(b"--target"), dir.path().into(), odd(b"--output"), odd(&output)];
    let before = names_in(dir.path());
    refused(&args, &["--output", "no name in UTF-8"]);
    assert_eq!(names_in(dir.path()), before);
    let mut args = args.to_vec();
    args.extend([odd(b"--draft"), odd(b"/nonexistent/\xff")]);
    refused(&args, &["draft", "No such file"]);
}

#[test]
fn an_output_that_cannot_be_written_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("checkpoint");
    Checkpoint::tiny(1).write(&from);
    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    refused(&build_args(&from, &file, &[]), &["creating", "file"]);
    refused(&build_args(&from, &file.join("model"), &[]), &["creating", "file/model"]);
    refused(&build_args(&from, Path::new("/proc/none/model"), &[]), &["creating", "/proc/none"]);
    refused(&build_args(&from, Path::new("/"), &[]), &["--output /"]);
    assert_eq!(fs::read(&file).unwrap(), b"x");
}

#[test]
fn requests_out_of_their_limits_are_refused_by_field() {
    let dir = built(&Checkpoint::tiny(1), &["--draft", "ngram", "--max-draft-len", "4"]);
    let model = dir.path().join("model");
    let long = "x".repeat(MAX_POSITION);
    let outside = VOCAB_SIZE.to_string();
    let vocabulary = format!("{VOCAB_SIZE}");
    let bias = format!("{VOCAB_SIZE}:1");
    for (options, parts) in [
        (&["--prompt", &long][..], &["prompt: 128 tokens, max_seq_len is 128"][..]),
        (&["--prompt", "abc", "--max-tokens", "126"], &["max_tokens: 126", "129", "128"]),
        (&["--prompt", "x", "--max-tokens", "0"], &["max_tokens: 0"]),
        (&["--prompt", ""], &["the prompt is empty"]),
        (&["--prompt-ids", &outside], &["input_ids", &outside, &vocabulary]),
        (&["--prompt", "x", "--temperature", "NaN"], &["temperature: NaN", "0 to 100"]),
        (&["--prompt", "x", "--temperature", "inf"], &["temperature: inf", "0 to 100"]),
        (&["--prompt", "x", "--top-p", "2.0"], &["top_p: 2", "at most 1"]),
        (&["--prompt", "x", "--min-p", "1.5"], &["min_p: 1.5", "0 to 1"]),
        (&["--prompt", "x", "--repetition-penalty", "0"], &["repetition_penalty: 0"]),
        (&["--prompt", "x", "--frequency-penalty", "-3"], &["frequency_penalty: -3", "-2 to 2"]),
        (&["--prompt", "x", "--logit-bias", &bias], &["logit_bias", &outside]),
        (&["--prompt", "x", "--logprobs", "21"], &["logprobs: 21", "20"]),
        (&["--prompt", "x", "--bad-word", ""], &["bad_words: an entry is empty"]),
        (&["--prompt", "x", "--draft-len", "5"], &["draft_len: 5", "max_draft_len 4"]),
        (&["--prompt", "x", "--chat"], &["--chat: the model has no chat template"]),
    ] {
        let args = [&["try", model.to_str().unwrap()][..], options].concat();
        refused(&args, parts);
    }
    assert_eq!(NUM_TOKENS, 257, "padding of the vocabulary counts as tokens that can be given");
}

#[test]
fn huge_lists_are_refused_by_their_length() {
    let dir = built(&Checkpoint::tiny(1), &[]);
    let model = dir.path().join("model");
    let many = |option: &str, value: &str, times: usize| -> Vec<String> {
        let first = ["try", model.to_str().unwrap(), "--prompt", "x"].map(String::from);
        let rest = [option, value].map(String::from);
        first.into_iter().chain((0..times).flat_map(|_| rest.clone())).collect()
    };
    refused(&many("--stop", "x", 5000), &["stop: 5000 entries, at most 256"]);
    refused(&many("--stop", &"y".repeat(2000), 1), &["stop: 2000 bytes", "at most 1024"]);
    refused(&many("--bad-word", "x", 5000), &["bad_words: 5000 entries, at most 1024"]);
    refused(&many("--bad-word", &"y".repeat(100), 1), &["bad_words: 100 tokens", "at most 64"]);
    refused(&many("--logit-bias", "1:2", 5000), &["logit_bias: 5000 entries, at most 4096"]);
}
