//! Whether a manifest makes sense on its own: the executors rely on everything that passes here.

use super::format::Result;
use super::{
    CostTable, Device, DrafterKind, Limits, Manifest, Peer, Precision, Role, Section, SectionSpec,
    code, expected_sections,
};
use crate::Error;
use crate::model::{Dtype, KvScales, ModelConfig};
use spec_kernels::{ARCHS, HASH};

/// Longest draft that the verify kernels, page counts and keys of draws are sized for.
pub(crate) const MAX_DRAFT_LEN: usize = 128;

/// Longest code of one kernel: a hundred times what the largest takes.
const MAX_CODE_BYTES: u64 = 64 << 20;

/// Everything but the places of the sections.
pub(super) fn manifest(manifest: &Manifest) -> Result<()> {
    let Manifest {
        builder: _,
        kernels,
        device,
        role,
        identity,
        drafter,
        target,
        model,
        precision,
        kv_scales,
        limits,
        tokenizer,
        end_tokens,
        bos_token,
        costs,
        sections,
    } = manifest;
    model.validate().map_err(|error| error.to_string())?;
    check_device(device, model, precision)?;
    check_kernels(device, kernels)?;
    kv_scales.as_ref().map_or(Ok(()), |scales| check_kv_scales(scales, model, precision))?;
    check_limits(limits, model)?;
    check_peers(*role, drafter, target.as_ref(), limits)?;
    if let (Role::Target, Some(drafted)) = (role, model.draft_vocab) {
        let all = model.vocab_size;
        return Err(format!("a target has logits of {drafted} tokens, expected all {all}"));
    }
    check_skip(drafter, model)?;
    check_hash("tokenizer", tokenizer)?;
    check_tokens(end_tokens.iter().chain(bos_token), model)?;
    costs.as_ref().map_or(Ok(()), check_costs)?;
    check_sections(sections, &expected_sections(model, precision, device))?;
    check_hash("identity", identity)?;
    let expected = manifest.compute_identity();
    if *identity != expected {
        return Err(format!("identity is {identity}, its parts give {expected}"));
    }
    Ok(())
}

impl Device {
    /// Whether an engine of this model and these number formats can be built for the device.
    pub fn validate(&self, model: &ModelConfig, precision: &Precision) -> crate::Result<()> {
        check_device(self, model, precision).map_err(Error::BadModel)
    }
}

fn check_device(device: &Device, model: &ModelConfig, precision: &Precision) -> Result<()> {
    let Device::Cuda { archs, min_driver: _ } = device else {
        return match precision.kv.holds_keys_and_values() {
            true => Ok(()),
            false => {
                Err(format!("kv is {}, engines for CPUs take fp32, fp16 or fp8", precision.kv))
            }
        };
    };
    if archs.is_empty() {
        return Err("device cuda lists no architecture, expected at least one".into());
    }
    for (idx, arch) in archs.iter().enumerate() {
        if !ARCHS.contains(&arch.as_str()) {
            let known = ARCHS.join(", ");
            return Err(format!("architecture {arch:?} is unknown, expected one of {known}"));
        }
        if archs[..idx].contains(arch) {
            return Err(format!("architecture {arch:?} is listed twice"));
        }
    }
    code::check_model(model, precision)
}

fn check_kv_scales(scales: &KvScales, model: &ModelConfig, precision: &Precision) -> Result<()> {
    if precision.kv != Dtype::Fp8 {
        return Err(format!("kv_scales: keys and values are {}, expected fp8", precision.kv));
    }
    scales.check(model).map_err(|what| format!("kv_scales: {what}"))
}

/// Code and server agree about names and parameters of kernels only where they come from the same sources.
fn check_kernels(device: &Device, kernels: &str) -> Result<()> {
    match device {
        Device::Cuda { .. } if kernels != HASH => {
            Err(format!("built with kernels {kernels:?}, this has {HASH:?}"))
        }
        _ => Ok(()),
    }
}

impl Limits {
    /// Whether an engine of this model can be built for these limits.
    pub fn validate(&self, model: &ModelConfig) -> crate::Result<()> {
        check_limits(self, model).map_err(Error::BadModel)
    }
}

fn check_limits(limits: &Limits, model: &ModelConfig) -> Result<()> {
    let Limits { max_draft_len, max_batch_size, max_seq_len, max_num_tokens } = *limits;
    let ranges = [
        ("max_draft_len", max_draft_len, 0, MAX_DRAFT_LEN),
        ("max_batch_size", max_batch_size, 1, 1 << 16),
        ("max_seq_len", max_seq_len, 1, model.max_position),
        ("max_num_tokens", max_num_tokens, 1, 1 << 20),
    ];
    for (name, value, least, most) in ranges {
        if value < least || value > most {
            return Err(format!("limits: {name} is {value}, expected {least} to {most}"));
        }
    }
    // A step verifies the draft and one more row, and may not outgrow the longest sequence.
    for (name, most) in [("max_num_tokens", max_num_tokens), ("max_seq_len", max_seq_len)] {
        if max_draft_len >= most {
            return Err(format!(
                "limits: max_draft_len {max_draft_len} plus 1 is more than {name} {most}"
            ));
        }
    }
    Ok(())
}

/// Most tokens of ended texts to draft from.
pub const MAX_SUFFIX_TOKENS: usize = 1 << 26;

fn check_peers(
    role: Role,
    drafter: &DrafterKind,
    target: Option<&Peer>,
    limits: &Limits,
) -> Result<()> {
    match (role, drafter, target) {
        (Role::Target, _, Some(peer)) => {
            return Err(format!("a target names {:?} as its target, expected none", peer.file));
        }
        (Role::Draft, _, None) => return Err("a draft names no target, expected one".into()),
        (Role::Draft, DrafterKind::None, Some(peer)) => return check_peer(peer),
        (Role::Draft, ..) => return Err("a draft names a drafter, expected none".into()),
        (Role::Target, DrafterKind::None, None) => return Ok(()),
        (Role::Target, DrafterKind::Model(peer), None) => check_peer(peer)?,
        (Role::Target, DrafterKind::Skip { .. }, None) => (),
        (Role::Target, &DrafterKind::Suffix { max_tokens }, None) => {
            if !(1..=MAX_SUFFIX_TOKENS).contains(&max_tokens) {
                return Err(format!(
                    "suffix: max_tokens is {max_tokens}, expected 1 to {MAX_SUFFIX_TOKENS}"
                ));
            }
        }
        (Role::Target, &DrafterKind::Ngram { max_ngram, min_ngram }, None) => {
            if min_ngram == 0 || min_ngram > max_ngram {
                return Err(format!(
                    "ngram: min_ngram is {min_ngram}, expected 1 to max_ngram {max_ngram}"
                ));
            }
        }
    }
    if limits.max_draft_len == 0 {
        return Err("limits: max_draft_len is 0, expected at least 1 with a drafter".into());
    }
    Ok(())
}

fn check_skip(drafter: &DrafterKind, model: &ModelConfig) -> Result<()> {
    let DrafterKind::Skip { layers, costs } = drafter else { return Ok(()) };
    layers.check(model).map_err(|what| format!("skip: {what}"))?;
    costs.as_ref().map_or(Ok(()), check_costs)
}

/// A peer lies beside its engine: a name that leads elsewhere is refused.
fn check_peer(peer: &Peer) -> Result<()> {
    let Peer { file, identity } = peer;
    if matches!(file.as_str(), "" | "." | "..") || file.contains(['/', '\\', '\0']) {
        return Err(format!("peer {file:?} is no plain file name"));
    }
    check_hash("peer identity", identity)
}

fn check_hash(what: &str, hash: &str) -> Result<()> {
    let is_hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    if hash.len() == 64 && hash.bytes().all(is_hex) {
        return Ok(());
    }
    Err(format!("{what} is {hash:?}, expected 64 lowercase hex digits"))
}

fn check_tokens<'a>(tokens: impl Iterator<Item = &'a u32>, model: &ModelConfig) -> Result<()> {
    for &token in tokens {
        if token as usize >= model.vocab_size {
            return Err(format!(
                "special token {token} is outside the vocabulary of {}",
                model.vocab_size
            ));
        }
    }
    Ok(())
}

fn check_costs(costs: &CostTable) -> Result<()> {
    let CostTable { rows, step_ms, position_ns, prompt_token_ms, acceptance } = costs;
    if rows.is_empty() || rows.len() != step_ms.len() {
        return Err(format!("costs: {} rows for {} times", rows.len(), step_ms.len()));
    }
    if rows[0] == 0 || !rows.is_sorted_by(|a, b| a < b) {
        return Err("costs: rows do not ascend from 1".into());
    }
    if let Some(ms) = step_ms.iter().find(|ms| !(**ms > 0.0 && ms.is_finite())) {
        return Err(format!("costs: a step takes {ms} ms, expected more than 0"));
    }
    if !(*position_ns >= 0.0 && position_ns.is_finite()) {
        return Err(format!("costs: a position takes {position_ns} ns, expected 0 or more"));
    }
    if !(*prompt_token_ms >= 0.0 && prompt_token_ms.is_finite()) {
        return Err(format!(
            "costs: a prompt's token takes {prompt_token_ms} ms, expected 0 or more"
        ));
    }
    if let Some(rate) = acceptance.iter().find(|rate| !(**rate > 0.0 && **rate < 1.0)) {
        return Err(format!(
            "costs: {rate} of drafts are accepted, expected a share between 0 and 1"
        ));
    }
    Ok(())
}

/// The sections are exactly those expected, which also makes their names unique.
fn check_sections(sections: &[Section], expected: &[SectionSpec]) -> Result<()> {
    for (idx, (section, spec)) in sections.iter().zip(expected).enumerate() {
        check_section(idx, section, spec)?;
    }
    if let Some(extra) = sections.get(expected.len()) {
        return Err(format!("section {:?} is not part of the model", extra.name));
    }
    if let Some(missing) = expected.get(sections.len()) {
        return Err(format!("section `{}` is missing", missing.name));
    }
    Ok(())
}

fn check_section(idx: usize, section: &Section, spec: &SectionSpec) -> Result<()> {
    let Section { name, kind, dtype, shape, offset: _, bytes, hash } = section;
    if *name != spec.name {
        return Err(format!("section {idx} is {name:?}, expected `{}`", spec.name));
    }
    if (kind, dtype, shape) != (&spec.kind, &spec.dtype, &spec.shape) {
        return Err(format!(
            "section `{name}` is a {kind:?} of {} {shape:?}, expected a {:?} of {} {:?}",
            shown(*dtype),
            spec.kind,
            shown(spec.dtype),
            spec.shape
        ));
    }
    match spec.bytes {
        Some(expected) if *bytes != expected => {
            return Err(format!("section `{name}` takes {bytes} bytes, expected {expected}"));
        }
        None if *bytes == 0 || *bytes > MAX_CODE_BYTES => {
            return Err(format!(
                "section `{name}` takes {bytes} bytes, expected 1 to {MAX_CODE_BYTES}"
            ));
        }
        _ => {}
    }
    check_hash(&format!("section `{name}`: hash"), hash)
}

fn shown(dtype: Option<Dtype>) -> &'static str {
    dtype.map_or("bytes", Dtype::name)
}
