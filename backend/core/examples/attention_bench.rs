//! Times the attention of a 28-layer model with 12 query heads, 2 key and value heads and 128
//! elements a head: decode steps of several batches and contexts, and a prefill of 512 tokens.
//! One thread, best of several runs. Arguments pick the cases whose line contains all of them.

use spec_core::model::Dtype;
use spec_core::runtime::{Isa, PAGE_TOKENS};
use spec_core::testing::PageId;
use spec_core::testing::cpu::{Attention, KvCache, Row};
use std::time::Instant;

const LAYERS: usize = 28;
const HEADS: usize = 12;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 128;

fn main() {
    for isa in Isa::supported() {
        for dtype in [Dtype::Fp32, Dtype::Fp16, Dtype::Fp8] {
            for (batch, context) in [(1, 100), (1, 1000), (1, 4000), (8, 1000), (32, 1000)] {
                time(isa, dtype, batch, context, 1);
            }
            time(isa, dtype, 8, 1000, 5);
            time(isa, dtype, 1, 512, 512);
        }
    }
}

/// The last `num_rows` positions of `batch` sequences of `context` positions, in every layer.
fn time(isa: Isa, dtype: Dtype, batch: usize, context: usize, num_rows: usize) {
    let case = format!("{isa:?} {dtype}: {batch} x {num_rows} rows at {context}");
    if !std::env::args().skip(1).all(|part| case.contains(&part)) {
        return;
    }
    let pages_each = context.div_ceil(PAGE_TOKENS);
    let kv = KvCache::new(dtype, LAYERS, batch * pages_each, KV_HEADS, HEAD_DIM)
        .expect("the cache is small");
    let all: Vec<PageId> = (0..kv.num_pages() as PageId).collect();
    let tables: Vec<&[PageId]> = all.chunks(pages_each).collect();
    let vector: Vec<f32> = (0..KV_HEADS * HEAD_DIM).map(|idx| (idx as f32).sin()).collect();
    let start = Instant::now();
    for layer in 0..LAYERS {
        for (pages, position) in tables.iter().flat_map(|t| (0..context).map(move |at| (t, at))) {
            write(&kv, layer, pages, position, &vector);
        }
    }
    let write_ns = start.elapsed().as_nanos() as usize / (LAYERS * batch * context);
    let rows: Vec<Row<'_>> = tables
        .iter()
        .flat_map(|&pages| {
            (context - num_rows..context).map(move |position| Row { pages, first: 0, position })
        })
        .collect();
    let q = vec![0.01; rows.len() * HEADS * HEAD_DIM];
    let mut out = q.clone();
    let mut best = f64::MAX;
    for _ in 0..4 {
        let start = Instant::now();
        for layer in 0..LAYERS {
            let scale = 1.0 / (HEAD_DIM as f32).sqrt();
            Attention {
                isa,
                kv: &kv,
                layer,
                branches: None,
                num_heads: HEADS,
                scale,
                q: &q,
                rows: &rows,
            }
            .run(&mut out);
        }
        best = best.min(start.elapsed().as_secs_f64() * 1e3);
    }
    println!("{case:40} {best:8.2} ms, write {write_ns} ns");
}

#[allow(unsafe_code)]
fn write(kv: &KvCache, layer: usize, pages: &[PageId], position: usize, vector: &[f32]) {
    // SAFETY: there is one thread.
    unsafe { kv.write(layer, pages, position, vector, vector) };
}
