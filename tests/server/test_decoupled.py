"""Responses of decoupled and of ordinary models: how many, in which order, and which one is last
(the behaviours of Triton's L0_decoupled that a text model can have).
"""

import queue

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from harness import client
from harness.cases import CASES, LIST
from harness.repository import Model
from harness.server import eventually

ASKED = dict(text_input=LIST, max_tokens=24)
STREAMS = {**ASKED, "stream": True}
REFUSAL = "Streaming is only supported if model is deployed using decoupled mode."


@pytest.fixture(scope="module")
def server(serve, engine):
    pool = {"max_tokens_in_paged_kv_cache": 4096}
    models = [Model("stream", engine, parameters=pool), Model("whole", engine, decoupled=False, parameters=pool)]
    return serve(models, gates=True)


def test_the_transaction_policy_is_told_to_clients(server):
    with server.grpc() as grpc:
        for model, decoupled in [("stream", True), ("whole", False)]:
            config = grpc.get_model_config(model, as_json=True)["config"]
            assert config.get("model_transaction_policy", {}).get("decoupled", False) == decoupled


def test_a_request_that_does_not_stream_gets_one_response_that_is_final(server, reference):
    answer = client.grpc_stream(server, "stream", ASKED).good()
    assert [reply.final for reply in answer.replies] == [True]
    assert answer.text == reference.text(**ASKED)


def test_a_streamed_request_gets_many_responses_and_the_last_is_final(server, reference):
    answer = client.grpc_stream(server, "stream", STREAMS).good()
    assert len(answer.replies) > 1
    assert [reply.final for reply in answer.replies] == [False] * (len(answer.replies) - 1) + [True]
    assert answer.text == reference.text(**ASKED)


def test_the_final_response_of_a_stream_carries_content(server):
    answer = client.grpc_stream(server, "stream", {**STREAMS, "return_num_output_tokens": True}).good()
    assert "text_output" in answer.replies[-1].outputs
    assert answer.sum("num_output_tokens") == 24


@pytest.mark.parametrize("asks_for_empty_finals", [True, False])
def test_empty_final_responses_are_not_needed_whether_asked_for_or_not(server, reference, asks_for_empty_finals):
    with client.Stream(server, "stream", STREAMS, enable_empty_final_response=asks_for_empty_finals) as stream:
        answer = stream.rest().good()
        with pytest.raises(queue.Empty):
            stream.arrived.get(timeout=0.5)
    assert answer.finals == 1
    assert answer.text == reference.text(**ASKED)


def test_one_token_is_one_response(server, reference):
    asked = {**CASES[10][1], "stream": True}
    answer = client.grpc_stream(server, "stream", asked).good()
    assert [reply.final for reply in answer.replies] == [True]
    assert answer.text == reference.text(**CASES[10][1])


def test_responses_of_many_requests_on_one_stream_keep_their_order_and_ids(server, reference):
    cases = [CASES[i][1] for i in (0, 2, 3, 4, 6)]
    arrived = queue.Queue()
    with server.grpc() as grpc:
        grpc.start_stream(lambda result, error: arrived.put((result, error)))
        for i, case in enumerate(cases):
            inputs = client.tensors(grpcclient, {**case, "stream": True})
            grpc.async_stream_infer("stream", inputs, request_id=f"r{i}", enable_empty_final_response=True)
        texts, finals = {}, []
        while len(finals) < len(cases):
            result, error = arrived.get(timeout=client.WAIT_SECONDS)
            assert error is None, error
            reply = client.reply_of(result)
            assert reply.id not in finals, "a response after the final one"
            texts[reply.id] = texts.get(reply.id, "") + (reply.text() or "")
            if reply.final:
                finals.append(reply.id)
        grpc.stop_stream()
    assert texts == {f"r{i}": reference.text(**case) for i, case in enumerate(cases)}


def test_requests_on_one_stream_run_at_once(server):
    long, short = {**STREAMS, "max_tokens": 200, "ignore_eos": True}, {**STREAMS, "max_tokens": 4}
    order = []
    arrived = queue.Queue()
    with server.grpc() as grpc:
        grpc.start_stream(lambda result, error: arrived.put((result, error)))
        with server.gate("stream"):
            for name, asked in [("long", long), ("short", short)]:
                grpc.async_stream_infer(
                    "stream", client.tensors(grpcclient, asked), request_id=name, enable_empty_final_response=True
                )
            eventually(lambda: server.requests("stream", "waiting") == 2, what="both are there")
        while len(order) < 2:
            result, error = arrived.get(timeout=client.WAIT_SECONDS)
            assert error is None, error
            reply = client.reply_of(result)
            order += [reply.id] * reply.final
        grpc.stop_stream()
    assert order == ["short", "long"]


@pytest.mark.parametrize("door", ["grpc_infer", "http_infer"])
def test_a_decoupled_model_is_refused_where_one_response_is_all_that_fits(server, door):
    answer = client.WHOLE[door](server, "stream", ASKED)
    assert "decoupled" in answer.error
    assert client.grpc_stream(server, "stream", ASKED).good().finals == 1


@pytest.mark.parametrize("door", ["grpc_infer", "http_infer", "generate"])
def test_an_ordinary_model_refuses_to_stream(server, door):
    answer = client.WHOLE[door](server, "whole", STREAMS)
    assert REFUSAL in answer.error
    assert answer.status in ("StatusCode.INVALID_ARGUMENT", "400")


def test_an_ordinary_model_refuses_to_stream_over_a_grpc_stream_too(server):
    answer = client.grpc_stream(server, "whole", STREAMS)
    assert REFUSAL in answer.error
    assert client.grpc_stream(server, "whole", ASKED).good().finals == 1


@pytest.mark.parametrize("door", ["grpc_infer", "http_infer", "generate"])
def test_an_ordinary_model_answers_when_streaming_is_declined(server, reference, door):
    answer = client.WHOLE[door](server, "whole", {**ASKED, "stream": False}).good()
    assert answer.text == reference.text(**ASKED)


def test_an_error_ends_the_request_and_is_its_only_response(server):
    answer = client.grpc_stream(server, "stream", {**STREAMS, "max_tokens": -1})
    assert "max_tokens" in answer.error
    assert answer.replies == []


def test_an_error_leaves_the_stream_open_for_others(server, reference):
    arrived = queue.Queue()
    with server.grpc() as grpc:
        grpc.start_stream(lambda result, error: arrived.put((result, error)))
        for asked in [{**STREAMS, "max_tokens": -1}, ASKED]:
            grpc.async_stream_infer("stream", client.tensors(grpcclient, asked), enable_empty_final_response=True)
            while True:
                result, error = arrived.get(timeout=client.WAIT_SECONDS)
                if error is not None or client.reply_of(result).final:
                    break
        grpc.stop_stream()
    assert error is None
    assert client.reply_of(result).text() == reference.text(**ASKED)


def test_wrong_shapes_are_refused(server):
    for shape in [(2, 2), (1, 1, 1), (1,)]:
        values = np.full(shape, b"x", dtype=np.object_)
        answer = client.grpc_stream(server, "stream", {"text_input": values, "max_tokens": 1})
        assert answer.error and "text_input" in answer.error, (shape, answer)
    assert client.grpc_stream(server, "stream", ASKED).good().finals == 1
