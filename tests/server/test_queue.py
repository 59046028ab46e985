"""Requests wait in the backend, by the policy that `dynamic_batching` gives: in the order of their priorities, as many and
as long as it allows, and looked after all the while.
"""

import time

import numpy as np
import pytest

from harness import client
from harness.held import Held
from harness.repository import Model
from harness.server import eventually

LONG = dict(text_input="A very long story:", max_tokens=100, ignore_eos=True, stream=True)
BRIEF = dict(text_input="A story:", max_tokens=4, ignore_eos=True, stream=True)
ONE = {"max_tokens_in_paged_kv_cache": 128, "max_running": 1}


# Seconds until a request is put off: far more than it takes to let one go that has just come.
PATIENCE = 4


def policy(text, more=""):
    return f"dynamic_batching {{ {more} default_queue_policy {{ {text} }} }}"


@pytest.fixture(scope="module")
def server(serve, small_engine):
    limit = "default_timeout_microseconds: 400000 allow_timeout_override: true timeout_action:"
    levels = "priority_levels: 3 default_priority_level: 2"
    return serve([
        Model("bounded", small_engine, parameters=ONE, extra=policy("max_queue_size: 2")),
        Model("timed", small_engine, parameters=ONE, extra=policy(f"{limit} REJECT")),
        Model("patient", small_engine, parameters=ONE,
              extra=policy(f"default_timeout_microseconds: {PATIENCE * 1_000_000} timeout_action: DELAY")),
        Model("ranked", small_engine, parameters=ONE, extra=policy("max_queue_size: 100", levels)),
        Model("plain", small_engine, parameters={**ONE, "max_queue_size": 100}),
        Model("token", small_engine, parameters={**ONE, "profile": "token"}),
        Model("held_back", small_engine, parameters={**ONE, "max_queue_size": 1, "when_full": "hold_back"},
              extra=policy("max_queue_size: 2")),
    ], gates=True)


def held(server, model, options=LONG, **how):
    """A model whose one place is taken."""
    return Held(server, model, options, **how)


def begun(stream):
    """When the first step took part of a request."""
    return int(stream.rest().good().value("first_scheduled_time_ns"))


def in_order(streams):
    """The names of streams in the order in which they were begun."""
    at = {name: begun(stream) for name, stream in streams.items()}
    for stream in streams.values():
        stream.close()
    return sorted(at, key=at.get)


def ask(server, model, **how):
    return client.Stream(server, model, {**BRIEF, "return_perf_metrics": True}, **how)


def test_requests_beyond_the_queue_are_refused_as_unavailable_and_the_others_finish(server):
    with held(server, "bounded") as full:
        waiting = [client.Stream(server, "bounded", BRIEF) for _ in range(2)]
        full.waiting(2)
        for _ in range(3):
            assert "maximum queue size" in client.grpc_stream(server, "bounded", LONG).error
        assert "maximum queue size" in client.generate(server, "bounded", {**LONG, "stream": False}).error
    for stream in waiting:
        assert stream.rest().good().finals == 1
        stream.close()
    assert client.grpc_stream(server, "bounded", {**BRIEF, "stream": False}).good().finals == 1


def test_a_model_that_holds_triton_back_lets_its_queue_refuse(server):
    """With status 503 of the generate endpoint. One waits in the backend, one keeps Triton's thread, two wait in Triton."""
    pending = lambda: server.metric("nv_inference_pending_request_count", model="held_back")
    with held(server, "held_back") as full:
        waiting = [client.Stream(server, "held_back", BRIEF)]
        full.waiting(1)
        for count in [0, 1, 2]:
            # They come one by one: the first is no longer pending when the second is.
            waiting.append(client.Stream(server, "held_back", BRIEF))
            eventually(lambda: pending() >= count, what=f"{count} pend in Triton")
        refused = client.generate(server, "held_back", {**BRIEF, "stream": False})
        assert refused.status == "503" and "maximum queue size" in refused.error
    for stream in waiting:
        assert stream.rest().good().finals == 1
        stream.close()


def test_a_place_in_the_queue_is_free_again_when_its_client_leaves(server):
    with held(server, "bounded") as full:
        waiting = [client.Stream(server, "bounded", BRIEF) for _ in range(2)]
        full.waiting(2)
        for stream in waiting:
            stream.cancel()
        full.waiting(0)
        with client.Stream(server, "bounded", BRIEF):
            full.waiting(1)


def test_a_request_that_waits_longer_than_the_queue_allows_is_refused(server):
    with held(server, "timed"):
        started = time.monotonic()
        answer = client.grpc_stream(server, "timed", BRIEF)
        assert "timeout" in answer.error.lower(), answer.error
        assert time.monotonic() - started > 0.4


def test_the_time_of_the_queue_does_not_count_once_a_request_runs(server):
    with held(server, "timed", BRIEF) as full:
        time.sleep(0.5)
        full.gate.open()
        assert full.stream.rest().good().finals == 1


def test_a_request_may_shorten_its_time_in_the_queue(server):
    with held(server, "timed") as full:
        started = time.monotonic()
        answer = client.grpc_stream(server, "timed", BRIEF, timeout=100_000)
        assert "timeout" in answer.error.lower(), answer.error
        assert time.monotonic() - started > 0.1
        full.waiting(0)


def test_a_request_that_is_put_off_is_served_behind_those_that_came_later(server):
    with held(server, "patient") as full:
        waiting = {"first": ask(server, "patient")}
        full.waiting(1)
        time.sleep(PATIENCE + 0.1)
        waiting["second"] = ask(server, "patient")
        full.waiting(2)
        full.go()
        assert in_order(waiting) == ["second", "first"]


@pytest.mark.parametrize("behind", [1, 12])
def test_higher_priorities_are_served_first(server, behind):
    """However many were handed over before."""
    with held(server, "ranked") as full:
        waiting = {}
        defaults = [(f"default {idx}", {}) for idx in range(behind)]
        ranked = [(name, {"priority": level}) for level, name in [(3, "low"), (2, "middle"), (1, "high")]]
        for name, options in defaults + ranked:
            waiting[name] = ask(server, "ranked", **options)
            # Those that are sent at once may arrive in any order.
            full.waiting(len(waiting))
        full.go()
        order = in_order(waiting)
    assert order == ["high", *(f"default {idx}" for idx in range(behind)), "middle", "low"]


def test_a_priority_may_be_an_input_too(server):
    """It wins over what stands beside the inputs."""
    with held(server, "ranked") as full:
        options = {**BRIEF, "return_perf_metrics": True}
        waiting = {"default": ask(server, "ranked")}
        full.waiting(1)
        waiting["low"] = client.Stream(server, "ranked", {**options, "priority": 3}, priority=1)
        full.waiting(2)
        waiting["high"] = client.Stream(server, "ranked", {**options, "priority": 1})
        full.waiting(3)
        full.go()
        assert in_order(waiting) == ["high", "default", "low"]


def test_rows_of_a_large_request_do_not_keep_the_others_waiting(server):
    rows = 6
    column = lambda value, dtype: np.full((rows, 1), value, dtype=dtype)
    many = {
        "text_input": column(b"A story:", np.object_), "max_tokens": column(4, np.int32),
        "ignore_eos": column(True, np.bool_), "return_perf_metrics": column(True, np.bool_),
        "stream": column(True, np.bool_),
    }
    with held(server, "plain") as full:
        batch = client.Stream(server, "plain", many)
        full.waiting(rows)
        single = ask(server, "plain")
        full.waiting(rows + 1)
        full.go()
        alone = begun(single)
        firsts = {}
        for reply in batch.rest().good().replies:
            if "first_token_time_ns" in reply.outputs:
                row = int(reply.outputs["batch_index"].reshape(-1)[0])
                firsts[row] = int(reply.outputs["first_token_time_ns"].reshape(-1)[0])
        for stream in (batch, single):
            stream.close()
    assert len(firsts) == rows
    assert sum(first < alone for first in firsts.values()) == 2, "its own row, and that of the request's turn"


@pytest.mark.parametrize("model", ["ranked", "plain"])
def test_one_that_waits_behind_others_is_looked_after(server, model):
    with held(server, model) as full:
        others = [client.Stream(server, model, BRIEF) for _ in range(4)]
        full.waiting(4)
        assert "expired" in client.grpc_stream(server, model, BRIEF, timeout=50_000).error
        with client.Stream(server, model, BRIEF) as leaves:
            full.waiting(5)
            leaves.cancel()
        full.waiting(4)
        for stream in others:
            stream.cancel()


def test_a_stop_request_takes_effect_at_once_however_full_the_model_is(server):
    ids = dict(input_ids=[1, 2, 3], ignore_eos=True, streaming=True)
    options = {**ids, "request_output_len": 100}
    with held(server, "token", options, request_id="target") as full:
        others = [client.Stream(server, "token", options, request_id=f"other {idx}") for idx in range(3)]
        full.waiting(3)
        stop = dict(input_ids=[1], stop=True)
        # The one that waits and the one that runs; none gets a step.
        for name, stream in [("other 1", others[1]), ("target", full.stream)]:
            assert client.grpc_stream(server, "token", stop, request_id=name).good().finals == 1
            assert stream.rest().good().finals == 1
        full.waiting(2)
        for stream in others:
            stream.cancel()


def test_a_stop_request_ends_nothing_of_another_name(server):
    options = dict(input_ids=[1, 2, 3], ignore_eos=True, streaming=True, request_output_len=100)
    with held(server, "token", options, request_id="target") as full:
        for name in ["Target", "targe", ""]:
            assert client.grpc_stream(server, "token", dict(input_ids=[1], stop=True), request_id=name).good()
        assert full.stream.next() is not None
        full.gate.let_pass(1)
        assert full.stream.next() is not None


def test_waiting_requests_show_in_the_metrics(server):
    with held(server, "ranked") as full:
        with client.Stream(server, "ranked", BRIEF):
            full.waiting(1)
            assert server.requests("ranked", "scheduled") == 1
    eventually(lambda: server.requests("ranked", "waiting") == 0 and server.requests("ranked", "active") == 0)


def test_time_in_the_queue_counts_as_queue_time(server):
    queue_ns = lambda: server.statistics("ranked")["inference_stats"]["queue"]["ns"]
    before = queue_ns()
    with held(server, "ranked") as full:
        waiting = client.Stream(server, "ranked", BRIEF)
        full.waiting(1)
        time.sleep(0.6)
        full.go()
        waiting.rest().good()
        waiting.close()
    eventually(lambda: queue_ns() - before > 500_000_000, what="half a second of queue time")
