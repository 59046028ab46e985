"""The vLLM backend's sample."""

import asyncio
import json

import numpy as np
import tritonclient.grpc.aio as aio

from .messages import WAIT_SECONDS, requested, tensor

# Strings all of them.
SAMPLING = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "100"}


def ask(server, prompts, *, model="vllm_model", stream=False, exclude_input_in_output=False, sampling=None):
    """All prompts on one stream, numbered; the sampling parameters as a tensor and as request parameters too."""
    sampling = sampling or SAMPLING
    vector = lambda value, kind: np.array([value], dtype=kind)

    def request(number, prompt):
        values = {
            "text_input": vector(prompt.encode(), np.object_), "stream": vector(stream, np.bool_),
            "sampling_parameters": vector(json.dumps(sampling).encode(), np.object_),
            "exclude_input_in_output": vector(exclude_input_in_output, np.bool_),
        }
        return {
            "model_name": model, "inputs": [tensor(name, value) for name, value in values.items()],
            "outputs": requested(["text_output"]), "request_id": str(number), "parameters": sampling,
        }

    async def requests():
        for number, prompt in enumerate(prompts):
            yield request(number, prompt)

    async def texts():
        texts = {str(number): "" for number in range(len(prompts))}
        async with aio.InferenceServerClient(server.grpc_url) as grpc:
            async for result, error in grpc.stream_infer(requests(), stream_timeout=WAIT_SECONDS):
                if error:
                    raise error
                for text in result.as_numpy("text_output"):
                    texts[result.get_response().id] += text.decode("utf-8")
        return list(texts.values())

    return asyncio.run(texts())
