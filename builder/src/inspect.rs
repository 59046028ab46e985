//! `spec-build inspect`: says what an engine file or a model folder is.

use crate::sizes::{self, Sizes};
use crate::table;
use anyhow::{Context, Result};
use serde_json::{Map, json};
use spec_core::engine::{Device, DrafterKind, Engine, Manifest, Section, SectionKind};
use spec_core::model::{DraftHead, Dtype, EagleConfig, EagleKind, KvScales, MedusaConfig};
use spec_core::runtime::ModelFolder;
use std::fmt::Write as _;
use std::path::Path;

/// An engine and, where it drafts by a model that is there, that model's.
pub struct Engines {
    /// The engine that was named, or the target of the folder.
    pub first: Engine,
    /// The drafter of a folder.
    pub draft: Option<Engine>,
    /// The opened folder, without its target.
    pub tokenizer: Option<spec_core::tokenizer::Tokenizer>,
}

impl Engines {
    /// Opens an engine file alone, or everything of a model folder.
    pub fn open(path: &Path) -> Result<Self> {
        if !path.is_dir() {
            return Ok(Self { first: Engine::open(path)?, draft: None, tokenizer: None });
        }
        let folder = ModelFolder::open(path)?;
        let draft = folder.target.open_drafter()?;
        Ok(Self { first: folder.target, draft, tokenizer: Some(folder.tokenizer) })
    }

    /// The engines by their roles.
    pub fn iter(&self) -> impl Iterator<Item = &Engine> {
        [&self.first].into_iter().chain(&self.draft)
    }
}

/// Runs the command.
pub fn inspect(path: &Path, as_json: bool) -> Result<()> {
    let engines = Engines::open(path)?;
    match as_json {
        true => println!("{}", json(&engines)?),
        false => print!("{}", report(&engines)?),
    }
    Ok(())
}

/// The manifest of a file, or those of a folder by role.
fn json(engines: &Engines) -> Result<String> {
    let manifests: Result<Map<_, _>, serde_json::Error> = engines
        .iter()
        .map(|engine| {
            let manifest = engine.manifest();
            Ok((role(manifest), serde_json::to_value(manifest)?))
        })
        .collect();
    let manifests = manifests.context("manifest")?;
    let whole = match engines.tokenizer {
        Some(_) => json!(manifests),
        None => json!(engines.first.manifest()),
    };
    Ok(serde_json::to_string_pretty(&whole)?)
}

fn report(engines: &Engines) -> Result<String> {
    let mut text = String::new();
    for engine in engines.iter() {
        describe(&mut text, engine)?;
        writeln!(text)?;
    }
    let manifests = engines.iter().map(Engine::manifest);
    let sizes: Vec<(String, Sizes)> =
        manifests.map(|manifest| (role(manifest), sizes_of(manifest))).collect();
    let columns: Vec<_> = sizes.iter().map(|(role, sizes)| (role.as_str(), sizes)).collect();
    write!(text, "{}", sizes::table(&columns))?;
    Ok(text)
}

fn sizes_of(manifest: &Manifest) -> Sizes {
    Sizes::new(&manifest.model, &manifest.precision, &manifest.device)
}

fn role(manifest: &Manifest) -> String {
    format!("{:?}", manifest.role).to_lowercase()
}

/// One engine, a line a fact. Exhaustive, so that a new fact of the manifest cannot be forgotten.
fn describe(text: &mut String, engine: &Engine) -> Result<()> {
    let Manifest {
        builder,
        kernels,
        device,
        role: _,
        identity,
        drafter,
        target,
        model: _,
        precision,
        kv_scales,
        limits,
        tokenizer,
        end_tokens,
        bos_token,
        costs,
        sections,
    } = engine.manifest();
    let sizes = sizes_of(engine.manifest());
    writeln!(text, "{}: a {}", engine.path().display(), role(engine.manifest()))?;
    let mut fact = |name: &str, value: String| writeln!(text, "  {name:<11} {value}");
    fact("built by", format!("{builder}, kernels {kernels}"))?;
    fact("device", shown_device(device))?;
    fact("model", shape(engine.manifest()))?;
    if let Some(draft_head) = &engine.manifest().model.draft_head {
        fact("head", head(draft_head))?;
    }
    fact("parameters", table::count(sizes.parameters))?;
    fact(
        "precision",
        format!(
            "weights {}, embedding and head {}, kv {}",
            precision.weights, precision.head, precision.kv
        ),
    )?;
    if precision.kv == Dtype::Fp8 {
        fact("kv scales", shown_scales(kv_scales.as_ref()))?;
    }
    fact(
        "limits",
        format!(
            "max_draft_len {}, max_batch_size {}, max_seq_len {}, max_num_tokens {}",
            limits.max_draft_len, limits.max_batch_size, limits.max_seq_len, limits.max_num_tokens
        ),
    )?;
    fact(
        "drafter",
        match drafter {
            DrafterKind::None => "none".into(),
            DrafterKind::Ngram { max_ngram, min_ngram } => {
                format!("look-up of the last {max_ngram} to {min_ngram} tokens")
            }
            DrafterKind::Suffix { max_tokens } => {
                format!("look-up in the text and in {max_tokens} tokens of earlier ones")
            }
            DrafterKind::Model(peer) => format!("{}, identity {}", peer.file, peer.identity),
            DrafterKind::Skip { layers, .. } => format!(
                "the target without attention of layers {:?} and MLPs of layers {:?}",
                layers.attention, layers.mlp
            ),
        },
    )?;
    if let Some(peer) = target {
        fact("target", format!("{}, identity {}", peer.file, peer.identity))?;
    }
    fact("identity", identity.clone())?;
    let bos = bos_token.map_or("no token put before it".into(), |id| format!("begins with {id}"));
    fact("text", format!("{bos}, ends with {end_tokens:?}"))?;
    fact("tokenizer", tokenizer.clone())?;
    let costs = costs.as_ref().map_or("not measured".into(), |table| {
        let last = table.rows.len() - 1;
        let of_first = table.step_ms[last] / table.step_ms[0];
        let (rows, ms) = (table.rows[0], table.step_ms[0]);
        format!("{ms:.2} ms for {rows} row(s), {of_first:.2} times that for {}", table.rows[last])
    });
    fact("step times", costs)?;
    let code: Vec<&Section> = sections.iter().filter(|s| s.kind == SectionKind::Code).collect();
    if let Device::Cuda { archs, .. } = device {
        let (kernels, archs) = (code.len(), archs.len());
        let bytes = table::bytes(total(&code));
        fact("code", format!("{kernels} kernels, for {archs} architecture(s), {bytes}"))?;
    }
    let bytes = table::bytes(total(&sections.iter().collect::<Vec<_>>()));
    fact("sections", format!("{}, {bytes}", sections.len()))?;
    Ok(())
}

fn total(sections: &[&Section]) -> u64 {
    sections.iter().map(|section| section.bytes).sum()
}

/// What stored keys and values are multiplied by, from the least to the most.
fn shown_scales(scales: Option<&KvScales>) -> String {
    let Some(scales) = scales else { return "all 1".into() };
    let range = |layers: &[Vec<i8>]| {
        let all = || layers.iter().flatten().copied();
        format!("2^{} to 2^{}", all().min().unwrap_or(0), all().max().unwrap_or(0))
    };
    format!("keys {}, values {}", range(&scales.keys), range(&scales.values))
}

fn shown_device(device: &Device) -> String {
    match device {
        Device::Cpu => "cpu".into(),
        Device::Cuda { archs, min_driver } => {
            format!("cuda:{}, driver {min_driver} or newer", archs.join(","))
        }
    }
}

/// What a head reads and drafts.
fn head(head: &DraftHead) -> String {
    match head {
        DraftHead::Eagle(eagle) => eagle_head(eagle),
        DraftHead::Medusa(medusa) => medusa_heads(medusa),
    }
}

fn eagle_head(eagle: &EagleConfig) -> String {
    let EagleConfig { kind, taps, draft_vocab, own_embed, own_head, .. } = eagle;
    let kind = match (kind, eagle.mask_token) {
        (_, Some(_)) => "P-EAGLE, all drafts in one pass,",
        (EagleKind::Eagle1, None) => "EAGLE-1",
        (EagleKind::Eagle3, None) => "EAGLE-3",
    };
    let shared = match (own_embed, own_head) {
        (true, true) => "nothing",
        (true, false) => "the head",
        (false, true) => "the token vectors",
        (false, false) => "token vectors and head",
    };
    let window = eagle.window.map_or(String::new(), |window| format!(", window {window}"));
    format!(
        "{kind} on the hidden states behind layers {taps:?}, drafts {draft_vocab} tokens{window}, has \
         {shared} of its target"
    )
}

/// How many there are, and what they have of their own.
fn medusa_heads(medusa: &MedusaConfig) -> String {
    let MedusaConfig { tap, num_blocks, block_bias, own_heads } = medusa;
    let number = |count: usize, what: &str| {
        let plural = if count == 1 { "" } else { "s" };
        format!("{count} {what}{plural}")
    };
    let (heads, layers) = (number(own_heads.len(), "head"), number(*num_blocks, "layer"));
    let bias = if *block_bias { "" } else { " without bias" };
    let shared = match own_heads.iter().filter(|is_own| !**is_own).count() {
        0 => String::new(),
        count => format!(", {count} with the target's matrix to the logits"),
    };
    format!("Medusa, {heads}, {layers}{bias}, on the normed state behind layer {tap}{shared}")
}

fn shape(manifest: &Manifest) -> String {
    let model = &manifest.model;
    if model.medusa().is_some() {
        return format!("{} wide, vocabulary {}", model.hidden_size, model.vocab_size);
    }
    let head = match (model.draft_vocab, model.tied_head) {
        (Some(drafted), _) => format!("drafts {drafted} of them"),
        (None, true) => "tied head".into(),
        (None, false) => "untied head".into(),
    };
    format!(
        "{:?}: {} layers of {} (mlp {}), {} heads of {} over {}, vocabulary {} ({head}), {} positions",
        model.family,
        model.num_layers,
        model.hidden_size,
        model.intermediate_size,
        model.num_heads,
        model.head_dim,
        model.num_kv_heads,
        model.vocab_size,
        model.max_position
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medusa_heads_are_named_with_what_they_have() {
        let medusa =
            MedusaConfig { tap: 4, num_blocks: 1, block_bias: true, own_heads: vec![true; 3] };
        assert_eq!(
            head(&DraftHead::Medusa(medusa.clone())),
            "Medusa, 3 heads, 1 layer, on the normed state behind layer 4"
        );
        let bare =
            MedusaConfig { num_blocks: 2, block_bias: false, own_heads: vec![false], ..medusa };
        let shown = head(&DraftHead::Medusa(bare));
        assert!(shown.starts_with("Medusa, 1 head, 2 layers without bias, "), "{shown}");
        assert!(shown.ends_with(", 1 with the target's matrix to the logits"), "{shown}");
    }
}
