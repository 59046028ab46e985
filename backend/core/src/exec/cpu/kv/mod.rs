//! The keys and values of every position, in pages.
//!
//! Per layer and page, keys lie as `[kv_head][head_dim][16 positions]`, so that the lanes of a vector
//! are positions and a score needs no sum across lanes; values as `[kv_head][16 positions][stride]`,
//! where the stride is `head_dim` rounded up to whole vectors, with zeros behind it.
//! Positions that nobody wrote hold whatever a previous owner of the page left there.
#![allow(unsafe_code)]

mod buffer;
mod element;

pub(super) use element::Element;

use super::simd::LANES;
use crate::model::{Dtype, HeadScales, KvScales};
use crate::pages::{PAGE_TOKENS, PageId};
use crate::{Error, Result};
use buffer::Buffer;
use std::ops::Range;

const _: () = assert!(PAGE_TOKENS == LANES, "a key vector is a page wide");

/// The most elements that a head may have.
const MAX_HEAD_DIM: usize = 1024;

/// Pages of keys and values for every layer of one model.
pub struct KvCache {
    dtype: Dtype,
    num_layers: usize,
    num_pages: usize,
    num_kv_heads: usize,
    head_dim: usize,
    /// `[layer][kv head]`; empty where all are 1.
    scales: Vec<HeadScales>,
    keys: Buffer,
    values: Buffer,
}

impl KvCache {
    /// Room for `num_pages` pages. The system commits the memory as pages are first written.
    /// Formats are fp32, fp16 and fp8.
    pub fn new(
        dtype: Dtype,
        num_layers: usize,
        num_pages: usize,
        num_kv_heads: usize,
        head_dim: usize,
    ) -> Result<Self> {
        if !dtype.holds_keys_and_values() {
            return Err(Error::Unsupported(format!("a {dtype} kv cache on the cpu")));
        }
        if head_dim == 0 || head_dim > MAX_HEAD_DIM {
            return Err(Error::Unsupported(format!(
                "head_dim {head_dim}, outside of 1 to {MAX_HEAD_DIM},"
            )));
        }
        let bytes = |row: usize| {
            [num_layers, num_pages, num_kv_heads, PAGE_TOKENS, row]
                .iter()
                .try_fold(dtype.bytes(), |product, &factor| product.checked_mul(factor))
                .and_then(Buffer::zeroed)
                .ok_or_else(|| {
                    Error::Capacity(format!(
                        "no memory for a kv cache of {num_pages} pages x {num_layers} layers x \
                         {num_kv_heads} heads x {head_dim} in {dtype}"
                    ))
                })
        };
        let keys = bytes(head_dim)?;
        let values = bytes(head_dim.next_multiple_of(LANES))?;
        let scales = Vec::new();
        Ok(Self { dtype, num_layers, num_pages, num_kv_heads, head_dim, scales, keys, values })
    }

    /// The same cache, still empty, with these scales.
    pub fn with_scales(mut self, scales: Option<&KvScales>) -> Self {
        self.scales = scales.into_iter().flat_map(KvScales::heads).collect();
        self
    }

    /// Makes room for the branches of a pass over these pages: so many pages of one layer.
    pub(super) fn reserve_branches(
        &self,
        num_pages: usize,
        branches: &mut Option<Self>,
    ) -> Result<()> {
        if num_pages > branches.as_ref().map_or(0, Self::num_pages) {
            let own = Self::new(self.dtype(), 1, num_pages, self.num_kv_heads, self.head_dim)?;
            *branches = Some(own);
        }
        Ok(())
    }

    /// What numbers that are stored for a head are to be multiplied by.
    pub(super) fn scales(&self, layer: usize, head: usize) -> HeadScales {
        let scales = self.scales.get(layer * self.num_kv_heads + head);
        scales.copied().unwrap_or(HeadScales::ONE)
    }

    /// Bytes that one page takes over all layers.
    pub(crate) fn page_bytes(
        dtype: Dtype,
        num_layers: usize,
        num_kv_heads: usize,
        head_dim: usize,
    ) -> usize {
        let row = head_dim + head_dim.next_multiple_of(LANES);
        num_layers * num_kv_heads * PAGE_TOKENS * row * dtype.bytes()
    }

    /// Addresses of all pages: of the keys, and of the values.
    pub(crate) fn addresses(&self) -> [Range<usize>; 2] {
        [self.keys.addresses(), self.values.addresses()]
    }

    pub(crate) fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Pages in the cache.
    pub fn num_pages(&self) -> usize {
        self.num_pages
    }

    pub(crate) fn num_kv_heads(&self) -> usize {
        self.num_kv_heads
    }

    pub(crate) fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Stores the key and the value (`[kv_head][head_dim]`) of one position of a sequence whose
    /// pages these are. What is too large for the format is stored as its largest number.
    ///
    /// # Safety
    /// While this runs, no other thread writes the same layer and position or reads that page of
    /// that layer. Other positions of the page may be written at the same time.
    pub unsafe fn write(
        &self,
        layer: usize,
        pages: &[PageId],
        position: usize,
        key: &[f32],
        value: &[f32],
    ) {
        // SAFETY: the caller's promise is the same.
        unsafe {
            match self.dtype {
                Dtype::Fp32 => self.write_as::<f32>(layer, pages, position, key, value),
                Dtype::Fp16 => self.write_as::<u16>(layer, pages, position, key, value),
                _ => self.write_as::<u8>(layer, pages, position, key, value),
            }
        }
    }

    /// [`KvCache::write`] for a known element type.
    ///
    /// # Safety
    /// As for `write`.
    unsafe fn write_as<E: Element>(
        &self,
        layer: usize,
        pages: &[PageId],
        position: usize,
        key: &[f32],
        value: &[f32],
    ) {
        assert_eq!(key.len(), self.num_kv_heads * self.head_dim, "elements of a key");
        assert_eq!(value.len(), self.num_kv_heads * self.head_dim, "elements of a value");
        let (page, slot) = (pages[position / PAGE_TOKENS], position % PAGE_TOKENS);
        let mut encoded = [E::default(); MAX_HEAD_DIM];
        let encoded = &mut encoded[..self.head_dim];
        for head in 0..self.num_kv_heads {
            let elements = head * self.head_dim..(head + 1) * self.head_dim;
            let scales = self.scales(layer, head);
            E::encode(&key[elements.clone()], 1.0 / scales.key, encoded);
            let at: *mut E = self.keys.at(self.key_offset(layer, page, head), self.key_block());
            for (idx, &element) in encoded.iter().enumerate() {
                // SAFETY: the block has `head_dim` vectors of 16 positions, `slot` is less than 16, and
                // nobody else touches this position: the caller's promise.
                unsafe { at.add(idx * PAGE_TOKENS + slot).write(element) };
            }
            E::encode(&value[elements], 1.0 / scales.value, encoded);
            let at: *mut E =
                self.values.at(self.value_offset(layer, page, head), self.value_block());
            // SAFETY: the block has 16 rows of a stride that is at least `head_dim`, and nobody else
            // touches this position: the caller's promise.
            unsafe {
                at.add(slot * self.value_stride())
                    .copy_from_nonoverlapping(encoded.as_ptr(), self.head_dim);
            }
        }
    }

    /// Stores at a position what another cache of the same shape holds at a slot of a layer, to the bit.
    ///
    /// # Safety
    /// As for `write`; and nobody writes to that slot of the other cache.
    #[expect(clippy::too_many_arguments, reason = "two places of three coordinates each")]
    pub(super) unsafe fn copy(
        &self,
        layer: usize,
        pages: &[PageId],
        position: usize,
        other: &Self,
        other_layer: usize,
        other_pages: &[PageId],
        slot: usize,
    ) {
        assert_eq!(
            (self.dtype, self.num_kv_heads, self.head_dim),
            (other.dtype, other.num_kv_heads, other.head_dim),
            "shapes of the caches"
        );
        let to = (layer, pages[position / PAGE_TOKENS], position % PAGE_TOKENS);
        let from = (other_layer, other_pages[slot / PAGE_TOKENS], slot % PAGE_TOKENS);
        // SAFETY: the caller's promise is the same.
        unsafe {
            match self.dtype {
                Dtype::Fp32 => self.copy_as::<f32>(to, other, from),
                Dtype::Fp16 => self.copy_as::<u16>(to, other, from),
                _ => self.copy_as::<u8>(to, other, from),
            }
        }
    }

    /// [`KvCache::copy`] for a known element type; places are layer, page and place in the page.
    ///
    /// # Safety
    /// As for `copy`.
    unsafe fn copy_as<E: Element>(
        &self,
        to: (usize, PageId, usize),
        other: &Self,
        from: (usize, PageId, usize),
    ) {
        for head in 0..self.num_kv_heads {
            let keys: *mut E = self.keys.at(self.key_offset(to.0, to.1, head), self.key_block());
            let others: *mut E =
                other.keys.at(other.key_offset(from.0, from.1, head), self.key_block());
            for element in 0..self.head_dim {
                // SAFETY: blocks have `head_dim` vectors of 16 positions, places are less than 16, and nobody
                // touches them: the caller's promise.
                unsafe {
                    let key = others.add(element * PAGE_TOKENS + from.2).read();
                    keys.add(element * PAGE_TOKENS + to.2).write(key);
                }
            }
            let stride = self.value_stride();
            let values: *mut E =
                self.values.at(self.value_offset(to.0, to.1, head), self.value_block());
            let others: *mut E =
                other.values.at(other.value_offset(from.0, from.1, head), self.value_block());
            // SAFETY: blocks have 16 rows of the stride; the rows are two different ones, or the same bytes.
            unsafe { values.add(to.2 * stride).copy_from(others.add(from.2 * stride), stride) };
        }
    }

    /// The keys of a head in a page: one vector of positions for each element of the head.
    pub(super) fn keys<E: Element>(
        &self,
        layer: usize,
        page: PageId,
        head: usize,
    ) -> &[[E; LANES]] {
        assert_eq!(E::DTYPE, self.dtype, "number format of the cache");
        let at: *mut E = self.keys.at(self.key_offset(layer, page, head), self.key_block());
        // SAFETY: `at` has checked the bounds; the bytes are initialised and any bits are valid. No
        // thread writes to the page meanwhile, as callers of `write` promise.
        unsafe { std::slice::from_raw_parts(at.cast(), self.key_block() / LANES) }
    }

    /// The values of a head in a page: for each position the vectors of its stride.
    pub(super) fn values<E: Element>(
        &self,
        layer: usize,
        page: PageId,
        head: usize,
    ) -> &[[E; LANES]] {
        assert_eq!(E::DTYPE, self.dtype, "number format of the cache");
        let at: *mut E = self.values.at(self.value_offset(layer, page, head), self.value_block());
        // SAFETY: as in `keys`.
        unsafe { std::slice::from_raw_parts(at.cast(), self.value_block() / LANES) }
    }

    /// The largest magnitudes of a head's keys and values in the first `len` positions of these pages, in FP32.
    pub(super) fn peaks(
        &self,
        layer: usize,
        head: usize,
        pages: &[PageId],
        len: usize,
    ) -> (f32, f32) {
        let largest = |most: f32, &x: &f32| most.max(x.abs());
        let (mut key, mut value) = (0.0, 0.0);
        for (idx, &page) in pages.iter().take(len.div_ceil(PAGE_TOKENS)).enumerate() {
            let slots = PAGE_TOKENS.min(len - idx * PAGE_TOKENS);
            let keys = self.keys::<f32>(layer, page, head).iter();
            key = keys.flat_map(|positions| &positions[..slots]).fold(key, largest);
            let values = self.values::<f32>(layer, page, head).as_flattened();
            value = values[..slots * self.value_stride()].iter().fold(value, largest);
        }
        (key, value)
    }

    /// Elements from one position's value to the next one's, a multiple of 16.
    pub(super) fn value_stride(&self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }

    fn key_block(&self) -> usize {
        self.head_dim * PAGE_TOKENS
    }

    fn value_block(&self) -> usize {
        self.value_stride() * PAGE_TOKENS
    }

    fn key_offset(&self, layer: usize, page: PageId, head: usize) -> usize {
        self.block(layer, page, head) * self.key_block()
    }

    fn value_offset(&self, layer: usize, page: PageId, head: usize) -> usize {
        self.block(layer, page, head) * self.value_block()
    }

    /// Index of a head's block among all blocks.
    fn block(&self, layer: usize, page: PageId, head: usize) -> usize {
        let page = page as usize;
        assert!(layer < self.num_layers, "layer {layer} of {}", self.num_layers);
        assert!(page < self.num_pages, "page {page} of {}", self.num_pages);
        assert!(head < self.num_kv_heads, "kv head {head} of {}", self.num_kv_heads);
        (layer * self.num_pages + page) * self.num_kv_heads + head
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(cache: &KvCache, layer: usize, pages: &[PageId], position: usize, from: f32) {
        let row = cache.num_kv_heads * cache.head_dim;
        let key: Vec<f32> = (0..row).map(|idx| from + idx as f32).collect();
        let value: Vec<f32> = key.iter().map(|x| -x).collect();
        // SAFETY: positions are written by one thread each, and read after that only.
        unsafe { cache.write(layer, pages, position, &key, &value) };
    }

    #[test]
    fn a_position_is_found_where_the_layout_says() {
        let cache = KvCache::new(Dtype::Fp32, 2, 4, 3, 18).unwrap();
        write(&cache, 1, &[2, 0, 3], 37, 100.0);
        let (head, element, slot) = (2, 17, 37 % PAGE_TOKENS);
        let expected = 100.0 + (head * 18 + element) as f32;
        assert_eq!(cache.keys::<f32>(1, 3, head)[element][slot], expected);
        let values = cache.values::<f32>(1, 3, head).as_flattened();
        assert_eq!(values[slot * 32 + element], -expected);
        assert_eq!(values[slot * 32 + 18], 0.0, "padding");
        let others =
            (0..4).filter(|&page| page != 3).flat_map(|page| cache.keys::<f32>(1, page, 2));
        assert!(others.flatten().all(|&x| x == 0.0), "other pages are untouched");
    }

    #[test]
    fn peaks_are_those_of_the_positions_that_count() {
        let cache = KvCache::new(Dtype::Fp32, 2, 4, 3, 18).unwrap();
        let pages = [2, 0, 3];
        for position in 0..40 {
            write(&cache, 1, &pages, position, 100.0 * position as f32);
        }
        // The last element of the head, at the last position.
        for (head, len) in [(0, 1), (2, 16), (1, 17), (2, 37)] {
            let most = (100 * (len - 1) + head * 18 + 17) as f32;
            assert_eq!(cache.peaks(1, head, &pages, len), (most, most), "head {head}, {len}");
        }
        assert_eq!(cache.peaks(0, 0, &pages, 40), (0.0, 0.0), "another layer");
    }

    #[test]
    fn threads_write_neighbouring_positions_at_once() {
        for dtype in [Dtype::Fp32, Dtype::Fp16, Dtype::Fp8] {
            let cache = KvCache::new(dtype, 1, 2, 1, 64).unwrap();
            std::thread::scope(|scope| {
                for worker in 0..4 {
                    let cache = &cache;
                    scope.spawn(move || {
                        for position in (worker..32).step_by(4) {
                            write(cache, 0, &[1, 0], position, 64.0);
                        }
                    });
                }
            });
            let first = match dtype {
                Dtype::Fp32 => cache.keys::<f32>(0, 1, 0)[0].map(|x| x),
                Dtype::Fp16 => {
                    cache.keys::<u16>(0, 1, 0)[0].map(|x| half::f16::from_bits(x).into())
                }
                _ => cache.keys::<u8>(0, 1, 0)[0].map(|x| if x == 0x68 { 64.0 } else { 0.0 }),
            };
            assert_eq!(first, [64.0; PAGE_TOKENS], "{dtype}");
        }
    }

    #[test]
    fn formats_and_sizes_that_do_not_fit_are_refused() {
        let message = |result: Result<KvCache>| result.err().unwrap().to_string();
        assert_eq!(
            message(KvCache::new(Dtype::Int8, 1, 1, 1, 64)),
            "a int8 kv cache on the cpu is not supported"
        );
        assert!(message(KvCache::new(Dtype::Fp32, 1, 1, 1, 2048)).contains("head_dim 2048"));
        let vast = message(KvCache::new(Dtype::Fp32, 1024, usize::MAX / 8, 8, 128));
        assert!(vast.contains("no memory for a kv cache"), "{vast}");
    }

    #[test]
    fn page_bytes_count_what_is_allocated() {
        let cache = KvCache::new(Dtype::Fp16, 3, 5, 2, 80).unwrap();
        let bytes = 5 * KvCache::page_bytes(Dtype::Fp16, 3, 2, 80);
        assert_eq!(cache.addresses().map(|range| range.len()).iter().sum::<usize>(), bytes);
    }
}
