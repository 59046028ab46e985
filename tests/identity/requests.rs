//! Requests over chats and code, greedy and seeded.

use crate::common::data;
use crate::common::models::SMOLLM2;
use spec_core::engine::Engine;
use spec_core::runtime::Request;
use spec_core::sampling::SamplingParams;
use spec_core::tokenizer::Tokenizer;

/// Greedy and seeded sampling, with and without what depends on the tokens before.
fn sampling(idx: usize, prompt: &[u32]) -> SamplingParams {
    let seeded = SamplingParams {
        temperature: 0.8,
        top_p: 0.95,
        seed: Some(idx as u64),
        ..SamplingParams::default()
    };
    match idx % 5 {
        0 => SamplingParams::default(),
        1 => seeded,
        2 => SamplingParams {
            repetition_penalty: 1.2,
            presence_penalty: 0.3,
            frequency_penalty: 0.2,
            ..seeded
        },
        3 => SamplingParams {
            top_k: 40,
            logit_bias: [(prompt[0], 4.0), (198, -3.0), (prompt[prompt.len() / 2], 2.0)].into(),
            bad_words: [vec![prompt[1]], prompt[2..4].to_vec()].into(),
            min_tokens: 8,
            ..seeded
        },
        _ => SamplingParams {
            repetition_penalty: 1.1,
            frequency_penalty: 0.3,
            ..SamplingParams::default()
        },
    }
}

fn request(idx: usize, prompt: Vec<u32>, max_tokens: usize) -> Request {
    let sampling = sampling(idx, &prompt);
    Request { sampling, prompt: prompt.into(), max_tokens, ..Request::default() }
}

/// Requests over the four shorter chats, one for each kind of sampling.
pub(crate) fn few_requests(max_tokens: usize) -> Vec<Request> {
    let prompts = data::six_prompts(SMOLLM2);
    let request = |idx: usize| request(idx, prompts[[0, 3, 1, 2, 1][idx]].1.clone(), max_tokens);
    (0..5).map(request).collect()
}

/// Requests over code to complete and over chats, in turn, of mixed lengths and kinds: one of several hundred
/// tokens, the others of 20 to 200.
pub(crate) fn many_requests(num: usize, tokenizer: &Tokenizer) -> Vec<Request> {
    let mut chats = data::six_prompts(SMOLLM2).into_iter().filter(|(name, _)| name != "summarise");
    let mut prompts = Vec::new();
    for (idx, problem) in data::json_lines("humaneval_dev.jsonl").iter().enumerate() {
        let text = problem["prompt"].as_str().expect("a text");
        let mut prompt = tokenizer.encode(text, true).expect("encodes");
        prompt.truncate(20 + idx * 7 % 60);
        prompts.push(prompt);
        prompts.extend(chats.next().map(|(_, prompt)| prompt));
    }
    assert!(prompts.len() >= num, "{} prompts", prompts.len());
    let request = |(idx, prompt)| request(idx, prompt, 10 + idx % 7);
    prompts.into_iter().take(num).enumerate().map(request).collect()
}

/// Of an engine.
pub(crate) fn tokenizer(engine: &Engine) -> Tokenizer {
    Tokenizer::open(engine.path().parent().expect("a version folder")).expect("opens")
}
