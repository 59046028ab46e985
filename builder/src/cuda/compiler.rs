//! Compiles variants of the kernels. The same sources, options and compiler give the same code, so what was compiled
//! once is kept.

use super::cache::Cache;
use super::cubin::Cubin;
use super::nvrtc::{Nvrtc, Source};
use anyhow::{Context, Result};
use rayon::prelude::*;
use spec_core::engine::{Precision, code_section, needed_variants};
use spec_core::exec::SearchPath;
use spec_core::model::ModelConfig;
use spec_kernels::{SOURCES, Variant, kernel_of};
use std::path::PathBuf;

/// The code of one kernel for one architecture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Code {
    /// Name of its section.
    pub section: String,
    /// An ELF file that the driver loads.
    pub cubin: Vec<u8>,
}

/// The compiler, the kernels' sources, and what was compiled before.
pub struct Compiler {
    nvrtc: Nvrtc,
    cache: Option<Cache>,
    sources: Vec<Source<'static>>,
}

impl Compiler {
    /// Finds and loads NVRTC.
    pub fn open(places: &SearchPath, cache: Option<Cache>) -> Result<Self> {
        Ok(Self { nvrtc: Nvrtc::open(places)?, cache, sources: SOURCES.to_vec() })
    }

    /// The same compiler for other sources.
    pub fn with_sources(self, sources: Vec<(&'static str, &'static str)>) -> Self {
        Self { sources, ..self }
    }

    /// Name and version, for the manifest.
    pub fn version(&self) -> String {
        let (major, minor) = self.nvrtc.version();
        format!("NVRTC {major}.{minor}")
    }

    /// A program of the same package as the compiler, such as `nvdisasm`, if it is installed.
    pub fn tool(&self, name: &str) -> Option<PathBuf> {
        let tool = self.nvrtc.folder()?.parent()?.join("bin").join(name);
        tool.is_file().then_some(tool)
    }

    /// Every kernel that a model needs, for every architecture, in the order of the engine's sections.
    pub fn compile_model(
        &self,
        archs: &[String],
        model: &ModelConfig,
        precision: &Precision,
    ) -> Result<Vec<Code>> {
        let of_arch = |arch| needed_variants(model, precision, arch).into_iter();
        let jobs: Vec<(&String, Variant)> =
            archs.iter().flat_map(|arch| of_arch(arch).map(move |v| (arch, v))).collect();
        let compile = |(arch, variant): &(&String, Variant)| -> Result<Code> {
            let cubin = self.compile(arch, variant)?;
            Ok(Code { section: code_section(arch, variant), cubin })
        };
        jobs.par_iter().with_max_len(1).map(compile).collect()
    }

    /// The code of a variant for an architecture.
    pub fn compile(&self, arch: &str, variant: &Variant) -> Result<Vec<u8>> {
        self.compiled(arch, variant).with_context(|| format!("kernel {variant} for {arch}"))
    }

    /// The same kernel as text in NVIDIA's assembly language, such as for `compute_90a`.
    pub fn ptx(&self, arch: &str, variant: &Variant) -> Result<String> {
        self.text(arch, variant).with_context(|| format!("kernel {variant} for {arch}"))
    }

    fn text(&self, arch: &str, variant: &Variant) -> Result<String> {
        let (main, headers) = self.texts(variant.kernel)?;
        let options = options(arch, variant);
        // The marker is no option: machine code of the same options has another key.
        let marked = [options.as_slice(), &["ptx".into()]].concat();
        let key = self.key(main, &headers, &marked);
        if let Some(text) = self.cache.as_ref().and_then(|cache| cache.get(&key)) {
            return Ok(String::from_utf8(text)?);
        }
        let text = self.nvrtc.ptx(main, &headers, &options)?;
        if let Some(cache) = &self.cache {
            cache.put(&key, text.as_bytes());
        }
        Ok(text)
    }

    fn compiled(&self, arch: &str, variant: &Variant) -> Result<Vec<u8>> {
        let (main, headers) = self.texts(variant.kernel)?;
        let options = options(arch, variant);
        let key = self.key(main, &headers, &options);
        if let Some(cubin) = self.cache.as_ref().and_then(|cache| cache.get(&key)) {
            return Ok(cubin);
        }
        let cubin = self.nvrtc.compile(main, &headers, &options)?;
        // The driver would look for the entry by this name, on a machine far away.
        Cubin::parse(&cubin)?.kernel(variant.kernel)?;
        if let Some(cache) = &self.cache {
            cache.put(&key, &cubin);
        }
        Ok(cubin)
    }

    /// A kernel's source, and all headers.
    fn texts(&self, kernel: &str) -> Result<(Source<'static>, Vec<Source<'static>>)> {
        let main = self.source(kernel);
        let main = main.with_context(|| format!("there is no source {kernel}.cu"))?;
        let headers = self.sources.iter().copied().filter(|(name, _)| name.ends_with(".cuh"));
        Ok((main, headers.collect()))
    }

    fn source(&self, kernel: &str) -> Option<Source<'static>> {
        self.sources.iter().copied().find(|(path, _)| kernel_of(path) == Some(kernel))
    }

    /// A hash over all that the code is made from, each part with its length.
    fn key(&self, main: Source<'_>, headers: &[Source<'_>], options: &[String]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        let mut part = |text: &str| {
            hasher.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
        };
        part(&self.version());
        options.iter().for_each(|option| part(option));
        for (name, text) in [&main].into_iter().chain(headers) {
            part(name);
            part(text);
        }
        hasher.finalize()
    }
}

fn options(arch: &str, variant: &Variant) -> Vec<String> {
    let fixed = ["--std=c++17".to_string(), format!("--gpu-architecture={arch}")];
    let defines = variant.defines.iter().map(|(name, value)| format!("-D{name}={value}"));
    fixed.into_iter().chain(defines).collect()
}
