"""Faults: an engine thread that panics, a step that fails on the device, and thousands of malformed requests.
Those that are hit are told; the server, other models and later requests are not harmed.

SPEC_FUZZ_REQUESTS sets how many malformed requests are sent (2,000 by default).
"""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness import client, fuzz, places
from harness.cases import CASES
from harness.repository import Model
from harness.server import eventually

ASKED = CASES[0][1]
POOL = {"max_tokens_in_paged_kv_cache": 4096}
# The step of an engine in which it fails; what is asked before must need fewer.
FAULT_STEP = 40
LONG = dict(text_input="A very long story:", max_tokens=200, ignore_eos=True, stream=True, num_draft_tokens=0)
BRIEF = dict(text_input="The capital of France is", max_tokens=3)
NUM_FUZZED = int(os.environ.get("SPEC_FUZZ_REQUESTS", 2000))


def faulty(serve, engine, fault):
    models = [Model(name, engine, parameters=POOL) for name in ["hit", "other"]]
    models.append(Model("whole", engine, decoupled=False, parameters=POOL))
    return serve(models, env={"SPEC_FAULT": f"{fault}:{FAULT_STEP}"}, gates=True, panics=True)


class Hit:
    """A server whose models have just met their fault: `hit` with three streams in flight, `whole` with two requests."""

    def __init__(self, server):
        self.server = server
        assert client.grpc_stream(server, "hit", BRIEF).good().text
        with server.gate("hit"):
            streams = [client.Stream(server, "hit", LONG) for _ in range(3)]
            eventually(lambda: server.requests("hit", "waiting") == 3, what="all are there")
        self.answers = [stream.rest() for stream in streams]
        for stream in streams:
            stream.close()
        ask = lambda _: client.grpc_infer(server, "whole", {**LONG, "stream": False})
        with ThreadPoolExecutor(2) as pool:
            with server.gate("whole"):
                answers = pool.map(ask, range(2))
                eventually(lambda: server.requests("whole", "waiting") == 2, what="both are there")
            self.codes = [answer.status for answer in answers]


@pytest.fixture(scope="module")
def panicked(serve, engine):
    return Hit(faulty(serve, engine, "panic"))


@pytest.fixture(scope="module")
def failed(serve, engine):
    return Hit(faulty(serve, engine, "error"))


def test_a_panic_fails_the_requests_in_flight_as_internal(panicked):
    for answer in panicked.answers:
        assert answer.finals == 0, answer
        assert "panic" in answer.error, answer.error
        assert answer.chunks, "they had run"
    assert panicked.codes == ["StatusCode.INTERNAL"] * 2


def test_after_a_panic_later_requests_are_told_the_cause(panicked):
    for _ in range(2):
        assert "panic" in client.grpc_stream(panicked.server, "hit", BRIEF).error
        answer = client.grpc_infer(panicked.server, "whole", BRIEF)
        assert answer.status == "StatusCode.UNAVAILABLE" and "panic" in answer.error, answer


def test_after_a_panic_the_server_lives_and_other_models_serve(panicked, reference):
    assert panicked.server.is_live()
    assert client.grpc_stream(panicked.server, "other", BRIEF).good().text == reference.text(**BRIEF)


def is_alive(server):
    """What the liveness probe of a container says."""
    command = [places.ROOT / "deploy/container/alive", str(server.http_port), str(server.metrics_port)]
    return subprocess.run(command, capture_output=True, text=True)


def test_an_engine_that_died_is_told_to_who_starts_servers_again(panicked, failed):
    eventually(lambda: is_alive(panicked.server).returncode == 1, what="the dead engine is seen")
    assert 'model="hit"' in is_alive(panicked.server).stderr
    probe = is_alive(failed.server)
    assert (probe.returncode, probe.stderr) == (0, ""), "a step that failed is no reason"


def test_after_a_panic_the_model_is_reloaded_and_serves(panicked, reference):
    server = panicked.server
    assert server.unload("hit") is None
    eventually(lambda: not server.is_ready("hit"))
    assert server.load("hit") is None
    assert client.grpc_stream(server, "hit", BRIEF).good().text == reference.text(**BRIEF)
    assert 'model="hit"' not in is_alive(server).stderr


def test_a_failed_step_fails_its_batch_as_internal(failed):
    for answer in failed.answers:
        assert answer.finals == 0, answer
        assert "inject" in answer.error or "fault" in answer.error, answer.error
    assert failed.codes == ["StatusCode.INTERNAL"] * 2


def test_after_a_failed_step_the_model_goes_on_serving(failed, reference):
    assert failed.server.is_ready("hit")
    assert client.grpc_stream(failed.server, "hit", BRIEF).good().text == reference.text(**BRIEF)
    eventually(lambda: failed.server.pages("hit", "used") == 0, what="no page in use")
    assert client.grpc_stream(failed.server, "other", BRIEF).good().text == reference.text(**BRIEF)


def test_failures_by_faults_are_counted(failed):
    fails = lambda: failed.server.statistics("hit")["inference_stats"].get("fail", {}).get("count", 0)
    eventually(lambda: fails() == 3, what="three failures")


@pytest.fixture(scope="module")
def fuzzed(serve, engine):
    return serve([
        Model("stream", engine, parameters=POOL),
        Model("whole", engine, decoupled=False, parameters=POOL),
        Model("vllm", engine, max_batch_size=0, parameters={**POOL, "profile": "vllm"}),
        Model("token", engine, parameters={**POOL, "profile": "token"}),
    ])


# How many of each kind; tensors are where the backend's own parsing is.
SHARES = {"tensors": 0.6, "json": 0.25, "bytes": 0.15}


@pytest.mark.parametrize("kind", SHARES)
def test_malformed_requests_leave_the_server_serving(fuzzed, reference, kind):
    count = int(NUM_FUZZED * SHARES[kind])
    told = fuzz.RUNS[kind](fuzzed, count)
    assert sum(told.values()) == count, told
    assert fuzzed.is_live()
    wrong = {code: n for code, n in told.items() if code in fuzz.HARMED}
    assert not wrong, told
    for model in ["stream", "whole", "token", "vllm"]:
        eventually(lambda: fuzzed.pages(model, "used") == 0, what=f"{model}: no page in use")
    for name in (0, 2, 3):
        asked = CASES[name][1]
        assert client.grpc_stream(fuzzed, "stream", asked).good().text == reference.text(**asked)
        assert client.grpc_infer(fuzzed, "whole", asked).good().text == reference.text(**asked)
