//! Attention as the formula says it, in f64.

use half::f16;

use crate::case::{Case, Image, Query, UNTOUCHED};

/// Of the mean magnitude of what is added: a weight is rounded to a half (2^-11 at most) and so is the
/// result; the rest is far below.
pub(crate) const TOLERANCE: f64 = 1.05 / 1024.0;

/// What is below a half's smallest step is lost.
pub(crate) const STEP: f64 = 1.0 / (1 << 24) as f64;

/// A result and the mean magnitude of what was added.
struct Expected {
    value: f64,
    magnitude: f64,
}

/// The result of one query head, which attends to key head `head` of `sequence`.
fn attend(
    (case, image): (&Case, &Image),
    (row, sequence): (&Query, usize),
    query: &[u16],
    head: usize,
) -> Vec<Expected> {
    let shape = case.shape;
    let (key_scale, value_scale) = shape.scales(head);
    let scale = shape.softmax_scale() * key_scale;
    let tokens: Vec<_> = (0..row.end()).filter(|&token| row.sees(token)).collect();
    let scores: Vec<f64> = tokens
        .iter()
        .map(|&token| {
            let key = |i| image.load(shape.kv, case.key_at(sequence, head, token, i));
            let dot: f64 =
                query.iter().enumerate().map(|(i, &q)| f16::from_bits(q).to_f64() * key(i)).sum();
            dot * f64::from(scale)
        })
        .collect();
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
    let total: f64 = weights.iter().sum();
    let element = |i| {
        let mut expected = Expected { value: 0.0, magnitude: 0.0 };
        for (&token, weight) in tokens.iter().zip(&weights) {
            let value = image.load(shape.kv, case.value_at(sequence, head, token, i));
            let term = weight / total * value * f64::from(value_scale);
            expected.value += term;
            expected.magnitude += term.abs();
        }
        expected
    };
    (0..shape.head_dim).map(element).collect()
}

/// The first difference beyond the tolerance.
pub(crate) fn compare(case: &Case, image: &Image, output: &[u16]) -> Result<(), String> {
    let shape = case.shape;
    let rows =
        output.chunks_exact(shape.row_len()).zip(image.queries.chunks_exact(shape.row_len()));
    for ((output, queries), row) in rows.zip(case.rows()) {
        let heads = output.chunks_exact(shape.head_dim).zip(queries.chunks_exact(shape.head_dim));
        for (head, (output, query)) in heads.enumerate() {
            let Some(sequence) = row.sequence else { continue };
            let expected = attend((case, image), (row, sequence), query, head / shape.group);
            for (i, (&bits, expected)) in output.iter().zip(&expected).enumerate() {
                let got = f16::from_bits(bits).to_f64();
                let error = (got - expected.value).abs();
                // Written so that NaN is an error.
                let close = error <= TOLERANCE * expected.magnitude + STEP && bits != UNTOUCHED;
                if !close {
                    let Expected { value, magnitude } = expected;
                    return Err(format!(
                        "{row:?} head {head} element {i}: {got}, not {value}: the error is {error:e}, \
                         the terms are {magnitude:e}"
                    ));
                }
            }
        }
    }
    Ok(())
}
