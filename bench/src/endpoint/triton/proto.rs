//! The messages of KServe's inference protocol that are used here, with the numbers of their fields. What else a server sends
//! is skipped.

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
    pub inputs: Vec<Tensor>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ModelInferRequest {
    #[prost(string, tag = "1")]
    pub model_name: String,
    #[prost(message, repeated, tag = "5")]
    pub inputs: Vec<Tensor>,
    #[prost(bytes = "vec", repeated, tag = "7")]
    pub raw_input_contents: Vec<Vec<u8>>,
}

/// A tensor that a model declares, or one of a request or a response: its values are in the `raw_` list of that message.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Tensor {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub datatype: String,
    #[prost(int64, repeated, tag = "3")]
    pub shape: Vec<i64>,
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
    pub outputs: Vec<Tensor>,
    #[prost(bytes = "vec", repeated, tag = "6")]
    pub raw_output_contents: Vec<Vec<u8>>,
}
