//! How an engine is run.

use super::{AdmissionPolicy, DraftPolicy, EngineLimits, Isa, Lookup, Pinning, Prefill};

/// How an engine is run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Threads of the CPU executor; `None` is one for each physical core that may be used, and no more than control
    /// groups leave time for.
    pub threads: Option<usize>,
    /// Whether they are bound to cores.
    pub pinning: Pinning,
    /// Sequences that run at once, at most the engine's `max_batch_size`.
    pub max_batch_size: Option<usize>,
    /// Bytes for the KV caches of target and drafter together. The least of this and the two limits below
    /// counts; without any, a quarter of what is free beside weights and workspace, or nine tenths of it on a GPU.
    /// Never more than is free, and never more than `max_batch_size` sequences of `max_seq_len` need.
    pub kv_bytes: Option<usize>,
    /// Share of the free memory for the KV caches.
    pub kv_free_fraction: Option<f64>,
    /// Tokens that the KV caches hold at most.
    pub kv_tokens: Option<usize>,
    /// How draft lengths are chosen.
    pub draft_policy: DraftPolicy,
    /// Where drafts are looked up, alone or ahead of a model that drafts; `None` is as the engine was built, and in the
    /// sequence's own text ahead of a model whose draft lengths adapt.
    pub lookup: Option<Lookup>,
    /// Continuations that a look-up drafts side by side, as a tree; at least 1.
    pub ngram_branches: usize,
    /// Branches that the drafts of a model or a head have at most, from 1 to
    /// [`MAX_DRAFT_BRANCHES`](super::MAX_DRAFT_BRANCHES), where it and its target are on a CPU, or on one GPU. With adapting
    /// lengths only those that are likely enough.
    pub draft_branches: usize,
    /// Tokens of such a draft at most, in all branches: on a CPU the likeliest ones. `None` is as many as the branches have.
    pub draft_tree_tokens: Option<usize>,
    /// Rows in a step, at most the engine's `max_num_tokens`.
    pub max_num_tokens: Option<usize>,
    /// Requests that may wait.
    pub max_queue: usize,
    /// When a request leaves the queue.
    pub admission: AdmissionPolicy,
    /// Whether requests that begin alike share the KV cache of their beginning.
    pub kv_reuse: bool,
    /// Instruction set of the CPU executor; `None` is the best this machine has.
    pub isa: Option<Isa>,
    /// Number of the GPU that an engine for GPUs runs on.
    pub gpu: usize,
    /// Number of the GPU of the drafter; `None` is that of the target.
    pub draft_gpu: Option<usize>,
    /// Who multiplies the rows of long prompts on a GPU; `None` is in blocks where somebody can.
    pub prefill: Option<Prefill>,
    /// Whether a GPU begins the next step before the host has seen what the last one brought.
    pub launch_ahead: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            threads: None,
            pinning: Pinning::default(),
            max_batch_size: None,
            kv_bytes: None,
            kv_free_fraction: None,
            kv_tokens: None,
            draft_policy: DraftPolicy::Adaptive,
            lookup: None,
            ngram_branches: 1,
            draft_branches: 1,
            draft_tree_tokens: None,
            max_num_tokens: None,
            max_queue: 1024,
            admission: AdmissionPolicy::default(),
            kv_reuse: true,
            isa: None,
            gpu: 0,
            draft_gpu: None,
            prefill: None,
            launch_ahead: true,
        }
    }
}

impl Options {
    /// Sequences that run at once.
    pub(super) fn max_batch_size(&self, limits: &EngineLimits) -> usize {
        limits.max_batch_size.min(self.max_batch_size.unwrap_or(usize::MAX)).max(1)
    }
}
