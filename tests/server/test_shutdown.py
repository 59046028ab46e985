"""A server that is told to end, whatever it is doing: it ends within its exit timeout and two seconds, with code 0, or with
1 where that time was not enough, and every client hears the end of its request.

SPEC_SHUTDOWNS=N runs each case N times, SPEC_EXIT_SECONDS is the exit timeout: a slow machine needs a longer one.
"""

import itertools
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness import client
from harness.repository import Model
from harness.server import eventually

EXIT_SECONDS = int(os.environ.get("SPEC_EXIT_SECONDS", 3))
ROUNDS = int(os.environ.get("SPEC_SHUTDOWNS", 1))
POOL = {"max_tokens_in_paged_kv_cache": 4096}
# Told one step at a time, they last as long as they are wanted.
LONG = dict(text_input="A very long story:", max_tokens=400, ignore_eos=True, stream=True)
NAMES = ["one", "two", "three"]
ENDED = "the server is shutting down"


class Dripping:
    """Lets models run a step now and then, so that their streams go on and do not end."""

    def __init__(self, server, models):
        self.gates = [server.gate(model) for model in models]
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self):
        while not self.ended.wait(0.02):
            for gate in self.gates:
                gate.let_pass(1)

    def __enter__(self):
        for gate in self.gates:
            gate.shut()
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()


def end(server):
    """Asks the server to end; its code."""
    started = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    try:
        code = server.process.wait(EXIT_SECONDS + 30)
    except Exception:
        server.kill()
        raise
    assert time.monotonic() - started < EXIT_SECONDS + max(2, EXIT_SECONDS / 2)
    assert code in (0, 1), server.log[-3000:]
    assert code == 0 or re.search("Exit timeout expired|has not ended within its exit timeout", server.log)
    return code


DOORS = {
    "http": lambda server, model: client.generate_stream(server, model, LONG),
    "grpc": lambda server, model: client.grpc_stream(server, model, LONG),
    "plain": lambda server, model: client.generate(server, model, {**LONG, "stream": False}),
}


class Streams:
    """Requests in flight, each of which has begun."""

    def __init__(self, server, doors, models, each=3):
        asked = [(door, model) for door, model, _ in itertools.product(doors, models, range(each))]
        self.pool = ThreadPoolExecutor(len(asked))
        self.answers = [self.pool.submit(DOORS[door], server, model) for door, model in asked]
        for model in models:
            count = sum(one == model for _, one in asked)
            eventually(lambda: server.requests(model, "scheduled") == count, what=f"{model}: {count} run")

    def told(self):
        """What each client was told when its request ended."""
        answers = [answer.result() for answer in self.answers]
        self.pool.shutdown()
        return [answer.error or "".join(answer.chunks[-1:]) for answer in answers]


@pytest.fixture
def start(serve, engine):
    def start(models=NAMES[:1], instances=1, **how):
        models = [Model(name, engine, parameters=POOL, instances=instances) for name in models]
        return serve(models, gates=True, args=[f"--exit-timeout-secs={EXIT_SECONDS}"], **how)

    return start


rounds = pytest.mark.parametrize("_round", range(ROUNDS))


@rounds
@pytest.mark.parametrize("instances", [1, 3])
@pytest.mark.parametrize("models", [1, 3])
@pytest.mark.parametrize("doors", [["http"], ["grpc"], ["http", "grpc", "plain"]], ids="-".join)
def test_under_load(start, doors, models, instances, _round):
    server = start(NAMES[:models], instances)
    with Dripping(server, NAMES[:models]):
        streams = Streams(server, doors, NAMES[:models])
        assert end(server) == 0
        assert streams.told() == [ENDED] * len(streams.answers)


def loading(server, model):
    """Starts to load a model, over gRPC: over HTTP tritonserver 2.51 keeps a thread busy with it that other clients may
    share."""

    def load():
        with server.grpc() as grpc:
            grpc.load_model(model)

    pool = ThreadPoolExecutor(1)
    loaded = pool.submit(load)
    eventually(lambda: f"loading: {model}" in server.log, what=f"{model} is loading")
    return loaded


@rounds
def test_while_a_model_is_loading(start, _round):
    server = start(NAMES[:2], load=["one"])
    (server.gates / "two.load").touch()
    with Dripping(server, ["one"]):
        streams = Streams(server, ["http", "grpc"], ["one"])
        loaded = loading(server, "two")
        end(server)
        assert streams.told() == [ENDED] * len(streams.answers)
        assert loaded.exception() is not None


@rounds
def test_while_a_model_is_unloading(start, _round):
    server = start(NAMES[:2])
    with Dripping(server, NAMES[:2]):
        streams = Streams(server, ["http", "grpc"], NAMES[:2])
        assert server.unload("two") is None
        end(server)
        assert streams.told() == [ENDED] * len(streams.answers)


@rounds
def test_with_an_engine_thread_that_does_not_come_back(start, _round):
    server = start()
    with Dripping(server, ["one"]):
        streams = Streams(server, ["http", "grpc"], ["one"])
        (server.gates / "one.stuck").touch()
        assert end(server) == 1
        assert streams.told() == [ENDED] * len(streams.answers)


@rounds
def test_with_requests_that_wait(start, _round):
    server = start()
    server.gate("one").shut()
    with ThreadPoolExecutor(6) as pool:
        doors = ["http", "grpc", "plain"] * 2
        answers = [pool.submit(DOORS[door], server, "one") for door in doors]
        eventually(lambda: server.requests("one", "waiting") == len(doors), what="all wait")
        assert end(server) == 0
        assert [answer.result().error for answer in answers] == [ENDED] * len(answers)


@rounds
def test_with_clients_that_keep_their_streams_open(start, _round):
    """What they asked is answered. Tritonserver 2.51 itself would wait for them for ever."""
    server = start()
    streams = [client.Stream(server, "one", {**LONG, "max_tokens": 3}) for _ in range(2)]
    for stream in streams:
        assert stream.rest().good().finals == 1
    end(server)
    for stream in streams:
        stream.close()


def test_what_runs_may_finish(serve, engine, reference):
    """Told one step at a time behind the signal, which would be too late if it were cut at once."""
    model = Model("one", engine, parameters={**POOL, "drain_timeout_ms": 60_000})
    server = serve([model], gates=True, args=["--exit-timeout-secs=120"])
    asked = {**LONG, "max_tokens": 150}
    gate = server.gate("one")
    gate.shut()
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(ask, server, "one", asked) for ask in [client.generate_stream, client.grpc_stream]]
        both_run = lambda: gate.let_pass(1) or server.requests("one", "scheduled") == len(answers)
        eventually(both_run, what="both run")
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: "Signal (15) received" in server.log, what="it is told to end")
        with Dripping(server, ["one"]):
            texts = [answer.result().good().text for answer in answers]
    assert texts == 2 * [reference.text(**{**asked, "stream": False})]
    assert server.process.wait(150) == 0


@rounds
def test_with_nothing_to_do(start, _round):
    assert end(start(NAMES, 2)) == 0
