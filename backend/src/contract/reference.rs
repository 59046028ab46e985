//! The users' reference, written from the tables.

use super::Profile;
use super::differences::{FROM_TENSORRT_LLM, FROM_VLLM};
use super::table::{Action, Input};
use crate::parameters::{KEYS, Meaning};

const HEAD: &str = "\
# Inputs, outputs and parameters

What a model takes and gives depends on the parameter `profile` of its `config.pbtxt`. Inputs and outputs need
not be declared there: they are filled in when the model is loaded. What is declared must agree with the tables;
INT32 inputs of one dimension may be declared as UINT32, for clients of 2023 that send them so.

Every input but the prompt can be left out. Each can also be given as a request parameter of the same name, as
the generate endpoint does; parameters may be strings (`\"256\"`), lists are JSON in a string. An input tensor
wins over a parameter. A name that is not in the tables, a value out of its limits and a prompt that leaves no
room for a token in the engine's `max_seq_len` are answered with INVALID_ARG, what is known but not built with
UNSUPPORTED; both name the input.

The request parameter `timeout` is the time in microseconds that a request may take, as Triton's clients send it. Tensors in
shared memory of a GPU are refused; in that of the system they are read and written. Strings that are request parameters end at
the first NUL, which is how Triton hands them over: a `cache_salt` of any bytes is an input tensor.
";

const BATCHED: &str = "\
`max_batch_size` is at least 1: every tensor has a batch dimension in front of the dimensions given here. Each
row is a prompt of its own, which `num_return_sequences` texts may follow.

Of a decoupled model each of these texts has responses of its own, one, or where the output is streamed as many as
bring something new; `batch_index` and `sequence_index` name the text. The generate endpoint takes one response
alone, so a client that wants several texts of such a model uses generate_stream. Of a model that is not decoupled one
response holds all texts: values are [rows, texts of a row], lists of values [rows, texts of a row, values], and
`num_input_tokens` is [rows, 1]. `text_output` is a flat list, without any dimension of the batch, as clients of
TensorRT-LLM read it. Where words bring the space in front of them (SentencePiece), a text that goes on from a prompt
begins with it, and an answer to `messages` does not.
";

const VLLM: &str = "\
`max_batch_size` is 0: a request is one prompt, which `n` texts may follow. Each response holds all of them, where the
output is streamed an empty one for a text without news; values are [texts], lists of values [texts, values], or
[values] where there is one text.
";

/// The reference as markdown.
pub fn reference() -> String {
    let mut text = HEAD.to_string();
    for (profile, title, about) in [
        (Profile::Text, "Profile `text`: the names of TensorRT-LLM's `tensorrt_llm_bls`", BATCHED),
        (Profile::Token, "Profile `token`: the names of TensorRT-LLM's `tensorrt_llm`", BATCHED),
        (Profile::Vllm, "Profile `vllm`: the names of Triton's vLLM backend", VLLM),
    ] {
        text += &format!("\n## {title}\n\n{about}");
        profile_tables(profile, &mut text);
    }
    for (from, rows) in
        [("TensorRT-LLM's backend", FROM_TENSORRT_LLM), ("Triton's vLLM backend", FROM_VLLM)]
    {
        text += &format!("\n## What differs from {from}\n");
        head(&mut text, &["What", "Here", "There", "Why"]);
        rows.iter().for_each(|row| text += &format!("| {} |\n", row.join(" | ")));
    }
    text += "\n## Parameters of the model configuration\n\nBooleans are `true`, `True`, `TRUE`, `1` and their opposites. An unfilled `${x}` is unset. A key that is not in the table is an error when the model is loaded.\n";
    parameters(&mut text);
    text
}

fn profile_tables(profile: Profile, text: &mut String) {
    let (given, refused): (Vec<_>, Vec<_>) =
        profile.inputs().iter().partition(|input| !input.is_refused());
    head(text, &["Input", "Type", "Dims", "Meaning"]);
    given.iter().for_each(|input| text.push_str(&input_row(input)));
    head(text, &["Declared, refused when given", "Type", "Dims", "Why"]);
    refused.iter().for_each(|input| text.push_str(&input_row(input)));
    if !profile.parameters().is_empty() {
        head(text, &["Request parameter", "Meaning"]);
        for input in profile.parameters() {
            let refused = if input.is_refused() { "not supported: " } else { "" };
            *text += &format!("| `{}` | {refused}{} |\n", input.name, input.option.help);
        }
    }
    head(text, &["Output", "Type", "Dims", "Meaning"]);
    for output in profile.outputs() {
        let (name, datatype) = (output.name, output.datatype.config_name());
        *text += &format!("| `{name}` | {datatype} | {:?} | {} |\n", output.dims, output.help);
    }
}

impl Input {
    fn is_refused(&self) -> bool {
        matches!(self.option.action, Action::Refused(..))
    }
}

fn input_row(input: &Input) -> String {
    let action = &input.option.action;
    let (datatype, dims) = (action.datatype().config_name(), action.dims());
    format!("| `{}` | {datatype} | {dims:?} | {} |\n", input.name, input.option.help)
}

fn parameters(text: &mut String) {
    head(text, &["Key", "Values", "Default", "Meaning"]);
    for key in KEYS {
        if let Meaning::Set(_) = key.meaning {
            let (name, values, default) = (key.name, key.values, key.default);
            *text += &format!("| `{name}` | {values} | {default} | {} |\n", key.help);
        }
    }
    head(text, &["Key of TensorRT-LLM that is refused", "Why"]);
    for key in KEYS {
        if let Meaning::Refused(why) = key.meaning {
            *text += &format!("| `{}` | {why} |\n", key.name);
        }
    }
}

fn head(text: &mut String, columns: &[&str]) {
    let titles = columns.join(" | ");
    *text += &format!("\n| {titles} |\n|{}\n", "---|".repeat(columns.len()));
}
