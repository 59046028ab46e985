//! A model and an executor for tests. The next token is a hash of the whole context. Every cached
//! position keeps the hash of the context it was computed in, and is checked whenever it would be
//! read: a page given to two sequences, or rows left out, are found at once.

use crate::Result;
use crate::batch::{
    Emitted, Entry, Executor, LongPrompts, Outcome, PromptBlocks, Stepped, Unwanted,
};
use crate::draft_source::{Branching, DraftLens, DraftSource};
use crate::pages::{PAGE_TOKENS, PageId, pages_for};
use crate::sampling::{Coupling, Sampler, SamplingParams};
use crate::sequence::{Limits, Sequence, SequenceId};
use std::collections::{BTreeMap, HashMap};

/// Tokens are below this.
pub(crate) const VOCAB_SIZE: u32 = 50;

/// An end token that the model draws once in `VOCAB_SIZE` tokens.
pub(crate) const END_TOKEN: u32 = 0;

/// Limits of a request that ends by length alone.
pub(crate) fn limits(max_tokens: usize, draft_len: usize) -> Limits {
    Limits {
        max_tokens,
        end_tokens: Vec::new(),
        ignore_eos: false,
        stop_tokens: Vec::new(),
        draft_len,
        is_fixed: false,
        priority: 0,
        row: 0,
    }
}

pub(crate) fn sequence(id: SequenceId, prompt: Vec<u32>, limits: Limits) -> Sequence {
    let sampler = Sampler::new(SamplingParams::default(), Coupling::Path(0), Vec::new());
    Sequence::new(id, prompt.into(), sampler, limits)
}

/// A sampler that reports on the prompt.
pub(crate) fn telling() -> Sampler {
    let params = SamplingParams { prompt_logprobs: Some(0), ..SamplingParams::default() };
    Sampler::new(params, Coupling::Path(0), Vec::new())
}

/// A token with nothing reported about it.
pub(crate) fn emitted(token: u32) -> Emitted {
    Emitted { token, logprob: None, rank: None, top_logprobs: Vec::new() }
}

/// What the model generates, without caches, drafts or batches.
pub(crate) fn expected(sequence: &Sequence, blocks: Option<PromptBlocks>) -> Vec<u32> {
    let contexts = contexts(&sequence.tokens, sequence.prompt_len, blocks);
    let mut context = contexts.last().copied().unwrap_or_default();
    let mut generated = Vec::new();
    while generated.len() < sequence.limits.max_tokens {
        let token = next(context);
        context = mix(context, token);
        generated.push(token);
        if sequence.limits.end_tokens.contains(&token) {
            break;
        }
    }
    generated
}

/// No token.
const IN_BLOCK: u32 = 1000;

/// The hash of no context, as good as.
const SCRIBBLE: u64 = 0xbad;

fn mix(context: u64, token: u32) -> u64 {
    let mut x = context ^ (u64::from(token) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The context behind each token. One that is computed in a block is another.
fn contexts(tokens: &[u32], prompt_len: usize, blocks: Option<PromptBlocks>) -> Vec<u64> {
    let blocks_end = blocks.map_or(0, |blocks| blocks.end(prompt_len));
    let mut context = 0;
    let contexts = tokens.iter().enumerate().map(|(position, &token)| {
        context = mix(context, token);
        if position < blocks_end {
            context = mix(context, IN_BLOCK);
        }
        context
    });
    contexts.collect()
}

fn next(context: u64) -> u32 {
    (mix(context, 12345) % u64::from(VOCAB_SIZE)) as u32
}

/// The cache of one model, by page and slot.
#[derive(Default)]
struct Cache(HashMap<(PageId, usize), u64>);

impl Cache {
    fn slot(pages: &[PageId], position: usize) -> (PageId, usize) {
        (pages[position / PAGE_TOKENS], position % PAGE_TOKENS)
    }

    fn write(&mut self, pages: &[PageId], position: usize, context: u64) {
        self.0.insert(Self::slot(pages, position), context);
    }

    fn check(&self, pages: &[PageId], contexts: &[u64], what: &str) {
        for (position, context) in contexts.iter().enumerate() {
            let cached = self.0.get(&Self::slot(pages, position));
            assert_eq!(cached, Some(context), "{what} cache at position {position}");
        }
    }
}

/// Tokens that wait for a head at which it reads them, asked or not.
const MOST_WAITING: usize = 64;

/// An executor whose drafters are right in `percent` of their tokens.
pub(crate) struct Fake {
    percent: u64,
    random: u64,
    target: Cache,
    /// None if the drafter needs none.
    draft: Option<Cache>,
    /// How far each sequence was computed.
    remembered: BTreeMap<SequenceId, usize>,
    blocks: Option<PromptBlocks>,
    /// How many of a hundred look-ups find something.
    found: u64,
    /// Whether the drafter reads what the target has computed in steps before, and one token more.
    reads_late: bool,
    pub(crate) num_steps: u64,
}

impl Fake {
    pub(crate) fn new(percent: u64, seed: u64, drafter_caches: bool) -> Self {
        Self {
            percent,
            random: seed,
            target: Cache::default(),
            draft: drafter_caches.then(Cache::default),
            remembered: BTreeMap::new(),
            blocks: None,
            found: 50,
            reads_late: false,
            num_steps: 0,
        }
    }

    /// Prompts are computed in these blocks.
    pub(crate) fn with_blocks(self, blocks: Option<PromptBlocks>) -> Self {
        Self { blocks, ..self }
    }

    /// So many of a hundred look-ups find something, in place of every other one.
    pub(crate) fn finding(self, found: u64) -> Self {
        Self { found, ..self }
    }

    /// Its drafter is a head on the target's states.
    pub(crate) fn with_head(self) -> Self {
        Self { reads_late: true, ..self }
    }

    /// Sequences that it was not told to forget.
    pub(crate) fn remembered(&self) -> usize {
        self.remembered.len()
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.random = mix(self.random, 1);
        self.random % 100 < percent
    }

    /// Every token of a prompt, with its place as what is reported.
    fn tell(entry: &Entry<'_>) -> Vec<Emitted> {
        let end = entry.computed + entry.chunk + 1 - usize::from(entry.samples());
        let first = end - entry.prompt_rows;
        let told = (first..end)
            .map(|idx| Emitted { logprob: Some(idx as f32), ..emitted(entry.tokens[idx]) });
        told.collect()
    }

    fn check(entry: &Entry<'_>) {
        let Entry { tokens, computed, chunk, draft_lens, given, draft_computed, pages, .. } =
            *entry;
        let draft_len = draft_lens.longest();
        assert!(chunk >= 1 && computed + chunk <= tokens.len());
        assert!(draft_len == 0 || entry.samples());
        assert!(draft_lens.model == 0 || entry.speculates);
        assert!(given.is_empty() || (entry.samples() && draft_len == 0));
        assert!(draft_computed <= computed);
        let DraftLens { lookup, model } = draft_lens;
        let Branching { width, max_tokens, .. } = entry.branching;
        let tree = (model * width).min(max_tokens);
        assert!(model <= max_tokens, "a tree of fewer tokens than a chain");
        let most_drafts = lookup.max(tree).max(given.len());
        assert!(entry.branching.width >= 1);
        // Under `GuaranteedNoEvict` others have reserved the rest.
        assert!(pages.len() <= pages_for(entry.max_len), "more pages than it ever needs");
        assert!(pages.len() >= pages_for(computed + chunk + most_drafts));
    }

    /// Who drafts.
    fn source(&mut self, entry: &Entry<'_>) -> DraftSource {
        let is_found = entry.draft_lens.lookup > 0 && self.chance(self.found);
        if is_found { DraftSource::Lookup } else { DraftSource::Model }
    }

    /// Up to `draft_len` tokens after `context`; now and then fewer.
    fn propose(&mut self, mut context: u64, draft_len: usize) -> Vec<u32> {
        let mut draft = Vec::new();
        while draft.len() < draft_len && !self.chance(5) {
            let right = self.chance(self.percent);
            let token = if right { next(context) } else { (next(context) + 1) % VOCAB_SIZE };
            context = mix(context, token);
            draft.push(token);
        }
        draft
    }

    fn run(&mut self, entry: &Entry<'_>) -> Outcome {
        Self::check(entry);
        match self.remembered.get(&entry.id) {
            Some(&computed) => assert_eq!(entry.computed, computed, "sequence {}", entry.id),
            None => assert_eq!(entry.computed % PAGE_TOKENS, 0, "only full pages are shared"),
        }
        let end = entry.computed + entry.chunk;
        let contexts = contexts(&entry.tokens[..end], entry.prompt_len, self.blocks);
        self.target.check(entry.pages, &contexts[..entry.computed], "target");
        (entry.computed..end).for_each(|p| self.target.write(entry.pages, p, contexts[p]));
        let source = self.source(entry);
        let has_many = || entry.computed >= entry.draft_computed + MOST_WAITING;
        let reads = match entry.speculates {
            true => source == DraftSource::Model,
            false => self.reads_late && entry.is_read && has_many(),
        };
        let read_to = match self.reads_late {
            true if entry.computed == 0 => 0,
            true => (entry.computed + 1).min(end),
            false => end,
        };
        if let Some(draft) = self.draft.as_mut().filter(|_| reads) {
            draft.check(entry.pages, &contexts[..entry.draft_computed], "draft");
            (entry.draft_computed..read_to).for_each(|p| draft.write(entry.pages, p, contexts[p]));
        }
        // An executor need not know how far a drafter is that it did not run.
        let draft_computed = match (reads, entry.speculates) {
            (true, _) => read_to,
            (false, true) => entry.draft_computed,
            (false, false) => 0,
        };
        let outcome = match entry.samples() {
            true => self.verify(entry, source, contexts[end - 1], draft_computed),
            false => Outcome { draft_computed, ..Outcome::default() },
        };
        let outcome = Outcome { prompt: Self::tell(entry), ..outcome };
        self.scribble(entry.pages, end + outcome.accepted);
        self.remembered.insert(entry.id, end + outcome.accepted);
        outcome
    }

    /// What a step leaves that began ahead and was not wanted: nothing that is valid is touched, and all else may be.
    fn scribble(&mut self, pages: &[PageId], valid: usize) {
        for position in valid..pages.len() * PAGE_TOKENS {
            for cache in [Some(&mut self.target), self.draft.as_mut()].into_iter().flatten() {
                cache.write(pages, position, SCRIBBLE);
            }
        }
    }

    fn verify(
        &mut self,
        entry: &Entry<'_>,
        source: DraftSource,
        mut context: u64,
        draft_computed: usize,
    ) -> Outcome {
        let mut draft = self.propose(context, *entry.draft_lens.of(source));
        // Tokens of the model.
        let proposed = if source == DraftSource::Model { draft.len() } else { 0 };
        draft.extend(entry.given);
        let (len, drafted) = (entry.tokens.len(), draft.len());
        let mut drafts_context = context;
        let mut tokens = Vec::new();
        for (idx, &token) in draft.iter().enumerate() {
            if tokens.len() == idx && token == next(context) {
                context = mix(context, token);
                tokens.push(emitted(token));
            }
            drafts_context = mix(drafts_context, token);
            self.target.write(entry.pages, len + idx, drafts_context);
            if let Some(draft) = self.draft.as_mut().filter(|_| idx + 1 < proposed) {
                draft.write(entry.pages, len + idx, drafts_context);
            }
        }
        let accepted = tokens.len();
        tokens.push(emitted(next(context)));
        // Other branches lie behind the first one, which is the one that is kept.
        let Branching { width, max_tokens, .. } = entry.branching;
        let num_others = ((width - 1) * proposed).min(max_tokens - proposed);
        for idx in 0..num_others {
            self.target.write(entry.pages, len + drafted + idx, SCRIBBLE);
        }
        let drafted = drafted + num_others;
        let read = if self.reads_late { 0 } else { accepted.min(proposed.saturating_sub(1)) };
        let draft_computed = draft_computed + read;
        let (draft_passes, draft_depth) = (proposed, draft.len());
        Outcome {
            tokens,
            drafted,
            draft_depth,
            accepted,
            draft_computed,
            draft_passes,
            ..Outcome::default()
        }
    }
}

impl Executor for Fake {
    fn step(&mut self, entries: &[Entry<'_>], unwanted: Unwanted<'_>) -> Result<Option<Stepped>> {
        if !unwanted() {
            self.num_steps += 1;
            let outcomes = entries.iter().map(|entry| self.run(entry)).collect();
            return Ok(Some(Stepped::as_asked(outcomes, None)));
        }
        for entry in entries {
            Self::check(entry);
            self.scribble(entry.pages, entry.computed);
        }
        Ok(None)
    }

    fn long_prompts(&self) -> LongPrompts {
        LongPrompts { rows_beside_others: 4, give_way: true }
    }

    fn prompt_blocks(&self) -> Option<PromptBlocks> {
        self.blocks
    }

    fn forget(&mut self, id: SequenceId) {
        self.remembered.remove(&id);
    }
}
