//! One model from checkpoint to engine sections: fuse, quantise, pack, write, panel by panel.
//!
//! Memory is bounded by a panel of 64 rows a thread, whatever the size of a tensor; sections are
//! worked on in parallel, the largest first, and their bytes do not depend on the order.

mod packing;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::names;
use crate::cuda::Code;
use crate::progress::Progress;
use anyhow::{Context, Result, ensure};
use packing::Packing;
use rayon::prelude::*;
use spec_core::engine::{Device, Engine, EngineWriter, Section, SectionKind, SectionWriter};
use spec_core::model::Dtype;
use spec_core::model::decoder::{self, Linear, Load, MatrixKind, Vector};
use std::ops::Range;

/// The largest finite half-precision number.
const FP16_MAX: f32 = 65504.0;

/// Writes every section of the model into `writer`; `code` is that of its kernels.
pub fn compile(
    checkpoint: &Checkpoint,
    device: &Device,
    code: &[Code],
    writer: &EngineWriter,
    progress: &Progress,
) -> Result<()> {
    for Code { section, cubin } in code {
        let mut section = writer.section(section);
        section.write(cubin)?;
        section.close();
        progress.add(cubin.len() as u64);
    }
    let mut parts = Parts(Vec::new());
    decoder::walk(&checkpoint.config, &mut parts)?;
    let section = |name: &str| writer.sections().iter().find(|section| section.name == name);
    let mut jobs: Vec<Job<'_>> = parts
        .0
        .iter()
        .map(|part| Job {
            checkpoint,
            section: section(&part.section).expect("sections are those of the parts"),
            sources: &part.sources,
            packing: Packing::of(device, part.kind, &checkpoint.config),
            progress,
        })
        .collect();
    jobs.sort_by_key(|job| std::cmp::Reverse(job.section.bytes));
    jobs.par_iter().with_max_len(1).try_for_each(|job| {
        let outcome = match job.section.kind {
            SectionKind::Weight => job.weight(writer),
            _ => job.vector(writer),
        };
        outcome.with_context(|| format!("section `{}`", job.section.name))
    })
}

/// Whether a matrix would be stored as this weight of an engine is; `read` gives its rows.
pub(crate) fn gives_section(
    engine: &Engine,
    section: &Section,
    kind: MatrixKind,
    read: impl Fn(Range<usize>, &mut [f32]) -> Result<()>,
) -> Result<bool> {
    let manifest = engine.manifest();
    let (Some(dtype), &[n, k]) = (section.dtype, &section.shape[..]) else { return Ok(false) };
    let packing = Packing::of(&manifest.device, Some(kind), &manifest.model);
    let mut values = vec![0.0; Packing::ROWS * k];
    let mut packed = vec![0; (packing.bytes)(dtype, k)];
    let mut scales = vec![0.0; if dtype.has_output_scales() { n } else { 0 }];
    let mut hash = blake3::Hasher::new();
    for first in (0..n).step_by(Packing::ROWS) {
        let rows = first..n.min(first + Packing::ROWS);
        let len = rows.len() * k;
        let row_scales =
            if dtype.has_output_scales() { &mut scales[rows.clone()] } else { &mut [][..] };
        let mut at = 0;
        for run in packing.runs(rows, n) {
            let len = run.len() * k;
            read(run, &mut values[at..at + len])?;
            at += len;
        }
        (packing.pack)(dtype, &values[..len], k, &mut packed, row_scales);
        hash.update(&packed);
    }
    let same_scales = || {
        let name = format!("{}.scale", section.name);
        let theirs = manifest.sections.iter().find(|section| section.name == name);
        theirs.is_none_or(|theirs| {
            let bytes = float_bytes(&scales, theirs.bytes as usize);
            *blake3::hash(&bytes).to_hex() == *theirs.hash
        })
    };
    Ok(*hash.finalize().to_hex() == *section.hash && same_scales())
}

/// A section, and the tensors whose rows make it up, in order. A weight's scales are written with it.
struct Part {
    section: String,
    sources: Vec<String>,
    /// Of the matrix, or of that whose bias it is.
    kind: Option<MatrixKind>,
}

struct Parts(Vec<Part>);

impl Load for Parts {
    type Matrix = ();
    type Vector = ();

    fn matrix(&mut self, linear: &Linear) -> spec_core::Result<()> {
        let tensors = || linear.sources.iter().map(|(tensor, _)| *tensor);
        let kind = Some(linear.kind);
        let sources = tensors().map(names::weight).collect();
        self.0.push(Part { section: linear.name.clone(), sources, kind });
        if linear.has_bias {
            let section = format!("{}.bias", linear.name);
            self.0.push(Part { section, sources: tensors().map(names::bias).collect(), kind });
        }
        Ok(())
    }

    fn vector(&mut self, vector: &Vector) -> spec_core::Result<()> {
        let sources = vec![names::weight(vector.source)];
        self.0.push(Part { section: vector.name.clone(), sources, kind: None });
        Ok(())
    }
}

/// One section in the making.
struct Job<'a> {
    checkpoint: &'a Checkpoint,
    section: &'a Section,
    sources: &'a [String],
    packing: Packing,
    progress: &'a Progress,
}

impl Job<'_> {
    fn vector(&self, writer: &EngineWriter) -> Result<()> {
        let mut values = Vec::new();
        for name in self.sources {
            let tensor = self.checkpoint.tensor(name)?;
            let start = values.len();
            values.resize(start + tensor.num_rows() * tensor.row_len(), 0.0);
            let read = &mut values[start..];
            self.checkpoint.read_rows(name, 0..tensor.num_rows(), read)?;
            self.checkpoint.check_finite(name, 0, read)?;
        }
        let runs = self.packing.runs(0..values.len(), values.len());
        let ordered: Vec<f32> = runs.into_iter().flat_map(|run| &values[run]).copied().collect();
        write_floats(writer.section(&self.section.name), &ordered)?;
        self.progress.add(self.section.bytes);
        Ok(())
    }

    fn weight(&self, writer: &EngineWriter) -> Result<()> {
        let Self { packing, .. } = self;
        let dtype = self.dtype();
        let &[n, k] = &self.section.shape[..] else { unreachable!("a weight has two dimensions") };
        let keeps_fp8 = dtype == Dtype::Fp8 && self.is_fp8_by_row(k)?;
        let mut section = writer.section(&self.section.name);
        let mut values = vec![0.0; if keeps_fp8 { 0 } else { Packing::ROWS * k }];
        let mut stored = vec![0; if keeps_fp8 { Packing::ROWS * k } else { 0 }];
        let mut packed = vec![0; (packing.bytes)(dtype, k)];
        let mut scales = vec![0.0; if dtype.has_output_scales() { n } else { 0 }];
        for first in (0..n).step_by(Packing::ROWS) {
            let rows = first..n.min(first + Packing::ROWS);
            let row_scales =
                if dtype.has_output_scales() { &mut scales[rows.clone()] } else { &mut [][..] };
            let len = rows.len() * k;
            let runs = packing.runs(rows, n);
            if keeps_fp8 {
                self.read_fp8(runs, k, &mut stored[..len], row_scales)?;
                (packing.pack_fp8)(&stored[..len], k, &mut packed);
            } else {
                self.read(runs, k, &mut values[..len])?;
                (packing.pack)(dtype, &values[..len], k, &mut packed, row_scales);
            }
            section.write(&packed)?;
            self.progress.add(packed.len() as u64);
        }
        section.close();
        if dtype.has_output_scales() {
            write_floats(writer.section(&format!("{}.scale", self.section.name)), &scales)?;
        }
        Ok(())
    }

    fn dtype(&self) -> Dtype {
        self.section.dtype.expect("weights have a number format")
    }

    /// Whether all sources hold e4m3 bytes with a scale that is constant along each row.
    fn is_fp8_by_row(&self, k: usize) -> Result<bool> {
        let mut row = vec![0; k];
        for name in self.sources {
            if !self.checkpoint.read_fp8_rows(name, 0..1, &mut row, &mut [0.0])? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn read(&self, runs: Vec<Range<usize>>, k: usize, out: &mut [f32]) -> Result<()> {
        self.each_source(runs, |name, from, to| {
            let out = &mut out[to.start * k..to.end * k];
            self.checkpoint.read_rows(name, from.clone(), out)?;
            self.checkpoint.check_finite(name, from.start, out)?;
            if self.dtype() == Dtype::Fp16 {
                let largest = out.iter().fold(0f32, |most, value| most.max(value.abs()));
                ensure!(
                    largest <= FP16_MAX,
                    "tensor `{name}`: {largest} in rows {from:?} exceeds fp16's {FP16_MAX}: use {}",
                    self.packing.wider
                );
            }
            Ok(())
        })
    }

    fn read_fp8(
        &self,
        runs: Vec<Range<usize>>,
        k: usize,
        out: &mut [u8],
        scales: &mut [f32],
    ) -> Result<()> {
        self.each_source(runs, |name, from, to| {
            let out = &mut out[to.start * k..to.end * k];
            let kept = self.checkpoint.read_fp8_rows(name, from, out, &mut scales[to])?;
            ensure!(kept, "tensor `{name}` holds e4m3 in some of its rows only");
            Ok(())
        })
    }

    /// Splits runs of rows of the fused matrix by source: `visit(name, rows of the source, rows of the output)`.
    fn each_source(
        &self,
        runs: Vec<Range<usize>>,
        mut visit: impl FnMut(&str, Range<usize>, Range<usize>) -> Result<()>,
    ) -> Result<()> {
        let mut done = 0;
        for rows in runs {
            let mut start = 0;
            for name in self.sources {
                let end = start + self.checkpoint.tensor(name)?.num_rows();
                let (first, last) = (rows.start.max(start), rows.end.min(end));
                if first < last {
                    let to = done..done + last - first;
                    visit(name, first - start..last - start, to)?;
                    done += last - first;
                }
                start = end;
            }
        }
        Ok(())
    }
}

/// Fills a section with these values and, behind them, zeros.
fn write_floats(mut section: SectionWriter<'_>, values: &[f32]) -> Result<()> {
    section.write(&float_bytes(values, section.len() as usize))?;
    section.close();
    Ok(())
}

/// These values, and zeros up to a length.
fn float_bytes(values: &[f32], len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    bytes.resize(bytes.len().max(len), 0);
    bytes
}

#[cfg(test)]
mod tests;
