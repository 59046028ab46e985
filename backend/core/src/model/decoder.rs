//! The parts of a decoder: which matrices and vectors it has, which tensors of a checkpoint they come from, how those are
//! fused, and how they may be split. Whoever builds, writes, loads or counts weights walks this; nobody else names them.
//!
//! A decoder is described by [`Linear`] and [`Vector`]; an executor turns each into what it computes with, and has the same
//! decoder of its own types.

use super::eagle::Eagle;
use super::medusa::Medusa;
use super::{DraftHead, ModelConfig};
use crate::Result;

/// What a tensor of a checkpoint is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorRole {
    /// The table of token vectors.
    Embed,
    /// Norm before attention.
    AttnNorm,
    /// Query projection.
    Q,
    /// Key projection.
    K,
    /// Value projection.
    V,
    /// Norm of each query head.
    QNorm,
    /// Norm of each key head.
    KNorm,
    /// Attention output projection.
    O,
    /// Norm before the MLP.
    MlpNorm,
    /// Gate projection of the MLP.
    Gate,
    /// Up projection of the MLP.
    Up,
    /// Down projection of the MLP.
    Down,
    /// Norm before the head.
    FinalNorm,
    /// The head, where it is not the table of token vectors.
    Head,
    /// Of an EAGLE head: norm of the target's hidden states of all layers together.
    TapsNorm,
    /// Norm of those of one.
    TapNorm,
    /// What fuses them.
    Fc,
    /// Norm of the state beside the token, before the first layer's attention.
    HiddenNorm,
    /// The token of each row of the head of a drafter.
    VocabMap,
    /// Hidden states of all layers that stand in for the target's where there are none yet.
    MaskHidden,
    /// Of a Medusa head, which is the layer: the block with this number.
    Block(usize),
    /// What makes logits of it, behind so many blocks.
    BehindBlocks(usize),
}

/// A tensor of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorId {
    /// What it is.
    pub role: TensorRole,
    /// Which layer's, tap's or Medusa head's; none outside of these.
    pub layer: Option<usize>,
}

/// What a matrix does in a pass. Kernels, layouts and number formats are chosen by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MatrixKind {
    /// From tokens to the residual stream.
    Embed,
    /// q, k and v of all heads.
    Qkv,
    /// From the attention's output to the residual stream.
    Out,
    /// Gate and up projection.
    GateUp,
    /// From the MLP to the residual stream.
    Down,
    /// To the logits.
    Head,
    /// From a target's hidden states to the state of an EAGLE head, or to the next state of a Medusa head.
    Fc,
}

/// How a matrix may be cut into parts that are multiplied apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// By outputs, each source by itself: every part computes some of them.
    Outputs,
    /// By inputs: the parts' results are added.
    Inputs,
}

impl MatrixKind {
    /// How it may be cut, so that the parts of one matrix go on with those of the next: one sum after the attention and one
    /// after the MLP.
    pub fn split(self) -> Split {
        match self {
            Self::Embed | Self::Qkv | Self::GateUp | Self::Head | Self::Fc => Split::Outputs,
            Self::Out | Self::Down => Split::Inputs,
        }
    }
}

/// A matrix that a pass reads: tensors of a checkpoint, one below the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Linear {
    /// Its section in an engine, such as `layers.0.qkv`.
    pub name: String,
    /// What it does.
    pub kind: MatrixKind,
    /// The tensors whose rows make it up, in order, and how many rows each has.
    pub sources: Vec<(TensorId, usize)>,
    /// Inputs.
    pub k: usize,
    /// Whether each output has a bias; its tensors are those of the sources.
    pub has_bias: bool,
}

impl Linear {
    /// Outputs.
    pub fn n(&self) -> usize {
        self.sources.iter().map(|(_, rows)| rows).sum()
    }

    /// Outputs and inputs.
    pub(crate) fn shape(&self) -> [usize; 2] {
        [self.n(), self.k]
    }
}

/// The weights of a norm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vector {
    /// Its section in an engine, such as `layers.0.input_norm`.
    pub name: String,
    /// The tensor.
    pub source: TensorId,
    /// Values.
    pub len: usize,
}

/// A decoder whose matrices are `M` and whose vectors are `V`. Fields are in the order of the computation, which is that of
/// an engine's sections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Decoder<M, V> {
    /// The table of token vectors.
    pub embed: M,
    pub layers: Vec<Layer<M, V>>,
    /// Norm before the head.
    pub final_norm: V,
    /// None where the table of token vectors is the head.
    head: Option<M>,
    /// The token of each row of the head, as a number; none where it has a row for each.
    pub vocab_map: Option<V>,
}

/// `residual += attention(norm(residual)); residual += mlp(residual)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layer<M, V> {
    /// Before the attention.
    pub input_norm: V,
    /// What looks at other rows.
    pub attention: Attention<M, V>,
    /// What looks at its row alone.
    pub mlp: Mlp<M, V>,
}

/// `out(attend(qkv(x)))`, heads of q and k normed where there are norms, and rotated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Attention<M, V> {
    /// Queries, keys and values.
    pub qkv: M,
    /// Of each query head.
    pub q_norm: Option<V>,
    /// Of each key head.
    pub k_norm: Option<V>,
    /// From all heads.
    pub out: M,
}

/// `down(silu(gate(norm(residual))) * up(norm(residual)))`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mlp<M, V> {
    /// Before everything.
    pub norm: V,
    /// Gate, then up.
    pub gate_up: M,
    /// Back.
    pub down: M,
}

impl<M, V> Decoder<M, V> {
    /// What turns the last norm's output into logits.
    pub(crate) fn head(&self) -> &M {
        self.head.as_ref().unwrap_or(&self.embed)
    }
}

/// Makes something of each part of a decoder.
pub trait Load {
    /// Of a matrix.
    type Matrix;
    /// Of a vector.
    type Vector;

    /// Makes it.
    fn matrix(&mut self, linear: &Linear) -> Result<Self::Matrix>;

    /// Makes it.
    fn vector(&mut self, vector: &Vector) -> Result<Self::Vector>;
}

/// Makes something of each part of a model, in the order of an engine's sections.
pub fn walk<L: Load>(config: &ModelConfig, loader: &mut L) -> Result<()> {
    match &config.draft_head {
        None => Decoder::of(config).load(loader).map(drop),
        Some(DraftHead::Eagle(eagle)) => Eagle::of(config, eagle).load(loader).map(drop),
        Some(DraftHead::Medusa(medusa)) => Medusa::of(config, medusa).load(loader).map(drop),
    }
}

impl Decoder<Linear, Vector> {
    /// The parts of a model. No size overflows: [`ModelConfig::validate`] bounds them.
    pub(crate) fn of(config: &ModelConfig) -> Self {
        let hidden = config.hidden_size;
        let table = |name: &str, kind, role, rows| Linear {
            name: name.into(),
            kind,
            sources: vec![(TensorId { role, layer: None }, rows)],
            k: hidden,
            has_bias: false,
        };
        let vector = |name: &str, role, len| {
            let source = TensorId { role, layer: None };
            Vector { name: name.into(), source, len }
        };
        let head = || table("head", MatrixKind::Head, TensorRole::Head, config.num_logits());
        let map = |drafted| vector("vocab_map", TensorRole::VocabMap, drafted);
        Self {
            embed: table("embed", MatrixKind::Embed, TensorRole::Embed, config.vocab_size),
            layers: (0..config.num_layers).map(|idx| Layer::of(config, idx)).collect(),
            final_norm: vector("final_norm", TensorRole::FinalNorm, hidden),
            head: (!config.tied_head).then(head),
            vocab_map: config.draft_vocab.map(map),
        }
    }

    /// Makes something of each part, in the order of an engine's sections.
    pub(crate) fn load<L: Load>(&self, loader: &mut L) -> Result<Decoder<L::Matrix, L::Vector>> {
        Ok(Decoder {
            embed: loader.matrix(&self.embed)?,
            layers: self.layers.iter().map(|layer| layer.load(loader)).collect::<Result<_>>()?,
            final_norm: loader.vector(&self.final_norm)?,
            head: self.head.as_ref().map(|head| loader.matrix(head)).transpose()?,
            vocab_map: optional(loader, self.vocab_map.as_ref())?,
        })
    }
}

impl Layer<Linear, Vector> {
    pub(crate) fn of(config: &ModelConfig, idx: usize) -> Self {
        let parts = Parts { config, idx };
        Self {
            input_norm: parts.norm("input_norm", TensorRole::AttnNorm, config.hidden_size),
            attention: parts.attention(config.hidden_size),
            mlp: parts.mlp(),
        }
    }

    pub(super) fn load<L: Load>(&self, loader: &mut L) -> Result<Layer<L::Matrix, L::Vector>> {
        Ok(Layer {
            input_norm: loader.vector(&self.input_norm)?,
            attention: self.attention.load(loader)?,
            mlp: self.mlp.load(loader)?,
        })
    }

    pub(crate) fn matrices(&self) -> [&Linear; 4] {
        [&self.attention.qkv, &self.attention.out, &self.mlp.gate_up, &self.mlp.down]
    }
}

impl Attention<Linear, Vector> {
    pub(super) fn load<L: Load>(&self, loader: &mut L) -> Result<Attention<L::Matrix, L::Vector>> {
        Ok(Attention {
            qkv: loader.matrix(&self.qkv)?,
            q_norm: optional(loader, self.q_norm.as_ref())?,
            k_norm: optional(loader, self.k_norm.as_ref())?,
            out: loader.matrix(&self.out)?,
        })
    }
}

impl Mlp<Linear, Vector> {
    pub(super) fn load<L: Load>(&self, loader: &mut L) -> Result<Mlp<L::Matrix, L::Vector>> {
        Ok(Mlp {
            norm: loader.vector(&self.norm)?,
            gate_up: loader.matrix(&self.gate_up)?,
            down: loader.matrix(&self.down)?,
        })
    }
}

/// Makes something of a vector that a model may lack.
pub(super) fn optional<L: Load>(
    loader: &mut L,
    vector: Option<&Vector>,
) -> Result<Option<L::Vector>> {
    vector.map(|vector| loader.vector(vector)).transpose()
}

/// The parts of a layer, by its number.
pub(super) struct Parts<'a> {
    pub(super) config: &'a ModelConfig,
    pub(super) idx: usize,
}

impl Parts<'_> {
    pub(super) fn norm(&self, part: &str, role: TensorRole, len: usize) -> Vector {
        Vector { name: self.name(part), source: self.tensor(role), len }
    }

    /// The attention, whose input has `k` values.
    pub(super) fn attention(&self, k: usize) -> Attention<Linear, Vector> {
        let config = self.config;
        let (q, kv) = (config.q_size(), config.kv_size());
        let head_norm = |part, role| config.qk_norm.then(|| self.norm(part, role, config.head_dim));
        let qkv = [(TensorRole::Q, q), (TensorRole::K, kv), (TensorRole::V, kv)];
        let out = [(TensorRole::O, config.hidden_size)];
        Attention {
            qkv: self.linear("qkv", MatrixKind::Qkv, &qkv, k, config.qkv_bias),
            q_norm: head_norm("q_norm", TensorRole::QNorm),
            k_norm: head_norm("k_norm", TensorRole::KNorm),
            out: self.linear("out", MatrixKind::Out, &out, q, config.out_bias),
        }
    }

    pub(super) fn mlp(&self) -> Mlp<Linear, Vector> {
        let &ModelConfig { hidden_size: hidden, intermediate_size: wide, mlp_bias, .. } =
            self.config;
        let gate_up = [(TensorRole::Gate, wide), (TensorRole::Up, wide)];
        let down = [(TensorRole::Down, hidden)];
        Mlp {
            norm: self.norm("post_norm", TensorRole::MlpNorm, hidden),
            gate_up: self.linear("gate_up", MatrixKind::GateUp, &gate_up, hidden, mlp_bias),
            down: self.linear("down", MatrixKind::Down, &down, wide, mlp_bias),
        }
    }

    fn linear(
        &self,
        part: &str,
        kind: MatrixKind,
        sources: &[(TensorRole, usize)],
        k: usize,
        has_bias: bool,
    ) -> Linear {
        let sources = sources.iter().map(|&(role, rows)| (self.tensor(role), rows)).collect();
        Linear { name: self.name(part), kind, sources, k, has_bias }
    }

    fn name(&self, part: &str) -> String {
        format!("layers.{}.{part}", self.idx)
    }

    fn tensor(&self, role: TensorRole) -> TensorId {
        TensorId { role, layer: Some(self.idx) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing::small_llama;

    /// Lists names and sources.
    struct Names(Vec<(String, Vec<TensorRole>)>);

    impl Load for Names {
        type Matrix = ();
        type Vector = ();

        fn matrix(&mut self, linear: &Linear) -> Result<()> {
            let roles = linear.sources.iter().map(|(tensor, _)| tensor.role).collect();
            self.0.push((linear.name.clone(), roles));
            Ok(())
        }

        fn vector(&mut self, vector: &Vector) -> Result<()> {
            self.0.push((vector.name.clone(), vec![vector.source.role]));
            Ok(())
        }
    }

    fn names(config: &ModelConfig) -> Vec<(String, Vec<TensorRole>)> {
        let mut names = Names(Vec::new());
        Decoder::of(config).load(&mut names).unwrap();
        names.0
    }

    #[test]
    fn parts_are_walked_in_the_order_of_the_computation() {
        use TensorRole::*;
        let config =
            ModelConfig { num_layers: 1, qk_norm: true, tied_head: false, ..small_llama() };
        let expected: [(&str, &[TensorRole]); 11] = [
            ("embed", &[Embed]),
            ("layers.0.input_norm", &[AttnNorm]),
            ("layers.0.qkv", &[Q, K, V]),
            ("layers.0.q_norm", &[QNorm]),
            ("layers.0.k_norm", &[KNorm]),
            ("layers.0.out", &[O]),
            ("layers.0.post_norm", &[MlpNorm]),
            ("layers.0.gate_up", &[Gate, Up]),
            ("layers.0.down", &[Down]),
            ("final_norm", &[FinalNorm]),
            ("head", &[Head]),
        ];
        let expected: Vec<_> =
            expected.iter().map(|(name, roles)| (name.to_string(), roles.to_vec())).collect();
        assert_eq!(names(&config), expected);
    }

    #[test]
    fn a_drafter_may_have_a_head_over_some_tokens() {
        let config = ModelConfig { tied_head: false, draft_vocab: Some(7), ..small_llama() };
        config.validate().unwrap();
        let decoder = Decoder::of(&config);
        assert_eq!(decoder.head().shape(), [7, config.hidden_size]);
        assert_eq!(decoder.embed.n(), config.vocab_size);
        assert_eq!(decoder.vocab_map.map(|map| map.len), Some(7));
        assert_eq!(names(&config).last().unwrap().1, [TensorRole::VocabMap]);
        for wrong in [
            ModelConfig { draft_vocab: Some(0), ..config.clone() },
            ModelConfig { draft_vocab: Some(config.vocab_size + 1), ..config.clone() },
            ModelConfig { tied_head: true, ..config.clone() },
        ] {
            let message = wrong.validate().unwrap_err().to_string();
            assert!(message.contains("draft_vocab is"), "{message}");
        }
    }

    #[test]
    fn what_a_model_lacks_is_no_part() {
        let config = ModelConfig { qk_norm: false, tied_head: true, ..small_llama() };
        let names = names(&config);
        let lacks = |part: &str| names.iter().all(|(name, _)| !name.ends_with(part));
        assert!(lacks("q_norm") && lacks("k_norm") && lacks("head"), "{names:?}");
        assert_eq!(names.len(), 1 + 6 * config.num_layers + 1);
        let decoder = Decoder::of(&config);
        assert_eq!(decoder.head(), &decoder.embed);
    }

    #[test]
    fn parts_that_are_cut_fit_each_other() {
        let layer = Layer::of(&small_llama(), 0);
        // What one computes by outputs the next takes by inputs.
        for (first, second) in
            [(&layer.attention.qkv, &layer.attention.out), (&layer.mlp.gate_up, &layer.mlp.down)]
        {
            assert_eq!((first.kind.split(), second.kind.split()), (Split::Outputs, Split::Inputs));
            assert_eq!(first.sources[0].1, second.k);
        }
    }
}
