"""The other two contracts: vLLM's (text without a batch dimension, sampling as JSON) and TensorRT-LLM's token
model (ids in, ids out).
"""

import json

import numpy as np
import pytest

from harness import client
from harness.cases import CASES, LIST
from harness.repository import Model
from harness.server import eventually

ASKED = CASES[0][1]


@pytest.fixture(scope="module")
def server(serve, engine):
    pool = {"max_tokens_in_paged_kv_cache": 4096}
    return serve([
        Model("vllm", engine, max_batch_size=0, parameters={**pool, "profile": "vllm"}),
        Model("token", engine, parameters={**pool, "profile": "token"}),
    ])


def vllm(server, prompt, sampling=None, parameters=None, **options):
    options = {"text_input": prompt, **options}
    if sampling is not None:
        options["sampling_parameters"] = json.dumps(sampling)
    return client.grpc_stream(server, "vllm", options, flat=True, parameters=parameters)


LONE = dict(exclude_input_in_output=True)


def greedy(max_tokens=16, **more):
    return {"temperature": 0, "max_tokens": max_tokens, **more}


def test_vllm_without_streaming_puts_the_prompt_first(server, reference):
    answer = vllm(server, ASKED["text_input"], greedy()).good()
    assert answer.text == ASKED["text_input"] + reference.text(**ASKED) and answer.finals == 1
    answer = vllm(server, ASKED["text_input"], greedy(), exclude_input_in_output=True).good()
    assert answer.text == reference.text(**ASKED)


def test_vllm_streams_the_new_text_only(server, reference):
    answer = vllm(server, ASKED["text_input"], greedy(), stream=True, return_num_output_tokens=True).good()
    assert len(answer.replies) > 1
    assert answer.text == reference.text(**ASKED)
    assert answer.sum("num_output_tokens") == 16


def test_vllm_refuses_to_stream_the_prompt(server):
    answer = vllm(server, "x", greedy(), stream=True, exclude_input_in_output=False)
    assert "exclude_input_in_output" in answer.error


def test_vllm_values_may_be_strings(server, reference):
    sampling = {"temperature": "0", "max_tokens": "16", "min_tokens": "16"}
    answer = vllm(server, ASKED["text_input"], sampling, exclude_input_in_output=True).good()
    assert answer.text == reference.text(**ASKED)


def test_vllm_takes_request_parameters_when_there_is_no_json(server, reference):
    parameters = {"temperature": "0", "max_tokens": "16"}
    answer = vllm(server, ASKED["text_input"], parameters=parameters, exclude_input_in_output=True).good()
    assert answer.text == reference.text(**ASKED)


def test_vllm_stops_at_16_tokens_unless_told(server):
    answer = vllm(server, "x", {"temperature": 0, "ignore_eos": True}, return_num_output_tokens=True).good()
    assert answer.sum("num_output_tokens") == 16


def test_vllm_options_mean_what_they_mean_elsewhere(server, reference):
    sampling = dict(max_tokens=33, temperature=0.7, seed=7)
    answer = vllm(server, LIST, sampling, stream=True).good()
    assert answer.text == reference.text(text_input=LIST, **sampling)
    answer = vllm(server, LIST, greedy(40, stop=["drawing"]), stream=True).good()
    assert answer.text == reference.text(text_input=LIST, max_tokens=40, stop_words=["drawing"])
    answer = vllm(server, LIST, greedy(40, stop="drawing"), stream=True).good()
    assert answer.text == reference.text(text_input=LIST, max_tokens=40, stop_words=["drawing"])


@pytest.mark.parametrize(
    "sampling,word",
    [
        ({"n": 0}, "n"), ({"n": 3, "best_of": 2}, "best_of"), ({"max_token": 4}, "max_token"), ({"temperature": -1}, "temperature"),
        ({"n": 2, "temperature": 0}, "n"), ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"detokenize": False, "stop": "x"}, "stop"),
        ({"top_p": "x"}, "top_p"), ({"stop": [1]}, "stop"), ({"max_tokens": 0}, "max_tokens"), ({"seed": "one"}, "seed"),
    ],
    ids=json.dumps,
)
def test_vllm_refuses_what_it_cannot_do_by_name(server, sampling, word):
    answer = client.generate(server, "vllm", {"text_input": "x", "sampling_parameters": json.dumps(sampling)})
    assert answer.status == "400" and word in answer.error, answer


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '{"max_tokens": 1e999}', "{" * 5000], ids=lambda t: repr(t[:20]))
def test_vllm_refuses_sampling_parameters_that_are_no_object(server, text):
    answer = client.generate(server, "vllm", {"text_input": "x", "sampling_parameters": text})
    assert answer.status == "400" and "sampling_parameters" in answer.error, answer


def test_vllm_additional_outputs(server, reference):
    flags = ["return_finish_reason", "return_cumulative_logprob", "return_logprobs", "return_num_input_tokens"]
    answer = vllm(server, ASKED["text_input"], greedy(logprobs=1), **dict.fromkeys(flags, True)).good()
    run = reference.ask(**ASKED, logprobs=1)
    assert answer.value("finish_reason").decode() == "length"
    assert answer.value("num_input_tokens") == len(run["prompt_ids"])
    assert answer.value("cumulative_logprob") == pytest.approx(sum(run["logprobs"]), abs=1e-3)
    told = json.loads(answer.value("logprobs"))
    assert [round(one[str(i)]["logprob"], 3) for one, i in zip(told, run["output_ids"])] == [
        round(value, 3) for value in run["logprobs"]
    ]
    plain = vllm(server, ASKED["text_input"], greedy(2)).good()
    assert set(plain.replies[0].outputs) == {"text_output"}


def test_vllm_tells_how_likely_the_prompts_tokens_are(server, reference):
    """A text put behind its prompt is as likely as when it was generated."""
    run = reference.ask(**ASKED, logprobs=2)
    prompt = ASKED["text_input"] + run["text"]
    assert reference.ask(text_input=prompt, max_tokens=1)["prompt_ids"] == run["prompt_ids"] + run["output_ids"]
    first = None
    for _ in range(2):  # the second finds the prompt's pages computed
        answer = vllm(server, prompt, greedy(2, prompt_logprobs=2)).good()
        told = json.loads(answer.value("prompt_logprobs"))
        assert len(told) == len(run["prompt_ids"]) + 16 and told[0] is None
        behind = told[len(run["prompt_ids"]):]
        for entry, token_id, logprob in zip(behind, run["output_ids"], run["logprobs"]):
            assert list(entry)[0] == str(token_id) and len(entry) == 2
            assert entry[str(token_id)]["rank"] == 1
            assert entry[str(token_id)]["logprob"] == pytest.approx(logprob, abs=1e-3)
        first = first or told
        assert told == first
    plain = vllm(server, prompt, greedy(2)).good()
    assert set(plain.replies[0].outputs) == {"text_output"} and plain.text == answer.text
    refused = vllm(server, prompt, greedy(2, prompt_logprobs=0), stream=True)
    assert "prompt_logprobs" in refused.error


def test_vllm_ranks_a_token_among_all(server):
    """A token that is drawn far from the likeliest still has its place."""
    sampling = {"temperature": 2.0, "seed": 3, "max_tokens": 24, "logprobs": 1}
    answer = vllm(server, LIST, sampling, return_logprobs=True).good()
    told = [list(entry.values()) for entry in json.loads(answer.value("logprobs"))]
    assert all((own["rank"] == 1) == (len(entry) == 1) for entry in told for own in entry[:1])
    assert max(entry[0]["rank"] for entry in told) > 1
    assert all(entry[1]["rank"] == 1 and entry[1]["logprob"] >= entry[0]["logprob"] for entry in told if len(entry) > 1)


def test_vllm_includes_the_stop_string_on_request(server, reference):
    expected = reference.text(text_input=LIST, max_tokens=40, stop_words=["drawing"])
    for stream in [False, True]:
        sampling = greedy(40, stop=["drawing"], include_stop_str_in_output=True)
        answer = vllm(server, LIST, sampling, stream=stream, exclude_input_in_output=True).good()
        assert answer.text == expected + "drawing"


def test_vllm_includes_the_stop_token_on_request(server, reference):
    run = reference.ask(text_input=LIST, max_tokens=40)
    without, including = [
        vllm(server, LIST, greedy(40, stop_token_ids=[run["output_ids"][5]], include_stop_str_in_output=included), **LONE)
        .good().text for included in [False, True]
    ]
    assert including.startswith(without) and including != without
    assert run["text"].startswith(including)


def test_vllm_holds_back_stop_strings_for_as_many_tokens(server, reference):
    run = reference.ask(text_input=LIST, max_tokens=40)
    stop = "part"
    for count in [0, 1, 7, 8, 9, 20, 39, 40]:
        asked = dict(text_input=LIST, max_tokens=40, stop_words=[stop], min_tokens=count)
        for stream in [False, True]:
            sampling = greedy(40, stop=[stop], min_tokens=count)
            answer = vllm(server, LIST, sampling, stream=stream, exclude_input_in_output=True).good()
            assert answer.text == reference.text(**asked), count
    assert reference.text(**asked) == run["text"], "with as many as there are none ends it"


def test_vllm_shows_special_tokens_on_request(server):
    end = {"logit_bias": {"2": 100.0}, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    for skip, text in [(True, ""), (False, "<|im_end|>")]:
        answer = vllm(server, "x", {**end, "skip_special_tokens": skip}, exclude_input_in_output=True).good()
        assert answer.text == text


def test_vllm_leaves_the_text_out_on_request(server):
    for stream in [False, True]:
        flags = dict(stream=stream, exclude_input_in_output=True, return_num_output_tokens=True)
        answer = vllm(server, LIST, greedy(24, detokenize=False), **flags).good()
        assert answer.text == "" and answer.sum("num_output_tokens") == 24


def token(server, ids, length, **options):
    """Without the prompt, unless told otherwise."""
    options = {
        "input_ids": np.array([ids], dtype=np.int32), "input_lengths": np.array([[len(ids)]], dtype=np.int32),
        "request_output_len": length, "exclude_input_in_output": True, **options,
    }
    return client.grpc_stream(server, "token", options)


def ids(answer):
    lists = [reply.outputs["output_ids"].reshape(-1) for reply in answer.replies if "output_ids" in reply.outputs]
    return np.concatenate(lists).tolist()


def test_token_ids_are_those_of_try(server, reference):
    for _, asked in [CASES[0], CASES[2]]:
        run = reference.ask(**asked)
        for streaming in [False, True]:
            answer = token(server, run["prompt_ids"], asked["max_tokens"], streaming=streaming).good()
            assert ids(answer) == run["output_ids"]
            assert answer.finals == 1
            assert (len(answer.replies) > 1) == streaming


def test_a_token_answer_has_the_shapes_of_tensorrt_llm(server, reference):
    run = reference.ask(**ASKED)
    answer = token(server, run["prompt_ids"], 16).good()
    assert answer.replies[0].outputs["output_ids"].shape == (1, 1, 16)
    assert answer.replies[0].outputs["sequence_length"].tolist() == [[16]]


def test_token_ids_begin_with_the_prompt_unless_they_are_streamed(server, reference):
    run = reference.ask(**ASKED)
    whole = run["prompt_ids"] + run["output_ids"]
    for excluded in [None, False]:
        answer = token(server, run["prompt_ids"], 16, exclude_input_in_output=excluded).good()
        assert ids(answer) == whole
        assert answer.replies[0].outputs["sequence_length"].tolist() == [[len(whole)]]
        answer = token(server, run["prompt_ids"], 16, exclude_input_in_output=excluded, streaming=True).good()
        assert ids(answer) == run["output_ids"]


@pytest.mark.parametrize("min_tokens", [0, 6, 13, 14, 15, 40])
def test_token_sequences_end_nothing_before_as_many_tokens(server, reference, min_tokens):
    run = reference.ask(text_input=LIST, max_tokens=40)
    output = run["output_ids"]
    words = np.array([[output[12:14], [2, -1]]], dtype=np.int32)
    ends = [end for end in range(2, 41) if output[end - 2:end] == output[12:14] and end > min_tokens]
    for streaming in [False, True]:
        options = dict(stop_words_list=words, min_tokens=min_tokens, ignore_eos=True, streaming=streaming)
        answer = token(server, run["prompt_ids"], 40, **options).good()
        assert ids(answer) == output[:min(ends, default=40)]


def test_seeded_token_ids_are_those_of_try(server, reference):
    run = reference.ask(**CASES[3][1])
    answer = token(server, run["prompt_ids"], 33, temperature=0.7, seed=7).good()
    assert ids(answer) == run["output_ids"]


def test_drafts_given_by_the_client_change_no_token(server, reference):
    run = reference.ask(**ASKED)
    right, wrong = run["output_ids"][:6], [5, 6, 7]
    for draft in [right, wrong, right[:2] + wrong]:
        given = np.array([draft], dtype=np.int32)
        answer = token(server, run["prompt_ids"], 16, draft_input_ids=given, return_perf_metrics=True).good()
        assert ids(answer) == run["output_ids"], draft
        if draft == right:
            assert answer.value("total_accepted_draft_tokens") >= len(right)


@pytest.mark.parametrize(
    "word,ids,options",
    [
        ("input_ids", [10**9], {}), ("input_ids", [-1], {}), ("request_output_len", [5], {"request_output_len": 0}),
        ("input_lengths", [5, 6], {"input_lengths": np.array([[7]], dtype=np.int32)}),
        ("draft_input_ids", [5], {"draft_input_ids": np.array([[10**8]], dtype=np.int32)}),
        ("runtime_top_p", [5], {"runtime_top_p": 1.5}), ("beam_width", [5], {"beam_width": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_token_requests_are_refused_by_name(server, word, ids, options):
    answer = token(server, ids, 4, **options)
    assert answer.error and word in answer.error, answer


def test_a_stop_request_ends_the_one_of_its_id(server):
    with client.Stream(server, "token", {
        "input_ids": np.array([[504, 3575]], dtype=np.int32), "input_lengths": np.array([[2]], dtype=np.int32),
        "request_output_len": 900, "end_id": 49151, "streaming": True,
    }, request_id="77") as stream:
        stream.next()
        stop = client.grpc_stream(server, "token", {
            "input_ids": np.array([[504]], dtype=np.int32), "input_lengths": np.array([[1]], dtype=np.int32),
            "request_output_len": 1, "stop": True,
        }, request_id="77").good()
        assert stop.finals == 1 and not stop.chunks
        answer = stream.rest()
        assert len(ids(answer)) < 899 and answer.finals <= 1
    eventually(lambda: server.pages("token", "used") == 0, what="no page in use")
