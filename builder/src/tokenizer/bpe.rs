//! The BPE model of a tokenizer: which tokens are in its vocabulary, and its merges.

use super::pre::Recipe;
use super::{GgufTokenizer, Kind};
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// The `model` of a `tokenizer.json`.
pub(super) fn model(source: &GgufTokenizer, kinds: &[Kind], recipe: Recipe) -> Result<Value> {
    let spm = recipe.is_sentence_piece();
    let vocab = vocabulary(source, kinds, spm)?;
    let merges = if spm && source.merges.is_empty() {
        merges_from_scores(source, kinds)?
    } else {
        parse_merges(source)?
    };
    for (left, right) in &merges {
        for token in [*left, *right, &[*left, *right].concat()] {
            ensure!(vocab.contains_key(token), "merge `{left} {right}`: {token:?} is no token");
        }
    }
    let unk = match source.unk {
        Some(id) => Some(id as usize),
        None => kinds.iter().position(|kind| *kind == Kind::Unknown),
    };
    Ok(json!({
        "type": "BPE",
        "dropout": null,
        "unk_token": unk.filter(|_| spm).map(|id| &source.tokens[id]),
        "continuing_subword_prefix": null,
        "end_of_word_suffix": null,
        "fuse_unk": spm,
        "byte_fallback": spm,
        "ignore_merges": recipe.ignore_merges,
        "vocab": vocab,
        "merges": merges,
    }))
}

/// Token to id, in id order. Added tokens behind all others are left out where the tokenizers crate
/// numbers them on to the same ids (Qwen, Llama 3); before, they are in it, as in the originals
/// (SmolLM, Llama 2).
fn vocabulary(source: &GgufTokenizer, kinds: &[Kind], spm: bool) -> Result<Map<String, Value>> {
    let is_real = |kind: Kind| spm || kind != Kind::Unused;
    let inner = |kind: Kind| is_real(kind) && !kind.is_added();
    let last = kinds.iter().rposition(|&kind| inner(kind)).map_or(0, |last| last + 1);
    let end = kinds.iter().rposition(|&kind| is_real(kind)).map_or(0, |last| last + 1);
    let dense = kinds[..end].iter().all(|&kind| is_real(kind));
    let len = if spm || !dense { end } else { last };
    let mut vocab = Map::new();
    for (id, token) in source.tokens[..len].iter().enumerate() {
        if !is_real(kinds[id]) {
            continue;
        }
        if let Some(first) = vocab.insert(token.clone(), json!(id)) {
            bail!("token {token:?} stands twice in the vocabulary, as {first} and as {id}");
        }
    }
    Ok(vocab)
}

fn parse_merges(source: &GgufTokenizer) -> Result<Vec<(&str, &str)>> {
    ensure!(!source.merges.is_empty(), "no merges (tokenizer.ggml.merges)");
    source
        .merges
        .iter()
        .map(|merge| merge.split_once(' ').with_context(|| format!("merge {merge:?} has no space")))
        .collect()
}

/// SentencePiece merges whichever neighbours give the piece of the best score. As a list that is
/// every way to cut a piece in two pieces, by score of the whole, best first; equal scores by the
/// longer left part, as Hugging Face converts it.
fn merges_from_scores<'a>(
    source: &'a GgufTokenizer,
    kinds: &[Kind],
) -> Result<Vec<(&'a str, &'a str)>> {
    let scores =
        source.scores.as_ref().context("neither merges nor scores (tokenizer.ggml.scores)")?;
    let normal = || (0..kinds.len()).filter(|&id| kinds[id] == Kind::Normal);
    let ids: HashMap<&str, usize> = normal().map(|id| (source.tokens[id].as_str(), id)).collect();
    let mut merges = Vec::new();
    for id in normal() {
        ensure!(!scores[id].is_nan(), "token {id} has the score NaN");
        let token = source.tokens[id].as_str();
        let mut cuts: Vec<_> = token
            .char_indices()
            .skip(1)
            .map(|(at, _)| token.split_at(at))
            .filter_map(|(left, right)| Some((*ids.get(left)?, *ids.get(right)?, left, right)))
            .collect();
        cuts.sort_by_key(|&(left_id, right_id, ..)| (left_id, right_id));
        merges.extend(cuts.into_iter().map(|(_, _, left, right)| (scores[id], left, right)));
    }
    let chars = |text: &str| text.chars().count();
    // A stable sort: the rest of the order is by id.
    merges.sort_by(|a, b| {
        let by_score = b.0.total_cmp(&a.0);
        by_score.then_with(|| (chars(b.1), chars(b.2)).cmp(&(chars(a.1), chars(a.2))))
    });
    Ok(merges.into_iter().map(|(_, left, right)| (left, right)).collect())
}
