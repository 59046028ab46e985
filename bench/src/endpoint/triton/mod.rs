//! A model of a Triton server, over a gRPC stream: this project's backend in its profiles, and others with the same inputs.

mod proto;
mod tensors;

use super::{Common, Remote};
use crate::answer::{Answer, Ask};
use crate::prompts::{Content, Prompt};
use crate::results::Speculation;
use crate::setting::Setting;
use anyhow::{Context, Result, anyhow, bail};
use proto::{
    ModelInferRequest, ModelMetadataRequest, ModelMetadataResponse, ModelStreamInferResponse,
    Tensor,
};
use serde_json::json;
use spec_build::cli::DraftLen;
use std::collections::HashMap;
use std::time::Instant;
use tensors::{Outputs, Value};
use tonic::client::Grpc;
use tonic::transport::{Channel, ClientTlsConfig, Endpoint as Connection};
use tonic::{IntoRequest, IntoStreamingRequest, Status, Streaming};
use tonic_prost::ProstCodec;

/// Whether a model is served in the profile of Triton's vLLM backend.
const SAMPLING_PARAMETERS: &str = "sampling_parameters";

/// A model that is asked in one way.
pub struct TritonEndpoint {
    channel: Channel,
    model: String,
    inputs: HashMap<String, Tensor>,
    draft_len: Option<usize>,
    temperature: f32,
    common: Common,
}

impl TritonEndpoint {
    /// Connects, and asks what the model takes.
    pub async fn open(remote: &Remote, setting: &Setting, common: &Common) -> Result<Self> {
        let Remote { host, model, tls } = remote;
        let mut connection = Connection::from_shared(remote.url())?;
        if *tls {
            connection = connection.tls_config(ClientTlsConfig::new().with_native_roots())?;
        }
        let channel =
            connection.connect().await.with_context(|| format!("connecting to {host}"))?;
        let metadata = metadata(channel.clone(), model)
            .await
            .map_err(|status| anyhow!("model {model} at {host}: {}", status.message()))?;
        let draft_len = match setting.draft_len {
            DraftLen::Auto => None,
            DraftLen::Fixed(len) => Some(len),
        };
        let inputs: HashMap<_, _> =
            metadata.inputs.into_iter().map(|input| (input.name.clone(), input)).collect();
        let (temperature, common) = (setting.temperature, common.clone());
        let endpoint =
            Self { channel, model: model.clone(), inputs, draft_len, temperature, common };
        endpoint.check()?;
        Ok(endpoint)
    }

    fn has(&self, input: &str) -> bool {
        self.inputs.contains_key(input)
    }

    fn check(&self) -> Result<()> {
        if !self.has("text_input") && !self.has("input_ids") {
            bail!("model {}: neither `text_input` nor `input_ids` is an input", self.model);
        }
        if self.draft_len.is_some() && !self.has("num_draft_tokens") {
            bail!(
                "model {}: no input `num_draft_tokens`, so draft lengths cannot be chosen",
                self.model
            );
        }
        if let Some(prompt) =
            self.common.prompts.iter().find(|prompt| self.prompt(prompt).is_none())
        {
            let why = match prompt.content {
                Content::Chat(_) => "no input `messages`, so that it has no chat template: --raw sends prompts as they are".into(),
                _ => format!("has no input for a prompt such as {:?}", prompt.content),
            };
            bail!("model {}: {why}", self.model);
        }
        Ok(())
    }

    /// The input that takes a prompt, and its value there.
    fn prompt(&self, prompt: &Prompt) -> Option<(&'static str, Value)> {
        let (name, value) = match &prompt.content {
            Content::Tokens(tokens) => ("input_ids", Value::Tokens(tokens.clone())),
            Content::Text(text) => ("text_input", Value::Text(text.clone())),
            Content::Chat(messages) if self.has("messages") => {
                ("messages", Value::Text(json!(messages).to_string()))
            }
            // Without its template a conversation is another prompt.
            Content::Chat(_) => return None,
        };
        self.has(name).then_some((name, value))
    }

    /// Everything that is sent but the prompt. What the model does not declare is left away.
    fn options(&self, ask: &Ask) -> Vec<(&'static str, Value)> {
        let (max_tokens, seed) = (self.common.max_tokens as i64, ask.seed as i64);
        let temperature = f64::from(self.temperature);
        let mut options = vec![
            ("stream", Value::Bool(true)),
            ("streaming", Value::Bool(true)),
            ("cache_salt", Value::Text(ask.cache_salt.clone())),
            ("exclude_input_in_output", Value::Bool(true)),
            ("return_num_input_tokens", Value::Bool(true)),
            ("return_num_output_tokens", Value::Bool(true)),
            ("return_perf_metrics", Value::Bool(true)),
        ];
        if self.has(SAMPLING_PARAMETERS) {
            let sampling = json!({
                "max_tokens": max_tokens,
                "temperature": temperature,
                "seed": seed,
                "ignore_eos": self.common.ignore_eos,
            });
            options.push((SAMPLING_PARAMETERS, Value::Text(sampling.to_string())));
        } else {
            options.extend([
                ("max_tokens", Value::Integer(max_tokens)),
                ("request_output_len", Value::Integer(max_tokens)),
                ("temperature", Value::Float(temperature)),
                ("seed", Value::Integer(seed)),
                ("ignore_eos", Value::Bool(self.common.ignore_eos)),
            ]);
        }
        options.extend(self.draft_len.map(|len| ("num_draft_tokens", Value::Integer(len as i64))));
        // Else a server that adapts takes the number for the most that it may draft.
        options.extend(self.draft_len.map(|_| ("fixed_draft_tokens", Value::Bool(true))));
        options.retain(|(name, _)| self.has(name));
        options
    }

    fn request(&self, ask: &Ask) -> Result<ModelInferRequest> {
        let prompt =
            self.prompt(&self.common.prompts[ask.prompt]).context("no input for the prompt")?;
        let mut values = self.options(ask);
        values.push(prompt);
        let mut request =
            ModelInferRequest { model_name: self.model.clone(), ..Default::default() };
        for (name, value) in values {
            let (tensor, raw) = tensors::input(&self.inputs[name], &value)?;
            request.inputs.push(tensor);
            request.raw_input_contents.push(raw);
        }
        Ok(request)
    }

    /// Asks over a stream of its own and waits.
    pub async fn ask(&self, ask: Ask) -> Answer {
        let mut answer = Answer::new(&ask);
        let mut text = Vec::new();
        if let Err(error) = self.stream(&ask, &mut answer, &mut text).await {
            answer.failure = Some(format!("{error:#}"));
        }
        if answer.failure.is_none() && answer.came.is_empty() {
            answer.failure = Some("an end without a token".into());
        }
        answer.text_hash = super::hash(std::iter::once(&text));
        answer
    }

    /// Reads to the stream's end whatever comes: some versions of tritonserver keep a model loaded, and cannot end, when a
    /// client leaves a stream early.
    async fn stream(&self, ask: &Ask, answer: &mut Answer, text: &mut Vec<u8>) -> Result<()> {
        let request = self.request(ask)?;
        let said = |status: Status| anyhow!("{:?}: {}", status.code(), status.message());
        answer.sent = Instant::now();
        let mut responses = stream_infer(self.channel.clone(), request).await.map_err(said)?;
        while let Some(response) = responses.message().await.map_err(said)? {
            if !response.error_message.is_empty() {
                answer.failure.get_or_insert(response.error_message);
                continue;
            }
            let Some(response) = response.infer_response else { continue };
            let outputs = Outputs(&response);
            let now = Instant::now();
            text.extend(outputs.text("text_output"));
            text.extend(outputs.integers("output_ids").into_iter().flat_map(i64::to_le_bytes));
            // A server that does not count its tokens sends one a response.
            let tokens = match outputs.integers("num_output_tokens")[..] {
                [] if response.outputs.is_empty() => 0,
                [] => 1,
                ref counts => counts.iter().sum::<i64>().max(0) as usize,
            };
            if tokens > 0 {
                answer.came.push((now, tokens));
            }
            if let [tokens, ..] = outputs.integers("num_input_tokens")[..] {
                answer.input_tokens = tokens.max(0) as usize;
            }
            answer.speculation = speculation(&outputs).or(answer.speculation.take());
        }
        Ok(())
    }
}

/// The counts so far, where a response has them.
fn speculation(outputs: &Outputs<'_>) -> Option<Speculation> {
    let count = |name: &str| outputs.integers(name).first().map(|&count| count.max(0) as u64);
    let histogram = outputs.integers("acceptance_histogram");
    Some(Speculation {
        steps: count("num_spec_steps")?,
        drafted: count("total_draft_tokens")?,
        accepted: count("total_accepted_draft_tokens")?,
        histogram: histogram.into_iter().map(|count| count.max(0) as u64).collect(),
    })
}

async fn metadata(channel: Channel, model: &str) -> Result<ModelMetadataResponse, Status> {
    let mut grpc = ready(channel).await?;
    let request = ModelMetadataRequest { name: model.into() }.into_request();
    let path = proto::MODEL_METADATA.parse().map_err(|_| Status::internal("a wrong path"))?;
    let codec: ProstCodec<ModelMetadataRequest, ModelMetadataResponse> = ProstCodec::default();
    Ok(grpc.unary(request, path, codec).await?.into_inner())
}

async fn stream_infer(
    channel: Channel,
    request: ModelInferRequest,
) -> Result<Streaming<ModelStreamInferResponse>, Status> {
    let mut grpc = ready(channel).await?;
    let request = futures_util::stream::iter([request]);
    let path = proto::MODEL_STREAM_INFER.parse().map_err(|_| Status::internal("a wrong path"))?;
    let codec: ProstCodec<ModelInferRequest, ModelStreamInferResponse> = ProstCodec::default();
    Ok(grpc.streaming(request.into_streaming_request(), path, codec).await?.into_inner())
}

async fn ready(channel: Channel) -> Result<Grpc<Channel>, Status> {
    let mut grpc = Grpc::new(channel).max_decoding_message_size(usize::MAX);
    grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    Ok(grpc)
}
