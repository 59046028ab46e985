//! The folder that `collect` fills: what it is of, the samples, and a file of hidden states for each.
//!
//! ```text
//! collected.json                       what all of it was made with; a later run must be of the same
//! samples.jsonl                        one sample a line, in the order in which they were finished
//! hidden_states/hs_N.safetensors       of sample N: `token_ids` [T], `hidden_states` bf16 [T, layers, hidden]
//! ```
//! The files of states are those that the trainer of `speculators` reads. A sample's line is written behind its file, so
//! what a run that was killed leaves is a file that the next one writes again.

use anyhow::{Context, Result, ensure};
use half::bf16;
use safetensors::Dtype;
use safetensors::tensor::{TensorView, serialize};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// What samples were made with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Origin {
    /// Identity of the target's engine.
    pub target: String,
    /// Hash of the prompts' tokens.
    pub prompts: String,
    /// Layers whose hidden states are kept; the last one is what the final norm gets.
    pub layers: Vec<usize>,
    pub hidden_size: usize,
    /// Of answers that are drawn.
    pub temperature: f32,
    pub max_tokens: usize,
    /// One prompt of so many is not for training.
    pub held_out: usize,
}

/// An answer of the target.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Answer {
    /// Number of its prompt.
    pub prompt: usize,
    /// Its number among the answers to this prompt.
    pub answer: usize,
    pub held_out: bool,
    /// How many of `token_ids` are the prompt.
    pub prompt_tokens: usize,
    /// Prompt and answer. The last token has no hidden states: nothing was computed of it.
    pub token_ids: Vec<u32>,
}

/// A line of the list.
#[derive(Debug, Serialize, Deserialize)]
struct Sample {
    /// Number of its file.
    sample: usize,
    #[serde(flatten)]
    answer: Answer,
}

/// The folder, open to be gone on with.
pub(super) struct Data {
    folder: PathBuf,
    samples: Samples,
    num_layers: usize,
    hidden_size: usize,
}

impl Data {
    /// Opens the folder, which is empty or not there or has samples of the same origin.
    pub(super) fn open(folder: &Path, origin: &Origin) -> Result<Self> {
        fs::create_dir_all(folder.join("hidden_states"))
            .with_context(|| format!("creating {}", folder.display()))?;
        let about = folder.join("collected.json");
        if about.try_exists()? {
            let read = || -> Result<Origin> { Ok(serde_json::from_slice(&fs::read(&about)?)?) };
            let found = read().with_context(|| format!("reading {}", about.display()))?;
            check_same(&found, origin)
                .with_context(|| format!("{} has other samples", folder.display()))?;
        } else {
            fs::write(&about, serde_json::to_vec_pretty(origin)?)
                .with_context(|| format!("writing {}", about.display()))?;
        }
        let path = folder.join("samples.jsonl");
        let samples =
            Samples::open(&path).with_context(|| format!("reading {}", path.display()))?;
        let (num_layers, hidden_size) = (origin.layers.len(), origin.hidden_size);
        Ok(Self { folder: folder.to_path_buf(), samples, num_layers, hidden_size })
    }

    /// Whether this answer to this prompt is there.
    pub(super) fn has(&self, prompt: usize, answer: usize) -> bool {
        self.samples.done.contains(&(prompt, answer))
    }

    /// Samples that are there.
    pub(super) fn len(&self) -> usize {
        self.samples.done.len()
    }

    /// Tokens whose hidden states are there.
    pub(super) fn tokens(&self) -> usize {
        self.samples.tokens
    }

    /// Bytes that these take.
    pub(super) fn bytes(&self) -> usize {
        self.tokens() * (size_of::<i64>() + size_of::<bf16>() * self.num_layers * self.hidden_size)
    }

    /// Adds an answer whose tokens but the last have `states`, `[token][layer][hidden]`.
    pub(super) fn add(&mut self, answer: Answer, states: &[bf16]) -> Result<()> {
        let sample = Sample { sample: self.len(), answer };
        let token_ids = &sample.answer.token_ids;
        let known = &token_ids[..token_ids.len() - 1];
        let values = known.len() * self.num_layers * self.hidden_size;
        ensure!(
            states.len() == values,
            "sample {}: {} values of hidden states, expected {values}",
            sample.sample,
            states.len()
        );
        self.write_states(sample.sample, known, states)?;
        self.samples.add(&sample).context("writing samples.jsonl")
    }

    fn write_states(&self, number: usize, token_ids: &[u32], states: &[bf16]) -> Result<()> {
        let ids: Vec<u8> = token_ids.iter().flat_map(|&id| i64::from(id).to_le_bytes()).collect();
        let states: Vec<u8> = states.iter().flat_map(|value| value.to_le_bytes()).collect();
        let shape = vec![token_ids.len(), self.num_layers, self.hidden_size];
        let tensors = [
            ("hidden_states", TensorView::new(Dtype::BF16, shape, &states)?),
            ("token_ids", TensorView::new(Dtype::I64, vec![token_ids.len()], &ids)?),
        ];
        let path = self.folder.join(format!("hidden_states/hs_{number}.safetensors"));
        fs::write(&path, serialize(tensors, None)?)
            .with_context(|| format!("writing {}", path.display()))
    }
}

/// The list of samples.
struct Samples {
    file: File,
    /// Prompt and answer of each.
    done: HashSet<(usize, usize)>,
    /// Tokens whose hidden states are there.
    tokens: usize,
}

impl Samples {
    /// Opens the list, if it is there. A last line that was not written whole goes.
    fn open(path: &Path) -> Result<Self> {
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(path)?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        file.set_len(whole as u64)?;
        let mut samples = Self { file, done: HashSet::new(), tokens: 0 };
        for (idx, line) in text[..whole].lines().enumerate() {
            let found: Sample =
                serde_json::from_str(line).with_context(|| format!("line {}", idx + 1))?;
            let Sample { sample, answer: Answer { prompt, answer, .. } } = found;
            ensure!(
                sample == idx && !samples.done.contains(&(prompt, answer)),
                "line {}: sample {sample}, answer {answer} to prompt {prompt}, is out of place",
                idx + 1
            );
            samples.count(&found);
        }
        Ok(samples)
    }

    fn add(&mut self, sample: &Sample) -> Result<()> {
        let mut line = serde_json::to_vec(sample)?;
        line.push(b'\n');
        self.file.write_all(&line)?;
        self.count(sample);
        Ok(())
    }

    fn count(&mut self, Sample { answer, .. }: &Sample) {
        self.done.insert((answer.prompt, answer.answer));
        self.tokens += answer.token_ids.len().saturating_sub(1);
    }
}

/// Refuses what is of something else, and names the first thing that differs.
fn check_same(found: &Origin, origin: &Origin) -> Result<()> {
    let (found, origin) = (serde_json::to_value(found)?, serde_json::to_value(origin)?);
    for (name, value) in origin.as_object().into_iter().flatten() {
        let there = &found[name];
        ensure!(there == value, "{name} is {there} there and {value} now");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin() -> Origin {
        Origin {
            target: "t".into(),
            prompts: "p".into(),
            layers: vec![1, 2],
            hidden_size: 3,
            temperature: 0.8,
            max_tokens: 5,
            held_out: 4,
        }
    }

    fn answer(prompt: usize, answer: usize) -> Answer {
        Answer { prompt, answer, held_out: false, prompt_tokens: 1, token_ids: vec![7, 8, 9] }
    }

    fn states() -> Vec<bf16> {
        (0..12).map(|value| bf16::from_f32(value as f32)).collect()
    }

    #[test]
    fn what_was_added_is_found_again_and_can_be_read() {
        let dir = tempfile::tempdir().unwrap();
        let mut data = Data::open(dir.path(), &origin()).unwrap();
        data.add(answer(3, 1), &states()).unwrap();
        let data = Data::open(dir.path(), &origin()).unwrap();
        assert!(data.has(3, 1) && !data.has(3, 0));
        assert_eq!((data.len(), data.tokens(), data.bytes()), (1, 2, 2 * (8 + 12)));
        let bytes = fs::read(dir.path().join("hidden_states/hs_0.safetensors")).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let tensor = file.tensor("hidden_states").unwrap();
        assert_eq!((tensor.dtype(), tensor.shape()), (Dtype::BF16, [2, 2, 3].as_slice()));
        let last = bf16::from_f32(11.0).to_le_bytes();
        assert_eq!(tensor.data()[22..], last);
        let ids: Vec<u8> = [7i64, 8].iter().flat_map(|id| id.to_le_bytes()).collect();
        assert_eq!(file.tensor("token_ids").unwrap().data(), ids);
    }

    #[test]
    fn a_line_that_was_cut_is_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let mut data = Data::open(dir.path(), &origin()).unwrap();
        data.add(answer(0, 0), &states()).unwrap();
        data.samples.file.write_all(b"{\"sample\": 1, \"pro").unwrap();
        let mut data = Data::open(dir.path(), &origin()).unwrap();
        assert_eq!(data.len(), 1);
        data.add(answer(1, 0), &states()).unwrap();
        assert_eq!(Data::open(dir.path(), &origin()).unwrap().len(), 2);
    }

    #[test]
    fn states_of_another_number_and_samples_of_another_origin_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut data = Data::open(dir.path(), &origin()).unwrap();
        let error = data.add(answer(0, 0), &states()[1..]).unwrap_err().to_string();
        assert!(error.contains("11 values") && error.contains("expected 12"), "{error}");
        let other = Origin { max_tokens: 6, ..origin() };
        let error = format!("{:#}", Data::open(dir.path(), &other).err().unwrap());
        assert!(error.contains("max_tokens is 5 there and 6 now"), "{error}");
        data.add(answer(0, 0), &states()).unwrap();
        let line = fs::read(dir.path().join("samples.jsonl")).unwrap();
        data.samples.file.write_all(&line).unwrap();
        let error = format!("{:#}", Data::open(dir.path(), &origin()).err().unwrap());
        assert!(error.contains("line 2") && error.contains("out of place"), "{error}");
    }
}
