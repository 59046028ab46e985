//! How often lookup drafts are right on real greedy text, against counts that were taken with an independent
//! implementation.
#![allow(clippy::unwrap_used)]

use serde_json::Value;
use spec_core::testing::draft::Ngram;
use std::path::Path;

fn read(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data").join(name);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().into_iter().flatten();
    ids.map(|id| id.as_u64().expect("token ids are whole numbers") as u32).collect()
}

/// Target passes, draft tokens and accepted drafts for one text; its first token comes from the prefill.
fn simulate(prompt: &[u32], output: &[u32], draft_len: usize) -> [usize; 3] {
    let all = [prompt, output].concat();
    let [mut passes, mut drafted, mut accepted] = [0; 3];
    let mut known = prompt.len() + 1;
    while known < all.len() {
        let drafts = Ngram::default().drafts_for(&all[..known], draft_len.min(all.len() - known));
        let kept = drafts.iter().zip(&all[known..]).take_while(|(a, b)| a == b).count();
        passes += 1;
        drafted += drafts.len();
        accepted += kept;
        known += kept + 1;
    }
    [passes, drafted, accepted]
}

#[test]
fn lookup_finds_what_the_reference_finds_on_real_text() {
    let prompts = read("six_prompts.json");
    let golden = read("golden/six_prompts_qwen2.5-coder-1.5b.json");
    let texts = prompts["qwen2.5-coder-1.5b"].as_array().unwrap();
    let runs = golden["runs"][0].as_array().unwrap();
    let pairs: Vec<_> = texts
        .iter()
        .zip(runs)
        .map(|(text, run)| {
            assert_eq!(text["name"], run["name"]);
            (ids(&text["ids"]), ids(&run["tokens"]))
        })
        .collect();
    for (draft_len, expected) in [(10, [507, 935, 259]), (4, [533, 488, 233])] {
        let mut totals = [0; 3];
        for (prompt, output) in &pairs {
            let counts = simulate(prompt, output, draft_len);
            totals.iter_mut().zip(counts).for_each(|(total, count)| *total += count);
        }
        assert_eq!(totals, expected, "draft length {draft_len}: passes, drafted, accepted");
    }
}
