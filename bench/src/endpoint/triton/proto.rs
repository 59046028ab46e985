//! The messages of KServe's inference protocol that are used here, with the numbers of their fields. What else a server sends
//! is skipped.

use std::collections::HashMap;

/// The service's methods.
pub(super) const MODEL_METADATA: &str = "/inference.GRPCInferenceService/ModelMetadata";
pub(super) const MODEL_STREAM_INFER: &str = "/inference.GRPCInferenceService/ModelStreamInfer";

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ModelMetadataRequest {
    #[prost(string, tag = "1")]
    pub name: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ModelMetadataResponse {
    #[prost(message, repeated, tag = "4")]
    pub inputs: Vec<TensorMetadata>,
    #[prost(message, repeated, tag = "5")]
    pub outputs: Vec<TensorMetadata>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct TensorMetadata {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub datatype: String,
    #[prost(int64, repeated, tag = "3")]
    pub shape: Vec<i64>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ModelInferRequest {
    #[prost(string, tag = "1")]
    pub model_name: String,
    #[prost(map = "string, message", tag = "4")]
    pub parameters: HashMap<String, InferParameter>,
    #[prost(message, repeated, tag = "5")]
    pub inputs: Vec<InferTensor>,
    #[prost(bytes = "vec", repeated, tag = "7")]
    pub raw_input_contents: Vec<Vec<u8>>,
}

/// A tensor of a request or of a response; its values are in the `raw_` list of the message.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct InferTensor {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub datatype: String,
    #[prost(int64, repeated, tag = "3")]
    pub shape: Vec<i64>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct InferParameter {
    #[prost(bool, optional, tag = "1")]
    pub bool_param: Option<bool>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ModelStreamInferResponse {
    #[prost(string, tag = "1")]
    pub error_message: String,
    #[prost(message, optional, tag = "2")]
    pub infer_response: Option<ModelInferResponse>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ModelInferResponse {
    #[prost(message, repeated, tag = "5")]
    pub outputs: Vec<InferTensor>,
    #[prost(bytes = "vec", repeated, tag = "6")]
    pub raw_output_contents: Vec<Vec<u8>>,
}
