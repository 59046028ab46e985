"""Malformed requests, drawn from a fixed seed: tensors over gRPC, JSON and raw bytes over HTTP.

Each run gives how often each outcome was seen. A request may by chance be a good one; what may not be seen is
an outcome of HARMED.
"""

import collections
import json
import random
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

from . import client, raw

NUM_CONNECTIONS = 4
# A server that broke, lost a request or kept its client waiting.
HARMED = {"INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED", "panic", "no answer"}
WAIT_SECONDS = 60

NAMES = """text_input messages max_tokens stop_words bad_words top_k top_p min_p temperature seed stream min_tokens
    repetition_penalty embedding_bias_words embedding_bias_weights num_draft_tokens fixed_draft_tokens end_id return_log_probs input_ids
    input_lengths request_output_len draft_input_ids stop_words_list bad_words_list embedding_bias streaming stop
    sampling_parameters exclude_input_in_output return_perf_metrics guided_decoding_guide lora_weights no_such""".split()
KINDS = {"BOOL": 1, "INT32": 4, "INT64": 8, "UINT8": 1, "UINT32": 4, "UINT64": 8, "FP16": 2, "FP32": 4, "FP64": 8, "BYTES": 0}
STRINGS = [
    b"", b"x", b"\0", b"\xff\xfe", b"\xed\xa0\x80", "ß日本😀".encode(), b"a" * 5000, b"word " * 400, b"{}", b"[]", b"null",
    b'[{"role": "user", "content": "x"}]', b'{"max_tokens": 3}', b'{"max_tokens": -3}', b'{"stop": [""]}', b"[" * 400,
    b'{"temperature": NaN}', b'{"seed": 18446744073709551616}', b"<|im_end|>", b"${x}",
]
NUMBERS = [0, 1, 2, 3, 7, -1, -2, 32, 1024, 2**31 - 1, -(2**31), 49151, 49152, 10**9]
FLOATS = [0.0, -0.0, 0.5, 1.0, 1.5, -1.0, 1e-38, 1e38, float("inf"), float("-inf"), float("nan")]
SHAPES = [[1, 1], [1], [], [1, 2], [2, 1], [1, 0], [0], [1, 1, 1], [1, -1], [3, 1], [1, 7], [2**31], [1, 2**62], [1, 2, 3]]
PARAMETERS = ["max_tokens", "temperature", "seed", "stream", "priority", "timeout", "top_k", "what", "binary_data_output"]


def _element(draw, kind):
    if kind == "BYTES":
        return raw.strings(draw.choice(STRINGS))
    if kind in ("FP32", "FP64"):
        return struct.pack("<f" if kind == "FP32" else "<d", draw.choice(FLOATS))
    size = KINDS[kind]
    return (draw.choice(NUMBERS) % 256**size).to_bytes(size, "little")


def _data(draw, kind, shape):
    count = 1
    for dim in shape:
        count *= max(0, min(dim, 8))
    data = b"".join(_element(draw, kind) for _ in range(min(count, 64)))
    damage = draw.random()
    if damage < 0.08:
        return data[: draw.randrange(len(data) + 1)]
    if damage < 0.16:
        return data + draw.randbytes(draw.randrange(1, 9))
    if damage < 0.20:
        return draw.randbytes(draw.randrange(40))
    return data


# What makes a request whole, so that damage elsewhere is reached; each is left out now and then.
GOOD = {
    "stream": [("text_input", "BYTES", [1, 1], raw.strings("x")), ("max_tokens", "INT32", [1, 1], raw.int32(2))],
    "vllm": [
        ("text_input", "BYTES", [1], raw.strings("x")),
        ("sampling_parameters", "BYTES", [1], raw.strings('{"max_tokens": 2}')),
    ],
    "token": [
        ("input_ids", "INT32", [1, 2], raw.int32(504, 3575)), ("input_lengths", "INT32", [1, 1], raw.int32(2)),
        ("request_output_len", "INT32", [1, 1], raw.int32(2)),
    ],
}
GOOD["whole"] = GOOD["stream"]


def _message(draw, model):
    tensors = {tensor[0]: tensor for tensor in GOOD[model] if draw.random() < 0.8}
    for _ in range(draw.randrange(1, 5)):
        name, kind = draw.choice(NAMES), draw.choice(list(KINDS))
        # Mostly the right type, so that more than the type is looked at.
        if draw.random() < 0.75:
            kind = client.datatype(name)
        shape = draw.choice(SHAPES[:2] if draw.random() < 0.6 else SHAPES)
        tensors[name] = (name, kind, shape, _data(draw, kind, shape))
    # Long generations are no damage and would only take time.
    for name in ["max_tokens", "request_output_len"]:
        if name in tensors and draw.random() < 0.9:
            tensors[name] = (name, "INT32", [1, 1], raw.int32(draw.choice([1, 2, 0, -1])))
    parameters = {}
    for _ in range(draw.choice([0, 0, 0, 1, 2])):
        parameters[draw.choice(PARAMETERS)] = draw.choice([1, -1, "1", "x", True, 0.5, "1e9"])
    message = raw.request(model, tensors.values(), parameters, draw.choice(["", "id", "id" * 500]))
    if draw.random() < 0.05 and message.raw_input_contents:
        del message.raw_input_contents[-1]
    return message


def tensors(server, count):
    """Random tensors to every profile, ordinary and decoupled."""

    def some(part):
        draw, told = random.Random(100 + part), collections.Counter()
        with raw.Raw(server) as connection:
            for _ in range(part, count, NUM_CONNECTIONS):
                model = draw.choice(list(GOOD))
                ask = connection.ask if model == "whole" else connection.stream
                code, text = ask(_message(draw, model), timeout=WAIT_SECONDS)
                told["panic" if text and "panic" in text else code] += 1
        return told

    return _together(some)


def _value(draw, depth=0):
    pick = draw.random()
    if pick < 0.15 and depth < 3:
        return [_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if pick < 0.25 and depth < 3:
        return {draw.choice(NAMES): _value(draw, depth + 1) for _ in range(draw.randrange(3))}
    numbers = [0, 1, -1, 2**31, 2**63, 2**64, 1e300, 0.5, -0.5]
    return draw.choice(["", "x", "\0", "ß😀", "5", "NaN", "true", None, True, False, *numbers])


def _object(draw):
    body = {"text_input": "x", "max_tokens": draw.choice([1, 2, 0, -1, "2"])}
    for name in list(body):
        if draw.random() < 0.15:
            del body[name]
    for _ in range(draw.randrange(1, 4)):
        # Asking for much is no damage.
        name = draw.choice([name for name in NAMES if name not in ("max_tokens", "request_output_len")])
        body[name] = _value(draw)
    if draw.random() < 0.2:
        body["parameters"] = _value(draw)
    text = json.dumps(body).encode()
    if draw.random() < 0.2:
        at = draw.randrange(len(text))
        text = text[:at] + draw.randbytes(draw.randrange(3)) + text[at + draw.randrange(3) :]
    return text


def json_bodies(server, count):
    """JSON that is nearly a request, to the generate and the infer endpoints."""

    def some(part):
        draw, told = random.Random(200 + part), collections.Counter()
        for _ in range(part, count, NUM_CONNECTIONS):
            model = draw.choice(list(GOOD))
            path = f"/v2/models/{model}/{draw.choice(['generate', 'generate_stream', 'generate', 'infer'])}"
            told[_posted(server, path, _object(draw))] += 1
        return told

    return _together(some)


def _posted(server, path, body):
    """The status. Triton's own JSON parser answers 500 to what it cannot read, so that code is no harm by itself."""
    try:
        status, _, text = server.http("POST", path, body, timeout=WAIT_SECONDS)
        return "panic" if b"panic" in text else str(status)
    except OSError:
        return "no answer"


def _bytes(draw):
    """The start of an HTTP request and then something else."""
    body = draw.randbytes(draw.randrange(200))
    claimed = draw.choice([len(body), 0, 10, len(body) + 5, "x"])
    inner = draw.choice([0, 5, len(body), 2**31, -1, "x"])
    binary = f"Inference-Header-Content-Length: {inner}\r\n" if draw.random() < 0.5 else ""
    path = draw.choice(["infer", "generate", "generate_stream", "%00", "../../x", "load", "stats", ""])
    method = draw.choice(["POST", "PUT", "GET", "P\0ST"])
    head = f"{method} /v2/models/whole/{path} HTTP/1.1\r\nHost: x\r\n{binary}"
    if draw.random() < 0.15:
        return draw.randbytes(draw.randrange(1, 300))
    return f"{head}Content-Length: {claimed}\r\n\r\n".encode() + body


def raw_bytes(server, count):
    """Bytes on the HTTP port. The server may close the connection without a word, so that is no harm here."""

    def some(part):
        draw, told = random.Random(300 + part), collections.Counter()
        for _ in range(part, count, NUM_CONNECTIONS):
            with socket.create_connection(("127.0.0.1", server.http_port), timeout=WAIT_SECONDS) as connection:
                connection.sendall(_bytes(draw))
                connection.shutdown(socket.SHUT_WR)
                told[_first_code(connection)] += 1
        return told

    return _together(some)


def _first_code(connection):
    try:
        words = connection.recv(4096).split(b" ", 2)
    except OSError:
        return "closed"
    # Triton's HTTP front answers what it does not know with 500 itself; only that it goes on counts here.
    return f"front {words[1].decode(errors='replace')}" if len(words) > 1 else "closed"


def _together(some):
    told = collections.Counter()
    with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
        for one in pool.map(some, range(NUM_CONNECTIONS)):
            told += one
    return told


RUNS = {"tensors": tensors, "json": json_bodies, "bytes": raw_bytes}
