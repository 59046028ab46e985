//! Attention of ragged rows over paged keys and values.
//!
//! The result of a row is a function of its query, its position and the keys and values that it sees up to
//! that position, bit for bit: not of the other rows, of how tasks are cut, or of threads. Positions are
//! reduced in order, in chunks of [`CHUNK`] that begin at multiples of it; each chunk is a softmax of
//! its own, and chunks are merged in order. What a page holds behind a row's position has no part in it.
#![allow(unsafe_code)]

mod kernel;
#[cfg(test)]
mod tests;

use super::isa::Isa;
use super::kv::{Element, KvCache};
use super::simd::{Kernel, Simd, dispatch};
use crate::model::Dtype;
use crate::pages::{PAGE_TOKENS, PageId};
use std::ops::Range;

/// Positions that are reduced as one: long enough that merging is cheap, short enough that the keys
/// and values of a chunk stay in a core's own cache for all rows of a task.
pub(crate) const CHUNK: usize = 256;

/// Rows and query heads that a task wants to have at least, to make the most of each key it loads.
const TASK_LINES: usize = 48;

/// The most rows of a task: later ones see positions that earlier ones do not.
const TASK_ROWS: usize = 16;

/// One query row: it attends to the positions from `first` up to its own.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    /// The pages of its sequence, in order.
    pub pages: &'a [PageId],
    /// The first position that it sees: 0, unless the model has a window or nothing is stored there. Later rows of a
    /// sequence see no earlier one.
    pub first: usize,
    /// Its position, whose key and value are stored already.
    pub position: usize,
}

/// A part of the work: some rows, and the query heads that share a key and value head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Task {
    /// Consecutive positions of one sequence.
    pub rows: Range<usize>,
    pub kv_head: usize,
}

/// The attention of one layer.
#[derive(Clone, Copy)]
pub struct Attention<'a> {
    /// The instructions to use.
    pub isa: Isa,
    /// Keys and values.
    pub kv: &'a KvCache,
    /// Which layer of `kv`.
    pub layer: usize,
    /// What pages numbered behind those of `kv` stand for: pages of this layer alone.
    pub branches: Option<&'a KvCache>,
    /// Query heads; a multiple of the cache's heads.
    pub num_heads: usize,
    /// What scores are multiplied by, `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Rotated queries, `[row][head][head_dim]`.
    pub q: &'a [f32],
    /// One a row of `q`.
    pub rows: &'a [Row<'a>],
}

impl Attention<'_> {
    /// The work cut into tasks that may run at the same time. It depends on `rows` and the head
    /// counts only, so that one list serves all layers of a pass.
    pub(crate) fn tasks(&self) -> Vec<Task> {
        let num_kv_heads = self.kv.num_kv_heads();
        let task_rows = (TASK_LINES / (self.num_heads / num_kv_heads)).clamp(1, TASK_ROWS);
        let mut tasks = Vec::new();
        let mut start = 0;
        while start < self.rows.len() {
            let limit = self.rows.len().min(start + task_rows);
            let end = (start + 1..limit)
                .find(|&idx| !follows(&self.rows[idx - 1], &self.rows[idx]))
                .unwrap_or(limit);
            tasks.extend((0..num_kv_heads).map(|kv_head| Task { rows: start..end, kv_head }));
            start = end;
        }
        tasks
    }

    /// Computes every row on this thread; `out` is like `q`.
    pub fn run(&self, out: &mut [f32]) {
        assert_eq!(out.len(), self.q.len(), "elements of the output");
        for task in self.tasks() {
            // SAFETY: `out` is like `q`, and nobody else has it.
            unsafe { self.run_task(&task, out.as_mut_ptr()) };
        }
    }

    /// Computes the rows and heads of a task.
    ///
    /// # Safety
    /// `out` points to as many elements as `q` has. Nobody else touches those of the task's rows and
    /// heads meanwhile. Nobody writes to the layer's pages that the task reads.
    pub(crate) unsafe fn run_task(&self, task: &Task, out: *mut f32) {
        let head_dim = self.kv.head_dim();
        assert_eq!(self.q.len(), self.rows.len() * self.num_heads * head_dim, "elements of q");
        assert!(self.num_heads.is_multiple_of(self.kv.num_kv_heads()), "head counts");
        let rows = &self.rows[task.rows.clone()];
        assert!(rows.is_sorted_by_key(|row| row.position), "rows of a task ascend");
        assert!(rows.is_sorted_by_key(|row| row.first), "what rows of a task see ascends");
        assert!(rows.iter().all(|row| row.first <= row.position), "a row sees itself");
        assert!(rows.iter().all(|row| row.position / PAGE_TOKENS < row.pages.len()), "pages");
        let run = Run { attention: self, task, out };
        match self.kv.dtype() {
            Dtype::Fp32 => dispatch(self.isa, Typed::<f32>::new(run)),
            Dtype::Fp16 => dispatch(self.isa, Typed::<u16>::new(run)),
            _ => dispatch(self.isa, Typed::<u8>::new(run)),
        }
    }

    /// The cache, layer and number of a page.
    fn page(&self, page: PageId) -> (&KvCache, usize, PageId) {
        match (page.checked_sub(self.kv.num_pages() as PageId), self.branches) {
            (Some(own), Some(branches)) => (branches, 0, own),
            _ => (self.kv, self.layer, page),
        }
    }

    /// Query heads that share a key and value head.
    fn group(&self) -> usize {
        self.num_heads / self.kv.num_kv_heads()
    }
}

/// Whether `next` is the position after `row` in the same sequence.
fn follows(row: &Row<'_>, next: &Row<'_>) -> bool {
    std::ptr::eq(row.pages, next.pages) && next.position == row.position + 1
}

/// A task and where its results go.
struct Run<'a> {
    attention: &'a Attention<'a>,
    task: &'a Task,
    out: *mut f32,
}

impl Run<'_> {
    /// Index of the first element of a line in `q` and in the output. Lines are the task's rows, and
    /// in each the heads of the group.
    fn offset(&self, line: usize) -> usize {
        let group = self.attention.group();
        let row = self.task.rows.start + line / group;
        let head = self.task.kv_head * group + line % group;
        (row * self.attention.num_heads + head) * self.attention.kv.head_dim()
    }

    fn query(&self, line: usize) -> &[f32] {
        let offset = self.offset(line);
        &self.attention.q[offset..offset + self.attention.kv.head_dim()]
    }

    fn result(&mut self, line: usize) -> &mut [f32] {
        // SAFETY: the offset is that of a query, `out` has as many elements, and the elements of the
        // task's lines are this task's alone: the promises of the caller of `run_task`.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.out.add(self.offset(line)),
                self.attention.kv.head_dim(),
            )
        }
    }

    /// Positions that a line attends to.
    fn context(&self, line: usize) -> Range<usize> {
        let row = &self.attention.rows[self.task.rows.start + line / self.attention.group()];
        row.first..row.position + 1
    }
}

/// A run whose element type is known.
struct Typed<'a, E> {
    run: Run<'a>,
    element: std::marker::PhantomData<E>,
}

impl<'a, E> Typed<'a, E> {
    fn new(run: Run<'a>) -> Self {
        Self { run, element: std::marker::PhantomData }
    }
}

impl<E: Element> Kernel for Typed<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        kernel::run::<S, E>(simd, self.run);
    }
}
