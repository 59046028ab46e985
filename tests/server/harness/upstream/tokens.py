"""NVIDIA's client of the token model."""

import queue
from dataclasses import dataclass, field

from tritonclient.utils import InferenceServerException

from .messages import WAIT_SECONDS, arrays, index, keep, metrics, requested, stop_request, tensor


@dataclass
class Tokens:
    """What the client has at the end: for each sequence the prompt, and the tokens behind it."""

    ids: list = field(default_factory=list)
    prompts: list = field(default_factory=list)
    responses: int = 0
    empty: int = 0
    cancelled: bool = False
    metrics: list = field(default_factory=list)
    log_probs: list = field(default_factory=list)
    counts: dict = field(default_factory=dict)


def ask(
    server, prompt, *, model="tensorrt_llm", streaming=False, sequences=None, output_len=16, request_id="", stop=None,
    cancel=None, outputs=(), exclude_input_in_output=None, end_id=-1, pad_id=50256, top_k=1, top_p=0.0, temperature=1.0,
    **options,
):
    """One prompt. `stop` and `cancel` are called before the request is ended, by a stop request or by cancelling; the
    client itself sleeps for a given time. What it takes for `end_id` and `pad_id` suits GPT-2."""
    options = {
        "input_ids": [int(one) for one in prompt], "input_lengths": len(prompt), "request_output_len": output_len,
        "beam_width": 1, "temperature": temperature, "streaming": streaming, "end_id": end_id, "pad_id": pad_id,
        "runtime_top_k": top_k, "runtime_top_p": top_p, "num_return_sequences": sequences,
        "exclude_input_in_output": exclude_input_in_output, **options,
    }
    inputs = [tensor(name, values) for name, values in arrays(options).items()]
    send = on_a_stream if streaming or sequences is not None else once
    results = queue.Queue()
    with server.grpc() as grpc:
        parameters = {"Streaming": streaming}
        send(grpc, model, inputs, requested(outputs) or None, request_id, parameters, results, stop, cancel)
    return read(results, prompt, options, outputs)


def on_a_stream(grpc, model, inputs, outputs, request_id, parameters, results, stop, cancel):
    """The parameters go with the stop request alone."""
    grpc.start_stream(keep(results), stream_timeout=WAIT_SECONDS)
    grpc.async_stream_infer(model, inputs, outputs=outputs, request_id=request_id)
    if stop:
        stop(results)
        grpc.async_stream_infer(model, stop_request(), request_id=request_id, parameters=parameters)
    if cancel:
        cancel(results)
    grpc.stop_stream(cancel_requests=cancel is not None)


def once(grpc, model, inputs, outputs, request_id, parameters, results, stop, cancel):
    """One response, and one to a stop request."""
    how = {"request_id": request_id, "callback": keep(results), "parameters": parameters}
    call = grpc.async_infer(model, inputs, outputs=outputs, **how)
    if stop:
        stop(results)
        grpc.async_infer(model, stop_request(), **how)
    if cancel:
        cancel(results)
        call.cancel()
    for one in [results.get(timeout=WAIT_SECONDS) for _ in range(2 if stop else 1)]:
        results.put(one)


def read(results, prompt, options, outputs):
    """Puts the responses together, and strips the prompt by its length."""
    streaming, excluded = options["streaming"], bool(options["exclude_input_in_output"])
    count = options["num_return_sequences"] or 1
    ids = [list(prompt) if streaming and not excluded else [] for _ in range(count)]
    lengths = [0] * count
    told = Tokens()
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
        read_returned(result, told, options)
    for length, found in zip(lengths, ids):
        whole, begin = found if streaming else found[:length], 0 if excluded else len(prompt)
        told.prompts.append(whole[:begin])
        told.ids.append(whole[begin:])
    return told


def read_returned(result, told, options):
    """What a request asked to be returned."""
    if options.get("return_log_probs"):
        told.log_probs.append([result.as_numpy(name)[0] for name in ("cum_log_probs", "output_log_probs")])
    if options.get("return_perf_metrics"):
        told.metrics.append(metrics(result))
    for name in ["num_input_tokens", "num_output_tokens"]:
        if options.get(f"return_{name}"):
            told.counts.setdefault(name, []).append(int(result.as_numpy(name)[0][0]))
