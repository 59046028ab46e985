//! What a pass of a head launches: rows of tokens and states put together, its layers, its logits, and what rows hand on.

use super::Eagle;
use crate::exec::cuda::device::{Address, Kernel, Op};
use crate::exec::cuda::model::Pass;
use crate::exec::cuda::model::code::ByRows;
use crate::exec::cuda::model::params::{JoinParams, Piece, Scaling};
use crate::exec::cuda::model::pass::{DecoderPart, Input, Output, PassOps};
use crate::exec::cuda::model::weights::Matrix;
use crate::model::EagleKind;

impl Eagle {
    /// The table of token vectors, and the kernel that reads it.
    fn embed(&self) -> (&Matrix, Kernel) {
        match (&self.parts.embed, self.code.embed, &self.target) {
            (Some(embed), Some(code), _) => (embed, code),
            (_, _, Some(target)) => (&target.decoder.embed, target.ends.embed),
            _ => unreachable!("checked when it was made"),
        }
    }

    /// What makes logits.
    fn head(&self) -> (&Matrix, &ByRows) {
        match (&self.parts.head, &self.code.head, &self.target) {
            (Some(head), Some(code), _) => (head, code),
            (_, _, Some(target)) => (target.decoder.head(), &target.ends.head),
            _ => unreachable!("checked when it was made"),
        }
    }

    /// A pass over rows that come with the states in their buffer, or `goes_on` with what those with logits of the pass
    /// before have handed on.
    pub(crate) fn pass(&self, pass: &Pass, goes_on: bool) -> Vec<Op> {
        let states = if goes_on { self.buffers.handed_on } else { self.buffers.states };
        let Self { layers, parts, buffers, .. } = self;
        let work = &layers.workspace;
        let first = &parts.first;
        let mut ops = PassOps::new(layers, pass, None, DecoderPart::default());
        let (embed, code) = self.embed();
        ops.embed(embed, code);
        match self.eagle.kind {
            EagleKind::Eagle1 => self.fuse_tokens(&mut ops, states),
            EagleKind::Eagle3 => self.join_tokens(&mut ops, states),
        }
        let sums = Output::Sums { code: &self.code.qkv, to: work.raw, squares: buffers.squares };
        ops.multiply(&first.attention.qkv, Input::Halves(buffers.joined), sums);
        let cache = layers.cache.layer(0);
        ops.rotate(&first.attention, cache, work.raw, Scaling::default());
        if pass.num_logits == 0 && parts.layers.is_empty() {
            // Its keys and values are all that is wanted of a row.
            return ops.ops();
        }
        ops.attend_with(&first.attention, cache);
        ops.mlp(&first.mlp);
        for (idx, layer) in parts.layers.iter().enumerate() {
            ops.layer(layer, idx + 1);
        }
        if pass.num_logits > 0 {
            if self.hands_on() {
                self.hand_on(&mut ops);
            }
            let (head, code) = self.head();
            let input = match (parts.final_norm, self.unit_norm) {
                (Some(norm), _) => Input::Normed(norm),
                (None, Some(norm)) if self.hands_on() => norm.of(buffers.handed_on),
                _ => unreachable!("EAGLE-1 hands on rows, and has a norm that changes nothing"),
            };
            ops.head(head, input, code);
        }
        ops.ops()
    }

    /// EAGLE-3: tokens and states side by side, each behind its norm, as the input of the first layer's attention. The
    /// residual stream begins with the state.
    fn join_tokens(&self, ops: &mut PassOps<'_>, states: Address) {
        let (work, first) = (&self.layers.workspace, &self.parts.first);
        let norm = |norm: Option<Address>| norm.expect("EAGLE-3 has it");
        let pieces = [
            self.piece(work.residual, norm(first.token_norm)),
            self.piece(states, norm(first.hidden_norm)),
        ];
        let params = JoinParams {
            kept: work.residual,
            keeps_normed: self.eagle.norm_before_residual.into(),
            ..self.first_layer_params(ops.pass)
        };
        ops.join(self.code.join, &pieces, params);
    }

    /// EAGLE-1: `fc` over tokens and states begins the residual stream, which the first layer's attention takes as it is.
    fn fuse_tokens(&self, ops: &mut PassOps<'_>, states: Address) {
        let Self { layers, parts, buffers, .. } = self;
        let residual = layers.workspace.residual;
        let params = JoinParams {
            joined: buffers.joined,
            // Where the tokens stood comes the product.
            cleared: residual,
            cleared_len: self.width() as u32,
            num_rows: ops.pass.num_rows as u32,
            ..JoinParams::default()
        };
        ops.join(self.code.join, &[self.piece(residual, 0), self.piece(states, 0)], params);
        let sums = Output::Sums { code: &self.code.fc, to: residual, squares: buffers.squares };
        ops.multiply(&parts.fc, Input::Halves(buffers.joined), sums);
        ops.join(self.code.join, &[self.piece(residual, 0)], self.first_layer_params(ops.pass));
    }

    /// How rows become the input of the first layer's attention, whose sums start at nothing.
    fn first_layer_params(&self, pass: &Pass) -> JoinParams {
        JoinParams {
            joined: self.buffers.joined,
            cleared: self.layers.workspace.raw,
            cleared_len: self.parts.first.attention.qkv.n as u32,
            num_rows: pass.num_rows as u32,
            ..JoinParams::default()
        }
    }

    /// Keeps the states of rows that have logits.
    fn hand_on(&self, ops: &mut PassOps<'_>) {
        let work = &self.layers.workspace;
        let norm = self.parts.final_norm.filter(|_| self.eagle.norm_output);
        let params = JoinParams {
            row_index: work.logit_rows,
            kept: self.buffers.handed_on,
            keeps_normed: 1,
            num_rows: ops.pass.num_logits as u32,
            ..JoinParams::default()
        };
        ops.join(self.code.join, &[self.piece(work.residual, norm.unwrap_or(0))], params);
    }

    /// Rows of a buffer that is as wide as a state.
    fn piece(&self, rows: Address, norm: Address) -> Piece {
        let len = self.width() as u32;
        Piece { rows, norm, stride: len, len }
    }
}
