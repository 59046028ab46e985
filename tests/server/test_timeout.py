"""Time limits: the client's own deadline, the request's `timeout`, and the model's `request_timeout_ms`.
A limit that passes ends the request, frees what it held, and touches no other.
"""

import http.client
import json
import time

import pytest

from harness import client
from harness.held import Held
from harness.repository import Model
from harness.server import eventually

# Held behind its first steps: nothing but a limit ends it.
LONG = dict(text_input="A very long story:", max_tokens=900, ignore_eos=True)
SHORT = dict(text_input="A short story:", max_tokens=3)
LIMIT_SECONDS = 0.5
EXPIRED = "timeout expired"
MODELS = ["stream", "whole", "limited", "narrow"]


@pytest.fixture(scope="module")
def server(serve, engine):
    pool = {"max_tokens_in_paged_kv_cache": 4096}
    return serve([
        Model("stream", engine, parameters=pool),
        Model("whole", engine, decoupled=False, parameters=pool),
        Model("limited", engine, parameters={**pool, "request_timeout_ms": int(LIMIT_SECONDS * 1000)}),
        Model("narrow", engine, parameters={"max_tokens_in_paged_kv_cache": 1024, "max_running": 1}),
    ], gates=True)


@pytest.fixture
def held(server):
    """All models run two steps more, and then none."""
    gates = [server.gate(model) for model in MODELS]
    for gate in gates:
        gate.let_pass(2)
    yield
    for gate in gates:
        gate.open()


@pytest.fixture(autouse=True)
def nothing_is_left(server):
    yield
    for model in MODELS:
        eventually(lambda: server.pages(model, "used") == 0, what=f"{model}: no page in use")
    assert client.grpc_stream(server, "stream", SHORT).good().finals == 1


def timed(ask):
    started = time.monotonic()
    answer = ask()
    return answer, time.monotonic() - started


def test_a_deadline_of_a_grpc_call(server, held):
    answer, seconds = timed(lambda: client.grpc_infer(server, "whole", LONG, client_timeout=LIMIT_SECONDS))
    assert answer.status == "StatusCode.DEADLINE_EXCEEDED"
    assert seconds >= LIMIT_SECONDS


def test_a_deadline_of_a_grpc_stream(server, held):
    options = {**LONG, "stream": True}
    answer, seconds = timed(lambda: client.grpc_stream(server, "stream", options, client_timeout=LIMIT_SECONDS))
    assert answer.status == "StatusCode.DEADLINE_EXCEEDED" and answer.finals == 0
    assert seconds >= LIMIT_SECONDS


@pytest.mark.parametrize("path", ["generate", "infer"])
def test_an_http_client_that_waits_no_longer(server, held, path):
    """Tritonserver 2.51 does not watch the connection of a request that it answers once, so the request may run to
    its end."""
    body = asked = {**LONG, "max_tokens": 12}
    if path == "infer":
        tensor = lambda name, kind, value: {"name": name, "datatype": kind, "shape": [1, 1], "data": [value]}
        kinds = {"text_input": "BYTES", "max_tokens": "INT32", "ignore_eos": "BOOL"}
        body = {"inputs": [tensor(name, kinds[name], value) for name, value in asked.items()]}
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=LIMIT_SECONDS)
    connection.request("POST", f"/v2/models/whole/{path}", json.dumps(body))
    with pytest.raises(TimeoutError):
        connection.getresponse()
    connection.close()


@pytest.mark.parametrize("door", ["grpc", "http"])
def test_the_timeout_of_a_request_is_honoured_while_it_runs(server, door):
    """The limit is raised until there is time for a step, however slow the machine."""
    for seconds in [LIMIT_SECONDS * 4**i for i in range(4)]:
        server.gate("stream").let_pass(2)
        options, us = {**LONG, "stream": True}, int(seconds * 1e6)
        answer = {
            "grpc": lambda: client.grpc_stream(server, "stream", options, timeout=us),
            "http": lambda: client.generate_stream(server, "stream", {**options, "timeout": us}),
        }[door]()
        server.gate("stream").open()
        assert EXPIRED in answer.error
        if answer.chunks:
            return
    raise AssertionError("it never ran")


def test_the_timeout_of_an_http_request_is_honoured(server, held):
    answer, seconds = timed(lambda: client.http_infer(server, "whole", LONG, timeout=int(LIMIT_SECONDS * 1e6)))
    assert answer.status == "503", answer.error
    assert seconds >= LIMIT_SECONDS


def test_the_timeout_of_a_generate_request_is_honoured(server, held):
    options = {**LONG, "timeout": int(LIMIT_SECONDS * 1e6)}
    answer, seconds = timed(lambda: client.generate(server, "stream", options))
    assert EXPIRED in (answer.error or answer.text)
    assert seconds >= LIMIT_SECONDS


def test_the_timeout_counts_while_a_request_waits(server):
    with Held(server, "narrow", {**LONG, "stream": True}) as running:
        assert running.stream.next() is not None
        answer, seconds = timed(lambda: client.grpc_stream(server, "narrow", LONG, timeout=int(LIMIT_SECONDS * 1e6)))
        assert EXPIRED in answer.error
        assert seconds >= LIMIT_SECONDS
        running.gate.let_pass(1)
        assert running.stream.next() is not None


def test_a_request_within_its_timeout_is_untouched(server):
    plain = client.grpc_stream(server, "stream", SHORT).good()
    limited = client.grpc_stream(server, "stream", SHORT, timeout=60_000_000).good()
    assert limited.text == plain.text


def test_the_limit_of_the_model_holds_for_every_request(server, held):
    answer, seconds = timed(lambda: client.grpc_stream(server, "limited", {**LONG, "stream": True}))
    assert EXPIRED in answer.error
    assert seconds >= LIMIT_SECONDS


def test_a_request_cannot_ask_for_more_than_the_limit_of_the_model(server, held):
    answer, seconds = timed(lambda: client.grpc_stream(server, "limited", LONG, timeout=60_000_000))
    assert EXPIRED in answer.error
    assert seconds >= LIMIT_SECONDS


def test_a_deadline_that_passed_is_counted_as_a_failure_once(server, held):
    fails = lambda: server.statistics("stream")["inference_stats"]["fail"]["count"]
    before = fails()
    assert client.grpc_stream(server, "stream", LONG, timeout=1000).error
    eventually(lambda: fails() == before + 1)
