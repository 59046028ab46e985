//! Who an engine is, whatever its peer, and whether two engines belong together.

use super::{Device, DrafterKind, Limits, Manifest, Peer, Precision, Role, Section, SectionKind};
use crate::model::{DraftHead, Dtype, KvScales, ModelConfig};
use crate::{Error, Result};
use serde::Serialize;

/// What an identity covers, as JSON. Offsets are left out: they move with the length of the names in
/// the manifest.
#[derive(Serialize)]
struct Computes<'a> {
    device: &'a Device,
    model: &'a ModelConfig,
    precision: &'a Precision,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_scales: &'a Option<KvScales>,
    sections: Vec<Contents<'a>>,
}

#[derive(Serialize)]
struct Contents<'a> {
    name: &'a str,
    kind: SectionKind,
    dtype: Option<Dtype>,
    shape: &'a [usize],
    hash: &'a str,
}

impl Manifest {
    /// The identity that this manifest must carry: blake3 over model, precision, scales, device and section
    /// hashes, in hex.
    pub fn compute_identity(&self) -> String {
        let Self {
            device,
            model,
            precision,
            kv_scales,
            sections,
            builder: _,
            kernels: _,
            role: _,
            identity: _,
            drafter: _,
            target: _,
            limits: _,
            tokenizer: _,
            end_tokens: _,
            bos_token: _,
            costs: _,
        } = self;
        let sections = sections.iter().map(contents).collect();
        let json = serde_json::to_vec(&Computes { device, model, precision, kv_scales, sections })
            // Serialising fails only for maps with odd keys and for failing writers.
            .expect("plain data becomes JSON");
        blake3::hash(&json).to_hex().to_string()
    }

    /// Whether these two were built for each other. The error names both values.
    pub fn check_pair(target: &Self, draft: &Self) -> Result<()> {
        let Self {
            role,
            identity,
            drafter,
            limits,
            tokenizer,
            builder: _,
            kernels: _,
            device: _,
            target: _,
            model,
            precision: _,
            kv_scales: _,
            end_tokens: _,
            bos_token: _,
            costs: _,
            sections: _,
        } = target;
        if (*role, draft.role) != (Role::Target, Role::Draft) {
            let found = format!("a {role:?} and a {:?}", draft.role).to_lowercase();
            return Err(bad_pair(format!("{found}, expected a target and a draft")));
        }
        let DrafterKind::Model(peer) = drafter else {
            return Err(bad_pair(format!("the target drafts by {drafter:?}, not by a model")));
        };
        check_names("target", peer, "draft", &draft.identity)?;
        let Some(peer) = &draft.target else {
            return Err(bad_pair("the draft names no target".into()));
        };
        check_names("draft", peer, "target", identity)?;
        if *tokenizer != draft.tokenizer {
            return Err(bad_pair(format!(
                "the target has tokenizer {tokenizer}, the draft {}",
                draft.tokenizer
            )));
        }
        check_head(model, &draft.model)?;
        check_limits(limits, &draft.limits)
    }
}

fn contents(section: &Section) -> Contents<'_> {
    let Section { name, kind, dtype, shape, hash, offset: _, bytes: _ } = section;
    Contents { name, kind: *kind, dtype: *dtype, shape, hash }
}

fn check_names(who: &str, peer: &Peer, whom: &str, identity: &str) -> Result<()> {
    let Peer { file, identity: named } = peer;
    if named == identity {
        return Ok(());
    }
    Err(bad_pair(format!("the {who} names {whom} {file:?} {named}, found {identity}")))
}

/// A head reads the target's hidden states, and drafts the target's tokens.
fn check_head(target: &ModelConfig, draft: &ModelConfig) -> Result<()> {
    let reads = match &draft.draft_head {
        None => return Ok(()),
        Some(DraftHead::Eagle(eagle)) => eagle.target_hidden,
        Some(DraftHead::Medusa(_)) => draft.hidden_size,
    };
    let pairs = [
        ("hidden_size", target.hidden_size, reads),
        ("vocab_size", target.vocab_size, draft.vocab_size),
    ];
    for (name, of_target, of_head) in pairs {
        if of_target != of_head {
            return Err(bad_pair(format!(
                "{name} is {of_target} in the target, the head is made for {of_head}"
            )));
        }
    }
    Ok(())
}

/// The draft runs every row that the target runs.
fn check_limits(target: &Limits, draft: &Limits) -> Result<()> {
    let Limits { max_draft_len, max_batch_size, max_seq_len, max_num_tokens } = *target;
    let pairs = [
        ("max_draft_len", max_draft_len, draft.max_draft_len),
        ("max_batch_size", max_batch_size, draft.max_batch_size),
        ("max_seq_len", max_seq_len, draft.max_seq_len),
        ("max_num_tokens", max_num_tokens, draft.max_num_tokens),
    ];
    for (name, target, draft) in pairs {
        if draft < target {
            return Err(bad_pair(format!(
                "{name} is {target} in the target, only {draft} in the draft"
            )));
        }
    }
    Ok(())
}

fn bad_pair(what: String) -> Error {
    Error::BadEngine(format!("target and draft: {what}: rebuild both with spec-build"))
}
