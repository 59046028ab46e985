"""A trace that a client began goes on in the server, with the phases of a request inside the backend."""

import json

import pytest

from harness import client
from harness.cases import LIST
from harness.otlp import Receiver
from harness.repository import Model
from harness.server import eventually

TRACE_ID, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONTEXT = {"traceparent": f"00-{TRACE_ID}-{CLIENT_SPAN}-01"}
PHASES = ["SPEC_QUEUE", "SPEC_PREFILL", "SPEC_DECODE"]


@pytest.fixture(scope="module")
def receiver():
    with Receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def server(serve, engine, receiver):
    settings = ["mode=opentelemetry", "rate=0", "level=TIMESTAMPS", f"opentelemetry,url={receiver.url}",
                "opentelemetry,bsp_schedule_delay=50"]
    return serve([Model("traced", engine, parameters={"draft_len": 8})],
                 args=[f"--trace-config={setting}" for setting in settings])


def spans_of(receiver, trace_id):
    """The spans of a trace by name, once its request's is among them."""
    found = lambda: {span.name: span for span in receiver.spans if span.trace_id == trace_id}
    eventually(lambda: "InferRequest" in found(), what="the request's span")
    return found()


def test_the_phases_of_a_request_are_spans_of_its_clients_trace(server, receiver):
    body = {"text_input": LIST, "max_tokens": 40, "return_perf_metrics": True, "return_num_output_tokens": True}
    status, _, answer = server.http("POST", "/v2/models/traced/generate", body, CONTEXT)
    assert status == 200, answer
    answer, spans = json.loads(answer), spans_of(receiver, TRACE_ID)
    assert spans["InferRequest"].parent_id == CLIENT_SPAN
    model = spans["traced"]
    assert model.parent_id == spans["InferRequest"].span_id
    phases = [spans[name] for name in PHASES]
    assert {phase.parent_id for phase in phases} == {model.span_id}
    times = [model.start, *[time for phase in phases for time in (phase.start, phase.end)], model.end]
    assert times == sorted(times), "one phase after the other, all within the model's span"
    assert phases[0].end == phases[1].start and phases[1].end == phases[2].start
    tokens, drafted, accepted = (
        answer[name] for name in ["num_output_tokens", "total_draft_tokens", "total_accepted_draft_tokens"])
    assert drafted >= accepted > 0
    assert f"SPEC tokens={tokens} drafted={drafted} accepted={accepted}" in model.events


def test_a_request_that_fails_has_the_phases_that_it_came_to(server, receiver):
    trace_id = TRACE_ID[::-1]
    body = {"text_input": "x", "max_tokens": -1}
    status = server.http("POST", "/v2/models/traced/generate", body, {"traceparent": f"00-{trace_id}-{CLIENT_SPAN}-01"})[0]
    assert status == 400
    spans = spans_of(receiver, trace_id)
    assert "traced" in spans and not set(PHASES) & set(spans)


def test_who_is_not_traced_tells_nothing(server, receiver):
    assert client.grpc_stream(server, "traced", {"text_input": "x", "max_tokens": 2}).good()
    # Traces come in the order of their ends: behind this one that of the request before it would be there.
    trace_id = TRACE_ID[1:] + TRACE_ID[0]
    server.http("POST", "/v2/models/traced/generate", {"text_input": "x", "max_tokens": 2},
                {"traceparent": f"00-{trace_id}-{CLIENT_SPAN}-01"})
    spans_of(receiver, trace_id)
    traced = [span for span in receiver.spans if span.name == "SPEC_DECODE" or span.name == "InferRequest"]
    assert all(span.trace_id in (TRACE_ID, TRACE_ID[::-1], trace_id) for span in traced)
