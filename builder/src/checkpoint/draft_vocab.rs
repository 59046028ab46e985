//! A model that drafts some tokens alone: of its head the rows of these are kept.

use super::names;
use super::tensor::{Source, Tensor};
use super::{Checkpoint, Target};
use anyhow::{Result, bail, ensure};
use std::sync::Arc;

impl Checkpoint {
    /// Leaves of the head the rows of these tokens, in their order. It was the table of token vectors perhaps: that stays whole,
    /// since every token is read.
    pub fn draft_only(&mut self, tokens: Vec<u32>) -> Result<()> {
        ensure!(self.config.draft_head.is_none(), "a head has a vocabulary of its own");
        ensure!(self.config.draft_vocab.is_none(), "it drafts some tokens alone already");
        let head = Target::tensor(self, names::HEAD)?;
        let (num_rows, width) = (head.num_rows(), head.row_len());
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= num_rows) {
            bail!("token {token} is outside of the vocabulary of {num_rows}");
        }
        self.config.draft_vocab = Some(tokens.len());
        self.config.tied_head = false;
        self.config.validate()?;
        let numbers: Arc<[f32]> = tokens.iter().map(|&token| token as f32).collect();
        let shape = vec![tokens.len(), width];
        let rows = Source::Rows { of: Box::new(head), rows: tokens.into() };
        self.tensors.insert(names::HEAD.into(), Tensor::of_values(rows, shape.clone()));
        let map = Tensor::of_values(Source::Values(numbers), vec![shape[0]]);
        self.tensors.insert(names::VOCAB_MAP.into(), map);
        Ok(())
    }

    /// The model as it was before it drafted some tokens alone.
    pub(crate) fn with_all_logits(&self) -> Self {
        let mut whole = Self {
            config: self.config.clone(),
            generation: self.generation.clone(),
            tokenizer: self.tokenizer.clone(),
            sliding_window: self.sliding_window,
            kv_scales: Ok(None),
            tensors: self.tensors.clone(),
        };
        if whole.config.draft_vocab.take().is_some() {
            whole.tensors.remove(names::VOCAB_MAP);
            let head = whole.tensors.get_mut(names::HEAD).expect("what drafts some has a head");
            if let Source::Rows { of, .. } = &head.source {
                *head = Tensor::clone(of);
            }
        }
        whole
    }
}
