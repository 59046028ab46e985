//! Which variant a compiled kernel is, for an emulated driver that is handed nothing but the code.

use spec_core::engine::Engine;

/// A line of hash and variant for each kernel of an engine.
pub fn code_table(engine: &Engine) -> String {
    let sections = engine.manifest().sections.iter();
    let lines = sections.filter_map(|section| {
        let (_, variant) = section.name.strip_prefix("code.")?.split_once('.')?;
        let hash = blake3::hash(engine.section(&section.name)).to_hex();
        Some(format!("{hash} {variant}\n"))
    });
    lines.collect()
}
