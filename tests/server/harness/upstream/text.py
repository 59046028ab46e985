"""NVIDIA's client of the text model."""

import queue
from dataclasses import dataclass, field

import numpy as np

from .messages import METRICS, WAIT_SECONDS, arrays, index, keep, metrics, requested, taken, tensor


@dataclass
class Texts:
    """What the client has at the end: for each prompt a text for each sequence."""

    texts: list = field(default_factory=list)
    metrics: list = field(default_factory=list)
    log_probs: list = field(default_factory=list)


def ask(
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
    outputs = ["text_output"]
    outputs += ["cum_log_probs", "output_log_probs"] if return_log_probs else []
    outputs += ["sequence_index"] if sequences and sequences > 1 else []
    outputs += ["batch_index"] if batched else []
    outputs += METRICS if return_perf_metrics else []
    told = Texts()
    with server.grpc() as grpc:
        for batch in [rows] if batched else [[row] for row in rows]:
            results = queue.Queue()
            grpc.start_stream(keep(results), stream_timeout=WAIT_SECONDS)
            inputs = [tensor(name, np.concatenate([row[name] for row in batch])) for name in batch[0]]
            grpc.async_stream_infer(model, inputs, outputs=requested(outputs), request_id="")
            grpc.stop_stream()  # waits for the answer
            read(results, told, [[""] * (sequences or 1) for _ in batch], streaming, outputs)
    return told


def read(results, told, texts, streaming, outputs):
    """Puts the responses to one request together."""
    for result in taken(results):
        row, sequence = index(result, "batch_index"), index(result, "sequence_index")
        text = result.as_numpy("text_output")[0].decode("utf-8")
        texts[row][sequence] = texts[row][sequence] + text if streaming else text
        if "output_log_probs" in outputs:
            told.log_probs.append(result.as_numpy("output_log_probs"))
        if METRICS[0] in outputs:
            told.metrics.append(metrics(result))
    told.texts += texts
