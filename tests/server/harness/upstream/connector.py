"""Connectors of libraries to the text model."""

import queue

import numpy as np
from tritonclient.utils import InferenceServerException

from .messages import WAIT_SECONDS, keep, matrix, requested, stop_request, tensor

REQUEST_ID = "4711"

# A configuration for langchain's, in the types of TensorRT-LLM's templates of 2023: counts without a sign.
UNSIGNED = "input [ " + ", ".join(
    f'{{ name: "{name}" data_type: TYPE_UINT32 dims: [ 1 ] optional: true }}'
    for name in ["max_tokens", "top_k", "beam_width"]
) + " ]"


def ask(server, prompt, *, model="ensemble", tokens=100, stream=True, count=np.int32):
    """The pieces of a text, to the response that is marked as the last. Then comes a stop request, whose tensors no text
    model of TensorRT-LLM has either, and the stream is waited for. langchain's `count` is np.uint32."""
    values = {
        "text_input": matrix(prompt, np.object_), "max_tokens": matrix(tokens, count), "top_k": matrix(1, count),
        "top_p": matrix(0, np.float32), "temperature": matrix(1, np.float32), "length_penalty": matrix(1, np.float32),
        "repetition_penalty": matrix(1, np.float32), "random_seed": matrix(0, np.uint64),
        "beam_width": matrix(1, count), "stream": matrix(stream, np.bool_),
    }
    results = queue.Queue()
    texts, last = [], False
    with server.grpc() as grpc:
        grpc.start_stream(keep(results), stream_timeout=WAIT_SECONDS)
        inputs = [tensor(name, value) for name, value in values.items()]
        grpc.async_stream_infer(model, inputs, outputs=requested(["text_output"]), request_id=REQUEST_ID)
        while not last:
            result = results.get(timeout=WAIT_SECONDS)
            if isinstance(result, InferenceServerException):
                raise result
            text = result.as_numpy("text_output")
            if text is not None:
                texts.append("".join(one.decode() for one in text))
            last = result.get_response().parameters["triton_final_response"].bool_param
        grpc.async_stream_infer(model, stop_request(np.uint32), request_id=REQUEST_ID, parameters={"Streaming": True})
        grpc.stop_stream()
    return texts
