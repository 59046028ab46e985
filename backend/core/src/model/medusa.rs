//! Heads that each draft one token from a target's last hidden state, Medusa's: what they are, and their parts.
//!
//! Head i of them is `lm(x)`, where x begins as the state behind the target's last norm and goes through blocks
//! `x + silu(W x + b)`. On the state of position p it says what stands at p + 2 + i, whatever stands in between.

use super::ModelConfig;
use super::decoder::{Linear, Load, MatrixKind, TensorId, TensorRole, Vector};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// Heads at most: each drafts one token of a step.
const MAX_HEADS: usize = 64;
/// Blocks of a head at most.
const MAX_BLOCKS: usize = 64;

/// What the heads are. Their width and vocabulary are those of the model that they draft for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MedusaConfig {
    /// So many layers of the target are behind the hidden states that they read: all.
    pub tap: usize,
    /// Blocks of each head.
    pub num_blocks: usize,
    /// The blocks have biases.
    pub block_bias: bool,
    /// Of each head whether it has a matrix of its own to the logits; else that of the target.
    pub own_heads: Vec<bool>,
}

impl MedusaConfig {
    /// Tokens that can be drafted in a step.
    pub fn num_heads(&self) -> usize {
        self.own_heads.len()
    }

    /// Checks what the executors rely on.
    pub(super) fn validate(&self, model: &ModelConfig) -> Result<()> {
        let refuse = |what: String| Err(Error::BadModel(format!("Medusa heads: {what}")));
        let Self { tap, num_blocks, block_bias: _, own_heads } = self;
        if own_heads.is_empty() || own_heads.len() > MAX_HEADS {
            let num_heads = own_heads.len();
            return refuse(format!("there are {num_heads}, expected 1 to {MAX_HEADS}"));
        }
        if *num_blocks > MAX_BLOCKS {
            return refuse(format!("{num_blocks} blocks each, expected at most {MAX_BLOCKS}"));
        }
        if *tap == 0 || *tap > 1024 {
            return refuse(format!("they read behind layer {tap}, expected 1 to 1024"));
        }
        if model.num_layers > 0 {
            return refuse(format!("they have {} layers of a decoder", model.num_layers));
        }
        Ok(())
    }
}

/// Heads whose matrices are `M` and whose vectors are `V`, in the order of the computation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Medusa<M, V> {
    /// The target's last norm.
    pub norm: V,
    pub heads: Vec<MedusaHead<M>>,
}

/// `lm(block(.. block(x)))`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MedusaHead<M> {
    pub blocks: Vec<M>,
    /// To the logits; none where it is the target's.
    pub head: Option<M>,
}

impl Medusa<Linear, Vector> {
    pub(crate) fn of(config: &ModelConfig, medusa: &MedusaConfig) -> Self {
        let (hidden, num_blocks) = (config.hidden_size, medusa.num_blocks);
        let matrix = |name: String, kind, role, head, rows, has_bias| Linear {
            name,
            kind,
            sources: vec![(TensorId { role, layer: Some(head) }, rows)],
            k: hidden,
            has_bias,
        };
        let block = |head: usize, idx: usize| {
            let name = format!("heads.{head}.blocks.{idx}");
            let role = TensorRole::Block(idx);
            matrix(name, MatrixKind::Fc, role, head, hidden, medusa.block_bias)
        };
        let to_logits = |head: usize| {
            let name = format!("heads.{head}.head");
            let role = TensorRole::BehindBlocks(num_blocks);
            matrix(name, MatrixKind::Head, role, head, config.vocab_size, false)
        };
        let norm = TensorId { role: TensorRole::TapsNorm, layer: None };
        let head = |(idx, is_own): (usize, &bool)| MedusaHead {
            blocks: (0..num_blocks).map(|number| block(idx, number)).collect(),
            head: is_own.then(|| to_logits(idx)),
        };
        Self {
            norm: Vector { name: "taps_norm".into(), source: norm, len: hidden },
            heads: medusa.own_heads.iter().enumerate().map(head).collect(),
        }
    }

    /// Makes something of each part, in the order of an engine's sections.
    pub(crate) fn load<L: Load>(&self, loader: &mut L) -> Result<Medusa<L::Matrix, L::Vector>> {
        let norm = loader.vector(&self.norm)?;
        let head = |head: &MedusaHead<Linear>| {
            Ok(MedusaHead {
                blocks: head.blocks.iter().map(|b| loader.matrix(b)).collect::<Result<_>>()?,
                head: head.head.as_ref().map(|head| loader.matrix(head)).transpose()?,
            })
        };
        Ok(Medusa { norm, heads: self.heads.iter().map(head).collect::<Result<_>>()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing::small_llama;
    use crate::model::{DraftHead, decoder};

    fn config(medusa: MedusaConfig) -> ModelConfig {
        let draft_head = Some(DraftHead::Medusa(medusa));
        ModelConfig { num_layers: 0, tied_head: false, draft_head, ..small_llama() }
    }

    fn heads(own_heads: &[bool]) -> MedusaConfig {
        MedusaConfig { tap: 3, num_blocks: 2, block_bias: true, own_heads: own_heads.into() }
    }

    /// Lists the names of parts.
    struct Names(Vec<String>);

    impl Load for Names {
        type Matrix = ();
        type Vector = ();

        fn matrix(&mut self, linear: &Linear) -> Result<()> {
            self.0.push(linear.name.clone());
            Ok(())
        }

        fn vector(&mut self, vector: &Vector) -> Result<()> {
            self.0.push(vector.name.clone());
            Ok(())
        }
    }

    #[test]
    fn a_head_that_has_the_targets_matrix_has_none_of_its_own() {
        let mut names = Names(Vec::new());
        decoder::walk(&config(heads(&[true, false])), &mut names).unwrap();
        let expected = [
            "taps_norm",
            "heads.0.blocks.0",
            "heads.0.blocks.1",
            "heads.0.head",
            "heads.1.blocks.0",
            "heads.1.blocks.1",
        ];
        assert_eq!(names.0, expected);
    }

    #[test]
    fn what_the_executors_rely_on_is_checked() {
        let refusal = |config: ModelConfig| config.validate().unwrap_err().to_string();
        assert!(config(heads(&[true])).validate().is_ok());
        assert!(refusal(config(heads(&[]))).contains("there are 0, expected 1 to 64"));
        assert!(refusal(config(heads(&[true; 65]))).contains("there are 65"));
        let deep = MedusaConfig { num_blocks: 65, ..heads(&[true]) };
        assert!(refusal(config(deep)).contains("65 blocks"));
        let behind_nothing = MedusaConfig { tap: 0, ..heads(&[true]) };
        assert!(refusal(config(behind_nothing)).contains("behind layer 0"));
        let layered = ModelConfig { num_layers: 1, ..config(heads(&[true])) };
        assert!(refusal(layered).contains("1 layers of a decoder"));
        let bare = ModelConfig { draft_head: None, ..config(heads(&[true])) };
        assert!(refusal(bare).contains("num_layers is 0"), "a model has layers");
    }
}
