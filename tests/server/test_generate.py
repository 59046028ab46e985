"""The generate endpoints (the behaviours of Triton's L0_http generate_endpoint_test that a text model can have)."""

import http.client
import json
import threading

import pytest

from harness import client
from harness.cases import CASES
from harness.repository import Model
from harness.server import eventually

ASKED = CASES[0][1]
PATH = "/v2/models/stream/generate"


@pytest.fixture(scope="module")
def server(serve, engine):
    return serve([Model("stream", engine, parameters={"max_tokens_in_paged_kv_cache": 4096})])


def post(server, body, path=PATH, **how):
    status, headers, text = server.http("POST", path, body, **how)
    return status, headers, text.decode()


def events(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


def test_generate_answers_with_one_json_object(server, reference):
    status, headers, text = post(server, ASKED)
    assert status == 200 and headers["Content-Type"] == "application/json"
    message = json.loads(text)
    assert message["text_output"] == reference.text(**ASKED)
    assert message["model_name"] == "stream" and message["model_version"] == "1"


def test_optional_outputs_appear_only_when_asked_for(server):
    plain = set(json.loads(post(server, ASKED)[2]))
    assert plain == {"model_name", "model_version", "text_output"}
    flags = {"return_num_input_tokens": True, "return_num_output_tokens": True, "return_log_probs": True}
    more = set(json.loads(post(server, {**ASKED, **flags})[2])) - plain
    assert {"num_input_tokens", "num_output_tokens", "cum_log_probs", "output_log_probs"} <= more


def test_all_inputs_at_once(server, reference):
    asked = dict(
        text_input="a b c a b c", max_tokens=6, temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, seed=3, min_tokens=2,
        repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, bad_words=[" zebra"], stop_words=["\n\n\n"],
        ignore_eos=True,
    )
    message = json.loads(post(server, {**asked, "num_draft_tokens": 3, "length_penalty": 1.0, "beam_width": 1})[2])
    assert message["text_output"] == reference.text(**asked)


def test_scalars_and_lists_mean_the_same(server, reference):
    status, _, text = post(server, {name: [value] for name, value in ASKED.items()})
    assert status == 200, text
    assert json.loads(text)["text_output"] == reference.text(**ASKED)


def test_parameters_are_options_too(server, reference):
    case = CASES[3][1]
    body = {"text_input": case["text_input"], "parameters": {k: v for k, v in case.items() if k != "text_input"}}
    status, _, text = post(server, body)
    assert status == 200, text
    assert json.loads(text)["text_output"] == reference.text(**case)


def test_an_option_given_twice_is_refused_by_triton(server):
    """The endpoint makes a tensor of each parameter that is named as an input."""
    status, _, text = post(server, {**ASKED, "parameters": {"max_tokens": 2}})
    assert status == 400 and "max_tokens" in text


def test_unknown_parameters_are_refused_by_name(server):
    status, _, text = post(server, {**ASKED, "parameters": {"temprature": 1}})
    assert status == 400 and "temprature" in text
    status, _, text = post(server, {**ASKED, "max_token": 1})
    assert status == 400 and "max_token" in text


def test_the_id_of_a_request_comes_back(server):
    status, _, text = post(server, {"id": "7b", **ASKED})
    assert status == 200, text
    # Tritonserver 2.51 passes it on as a parameter instead, which must not be refused.
    assert json.loads(text).get("id", "7b") == "7b"


def test_generate_stream_sends_events_whose_texts_add_up(server, reference):
    status, headers, text = post(server, {**ASKED, "stream": True}, PATH + "_stream")
    assert status == 200 and headers["Content-Type"].startswith("text/event-stream")
    told = events(text)
    assert len(told) > 1
    assert "".join(one["text_output"] for one in told) == reference.text(**ASKED)


def test_generate_stream_without_streaming_sends_one_event(server, reference):
    told = events(post(server, ASKED, PATH + "_stream")[2])
    assert [one["text_output"] for one in told] == [reference.text(**ASKED)]


def test_generate_refuses_several_responses_and_points_to_generate_stream(server):
    status, _, text = post(server, {**ASKED, "stream": True})
    assert "error" in json.loads(text) and "generate expects model to produce exactly 1 response" in text
    eventually(lambda: server.pages("stream", "used") == 0, what="no page in use")


def test_missing_inputs_are_refused(server):
    for path in [PATH, PATH + "_stream"]:
        status, _, text = post(server, {"max_tokens": 4}, path)
        assert status == 400 and "text_input" in text


@pytest.mark.parametrize(
    "body",
    [
        {"text_input": 5}, {"text_input": {"a": 1}}, {"text_input": "x", "max_tokens": "many"},
        {"text_input": "x", "max_tokens": 2**40}, {"text_input": "x", "temperature": "warm"},
        {"text_input": "x", "stop_words": [1, 2]}, {"text_input": "x", "stream": 3},
    ],
    ids=json.dumps,
)
def test_invalid_types_are_refused(server, body):
    for path in [PATH, PATH + "_stream"]:
        status, _, text = post(server, {"max_tokens": 1, **body}, path)
        # What Triton's JSON parser refuses has code 500, what the backend refuses 400.
        assert status in (400, 500), text
        assert json.loads(text.removeprefix("data: "))["error"]


def test_duplicate_inputs_do_not_harm(server):
    body = '{"text_input": "x", "text_input": "y", "max_tokens": 2}'
    assert post(server, body)[0] in (200, 400)
    assert post(server, ASKED)[0] == 200


@pytest.mark.parametrize("body", ["", "{", "[]", "null", '"text"', "{}", '{"text_input":', "\0\0"], ids=repr)
def test_bodies_that_are_no_request_are_refused(server, body):
    status, _, text = post(server, body)
    assert status in (400, 500) and json.loads(text)["error"], text
    assert post(server, ASKED)[0] == 200


def test_unknown_models_and_versions_are_refused(server):
    for path in ["/v2/models/none/generate", "/v2/models/stream/versions/9/generate"]:
        assert 400 <= post(server, ASKED, path)[0] < 500
    assert post(server, ASKED, "/v2/models/stream/versions/1/generate")[0] == 200


def test_an_error_before_the_first_response_sets_the_code_of_a_stream(server):
    status, _, text = post(server, {**ASKED, "stream": True, "top_p": 2.5}, PATH + "_stream")
    assert status == 400 and "top_p" in text


def test_messages_are_rendered_with_the_chat_template(server, reference):
    question = "Name one fruit."
    body = {"messages": json.dumps([{"role": "user", "content": question}]), "max_tokens": 12}
    status, _, text = post(server, body)
    assert status == 200, text
    assert json.loads(text)["text_output"] == reference.text(chat=[question], max_tokens=12)


def test_unicode_of_every_kind_goes_through(server, reference):
    asked = dict(text_input='Größe 😀 "\\ 日本\t\n', max_tokens=8)
    assert json.loads(post(server, asked)[2])["text_output"] == reference.text(**asked)


def test_many_streams_at_once_and_some_that_go_away(server, reference):
    expected = reference.text(**ASKED)
    texts = []

    def stay():
        texts.append(client.generate_stream(server, "stream", {**ASKED, "stream": True}).text)

    def leave():
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
        body = {**ASKED, "max_tokens": 300, "ignore_eos": True, "stream": True}
        connection.request("POST", PATH + "_stream", json.dumps(body))
        connection.getresponse().readline()
        connection.close()

    threads = [threading.Thread(target=leave if i % 3 == 0 else stay) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [expected] * 8
    eventually(lambda: server.pages("stream", "used") == 0, what="no page in use")


def test_generate_is_quick_to_be_asked_again(server):
    """Requests on one kept connection, as clients with a pool make them."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    for _ in range(10):
        connection.request("POST", PATH, json.dumps({**ASKED, "max_tokens": 1}))
        response = connection.getresponse()
        assert response.status == 200
        response.read()
    connection.close()
