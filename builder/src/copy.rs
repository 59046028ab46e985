//! Engines that are built already, copied with another manifest into a version folder in the making.

use crate::folder::file_of;
use crate::progress::Progress;
use anyhow::{Context, Result, bail, ensure};
use spec_core::engine::{Engine, EngineWriter, Manifest, Sealed, SectionKind};
use std::fs;
use std::path::{Path, PathBuf};

/// Bytes that are copied at a time.
const CHUNK: usize = 16 << 20;

/// The model folder of a version folder, and the version.
pub(crate) fn parts(version_dir: &Path) -> Result<(PathBuf, String)> {
    let whole = fs::canonicalize(version_dir)
        .with_context(|| format!("opening {}", version_dir.display()))?;
    match (whole.parent(), whole.file_name().and_then(|name| name.to_str())) {
        (Some(model), Some(version)) => Ok((model.to_path_buf(), version.to_string())),
        _ => bail!("{} is no version folder of a model", version_dir.display()),
    }
}

/// The same engine with another manifest, not in its place yet.
pub(crate) fn engine(
    engine: &Engine,
    manifest: Manifest,
    folder: &Path,
    quiet: bool,
) -> Result<Sealed> {
    let file = file_of(manifest.role);
    let sections = &engine.manifest().sections;
    let code = sections.iter().filter(|section| section.kind == SectionKind::Code);
    let code = code.map(|section| (section.name.clone(), section.bytes)).collect();
    let writer = EngineWriter::with_code(folder.join(file), manifest, &code)?;
    let bytes = sections.iter().map(|section| section.bytes).sum();
    let progress = if quiet { Progress::hidden() } else { Progress::start(file, bytes) };
    let reader = engine.reader()?;
    let mut chunk = Vec::new();
    for section in sections {
        let (source, mut copy) = (reader.section(&section.name), writer.section(&section.name));
        for offset in (0..source.len()).step_by(CHUNK) {
            chunk.resize(CHUNK.min(source.len() - offset), 0);
            source.read(offset, &mut chunk)?;
            copy.write(&chunk)?;
            progress.add(chunk.len() as u64);
        }
        copy.close();
    }
    reader.finish()?;
    progress.finish();
    Ok(writer.seal()?)
}

/// Refuses a copy that is not what the engine says it is.
pub(crate) fn check(engine: &Engine, folder: &Path) -> Result<()> {
    let copy = Engine::open(folder.join(file_of(engine.manifest().role)))?;
    let (was, is) = (&engine.manifest().identity, &copy.manifest().identity);
    ensure!(
        was == is,
        "{} was damaged: its identity is {was}, that of a copy {is}",
        engine.path().display()
    );
    Ok(())
}
