//! The kernel of a task: scores, softmax and weighted values, a chunk of positions at a time and a
//! block of lines (a row's query head each) at a time, in registers.

use super::{CHUNK, Run};
use crate::exec::cpu::kv::Element;
use crate::exec::cpu::simd::{LANES, Simd, exp, prefix, sum};
use crate::pages::PAGE_TOKENS;
use std::ops::Range;

const CHUNK_PAGES: usize = CHUNK / PAGE_TOKENS;

/// Lines in the largest block.
const MAX_BLOCK: usize = 12;

/// Scores, then weights, of one line in a chunk: a vector a page.
type Weights = [[f32; LANES]; CHUNK_PAGES];

/// The softmax of a line over the positions so far.
#[derive(Clone, Copy)]
struct Total {
    /// The largest score.
    max: f32,
    /// Sum of exp(score - max).
    sum: f32,
}

/// The keys and values of a chunk, by page.
struct Chunk<'a, E> {
    /// Of each page, a vector of positions for each element of the head.
    keys: [&'a [[E; LANES]]; CHUNK_PAGES],
    /// Of each page, for each position the vectors of its value.
    values: [&'a [[E; LANES]]; CHUNK_PAGES],
    /// Vectors of a value.
    vectors: usize,
}

/// What the lines of a block have of a chunk.
struct Block<'a> {
    /// `[element][line]`, scaled.
    q: &'a [f32],
    /// Positions of the chunk that each line attends to: where they begin and end, both ascending. None where they
    /// begin at their end.
    begins: &'a [usize],
    ends: &'a [usize],
    weights: &'a mut [Weights],
    /// `[line][vector]`: the weighted sum of the chunk's values.
    partial: &'a mut [[f32; LANES]],
}

#[inline(always)]
pub(super) fn run<S: Simd, E: Element>(s: S, mut run: Run<'_>) {
    let (kv, group) = (run.attention.kv, run.attention.group());
    let num_lines = run.task.rows.len() * group;
    let vectors = kv.value_stride() / LANES;
    let blocks = blocks::<S>(num_lines);
    let scales = kv.scales(run.attention.layer, run.task.kv_head);
    let q = pack_queries(&run, &blocks, run.attention.scale * E::SCALE * scales.key);
    let mut weights = [[[0.0; LANES]; CHUNK_PAGES]; MAX_BLOCK];
    let mut partial = vec![[0.0; LANES]; MAX_BLOCK * vectors];
    let mut acc = vec![[0.0; LANES]; num_lines * vectors];
    let mut totals = vec![Total { max: f32::NEG_INFINITY, sum: 0.0 }; num_lines];
    let (seen, context) = (run.context(0).start, run.context(num_lines - 1).end);
    for start in (seen / CHUNK * CHUNK..context).step_by(CHUNK) {
        let chunk = gather::<E>(&run, start, context, vectors);
        for &(first, len) in &blocks {
            let (mut begins, mut ends) = ([0; MAX_BLOCK], [0; MAX_BLOCK]);
            for (idx, (begin, end)) in begins.iter_mut().zip(&mut ends).enumerate().take(len) {
                let context = run.context(first + idx);
                *end = context.end.saturating_sub(start).min(CHUNK);
                *begin = context.start.saturating_sub(start).min(*end);
            }
            let mut block = Block {
                q: &q[first * kv.head_dim()..(first + len) * kv.head_dim()],
                begins: &begins[..len],
                ends: &ends[..len],
                weights: &mut weights[..len],
                partial: &mut partial[..len * vectors],
            };
            attend(s, &chunk, &mut block, &mut totals[first..], &mut acc[first * vectors..]);
        }
    }
    for line in 0..num_lines {
        let scale = E::SCALE * scales.value / totals[line].sum;
        let acc = acc[line * vectors..][..vectors].as_flattened();
        for (out, &x) in run.result(line).iter_mut().zip(acc) {
            *out = x * scale;
        }
    }
}

/// Cuts lines into blocks (first, len) of the sizes that kernels exist for.
fn blocks<S: Simd>(num_lines: usize) -> Vec<(usize, usize)> {
    let sizes: &[usize] = if S::WIDE { &[12, 6, 4, 2, 1] } else { &[6, 4, 2, 1] };
    let mut blocks = Vec::new();
    let mut first = 0;
    while first < num_lines {
        let len = sizes.iter().copied().find(|&size| size <= num_lines - first).unwrap_or(1);
        blocks.push((first, len));
        first += len;
    }
    blocks
}

/// Scaled queries as `[block][element][line]`.
fn pack_queries(run: &Run<'_>, blocks: &[(usize, usize)], scale: f32) -> Vec<f32> {
    let head_dim = run.attention.kv.head_dim();
    let num_lines = run.task.rows.len() * run.attention.group();
    let mut packed = vec![0.0; num_lines * head_dim];
    for &(first, len) in blocks {
        let block = &mut packed[first * head_dim..(first + len) * head_dim];
        for line in 0..len {
            for (packed, &q) in block.chunks_exact_mut(len).zip(run.query(first + line)) {
                packed[line] = q * scale;
            }
        }
    }
    packed
}

/// The pages of the chunk at `start`, up to the last that holds a position of the context.
fn gather<'a, E: Element>(
    run: &Run<'a>,
    start: usize,
    context: usize,
    vectors: usize,
) -> Chunk<'a, E> {
    let attention = run.attention;
    let first = start / PAGE_TOKENS;
    let last = context.div_ceil(PAGE_TOKENS).min(first + CHUNK_PAGES);
    let pages = &attention.rows[run.task.rows.start].pages[first..last];
    let mut chunk = Chunk { keys: [&[]; CHUNK_PAGES], values: [&[]; CHUNK_PAGES], vectors };
    for (idx, &page) in pages.iter().enumerate() {
        let (kv, layer, page) = attention.page(page);
        chunk.keys[idx] = kv.keys(layer, page, run.task.kv_head);
        chunk.values[idx] = kv.values(layer, page, run.task.kv_head);
    }
    chunk
}

/// A block's part in a chunk: adds to the totals and the weighted sums of its lines.
#[inline(always)]
fn attend<S: Simd, E: Element>(
    s: S,
    chunk: &Chunk<'_, E>,
    block: &mut Block<'_>,
    totals: &mut [Total],
    acc: &mut [[f32; LANES]],
) {
    let len = block.ends.len();
    if block.ends[len - 1] == 0 {
        return;
    }
    match len {
        12 => score::<S, E, 12, 1>(s, chunk, block),
        6 => score::<S, E, 6, 1>(s, chunk, block),
        4 => score::<S, E, 4, 1>(s, chunk, block),
        2 => score::<S, E, 2, 2>(s, chunk, block),
        _ => score::<S, E, 1, 4>(s, chunk, block),
    }
    let mut parts = [Total { max: f32::NEG_INFINITY, sum: 0.0 }; MAX_BLOCK];
    for (line, weights) in block.weights.iter_mut().enumerate() {
        if block.begins[line] < block.ends[line] {
            parts[line] = softmax(s, weights, block.begins[line], block.ends[line]);
        }
    }
    match len {
        12 => weigh::<S, E, 12, 2>(s, chunk, block),
        6 if S::WIDE => weigh::<S, E, 6, 4>(s, chunk, block),
        6 => weigh::<S, E, 6, 1>(s, chunk, block),
        4 if S::WIDE => weigh::<S, E, 4, 4>(s, chunk, block),
        4 => weigh::<S, E, 4, 1>(s, chunk, block),
        2 if S::WIDE => weigh::<S, E, 2, 4>(s, chunk, block),
        2 => weigh::<S, E, 2, 2>(s, chunk, block),
        _ => weigh::<S, E, 1, 4>(s, chunk, block),
    }
    let vectors = chunk.vectors;
    for line in 0..len {
        if block.begins[line] < block.ends[line] {
            let partial = &block.partial[line * vectors..][..vectors];
            let acc = &mut acc[line * vectors..][..vectors];
            merge(s, &mut totals[line], parts[line], acc, partial);
        }
    }
}

/// Scores of `R` lines for whole pages, `P` pages at a time: the order of additions is that of the
/// head's elements whatever `R` and `P`. Positions behind a line's end get scores of no meaning.
#[inline(always)]
fn score<S: Simd, E: Element, const R: usize, const P: usize>(
    s: S,
    chunk: &Chunk<'_, E>,
    block: &mut Block<'_>,
) {
    let pages = block.ends[R - 1].div_ceil(PAGE_TOKENS);
    let mut page = 0;
    while page + P <= pages {
        score_pages::<S, E, R, P>(s, chunk, block, page);
        page += P;
    }
    while page < pages {
        score_pages::<S, E, R, 1>(s, chunk, block, page);
        page += 1;
    }
}

#[inline(always)]
fn score_pages<S: Simd, E: Element, const R: usize, const P: usize>(
    s: S,
    chunk: &Chunk<'_, E>,
    block: &mut Block<'_>,
    first: usize,
) {
    let (q, _) = block.q.as_chunks::<R>();
    let mut keys: [&[[E; LANES]]; P] = [&[]; P];
    for (page, keys) in keys.iter_mut().enumerate() {
        *keys = &chunk.keys[first + page][..q.len()];
    }
    let mut acc = [[s.splat(0.0); P]; R];
    for (element, q) in q.iter().enumerate() {
        for page in 0..P {
            let key = E::load(s, &keys[page][element]);
            for line in 0..R {
                acc[line][page] = s.mul_add(s.splat(q[line]), key, acc[line][page]);
            }
        }
    }
    for (acc, weights) in acc.iter().zip(block.weights.iter_mut()) {
        for (&score, weights) in acc.iter().zip(&mut weights[first..]) {
            s.store(score, weights);
        }
    }
}

/// Turns the scores of the positions from `begin` to `end` into exp(score - max), and those of the others into 0 as far as
/// they share a page with one of these.
#[inline(always)]
fn softmax<S: Simd>(s: S, weights: &mut Weights, begin: usize, end: usize) -> Total {
    weights[begin / LANES][..begin % LANES].fill(f32::NEG_INFINITY);
    let (full, rest) = (end / LANES, end % LANES);
    if rest > 0 {
        let scores = prefix(s, rest, s.load(&weights[full]), f32::NEG_INFINITY);
        s.store(scores, &mut weights[full]);
    }
    let weights = &mut weights[begin / LANES..end.div_ceil(LANES)];
    let mut lanes = s.splat(f32::NEG_INFINITY);
    for scores in weights.iter() {
        lanes = s.max(lanes, s.load(scores));
    }
    let mut largest = [0.0; LANES];
    s.store(lanes, &mut largest);
    let max = largest.into_iter().fold(f32::NEG_INFINITY, f32::max);
    let shift = s.splat(max);
    let mut total = s.splat(0.0);
    for scores in weights.iter_mut() {
        let weight = exp(s, s.sub(s.load(scores), shift));
        s.store(weight, scores);
        total = s.add(total, weight);
    }
    Total { max, sum: sum(s, total) }
}

/// The weighted values of `R` lines, `B` vectors of the head at a time. What a line does not see may be NaN, so that a
/// weight of 0 would not do: the lines meet where the last one begins, and part where the first one ends.
#[inline(always)]
fn weigh<S: Simd, E: Element, const R: usize, const B: usize>(
    s: S,
    chunk: &Chunk<'_, E>,
    block: &mut Block<'_>,
) {
    block.partial.fill([0.0; LANES]);
    let end = block.ends[0];
    let begin = block.begins[R - 1].min(end);
    weigh_each::<S, E, R>(s, chunk, block, 0..begin);
    if begin < end {
        weigh_range::<S, E, R, B>(s, chunk, block.weights, block.partial, begin..end);
    }
    weigh_each::<S, E, R>(s, chunk, block, end..CHUNK);
}

/// The weighted values of `R` lines one by one, as far as they see positions of `range`.
#[inline(always)]
fn weigh_each<S: Simd, E: Element, const R: usize>(
    s: S,
    chunk: &Chunk<'_, E>,
    block: &mut Block<'_>,
    range: Range<usize>,
) {
    for line in 0..R {
        let (begin, end) = (block.begins[line].max(range.start), block.ends[line].min(range.end));
        if begin < end {
            let weights = &block.weights[line..];
            let partial = &mut block.partial[line * chunk.vectors..];
            weigh_range::<S, E, 1, 4>(s, chunk, weights, partial, begin..end);
        }
    }
}

#[inline(always)]
fn weigh_range<S: Simd, E: Element, const R: usize, const B: usize>(
    s: S,
    chunk: &Chunk<'_, E>,
    weights: &[Weights],
    partial: &mut [[f32; LANES]],
    range: Range<usize>,
) {
    let mut vector = 0;
    while vector + B <= chunk.vectors {
        weigh_vectors::<S, E, R, B>(s, chunk, weights, partial, range.clone(), vector);
        vector += B;
    }
    while vector < chunk.vectors {
        weigh_vectors::<S, E, R, 1>(s, chunk, weights, partial, range.clone(), vector);
        vector += 1;
    }
}

/// Adds the positions of a range in order, to `B` vectors from `first` on.
#[inline(always)]
fn weigh_vectors<S: Simd, E: Element, const R: usize, const B: usize>(
    s: S,
    chunk: &Chunk<'_, E>,
    weights: &[Weights],
    partial: &mut [[f32; LANES]],
    range: Range<usize>,
    first: usize,
) {
    let mut acc = [[s.splat(0.0); B]; R];
    for (acc, partial) in acc.iter_mut().zip(partial.chunks_exact(chunk.vectors)) {
        for (acc, partial) in acc.iter_mut().zip(&partial[first..]) {
            *acc = s.load(partial);
        }
    }
    for page in range.start / PAGE_TOKENS..range.end.div_ceil(PAGE_TOKENS) {
        let mut lines = [&[0.0; LANES]; R];
        for (line, weights) in lines.iter_mut().zip(weights) {
            *line = &weights[page];
        }
        let start = page * PAGE_TOKENS;
        let (begin, end) = (range.start.saturating_sub(start), PAGE_TOKENS.min(range.end - start));
        let rows = chunk.values[page].chunks_exact(chunk.vectors);
        for (slot, row) in rows.enumerate().take(end).skip(begin) {
            let values = &row[first..][..B];
            let mut value = [s.splat(0.0); B];
            for vector in 0..B {
                value[vector] = E::load(s, &values[vector]);
            }
            for line in 0..R {
                let weight = s.splat(lines[line][slot]);
                for vector in 0..B {
                    acc[line][vector] = s.mul_add(weight, value[vector], acc[line][vector]);
                }
            }
        }
    }
    for (acc, partial) in acc.iter().zip(partial.chunks_exact_mut(chunk.vectors)) {
        for (&sum, partial) in acc.iter().zip(&mut partial[first..]) {
            s.store(sum, partial);
        }
    }
}

/// Adds a chunk's softmax and weighted values to those of the chunks before it.
#[inline(always)]
fn merge<S: Simd>(
    s: S,
    total: &mut Total,
    part: Total,
    acc: &mut [[f32; LANES]],
    partial: &[[f32; LANES]],
) {
    if total.sum == 0.0 {
        // The first chunk: every chunk's own sum is at least 1, or NaN.
        *total = part;
        acc.copy_from_slice(partial);
        return;
    }
    let max = total.max.max(part.max);
    let (keep, add) = (exp(s, s.splat(total.max - max)), exp(s, s.splat(part.max - max)));
    for (acc, partial) in acc.iter_mut().zip(partial) {
        let sum = s.mul_add(s.load(acc), keep, s.mul(s.load(partial), add));
        s.store(sum, acc);
    }
    let scaled = s.mul_add(s.splat(total.sum), keep, s.mul(s.splat(part.sum), add));
    let mut lanes = [0.0; LANES];
    s.store(scaled, &mut lanes);
    *total = Total { max, sum: lanes[0] };
}
