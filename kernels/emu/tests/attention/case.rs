//! A pass of attention as a test states it, and its image in device memory. What is drawn depends on
//! names alone (of a sequence, of a query), so that the same row can be put into different passes.

use crate::image::HalfUnits;
use half::f16;
use spec_emu::{Arena, Launch, Schedule, launch};
use spec_kernels::{Format, Variant};

/// Positions of a page.
pub(crate) const PAGE_TOKENS: usize = 16;

/// Threads of a block, as the kernel says.
const THREADS: u32 = 128;

/// Bytes of the kernel's plan in shared memory, as the kernel says.
const PLAN_BYTES: usize = 3288;

/// Levels of its tree of splits: a block has a place for a node of each.
const LEVELS: usize = 3;

/// Blocks that the workspace has room for beyond those of the pass: a larger grid may share it.
pub(crate) const MORE_BLOCKS: usize = 2;

/// Key of a row that nobody wants, as the kernels know it.
const NO_SEQUENCE: u32 = u32::MAX;

/// What outputs hold before; no output of these tests has this value.
pub(crate) const UNTOUCHED: u16 = 0xfbad;

/// What a variant is compiled for, and key heads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) kv: Format,
    pub(crate) head_dim: usize,
    pub(crate) group: usize,
    pub(crate) kv_heads: usize,
    /// Of a tile, each query row `group` times.
    pub(crate) tile_rows: usize,
    /// Rows see no positions before their first.
    pub(crate) is_windowed: bool,
}

/// A sequence's keys and values; all positions below `len` are written except `holes`.
#[derive(Clone, Debug)]
pub(crate) struct Context {
    pub(crate) name: u64,
    pub(crate) len: usize,
    pub(crate) holes: Vec<usize>,
}

/// A query row; of no sequence, if it is inactive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Query {
    pub(crate) name: u64,
    pub(crate) sequence: Option<usize>,
    pub(crate) base: usize,
    pub(crate) ancestors: u64,
    /// The first position that it sees, where rows are windowed.
    pub(crate) first: usize,
}

/// A pass.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) shape: Shape,
    pub(crate) contexts: Vec<Context>,
    pub(crate) tiles: Vec<Vec<Query>>,
    pub(crate) split_tokens: usize,
    /// Items with a partial each: where there would be more, they are larger.
    pub(crate) max_items: usize,
    pub(crate) grid: u32,
    /// How far apart scores lie: 1 for flat weights, more for peaks.
    pub(crate) spread: f32,
}

/// A pass in device memory.
pub(crate) struct Image {
    pub(crate) params: Vec<u8>,
    pub(crate) queries: Vec<u16>,
    cache: Vec<u8>,
    output: u64,
    arrivals: u64,
    num_arrivals: usize,
}

impl Shape {
    pub(crate) fn variant(&self) -> String {
        let variant = match self.tile_rows {
            16 => Variant::attention(self.kv, self.head_dim, self.group),
            _ => Variant::attention_wide(self.kv, self.head_dim, self.group),
        };
        let variant = if self.is_windowed { variant.windowed() } else { variant };
        variant.to_string()
    }

    /// Query rows of a full tile.
    pub(crate) fn tile_queries(&self) -> usize {
        self.tile_rows / self.group
    }

    pub(crate) fn row_len(&self) -> usize {
        self.kv_heads * self.group * self.head_dim
    }

    fn element_bytes(&self) -> usize {
        match self.kv {
            Format::Fp8 => 1,
            Format::Fp16 => 2,
        }
    }

    /// Keys and values of one head in a page.
    fn page_bytes(&self) -> usize {
        2 * PAGE_TOKENS * self.head_dim * self.element_bytes()
    }

    fn shared_bytes(&self) -> usize {
        let (num_rings, stages) = match (self.tile_rows, self.page_bytes()) {
            (64, _) => (1, 4),
            (_, 8192) => (4, 2),
            _ => (4, 4),
        };
        let sums_bytes = 4 * self.tile_rows * (self.head_dim + 8);
        num_rings * (stages * self.page_bytes()).max(sums_bytes) + PLAN_BYTES
    }

    /// Of the scores.
    pub(crate) fn softmax_scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// What stored keys and values of a head are multiplied by.
    pub(crate) fn scales(&self, head: usize) -> (f32, f32) {
        match self.kv {
            Format::Fp8 => ([0.5, 0.25, 1.0][head % 3], [0.125, 2.0][head % 2]),
            Format::Fp16 => (1.0, 1.0),
        }
    }

    /// As the kernel takes them.
    fn scale_bytes(&self) -> Vec<u8> {
        let keys = (0..self.kv_heads).map(|head| self.scales(head).0);
        let values = (0..self.kv_heads).map(|head| self.scales(head).1);
        keys.chain(values).flat_map(f32::to_le_bytes).collect()
    }
}

impl Context {
    pub(crate) fn new(name: u64, len: usize) -> Self {
        Self { name, len, holes: Vec::new() }
    }

    fn is_written(&self, token: usize) -> bool {
        token < self.len && !self.holes.contains(&token)
    }
}

impl Query {
    /// The row of a chain that writes position `slot` and sees it.
    pub(crate) fn chain(name: u64, sequence: usize, slot: usize) -> Self {
        Self { name, sequence: Some(sequence), base: slot + 1, ancestors: 0, first: 0 }
    }

    pub(crate) const INACTIVE: Self =
        Self { name: 0, sequence: None, base: 0, ancestors: 0, first: 0 };

    pub(crate) fn sees(&self, token: usize) -> bool {
        let is_ancestor = token >= self.base
            && token - self.base < 64
            && self.ancestors >> (token - self.base) & 1 == 1;
        token >= self.first && (token < self.base || is_ancestor)
    }

    /// One more than the last position that it sees.
    pub(crate) fn end(&self) -> usize {
        self.base + (64 - self.ancestors.leading_zeros() as usize)
    }
}

impl Case {
    /// Rows of a chain at the end of each context, `counts` of them, in tiles as full as they go.
    pub(crate) fn chains(shape: Shape, lens: &[usize], num_rows: usize) -> Self {
        let contexts = (0..).zip(lens).map(|(i, &len)| Context::new(100 + i, len)).collect();
        let mut tiles = Vec::new();
        for (sequence, &len) in lens.iter().enumerate() {
            let rows: Vec<_> = (len.saturating_sub(num_rows)..len)
                .map(|slot| Query::chain((1000 * (sequence + 1) + slot) as u64, sequence, slot))
                .collect();
            tiles.extend(rows.chunks(shape.tile_queries()).map(<[Query]>::to_vec));
        }
        Self { shape, contexts, tiles, split_tokens: 64, max_items: 512, grid: 5, spread: 2.0 }
    }

    pub(crate) fn rows(&self) -> impl Iterator<Item = &Query> {
        self.tiles.iter().flatten()
    }

    /// Which page of the cache has a page of a sequence: all over the place.
    fn page_id(&self, sequence: usize, page: usize) -> usize {
        let place = sequence * self.max_pages() + page;
        place * 7 % self.num_pages()
    }

    fn max_pages(&self) -> usize {
        let longest = self.contexts.iter().map(|c| c.len).max().unwrap_or(0);
        longest.div_ceil(PAGE_TOKENS) + 1
    }

    /// Not a multiple of 7.
    fn num_pages(&self) -> usize {
        let used = self.contexts.len() * self.max_pages();
        if used.is_multiple_of(7) { used + 1 } else { used }
    }

    fn place(&self, sequence: usize, head: usize, token: usize) -> usize {
        let page = self.page_id(sequence, token / PAGE_TOKENS);
        (page * self.shape.kv_heads + head) * self.shape.page_bytes()
    }

    /// Offset in the cache of an element of a key.
    pub(crate) fn key_at(&self, sequence: usize, head: usize, token: usize, i: usize) -> usize {
        let element = token % PAGE_TOKENS * self.shape.head_dim + i;
        self.place(sequence, head, token) + element * self.shape.element_bytes()
    }

    /// Offset in the cache of an element of a value.
    pub(crate) fn value_at(&self, sequence: usize, head: usize, token: usize, i: usize) -> usize {
        let element = (PAGE_TOKENS * self.shape.head_dim) + i * PAGE_TOKENS + token % PAGE_TOKENS;
        self.place(sequence, head, token) + element * self.shape.element_bytes()
    }

    /// The cache, NaN where nothing is written.
    fn cache(&self) -> Vec<u8> {
        let shape = self.shape;
        let num_bytes = self.num_pages() * shape.kv_heads * shape.page_bytes();
        let mut cache = vec![0xff; num_bytes];
        for (sequence, context) in self.contexts.iter().enumerate() {
            for token in (0..context.len).filter(|&t| context.is_written(t)) {
                for head in 0..shape.kv_heads {
                    let seed = mix(context.name, (token * shape.kv_heads + head) as u64);
                    for i in 0..shape.head_dim {
                        let key = self.key_at(sequence, head, token, i);
                        let value = self.value_at(sequence, head, token, i);
                        store(&mut cache[key..], shape.kv, mix(seed, 2 * i as u64));
                        store(&mut cache[value..], shape.kv, mix(seed, 2 * i as u64 + 1));
                    }
                }
            }
        }
        cache
    }

    fn draw_queries(&self) -> Vec<u16> {
        let row_len = self.shape.row_len() as u64;
        self.rows()
            .flat_map(|row| (0..row_len).map(|i| uniform(mix(row.name, i))))
            .map(|value| f16::from_f32(value * self.spread).to_bits())
            .collect()
    }

    /// One number a sequence and page; what is behind a sequence's end does not exist.
    fn page_table(&self) -> Vec<u32> {
        let mut table = Vec::new();
        for (sequence, context) in self.contexts.iter().enumerate() {
            for page in 0..self.max_pages() {
                let exists = page * PAGE_TOKENS < context.len;
                table.push(if exists { self.page_id(sequence, page) as u32 } else { u32::MAX });
            }
        }
        table
    }

    /// Positions of a tile's sequence below the first one that a row of the pass writes: as if each row wrote the last one
    /// that it sees whole.
    fn num_old(&self, tile: &[Query]) -> usize {
        let of_sequence = |row: &&Query| row.sequence == tile.first().and_then(|row| row.sequence);
        let bases = self.rows().filter(of_sequence).map(|row| row.base);
        bases.min().map_or(0, |base| base.saturating_sub(1))
    }

    /// The tables of rows and tiles, as bytes.
    fn tables(&self) -> (Vec<u8>, Vec<u8>) {
        let (mut rows, mut tiles) = (Vec::new(), Vec::new());
        let mut first = 0u32;
        for tile in &self.tiles {
            assert!(tile.len() <= self.shape.tile_queries(), "{} rows in a tile", tile.len());
            for row in tile {
                let sequence = row.sequence.map_or(NO_SEQUENCE, |s| s as u32);
                let base = row.base as u32;
                rows.extend([0, base, base, base].map(u32::to_le_bytes).concat());
                rows.extend(row.ancestors.to_le_bytes());
                rows.extend([sequence, row.first as u32].map(u32::to_le_bytes).concat());
            }
            let num_old = self.num_old(tile) as u32;
            tiles.extend([first, tile.len() as u32, num_old].map(u32::to_le_bytes).concat());
            first += tile.len() as u32;
        }
        (rows, tiles)
    }

    /// Puts the pass into device memory.
    pub(crate) fn image(&self, arena: &Arena) -> Image {
        let (shape, cache, queries) = (self.shape, self.cache(), self.draw_queries());
        let (rows, tiles) = self.tables();
        let partial_bytes = 4 * shape.tile_rows * (shape.head_dim + 4);
        let num_blocks = self.grid as usize + MORE_BLOCKS;
        let addresses = [
            arena.put(&halves(&queries)),
            arena.put(&cache),
            arena.put(&rows),
            arena.put(&tiles),
            arena
                .put(&self.page_table().into_iter().flat_map(u32::to_le_bytes).collect::<Vec<_>>()),
            arena.put(&halves(&vec![UNTOUCHED; queries.len()])),
            arena.alloc((self.max_items + LEVELS * num_blocks) * partial_bytes),
            arena.put(&vec![0; 4 * self.max_items]),
            arena.put(&shape.scale_bytes()),
        ];
        let (output_units, unused) = (0, 0);
        let numbers = [
            self.tiles.len(),
            shape.kv_heads,
            self.max_pages(),
            self.split_tokens,
            self.max_items,
            output_units,
            unused,
        ];
        let mut params = addresses.map(u64::to_le_bytes).concat();
        params.extend(shape.softmax_scale().to_le_bytes());
        params.extend(numbers.map(|n| (n as u32).to_le_bytes()).concat());
        let (output, arrivals) = (addresses[5], addresses[7]);
        Image { params, queries, cache, output, arrivals, num_arrivals: self.max_items }
    }

    pub(crate) fn launch<'a>(&self, variant: &'a str, params: &'a [u8]) -> Launch<'a> {
        Launch {
            variant,
            grid: self.grid,
            block: THREADS,
            shared_bytes: self.shape.shared_bytes() as u32,
            params,
            ..Launch::default()
        }
    }

    /// Runs the pass; the outputs of all rows.
    pub(crate) fn run(&self, schedule: &Schedule) -> Result<(Image, Vec<u16>), String> {
        let arena = Arena::new(1 << 28);
        let image = self.image(&arena);
        launch(&self.launch(&self.shape.variant(), &image.params), schedule)?;
        let output = image.output(&arena);
        image.arrivals_are_zero(&arena)?;
        Ok((image, output))
    }

    /// The same, of outputs that lie in units.
    pub(crate) fn run_in_units(&self, schedule: &Schedule) -> Result<Vec<u16>, String> {
        const PADDING: u8 = UNTOUCHED as u8;
        let arena = Arena::new(1 << 28);
        let mut image = self.image(&arena);
        let units = HalfUnits { len: self.shape.row_len() };
        let num_rows = self.rows().count();
        let mut bytes = vec![PADDING; units.bytes(num_rows)];
        let output = arena.put(&bytes);
        image.params[40..48].copy_from_slice(&output.to_le_bytes());
        image.params[96..100].copy_from_slice(&(units.of_tile() as u32).to_le_bytes());
        launch(&self.launch(&self.shape.variant(), &image.params), schedule)?;
        arena.read(output, &mut bytes);
        let rows = units.unpack(&bytes, num_rows, PADDING);
        Ok(rows.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect())
    }
}

impl Image {
    /// Where the first of the params, the address of the queries, stands for another pass's output.
    pub(crate) fn read_queries_from(&mut self, other: &Self, queries: Vec<u16>) {
        self.params[..8].copy_from_slice(&other.output.to_le_bytes());
        self.queries = queries;
    }

    /// Takes the keys and values that the pass writes out of the cache; the arguments of what puts them there.
    pub(crate) fn take_newest(&mut self, case: &Case, arena: &Arena) -> Vec<u8> {
        let (shape, mut old) = (case.shape, self.cache.clone());
        for (sequence, context) in case.contexts.iter().enumerate() {
            let tile = case.tiles.iter().flatten().find(|row| row.sequence == Some(sequence));
            let first = tile.map_or(context.len, |row| case.num_old(std::slice::from_ref(row)));
            let places = (first..context.len)
                .flat_map(|token| (0..shape.kv_heads).map(move |head| (token, head)))
                .flat_map(|(token, head)| (0..shape.head_dim).map(move |i| (token, head, i)));
            for (token, head, i) in places {
                for at in
                    [case.key_at(sequence, head, token, i), case.value_at(sequence, head, token, i)]
                {
                    old[at..at + shape.element_bytes()].fill(0xff);
                }
            }
        }
        let (from, to) = (arena.put(&self.cache), arena.put(&old));
        self.params[8..16].copy_from_slice(&to.to_le_bytes());
        let num_words = (self.cache.len() / 4) as u64;
        [from, to, num_words].map(u64::to_le_bytes).concat()
    }

    /// Uses another pass's partials and arrivals.
    pub(crate) fn share_workspace(&mut self, other: &Self) {
        self.params[48..64].copy_from_slice(&other.params[48..64]);
    }

    pub(crate) fn output(&self, arena: &Arena) -> Vec<u16> {
        let mut bytes = vec![0; 2 * self.queries.len()];
        arena.read(self.output, &mut bytes);
        bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect()
    }

    pub(crate) fn arrivals_are_zero(&self, arena: &Arena) -> Result<(), String> {
        let mut bytes = vec![1; 4 * self.num_arrivals];
        arena.read(self.arrivals, &mut bytes);
        let left = bytes.iter().filter(|&&b| b != 0).count();
        if left == 0 { Ok(()) } else { Err(format!("{left} counters of arrivals are not 0")) }
    }

    /// The stored number at an offset of the cache.
    pub(crate) fn load(&self, kv: Format, at: usize) -> f64 {
        match kv {
            Format::Fp16 => f16::from_le_bytes([self.cache[at], self.cache[at + 1]]).to_f64(),
            Format::Fp8 => e4m3(self.cache[at]),
        }
    }
}

fn halves(values: &[u16]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// Stores something drawn: in halves up to 1.5, in e4m3 up to 2.
fn store(to: &mut [u8], kv: Format, drawn: u64) {
    match kv {
        Format::Fp16 => {
            let value = f16::from_f32(1.5 * uniform(drawn));
            to[..2].copy_from_slice(&value.to_le_bytes());
        }
        Format::Fp8 => to[0] = (drawn % 0x41) as u8 | (drawn >> 32 & 0x80) as u8,
    }
}

fn e4m3(bits: u8) -> f64 {
    let (exponent, fraction) = (i32::from(bits >> 3 & 15), f64::from(bits & 7));
    let magnitude = match exponent {
        0 => fraction * 2f64.powi(-9),
        _ => (8.0 + fraction) * 2f64.powi(exponent - 10),
    };
    if bits & 0x80 == 0 { magnitude } else { -magnitude }
}

/// A number that looks random, of two.
pub(crate) fn mix(a: u64, b: u64) -> u64 {
    let mut x = a.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ b.wrapping_add(0x632b_e59b_d9b4_e019);
    for multiplier in [0xbf58_476d_1ce4_e5b9u64, 0x94d0_49bb_1331_11eb] {
        x = (x ^ x >> 30).wrapping_mul(multiplier);
    }
    x ^ x >> 31
}

/// From -1 to 1.
fn uniform(drawn: u64) -> f32 {
    (drawn >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}
