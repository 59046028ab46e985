//! Heads that draft from a target's hidden states, EAGLE's: what one is, and its parts.
//!
//! A row of a head is a token and a *state*: at first what `fc` makes of the hidden states that the target had one position
//! before the token, then, where the head drafts on, what the head itself had there. EAGLE-3 puts both side by side as the
//! input of its first layer's attention; EAGLE-1 and 2 fuse them by `fc` instead, and take the target's last hidden state as
//! it is.

use super::ModelConfig;
use super::decoder::{
    Attention, Layer, Linear, Load, MatrixKind, Mlp, Parts, TensorId, TensorRole, Vector, optional,
};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// Which of EAGLE's two ways a head has to bring tokens and states together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EagleKind {
    /// EAGLE-1 and 2: `fc` over both; no norm before the first layer, none behind the last.
    Eagle1,
    /// EAGLE-3: side by side, each with its norm, into the attention of the first layer.
    Eagle3,
}

/// Layers that a head reads, at most.
pub(crate) const MOST_TAPS: usize = 16;

/// What is normed before `fc`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TapNorms {
    /// Nothing.
    None,
    /// The hidden states of all layers as one vector.
    Together,
    /// Those of each layer.
    Each,
}

/// What a head is besides the shape of its layers. Sizes are in elements.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EagleConfig {
    /// How tokens and states come together.
    pub kind: EagleKind,
    /// So many layers of the target are behind each of the hidden states that it reads, ascending.
    pub taps: Vec<usize>,
    /// Width of the target's residual stream.
    pub target_hidden: usize,
    /// What is normed before `fc`.
    pub tap_norms: TapNorms,
    /// `fc` has a bias.
    pub fc_bias: bool,
    /// The residual stream begins with the normed state, not with the state itself.
    pub norm_before_residual: bool,
    /// The state that a row hands on is behind the last norm, not in front of it.
    pub norm_output: bool,
    /// Positions that a row sees at most.
    pub window: Option<usize>,
    /// It has a table of token vectors of its own; else that of the target.
    pub own_embed: bool,
    /// It has a head of its own; else that of the target.
    pub own_head: bool,
    /// Tokens that it drafts.
    pub draft_vocab: usize,
    /// They are not the target's first ones.
    pub maps_vocab: bool,
    /// The token of the rows behind the first one, where all drafts come from one pass: P-EAGLE.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask_token: Option<u32>,
}

impl EagleConfig {
    pub(crate) fn fc_inputs(&self, hidden_size: usize) -> usize {
        match self.kind {
            EagleKind::Eagle1 => hidden_size + self.target_hidden,
            EagleKind::Eagle3 => self.taps.len() * self.target_hidden,
        }
    }

    /// Inputs of the first layer's attention.
    pub(crate) fn first_inputs(&self, hidden_size: usize) -> usize {
        match self.kind {
            EagleKind::Eagle1 => hidden_size,
            EagleKind::Eagle3 => 2 * hidden_size,
        }
    }

    /// The first position that a row sees: none sees 0, where there is no state before the token.
    pub(crate) fn first_seen(&self, position: usize) -> usize {
        (position + 1).saturating_sub(self.window.unwrap_or(usize::MAX)).max(1)
    }

    /// Checks what the executors rely on.
    pub(super) fn validate(&self, model: &ModelConfig) -> Result<()> {
        let Self { kind, taps, target_hidden, window, draft_vocab, maps_vocab, own_head, .. } =
            self;
        let refuse = |what: String| Err(Error::BadModel(format!("EAGLE head: {what}")));
        let most = MOST_TAPS;
        if taps.is_empty() || taps.len() > most || !taps.is_sorted_by(|a, b| a < b) {
            return refuse(format!("taps are {taps:?}, expected 1 to {most} ascending numbers"));
        }
        if *kind == EagleKind::Eagle1 && taps.len() != 1 {
            return refuse(format!("taps are {taps:?}, expected one of EAGLE-1"));
        }
        if *kind == EagleKind::Eagle1 && *target_hidden != model.hidden_size {
            let own = model.hidden_size;
            return refuse(format!(
                "the target's width is {target_hidden}, expected {own}, its own"
            ));
        }
        if *target_hidden == 0 || *target_hidden > 1 << 16 {
            return refuse(format!("the target's width is {target_hidden}, expected 1 to 65536"));
        }
        if let Some(mask) = self.mask_token
            && (*kind == EagleKind::Eagle1 || mask as usize >= model.vocab_size)
        {
            let all = model.vocab_size;
            return refuse(format!("its mask token is {mask}, expected one of {all} of EAGLE-3"));
        }
        if *window == Some(0) {
            return refuse("its window is 0, expected at least 1".into());
        }
        if *draft_vocab == 0 || *draft_vocab > model.vocab_size {
            let most = model.vocab_size;
            return refuse(format!("it drafts {draft_vocab} tokens, expected 1 to {most}"));
        }
        if !own_head && (*maps_vocab || *draft_vocab != model.vocab_size) {
            let all = model.vocab_size;
            return refuse(format!("it drafts {draft_vocab} of {all} tokens by the target's head"));
        }
        Ok(())
    }
}

/// A head whose matrices are `M` and whose vectors are `V`, in the order of the computation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Eagle<M, V> {
    /// The table of token vectors; none where it is the target's.
    pub embed: Option<M>,
    /// Before `fc`: none, one over all taps, or one each.
    pub tap_norms: Vec<V>,
    /// From the taps (EAGLE-1: from token and state) to the state.
    pub fc: M,
    /// The layer that sees both.
    pub first: FirstLayer<M, V>,
    /// Those behind it.
    pub layers: Vec<Layer<M, V>>,
    /// Before the head; none in EAGLE-1.
    pub final_norm: Option<V>,
    /// None where it is the target's.
    pub head: Option<M>,
    /// The target's token of each row of the head, as a number; none where it is the row's own.
    pub vocab_map: Option<V>,
    /// Taps of the rows whose token is the mask; none where each draft takes a pass.
    pub mask_hidden: Option<V>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FirstLayer<M, V> {
    /// Of the token; none in EAGLE-1.
    pub token_norm: Option<V>,
    /// Of the state; none in EAGLE-1.
    pub hidden_norm: Option<V>,
    /// Over both.
    pub attention: Attention<M, V>,
    /// As in any layer.
    pub mlp: Mlp<M, V>,
}

impl Eagle<Linear, Vector> {
    pub(crate) fn of(config: &ModelConfig, eagle: &EagleConfig) -> Self {
        let (hidden, wide) = (config.hidden_size, eagle.target_hidden);
        let table = |name: &str, kind, role, rows, k, has_bias| Linear {
            name: name.into(),
            kind,
            sources: vec![(TensorId { role, layer: None }, rows)],
            k,
            has_bias,
        };
        let norm = |name: String, role, layer, len| {
            let source = TensorId { role, layer };
            Vector { name, source, len }
        };
        let num_taps = eagle.taps.len();
        let tap_norm = |idx| norm(format!("tap_norm.{idx}"), TensorRole::TapNorm, Some(idx), wide);
        let (vocab, drafted) = (config.vocab_size, eagle.draft_vocab);
        let embed = || table("embed", MatrixKind::Embed, TensorRole::Embed, vocab, hidden, false);
        let head = || table("head", MatrixKind::Head, TensorRole::Head, drafted, hidden, false);
        let is_third = eagle.kind == EagleKind::Eagle3;
        let of_third = |vector: Vector| is_third.then_some(vector);
        let parts = Parts { config, idx: 0 };
        let vocab_map = || norm("vocab_map".into(), TensorRole::VocabMap, None, drafted);
        let mask_hidden =
            |_| norm("mask_hidden".into(), TensorRole::MaskHidden, None, num_taps * wide);
        Self {
            embed: eagle.own_embed.then(embed),
            tap_norms: match eagle.tap_norms {
                TapNorms::None => Vec::new(),
                TapNorms::Together => {
                    let len = num_taps * wide;
                    vec![norm("taps_norm".into(), TensorRole::TapsNorm, None, len)]
                }
                TapNorms::Each => (0..num_taps).map(tap_norm).collect(),
            },
            fc: {
                let k = eagle.fc_inputs(hidden);
                table("fc", MatrixKind::Fc, TensorRole::Fc, hidden, k, eagle.fc_bias)
            },
            first: FirstLayer {
                token_norm: of_third(parts.norm("input_norm", TensorRole::AttnNorm, hidden)),
                hidden_norm: of_third(parts.norm("hidden_norm", TensorRole::HiddenNorm, hidden)),
                attention: parts.attention(eagle.first_inputs(hidden)),
                mlp: parts.mlp(),
            },
            layers: (1..config.num_layers).map(|idx| Layer::of(config, idx)).collect(),
            final_norm: of_third(norm("final_norm".into(), TensorRole::FinalNorm, None, hidden)),
            head: eagle.own_head.then(head),
            vocab_map: eagle.maps_vocab.then(vocab_map),
            mask_hidden: eagle.mask_token.map(mask_hidden),
        }
    }

    /// Makes something of each part, in the order of an engine's sections.
    pub(crate) fn load<L: Load>(&self, loader: &mut L) -> Result<Eagle<L::Matrix, L::Vector>> {
        Ok(Eagle {
            embed: self.embed.as_ref().map(|embed| loader.matrix(embed)).transpose()?,
            tap_norms: self.tap_norms.iter().map(|v| loader.vector(v)).collect::<Result<_>>()?,
            fc: loader.matrix(&self.fc)?,
            first: FirstLayer {
                token_norm: optional(loader, self.first.token_norm.as_ref())?,
                hidden_norm: optional(loader, self.first.hidden_norm.as_ref())?,
                attention: self.first.attention.load(loader)?,
                mlp: self.first.mlp.load(loader)?,
            },
            layers: self.layers.iter().map(|layer| layer.load(loader)).collect::<Result<_>>()?,
            final_norm: optional(loader, self.final_norm.as_ref())?,
            head: self.head.as_ref().map(|head| loader.matrix(head)).transpose()?,
            vocab_map: optional(loader, self.vocab_map.as_ref())?,
            mask_hidden: optional(loader, self.mask_hidden.as_ref())?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::DraftHead;
    use crate::model::testing::small_llama;

    fn refusal(eagle: EagleConfig) -> Option<String> {
        let draft_head = Some(DraftHead::Eagle(eagle));
        let config = ModelConfig { num_layers: 1, tied_head: false, draft_head, ..small_llama() };
        config.validate().err().map(|error| error.to_string())
    }

    #[test]
    fn what_the_executors_rely_on_is_checked() {
        let ModelConfig { hidden_size, vocab_size, .. } = small_llama();
        let first = EagleConfig {
            kind: EagleKind::Eagle1,
            taps: vec![2],
            target_hidden: hidden_size,
            tap_norms: TapNorms::Together,
            fc_bias: true,
            norm_before_residual: false,
            norm_output: false,
            window: None,
            own_embed: true,
            own_head: true,
            draft_vocab: vocab_size,
            maps_vocab: false,
            mask_token: None,
        };
        assert_eq!(refusal(first.clone()), None);
        let third = EagleConfig { kind: EagleKind::Eagle3, taps: vec![0, 1, 2], ..first.clone() };
        assert_eq!(refusal(third.clone()), None);
        // EAGLE-3 makes states as wide as it is of wider ones.
        let twice = 2 * hidden_size;
        assert_eq!(refusal(EagleConfig { target_hidden: twice, ..third.clone() }), None);
        let refused = |eagle: EagleConfig, what: &str| {
            let message = refusal(eagle).expect("it is refused");
            assert!(message.contains(what), "{message}");
        };
        let wider = format!("the target's width is {twice}, expected {hidden_size}");
        refused(EagleConfig { target_hidden: twice, ..first.clone() }, &wider);
        refused(EagleConfig { taps: vec![1, 2], ..first.clone() }, "expected one of EAGLE-1");
        refused(EagleConfig { mask_token: Some(1), ..first.clone() }, "its mask token is 1");
        refused(EagleConfig { taps: vec![2, 1], ..third.clone() }, "taps are [2, 1]");
        refused(EagleConfig { target_hidden: 0, ..third.clone() }, "the target's width is 0");
        refused(EagleConfig { window: Some(0), ..third.clone() }, "its window is 0");
        let none = EagleConfig { draft_vocab: 0, ..third.clone() };
        refused(none, "it drafts 0 tokens");
        let beyond = EagleConfig { mask_token: Some(vocab_size as u32), ..third.clone() };
        refused(beyond, "its mask token is");
        let few = EagleConfig { draft_vocab: vocab_size - 1, own_head: false, ..third };
        refused(few, "by the target's head");
    }
}
