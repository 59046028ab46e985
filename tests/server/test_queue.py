"""Back-pressure: while a model is full, its requests wait in Triton's queue, whose policy then counts: its
length, its time limit, its priorities.
"""

import time

import pytest

from harness import client
from harness.repository import Model
from harness.server import eventually

# One sequence of this length fills the pages of a model, the next waits inside, a third blocks its instance.
LONG = dict(text_input="A very long story:", max_tokens=120, ignore_eos=True, stream=True)
BRIEF = dict(text_input="A story:", max_tokens=120, ignore_eos=True, stop_words=[" the"], stream=True)
FULL = {"max_tokens_in_paged_kv_cache": 128, "max_queue_size": 1, "enable_kv_cache_reuse": "false"}


def policy(text, more=""):
    return f"dynamic_batching {{ {more} default_queue_policy {{ {text} }} }}"


@pytest.fixture(scope="module")
def server(serve, small_engine):
    small = Model("small", small_engine, parameters=FULL, extra=policy("max_queue_size: 2"))
    limit = "timeout_action: REJECT default_timeout_microseconds: 400000 allow_timeout_override: true"
    timed = Model("timed", small_engine, parameters=FULL, extra=policy(limit))
    levels = "priority_levels: 3 default_priority_level: 2"
    ranked = Model("ranked", small_engine, parameters=FULL, extra=policy("max_queue_size: 100", levels))
    return serve([small, timed, ranked])


class Filled:
    """Keeps a model full: one request runs, one waits inside, one blocks the instance."""

    def __init__(self, server, model):
        self.server, self.model, self.streams = server, model, []

    def __enter__(self):
        for _ in range(3):
            self.streams.append(client.Stream(self.server, self.model, LONG))
            # Only what has started makes the next one wait.
            assert len(self.streams) > 1 or self.streams[0].next() is not None
            time.sleep(0.1)
        return self

    def __exit__(self, *_):
        for stream in reversed(self.streams):
            stream.cancel()
        eventually(lambda: self.server.pages(self.model, "used") == 0, what=f"{self.model}: empty again")


def pending(server, model):
    return server.metric("nv_inference_pending_request_count", model=model)


def test_requests_beyond_the_queue_are_refused_as_unavailable_and_the_admitted_ones_finish(server):
    """They are let finish, not cancelled: tritonserver 2.51 keeps a model for ever whose queue refused some requests
    and had others cancelled, whatever its backend."""
    admitted = []
    for asked in [LONG, LONG, LONG, BRIEF, BRIEF]:
        admitted.append(client.Stream(server, "small", asked))
        # One runs, one waits inside, one blocks the instance; they must come one by one for that.
        assert len(admitted) > 1 or admitted[0].next() is not None
        time.sleep(0.15)
    eventually(lambda: pending(server, "small") == 2, what="two pend in Triton")
    for _ in range(3):
        assert "maximum queue size" in client.grpc_stream(server, "small", LONG).error
    assert client.generate(server, "small", {**LONG, "stream": False}).status == "503"
    for stream in admitted:
        assert stream.rest().good().finals == 1
        stream.close()
    assert client.grpc_stream(server, "small", {**BRIEF, "stream": False}).good().finals == 1


def test_a_request_that_waits_longer_than_the_queue_allows_is_refused(server):
    with Filled(server, "timed"):
        started = time.monotonic()
        answer = client.grpc_stream(server, "timed", LONG)
        assert "timeout" in answer.error.lower(), answer.error
        assert 0.3 < time.monotonic() - started < 5


def test_a_request_may_shorten_its_time_in_the_queue(server):
    with Filled(server, "timed"):
        started = time.monotonic()
        answer = client.grpc_stream(server, "timed", LONG, timeout=100_000)
        assert "timeout" in answer.error.lower(), answer.error
        assert time.monotonic() - started < 5


def test_higher_priorities_are_served_first_under_back_pressure(server):
    finished = []
    with Filled(server, "ranked") as full:
        waiting = {}
        for name, priority in [("low", 3), ("middle", 2), ("default", 0), ("high", 1)]:
            waiting[name] = client.Stream(server, "ranked", BRIEF, priority=priority)
            time.sleep(0.1)
        eventually(lambda: pending(server, "ranked") >= 4, what="all pend in Triton")
        for stream in full.streams:
            stream.cancel()
        first_times = {}
        while len(first_times) < len(waiting):
            for name, stream in waiting.items():
                if name not in first_times and not stream.arrived.empty():
                    first_times[name] = time.monotonic()
            time.sleep(0.002)
        finished = sorted(first_times, key=first_times.get)
        for stream in waiting.values():
            stream.rest().good()
            stream.close()
    assert finished[0] == "high" and finished[-1] == "low", finished


def test_waiting_requests_show_in_the_metrics(server):
    request = lambda kind: server.metric("nv_trt_llm_request_metrics", model="ranked", request_type=kind)
    with Filled(server, "ranked"):
        # One waits inside, one at the door.
        eventually(lambda: 1 <= request("waiting") <= 2)
        assert request("scheduled") == 1
    eventually(lambda: request("waiting") == 0 and request("active") == 0)


def test_time_in_the_queue_of_the_backend_counts_as_queue_time(server):
    queue_ns = lambda: server.statistics("ranked")["inference_stats"]["queue"]["ns"]
    before = queue_ns()
    with client.Stream(server, "ranked", LONG) as running:
        running.next()
        with client.Stream(server, "ranked", BRIEF) as waiting:
            time.sleep(0.8)
            running.cancel()
            waiting.rest().good()
    eventually(lambda: queue_ns() - before > 500_000_000, what="half a second of queue time")
