"""Clients that no package index has, written down: what they send, in what order, and how they read the answers, so that
an answer which they would stumble over fails here too. Messages are theirs, tensor for tensor; the code is not.

    text_client    triton_backend/inflight_batcher_llm/client/end_to_end_grpc_client.py, NVIDIA/TensorRT-LLM, 2a9abd95
    token_client   triton_backend/inflight_batcher_llm/client/inflight_batcher_llm_client.py, NVIDIA/TensorRT-LLM, 000a01de
    vllm_client    samples/client.py, triton-inference-server/vllm_backend, a2c7e767
    connector      llama_index/llms/nvidia_triton/utils.py of llama-index-llms-nvidia-triton 0.6.0, and with `unsigned`
                   langchain_nvidia_trt/llms.py of langchain-nvidia-trt 0.0.1rc0 (scripts/test-clients runs both themselves)
"""

import asyncio
import json
import queue
from dataclasses import dataclass, field

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as aio
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from . import client

METRICS = """kv_cache_alloc_new_blocks kv_cache_reused_blocks kv_cache_alloc_total_blocks arrival_time_ns
    first_scheduled_time_ns first_token_time_ns last_token_time_ns acceptance_rate total_accepted_draft_tokens
    total_draft_tokens""".split()

# Nothing takes so long here; a client that waits for ever would hang the suite.
WAIT_SECONDS = client.WAIT_SECONDS


def tensor(name, values):
    one = grpcclient.InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype))
    one.set_data_from_numpy(values)
    return one


def arrays(options):
    """Options as these clients send them: [1, 1], lists [1, N]."""
    return {name: client.array(name, value) for name, value in options.items() if value is not None}


def requested(names):
    return [grpcclient.InferRequestedOutput(name) for name in names]


def keep(results):
    """A callback that keeps what comes, a result or an error."""
    return lambda result, error: results.put(error or result)


def taken(results):
    """All that has come. An error ends the test: none of these clients can go on after one."""
    while not results.empty():
        result = results.get()
        if isinstance(result, InferenceServerException):
            raise result
        yield result


def index(result, name):
    """`batch_index` and `sequence_index` are read as matrices; left out they are 0."""
    value = result.as_numpy(name)
    return 0 if value is None else int(value[0][0])


def metrics(result):
    """Read of every response that carries output."""
    return {name: result.as_numpy(name)[0][0] for name in METRICS}


@dataclass
class Texts:
    """What the text client has at the end: for each prompt a text for each sequence."""

    texts: list = field(default_factory=list)
    metrics: list = field(default_factory=list)
    log_probs: list = field(default_factory=list)


def text_client(
    server, prompts, *, model="ensemble", streaming=False, batched=False, sequences=None, output_len=100, temperature=1.0,
    exclude_input_in_output=False, return_log_probs=None, return_perf_metrics=None, **options,
):
    """Every prompt on a stream of its own, or all as rows of one request."""
    common = {
        "max_tokens": output_len, "stream": streaming, "beam_width": 1, "temperature": temperature,
        "num_return_sequences": sequences, "exclude_input_in_output": exclude_input_in_output,
        "return_log_probs": return_log_probs, "return_perf_metrics": return_perf_metrics, **options,
    }
    rows = [arrays({"text_input": prompt, **common}) for prompt in prompts]
    batches = [rows] if batched else [[row] for row in rows]
    outputs = ["text_output"]
    outputs += ["cum_log_probs", "output_log_probs"] if return_log_probs else []
    outputs += ["sequence_index"] if sequences and sequences > 1 else []
    outputs += ["batch_index"] if batched else []
    outputs += METRICS if return_perf_metrics else []
    told = Texts()
    with server.grpc() as grpc:
        for batch in batches:
            results = queue.Queue()
            grpc.start_stream(keep(results), stream_timeout=WAIT_SECONDS)
            inputs = [tensor(name, np.concatenate([row[name] for row in batch])) for name in batch[0]]
            grpc.async_stream_infer(model, inputs, outputs=requested(outputs), request_id="")
            grpc.stop_stream()  # waits for the answer
            texts = [[""] * (sequences or 1) for _ in batch]
            for result in taken(results):
                row, sequence = index(result, "batch_index"), index(result, "sequence_index")
                text = result.as_numpy("text_output")[0].decode("utf-8")
                texts[row][sequence] = texts[row][sequence] + text if streaming else text
                if return_log_probs:
                    told.log_probs.append(result.as_numpy("output_log_probs"))
                if return_perf_metrics:
                    told.metrics.append(metrics(result))
            told.texts += texts
    return told


@dataclass
class Tokens:
    """What the token client has at the end: for each sequence the tokens behind the prompt."""

    ids: list
    prompts: list
    responses: int = 0
    cancelled: bool = False
    empty: int = 0
    metrics: list = field(default_factory=list)
    log_probs: list = field(default_factory=list)
    counts: dict = field(default_factory=dict)


# The client sends memory that it does not initialise.
ANY_ID = -1717986919


def stop_request():
    """What ends the request of the same id."""
    matrix = lambda value, kind: np.array([[value]], dtype=kind)
    return [
        tensor("input_ids", matrix(ANY_ID, np.int32)), tensor("input_lengths", matrix(0, np.int32)),
        tensor("request_output_len", matrix(0, np.int32)), tensor("stop", matrix(True, np.bool_)),
    ]


def token_client(
    server, prompt, *, model="tensorrt_llm", streaming=False, sequences=None, output_len=16, request_id="", stop=None,
    cancel=None, outputs=(), exclude_input_in_output=None, end_id=-1, pad_id=50256, top_k=1, top_p=0.0, temperature=1.0,
    **options,
):
    """One prompt of tokens. `stop` and `cancel` are waited for before the request is ended by a stop request, or by
    cancelling; the client itself sleeps for a given time. Its defaults of `end_id` and `pad_id` suit GPT-2."""
    options = {
        "input_ids": [int(one) for one in prompt], "input_lengths": len(prompt), "request_output_len": output_len,
        "beam_width": 1, "temperature": temperature, "streaming": streaming, "end_id": end_id, "pad_id": pad_id,
        "runtime_top_k": top_k, "runtime_top_p": top_p, "num_return_sequences": sequences,
        "exclude_input_in_output": exclude_input_in_output, **options,
    }
    inputs = [tensor(name, values) for name, values in arrays(options).items()]
    how = {"outputs": requested(outputs) or None, "request_id": request_id}
    results = queue.Queue()
    with server.grpc() as grpc:
        if streaming or sequences is not None:
            grpc.start_stream(keep(results), stream_timeout=WAIT_SECONDS)
            grpc.async_stream_infer(model, inputs, **how)
            if stop:
                stop(results)
                grpc.async_stream_infer(model, stop_request(), request_id=request_id, parameters={"Streaming": streaming})
            if cancel:
                cancel(results)
            grpc.stop_stream(cancel_requests=cancel is not None)
        else:
            parameters = {"Streaming": streaming}
            call = grpc.async_infer(model, inputs, callback=keep(results), parameters=parameters, **how)
            if stop:
                stop(results)
                how = {"request_id": request_id, "callback": keep(results), "parameters": parameters}
                grpc.async_infer(model, stop_request(), **how)
            if cancel:
                cancel(results)
                call.cancel()
            arrived = [results.get(timeout=WAIT_SECONDS) for _ in range(2 if stop else 1)]
            for one in arrived:
                results.put(one)
    return token_answer(results, prompt, options, outputs)


def token_answer(results, prompt, options, outputs):
    """Reads the responses as the client does, which strips the prompt by its length."""
    streaming, excluded = options["streaming"], bool(options["exclude_input_in_output"])
    count = options["num_return_sequences"] or 1
    prompt = list(prompt)
    ids = [list(prompt) if streaming and not excluded else [] for _ in range(count)]
    lengths = [0] * count
    told = Tokens(ids=[], prompts=[])
    while not results.empty():
        result = results.get()
        if isinstance(result, InferenceServerException):
            if result.status() != "StatusCode.CANCELLED":
                raise result
            told.cancelled = True
            continue
        told.responses += 1
        names = {output.name for output in result.get_response().outputs}
        assert not outputs or names == set(outputs), f"asked for {outputs}, got {names}"
        values = result.as_numpy("output_ids")
        if values is None:
            told.empty += 1
            continue
        at = index(result, "sequence_index")
        lengths[at] = result.as_numpy("sequence_length")[0][0]
        if not streaming or lengths[at] > 0:
            ids[at] += values[0][0].tolist()
        if options.get("return_log_probs"):
            told.log_probs.append(np.vstack([result.as_numpy("cum_log_probs")[0], result.as_numpy("output_log_probs")[0].sum(-1)]))
        if options.get("return_perf_metrics"):
            told.metrics.append(metrics(result))
        for name in ["num_input_tokens", "num_output_tokens"]:
            if options.get(f"return_{name}"):
                told.counts[name] = told.counts.get(name, []) + [int(result.as_numpy(name)[0][0])]
    for at in range(count):
        whole = ids[at] if streaming else ids[at][: lengths[at]]
        told.prompts.append(whole[: 0 if excluded else len(prompt)])
        told.ids.append(whole[0 if excluded else len(prompt):])
    return told


def vllm_client(server, prompts, *, model="vllm_model", stream=False, exclude_input_in_output=False, sampling=None):
    """All prompts on one stream, numbered; the sampling parameters as a tensor and as request parameters too. Their
    values are strings."""
    sampling = sampling or {"temperature": "0.1", "top_p": "0.95", "max_tokens": "100"}
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

    async def ask():
        texts = {str(number): "" for number in range(len(prompts))}
        async with aio.InferenceServerClient(server.grpc_url) as grpc:
            async for result, error in grpc.stream_infer(requests(), stream_timeout=WAIT_SECONDS):
                if error:
                    raise error
                for text in result.as_numpy("text_output"):
                    texts[result.get_response().id] += text.decode("utf-8")
        return list(texts.values())

    return asyncio.run(ask())


def connector(server, prompt, *, model="ensemble", tokens=100, stream=True, seed=0, unsigned=False):
    """Reads to the response that is marked as the last, then sends a stop request, whose tensors no text model of
    TensorRT-LLM has either, and waits for the stream to end."""
    count = np.uint32 if unsigned else np.int32
    matrix = lambda value, kind: np.array([[value]], dtype=kind)
    values = {
        "text_input": matrix(prompt, np.object_), "max_tokens": matrix(tokens, count), "top_k": matrix(1, count),
        "top_p": matrix(0, np.float32), "temperature": matrix(1, np.float32), "length_penalty": matrix(1, np.float32),
        "repetition_penalty": matrix(1, np.float32), "random_seed": matrix(seed, np.uint64),
        "beam_width": matrix(1, count), "stream": matrix(stream, np.bool_),
    }
    stop = {
        "input_ids": matrix(ANY_ID, np.int32), "input_lengths": matrix(0, np.int32),
        "request_output_len": matrix(0, np.uint32), "stop": matrix(True, np.bool_),
    }
    results = queue.Queue()
    texts, last = [], False
    with server.grpc() as grpc:
        grpc.start_stream(keep(results), stream_timeout=WAIT_SECONDS)
        inputs = [tensor(name, value) for name, value in values.items()]
        grpc.async_stream_infer(model, inputs, outputs=requested(["text_output"]), request_id="4711")
        while not last:
            result = results.get(timeout=WAIT_SECONDS)
            if isinstance(result, InferenceServerException):
                raise result
            text = result.as_numpy("text_output")
            if text is not None:
                texts.append("".join(one.decode() for one in text))
            last = result.get_response().parameters["triton_final_response"].bool_param
        inputs = [tensor(name, value) for name, value in stop.items()]
        grpc.async_stream_infer(model, inputs, request_id="4711", parameters={"Streaming": True})
        grpc.stop_stream()
    return texts
