"""Several texts for a prompt: each is the one of its seed, and answers hold what their profile says.

Text number i has the seed plus i, so that each of them has a reference of its own.
"""

import json

import numpy as np
import pytest

from harness import client
from harness.repository import Model
from harness.server import eventually

PROMPTS = ["Once upon a time", "1, 2, 3, 4, 1, 2,"]
DRAWN = dict(max_tokens=16, temperature=1.0, seed=7)


@pytest.fixture(scope="module")
def server(serve, engine):
    pool = {"max_tokens_in_paged_kv_cache": 4096}
    return serve([
        Model("text", engine, parameters=pool),
        Model("whole", engine, decoupled=False, parameters=pool),
        Model("token", engine, decoupled=False, parameters={**pool, "profile": "token"}),
        Model("vllm", engine, max_batch_size=0, parameters={**pool, "profile": "vllm"}),
    ])


def run(reference, prompt, number, **options):
    return reference.ask(text_input=prompt, **{**DRAWN, **options, "seed": DRAWN["seed"] + number})


def texts(reference, prompt, count, **options):
    return [run(reference, prompt, number, **options)["text"] for number in range(count)]


def rows(prompts, **options):
    """The same options for each prompt."""
    common = {name: np.repeat(client.array(name, value), len(prompts), axis=0) for name, value in options.items()}
    return {"text_input": np.array([[one.encode()] for one in prompts], dtype=np.object_), **common}


def index(reply, name):
    value = reply.outputs.get(name)
    return 0 if value is None else int(value[0][0])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("count", [1, 3])
def test_each_text_has_responses_of_its_own_where_there_may_be_several(server, reference, stream, count):
    asked = rows(PROMPTS, num_return_sequences=count, stream=stream, return_perf_metrics=True, **DRAWN)
    answer = client.grpc_stream(server, "text", asked).good()
    told = [[""] * count for _ in PROMPTS]
    for reply in answer.replies:
        if reply.outputs:
            assert reply.outputs["text_output"].shape == (1,)
            assert reply.outputs["num_spec_steps"][0][0] > 0
            told[index(reply, "batch_index")][index(reply, "sequence_index")] += reply.text()
    assert told == [texts(reference, prompt, count) for prompt in PROMPTS]
    assert len(answer.chunks) == 2 * count or stream
    assert answer.finals == 1


@pytest.mark.parametrize("door", [client.grpc_infer, client.http_infer])
def test_one_response_holds_all_texts_where_there_is_only_one(server, reference, door):
    flags = dict(return_log_probs=True, return_num_input_tokens=True, return_num_output_tokens=True)
    answer = door(server, "whole", rows(PROMPTS, num_return_sequences=3, **flags, **DRAWN)).good()
    outputs = answer.replies[0].outputs
    expected = [text for prompt in PROMPTS for text in texts(reference, prompt, 3)]
    assert [one.decode() for one in outputs["text_output"]] == expected
    shapes = {"cum_log_probs": (2, 3), "output_log_probs": (2, 3, 16), "num_input_tokens": (2, 1), "num_output_tokens": (2, 3)}
    assert {name: outputs[name].shape for name in shapes} == shapes
    assert outputs["batch_index"].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert outputs["sequence_index"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert np.allclose(outputs["cum_log_probs"], outputs["output_log_probs"].sum(axis=2), atol=1e-3)


def test_token_ids_have_a_dimension_for_the_texts_of_a_prompt(server, reference):
    runs = [run(reference, PROMPTS[0], number) for number in range(3)]
    prompt = runs[0]["prompt_ids"]
    asked = {
        "input_ids": np.array([prompt], dtype=np.int32), "request_output_len": 16, "temperature": 1.0,
        "seed": DRAWN["seed"], "num_return_sequences": 3,
    }
    outputs = client.grpc_infer(server, "token", asked).good().replies[0].outputs
    assert outputs["output_ids"].tolist() == [[prompt + one["output_ids"] for one in runs]]
    assert outputs["sequence_length"].tolist() == [[len(prompt) + 16] * 3]


def vllm(server, sampling, **options):
    asked = {"text_input": PROMPTS[0], "sampling_parameters": json.dumps({**DRAWN, **sampling}), **options}
    return client.grpc_stream(server, "vllm", asked, flat=True)


def test_vllm_answers_n_texts_at_once(server, reference):
    flags = ["return_finish_reason", "return_cumulative_logprob", "return_num_input_tokens", "return_num_output_tokens"]
    answer = vllm(server, {"n": 3}, **dict.fromkeys(flags, True)).good()
    outputs = answer.replies[0].outputs
    expected = texts(reference, PROMPTS[0], 3)
    assert [one.decode() for one in outputs["text_output"]] == [PROMPTS[0] + text for text in expected]
    assert [one.decode() for one in outputs["finish_reason"]] == ["length"] * 3
    assert outputs["cumulative_logprob"].shape == (3,) and outputs["num_output_tokens"].tolist() == [16] * 3
    assert outputs["num_input_tokens"].shape == (1,)


def test_vllm_streams_n_texts_side_by_side(server, reference):
    answer = vllm(server, {"n": 3}, stream=True, return_num_output_tokens=True, return_finish_reason=True).good()
    told, counts = [""] * 3, np.zeros(3, dtype=int)
    for reply in answer.replies:
        if reply.outputs:
            pieces = [one.decode() for one in reply.outputs["text_output"]]
            told = [text + piece for text, piece in zip(told, pieces, strict=True)]
            counts += reply.outputs["num_output_tokens"]
    assert told == texts(reference, PROMPTS[0], 3)
    assert counts.tolist() == [16] * 3
    assert [one.decode() for one in answer.replies[-1].outputs["finish_reason"]] == ["length"] * 3


def test_the_likeliest_of_several_are_answered_first(server, reference):
    runs = [run(reference, PROMPTS[0], number, logprobs=0) for number in range(5)]
    runs.sort(key=lambda one: -sum(one["logprobs"]))
    flags = dict(exclude_input_in_output=True, return_cumulative_logprob=True)
    outputs = vllm(server, {"n": 2, "best_of": 5}, **flags).good().replies[0].outputs
    assert [one.decode() for one in outputs["text_output"]] == [one["text"] for one in runs[:2]]
    assert outputs["cumulative_logprob"] == pytest.approx([sum(one["logprobs"]) for one in runs[:2]], abs=1e-3)


def test_log_probabilities_of_the_prompt_are_told_once_for_all_texts(server):
    told = [vllm(server, {"prompt_logprobs": 1, **several}).good() for several in [{}, {"n": 3}, {"n": 2, "best_of": 4}]]
    lists = [one.replies[0].outputs["prompt_logprobs"] for one in told]
    assert all(one.shape == (1,) and one[0] == lists[0][0] for one in lists)
    assert len(json.loads(lists[0][0])) > 3


def test_more_texts_than_one_request_may_have_are_refused(server):
    answer = client.grpc_stream(server, "text", rows(PROMPTS, max_tokens=1, num_return_sequences=65))
    assert "num_return_sequences" in answer.error
    assert "best_of" in vllm(server, {"best_of": 2}, stream=True).error


def test_texts_share_the_pages_of_their_prompt(server):
    long = "The parts store has brackets of aluminium, hinges of steel and screws of all lengths. " * 8
    asked = dict(text_input=long, max_tokens=2, num_return_sequences=4, return_perf_metrics=True)
    outputs = client.grpc_infer(server, "whole", asked).good().replies[0].outputs
    new, reused = outputs["kv_cache_alloc_new_blocks"][0], outputs["kv_cache_reused_blocks"][0]
    assert reused[0] == 0 and (reused[1:] > 0).all() and (new[1:] < new[0]).all()


def test_a_client_that_leaves_ends_all_texts(server):
    with client.Stream(server, "text", rows(PROMPTS, num_return_sequences=4, stream=True, max_tokens=900, ignore_eos=True)) as one:
        one.next()
    eventually(lambda: server.pages("text", "used") == 0, what="no page in use")
