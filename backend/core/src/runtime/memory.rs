//! What a runtime takes of each memory: weights, what its steps work in, and the KV pages that it gets of what is left.

use super::Options;
use crate::engine::Limits;
use crate::pages::pages_for;
use crate::{Error, Result};
use std::fmt;

/// A type of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MemoryType {
    /// Of the machine.
    Cpu,
    /// Of the machine, page-locked for copies to and from a GPU.
    Pinned,
    /// Of the GPU with this number.
    Gpu(usize),
}

/// Memory that a runtime holds until it is dropped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// What it has for itself: KV caches, in use or not, and what its steps work in at most.
    pub own: Vec<(MemoryType, usize)>,
    /// Weights, which it may have together with others.
    pub weights: Vec<WeightCopy>,
}

/// One copy of a model's weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightCopy {
    /// Its number in this process.
    pub number: u64,
    /// Where it is.
    pub memory: MemoryType,
    /// Its length.
    pub bytes: usize,
    /// Whether this runtime loaded it, or found it loaded.
    pub is_first: bool,
}

impl Memory {
    /// What this and another runtime hold together: weights that they share are there once.
    pub fn merge(&mut self, other: &Self) {
        self.own.extend_from_slice(&other.own);
        other.weights.iter().for_each(|copy| self.add_weights(copy.clone()));
    }

    /// Holds a copy, once.
    pub(super) fn add_weights(&mut self, copy: WeightCopy) {
        if self.weights.iter().all(|mine| mine.number != copy.number) {
            self.weights.push(copy);
        }
    }

    /// Bytes of the types that are asked for.
    pub fn bytes(&self, of: impl Fn(MemoryType) -> bool) -> usize {
        let weights = self.weights.iter().map(|copy| (copy.memory, copy.bytes));
        let all = self.own.iter().copied().chain(weights);
        all.filter(|(memory, _)| of(*memory)).map(|(_, bytes)| bytes).sum()
    }
}

impl fmt::Display for MemoryType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => write!(f, "the machine"),
            Self::Pinned => write!(f, "the machine's page-locked memory"),
            Self::Gpu(number) => write!(f, "GPU {number}"),
        }
    }
}

/// What the models of a runtime need of one memory, and what is free there.
#[derive(Clone, Debug)]
pub(super) struct Source {
    pub(super) memory: MemoryType,
    /// Weights that are still to be loaded.
    pub(super) weight_bytes: usize,
    /// What steps work in.
    pub(super) working_bytes: usize,
    /// A KV page of all models that run there.
    pub(super) page_bytes: usize,
    /// What is free, where the system says so.
    pub(super) free: Option<Free>,
    /// Share of what is left beside weights and work that pages get where nothing is said.
    pub(super) fraction: f64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Free {
    /// Without what is promised and kept back.
    pub(super) bytes: usize,
    /// Promised to this process's models, and not used yet.
    pub(super) promised: usize,
    /// Kept for what nobody plans.
    pub(super) reserve: usize,
    /// Of what it is free, such as `of the machine's memory`.
    pub(super) bound: String,
}

impl Source {
    /// What is left for pages.
    fn left(&self) -> Option<usize> {
        let taken = self.weight_bytes + self.working_bytes;
        self.free.as_ref().map(|free| free.bytes.saturating_sub(taken))
    }

    fn pages(&self, fraction: f64) -> usize {
        // A memory whose engines have no cache holds any number.
        let most = |bytes| ((bytes as f64 * fraction) as usize).checked_div(self.page_bytes);
        self.left().and_then(most).unwrap_or(usize::MAX)
    }

    /// Refuses a model of which not even one sequence fits.
    fn check(&self, per_sequence: usize, max_seq_len: usize) -> Result<()> {
        let Self { weight_bytes, working_bytes, .. } = *self;
        let kv_bytes = per_sequence.saturating_mul(self.page_bytes);
        let needed = weight_bytes.saturating_add(working_bytes).saturating_add(kv_bytes);
        let Some(free) = self.free.as_ref().filter(|free| free.bytes < needed) else {
            return Ok(());
        };
        let Free { bytes, promised, reserve, bound } = free;
        let [weights, work, kv] = [weight_bytes, working_bytes, kv_bytes].map(mib);
        let [left, promised, reserve] = [bytes, promised, reserve].map(|bytes| bytes >> 20);
        Err(Error::Capacity(format!(
            "the model does not fit into the memory of {}: it needs {} MiB (weights {weights}, workspace {work}, KV \
             cache {kv} for one sequence of max_seq_len {max_seq_len}), {left} MiB are left {bound} ({promised} MiB are \
             promised to models and not used yet, {reserve} MiB are kept back): {} the workspace, spec-build \
             --max-seq-len and --kv-dtype the KV cache, --dtype the weights",
            self.memory,
            weights + work + kv,
            match self.memory {
                MemoryType::Gpu(_) => "spec-build --max-batch-size and --max-num-tokens lower",
                MemoryType::Cpu | MemoryType::Pinned => "max_num_tokens and max_running lower",
            }
        )))
    }
}

/// In MiB; a part of one counts.
fn mib(bytes: usize) -> usize {
    bytes.div_ceil(1 << 20)
}

/// Pages that target and drafter get, of the memory that is free and allowed.
pub(super) fn num_pages(limits: &Limits, sources: &[Source], options: &Options) -> Result<usize> {
    let max_seq_len = limits.max_seq_len;
    let per_sequence = pages_for(max_seq_len);
    sources.iter().try_for_each(|source| source.check(per_sequence, max_seq_len))?;
    let wanted = per_sequence.saturating_mul(options.max_batch_size(limits));
    let allowed = match allowed_pages(options, sources) {
        // Nobody asked for less than one sequence, and one fits.
        None => pages_of(sources, None).max(per_sequence),
        Some(allowed) => allowed.min(pages_of(sources, Some(1.0))),
    };
    if allowed < per_sequence {
        let page_bytes: usize = sources.iter().map(|source| source.page_bytes).sum();
        return Err(Error::Capacity(format!(
            "the KV cache needs {} MiB for one sequence of max_seq_len {max_seq_len}, {} MiB are allowed: raise \
             max_tokens_in_paged_kv_cache or kv_cache_free_gpu_mem_fraction, or build with a smaller --max-seq-len",
            mib(per_sequence.saturating_mul(page_bytes)),
            allowed.saturating_mul(page_bytes) >> 20
        )));
    }
    Ok(wanted.min(allowed))
}

/// Pages that the options allow: the fewest of what each limit gives. `None` where nothing is said.
fn allowed_pages(options: &Options, sources: &[Source]) -> Option<usize> {
    let page_bytes: usize = sources.iter().map(|source| source.page_bytes).sum();
    let limits = [
        options.kv_bytes.map(|bytes| bytes / page_bytes),
        options.kv_free_fraction.map(|fraction| pages_of(sources, Some(fraction))),
        options.kv_tokens.map(pages_for),
    ];
    limits.into_iter().flatten().min()
}

/// Pages that a part of each memory holds; by default the part that is its own.
fn pages_of(sources: &[Source], fraction: Option<f64>) -> usize {
    let pages = sources.iter().map(|source| source.pages(fraction.unwrap_or(source.fraction)));
    pages.min().unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::PAGE_TOKENS;
    use proptest::prelude::*;

    const MIB: usize = 1 << 20;
    const SEQUENCE: usize = 4;
    const LIMITS: Limits = Limits {
        max_draft_len: 4,
        max_batch_size: 10,
        max_seq_len: SEQUENCE * PAGE_TOKENS,
        max_num_tokens: 128,
    };

    /// 100 MiB of weights, 20 of workspace, pages of 1 MiB.
    fn source(free_mib: usize) -> Source {
        Source {
            memory: MemoryType::Cpu,
            weight_bytes: 100 * MIB,
            working_bytes: 20 * MIB,
            page_bytes: MIB,
            free: Some(Free {
                bytes: free_mib * MIB,
                promised: 7 * MIB,
                reserve: 9 * MIB,
                bound: "of the machine's memory".into(),
            }),
            fraction: 0.25,
        }
    }

    fn pages(free_mib: usize, options: &Options) -> Result<usize> {
        num_pages(&LIMITS, &[source(free_mib)], options)
    }

    #[test]
    fn by_default_pages_get_a_part_of_what_weights_and_workspace_leave() {
        let default = Options::default();
        assert_eq!(pages(120 + 40, &default).unwrap(), 10);
        assert_eq!(pages(120 + 1000, &default).unwrap(), 10 * SEQUENCE, "no more than is of use");
        assert_eq!(pages(120 + 8, &default).unwrap(), SEQUENCE, "at least one sequence");
        let unknown = Source { free: None, ..source(0) };
        assert_eq!(num_pages(&LIMITS, &[unknown], &default).unwrap(), 10 * SEQUENCE);
    }

    #[test]
    fn the_least_limit_counts_and_none_promises_what_is_not_there() {
        let of = |options: Options| pages(120 + 20, &options).unwrap();
        let default = Options::default();
        assert_eq!(of(Options { kv_tokens: Some(6 * PAGE_TOKENS), ..default.clone() }), 6);
        assert_eq!(of(Options { kv_bytes: Some(7 * MIB), ..default.clone() }), 7);
        assert_eq!(of(Options { kv_free_fraction: Some(0.6), ..default.clone() }), 12);
        let both = Options { kv_tokens: Some(usize::MAX), kv_bytes: Some(30 * MIB), ..default };
        assert_eq!(of(both), 20, "20 MiB are left");
    }

    #[test]
    fn what_cannot_fit_is_refused_with_the_sum() {
        assert_eq!(
            pages(120 + SEQUENCE - 1, &Options::default()).unwrap_err().to_string(),
            "the model does not fit into the memory of the machine: it needs 124 MiB (weights 100, workspace 20, KV \
             cache 4 for one sequence of max_seq_len 64), 123 MiB are left of the machine's memory (7 MiB are promised \
             to models and not used yet, 9 MiB are kept back): max_num_tokens and max_running lower the workspace, \
             spec-build --max-seq-len and --kv-dtype the KV cache, --dtype the weights"
        );
        let gpu = Source { memory: MemoryType::Gpu(2), ..source(0) };
        let error = num_pages(&LIMITS, &[source(500), gpu], &Options::default()).unwrap_err();
        assert!(error.to_string().contains("the memory of GPU 2: it needs 124 MiB"), "{error}");
    }

    #[test]
    fn limits_that_leave_no_sequence_are_named() {
        let options = Options { kv_tokens: Some(PAGE_TOKENS), ..Options::default() };
        let error = pages(1000, &options).unwrap_err().to_string();
        assert!(
            error.contains("needs 4 MiB for one sequence of max_seq_len 64, 1 MiB are allowed")
        );
        assert!(error.contains("raise max_tokens_in_paged_kv_cache"), "{error}");
    }

    #[test]
    fn weights_that_are_shared_count_once() {
        let copy =
            |number, is_first| WeightCopy { number, memory: MemoryType::Cpu, bytes: 100, is_first };
        let instance = |number, is_first| Memory {
            own: vec![(MemoryType::Cpu, 5), (MemoryType::Gpu(1), 3)],
            weights: vec![copy(number, is_first)],
        };
        let mut all = Memory::default();
        [instance(7, true), instance(7, false), instance(8, true)]
            .iter()
            .for_each(|i| all.merge(i));
        assert_eq!(all.bytes(|memory| memory == MemoryType::Cpu), 3 * 5 + 2 * 100);
        assert_eq!(all.bytes(|memory| matches!(memory, MemoryType::Gpu(_))), 3 * 3);
        assert_eq!(all.bytes(|_| true), 3 * 8 + 2 * 100);
    }

    proptest! {
        /// Whatever is said, what is given fits beside weights and workspace, and holds a sequence.
        #[test]
        fn pages_fit_into_what_is_free(
            free in prop::collection::vec(0usize..400, 1..3),
            fraction in prop::option::of(0.0f64..=1.0),
            tokens in prop::option::of(0usize..10_000),
            bytes in prop::option::of(0usize..400 * MIB),
        ) {
            let sources: Vec<Source> = free.iter().map(|&mib| source(mib)).collect();
            let options = Options {
                kv_free_fraction: fraction, kv_tokens: tokens, kv_bytes: bytes, ..Options::default()
            };
            if let Ok(pages) = num_pages(&LIMITS, &sources, &options) {
                prop_assert!((SEQUENCE..=10 * SEQUENCE).contains(&pages));
                for source in &sources {
                    let taken = source.weight_bytes + source.working_bytes + pages * source.page_bytes;
                    prop_assert!(taken <= source.free.as_ref().unwrap().bytes);
                }
            }
        }
    }
}
