"""Clients that leave a gRPC stream without closing it. Whatever became of their requests, the model must still unload
and the server end: with one exception, which is the server's own, as a backend that does nothing shows.
"""

import json
import queue
import subprocess
import time
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from harness import client, places, raw
from harness.repository import Model
from harness.server import eventually

POOL = {"max_tokens_in_paged_kv_cache": 2048}
EXIT_SECONDS = 2

NOTHING = """
backend: "nothing" max_batch_size: 32 model_transaction_policy { decoupled: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""


@pytest.fixture(scope="module")
def server(serve, engine):
    return serve([Model("ours", engine, parameters=POOL)], gates=True)


@pytest.fixture
def loaded(server):
    assert server.load("ours") is None
    return server


def state(server, model):
    index = json.loads(server.http("POST", "/v2/repository/index", {})[2])
    return next(one.get("state") for one in index if one["name"] == model)


def unload(server, model):
    assert server.unload(model) is None


def unloaded(server, model):
    return state(server, model) == "UNAVAILABLE"


def goes(server, model, seconds):
    """Whether it is unloaded within this time."""
    deadline = time.monotonic() + seconds
    while not unloaded(server, model):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def request(model, *more):
    return raw.request(model, [("text_input", "BYTES", [1, 1], raw.strings("A story:")), *more])


def endless(model):
    return request(model, ("max_tokens", "INT32", [1, 1], raw.int32(900)), ("stream", "BOOL", [1, 1], b"\1"))


def refused(model):
    """By Triton's core: the input is not declared."""
    return request(model, ("no_such_input", "INT32", [1, 1], raw.int32(1)))


def wrong(model):
    """By the backend: the value is out of its limits."""
    return request(model, ("temperature", "FP32", [1, 1], raw.fp32(-1.0)))


def leave(server, *messages):
    """Sends requests on one stream, each after the first response to the one before, and goes: the error of each."""
    with grpc.insecure_channel(server.grpc_url) as channel:
        sent = queue.Queue()
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter(sent.get, None))
        errors = []
        for message in messages:
            sent.put(message)
            errors.append(next(call).error_message)
        call.cancel()
        server.num_cancelled_streams += 1
    return errors


LEFT = {
    "a text in the making": ([endless], ""),
    "a value that the backend refused": ([wrong], "temperature"),
    "a request that the core refused, behind another": ([wrong, refused], "no_such_input"),
    "a text behind a refused value": ([wrong, endless], ""),
}


# The server forgets one stream in hundreds, see scripts/bench/left-streams: not three times running. The last time is long
# enough for any machine.
PATIENCE = [10, 10, 120]


@pytest.mark.parametrize("what", LEFT)
def test_a_model_unloads_after_a_stream_was_left_with(server, what):
    requests, error = LEFT[what]
    for seconds in PATIENCE:
        assert server.load("ours") is None
        said = leave(server, *(make("ours") for make in requests))[-1]
        assert error in said and bool(error) == bool(said), said
        unload(server, "ours")
        if goes(server, "ours", seconds):
            return
    raise AssertionError("still loaded")


def test_a_model_unloads_after_streams_that_wait_were_left(server):
    story = dict(text_input="A story:", max_tokens=4, stream=True)
    for seconds in PATIENCE:
        assert server.load("ours") is None
        with server.gate("ours"):
            streams = [client.Stream(server, "ours", story) for _ in range(3)]
            eventually(lambda: server.requests("ours", "waiting") == 3, what="all wait")
            for stream in streams:
                stream.cancel()
            eventually(lambda: server.requests("ours", "waiting") == 0, what="none waits")
        unload(server, "ours")
        if goes(server, "ours", seconds):
            return
    raise AssertionError("still loaded")


def test_a_model_unloads_after_a_refused_stream_was_closed(loaded):
    with raw.Raw(loaded) as asker:
        code, error = asker.stream(refused("ours"))
    assert code == "ERROR" and "no_such_input" in error
    unload(loaded, "ours")
    eventually(lambda: unloaded(loaded, "ours"), what="unloaded")


def backends_with_nothing(folder):
    """A folder of backends: this one and one that does nothing."""
    (folder / "nothing").mkdir(parents=True)
    (folder / "spec").symlink_to(places.backends() / "spec")
    source = Path(__file__).parent / "harness/nothing.c"
    library = folder / "nothing/libtriton_nothing.so"
    subprocess.run(["cc", "-Wall", "-shared", "-fPIC", "-o", library, source], check=True)
    return folder


def test_a_stream_whose_first_request_the_core_refused_is_kept_by_the_server(serve, engine, tmp_path):
    """tritonserver 2.51 forgets to release it where the client leaves (what is cancelled with a stream are the requests
    that the core took), and with it the model, whoever's that is. No backend hears of the request. A server that does so
    no longer fails here, and its users are rid of the exception."""
    backends = backends_with_nothing(tmp_path / "backends")
    models = [Model(name, engine, parameters=POOL) for name in ["ours", "clock"]]
    how = dict(backends=backends, args=[f"--exit-timeout-secs={EXIT_SECONDS}"], ends=False)
    server = serve(models, load=["ours", "clock"], **how)
    (server.repository.path / "nothing/1").mkdir(parents=True)
    server.repository.configure("nothing", NOTHING)
    assert server.load("nothing") is None
    with raw.Raw(server) as asker:
        assert asker.stream(request("nothing")) == ("OK", None)
    for model in ["nothing", "ours"]:
        assert "no_such_input" in leave(server, refused(model))[0]
        unload(server, model)
    # A model that nothing holds goes in the meantime, so those had the time.
    unload(server, "clock")
    eventually(lambda: unloaded(server, "clock"), what="unloaded")
    assert [state(server, model) for model in ["nothing", "ours"]] == ["UNLOADING", "UNLOADING"]
    # The server waits for them as long as it was told, no longer, and says so by its code.
    assert server.stop() == 1
