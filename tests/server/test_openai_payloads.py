"""The tensors that Triton's OpenAI frontend sends and what its own tests assert about the answers.

The frontend's tests themselves cannot run here: it is in no package, and the one that it imports, `tritonserver`, is
built for glibc 2.39. So its requests are made at tensor level, and answers are checked as its response validation does
(harness/frontend.py).
"""

import numpy as np
import pytest

from harness import client
from harness.frontend import DEFAULT_MAX_TOKENS, FORMATS, trtllm, validated
from harness.repository import Model

PROMPT = "machine learning is"
MESSAGES = "<|im_start|>user\nWhat is machine learning?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def server(serve, engine):
    pool = {"max_tokens_in_paged_kv_cache": 4096}
    return serve([
        Model("trtllm", engine, parameters=pool),
        Model("vllm", engine, max_batch_size=0, parameters={**pool, "profile": "vllm"}),
    ])


@pytest.fixture(params=FORMATS)
def complete(request, server):
    """Asks for a completion as the frontend does, and validates the responses as it does."""

    def ask(prompt=PROMPT, **options):
        tensors = FORMATS[request.param](prompt, **options)
        answer = client.grpc_stream(server, request.param, tensors).good()
        return validated(answer, options.get("stream", False))

    return ask


def test_the_inputs_that_the_frontend_looks_for_are_declared(server):
    with server.grpc() as grpc:
        declared = {one.name for one in grpc.get_model_metadata("trtllm").inputs}
        assert {"exclude_input_in_output", "guided_decoding_guide_type", "guided_decoding_guide", "lora_task_id"} <= declared
        assert grpc.get_model_config("trtllm").config.backend == "spec"


def test_one_token_is_one_word(complete):
    text = complete(max_tokens=1, temperature=0.0).text
    assert len(text.split()) == 1


def test_temperature_0_is_deterministic_and_is_not_temperature_1(complete):
    cold = [complete(temperature=0.0, max_tokens=32).text for _ in range(2)]
    warm = complete(temperature=1.0, max_tokens=32).text
    assert cold[0] == cold[1] and cold[0] != warm


def test_equal_seeds_give_equal_texts_and_others_do_not(complete):
    texts = [complete(seed=seed, temperature=1.0, top_p=1.0, max_tokens=32).text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("stream", [False, True])
def test_penalties_and_top_p_are_taken(complete, stream):
    options = dict(top_p=0.5, presence_penalty=0.5, frequency_penalty=0.5, temperature=0.7, seed=3, max_tokens=48)
    text = complete(stream=stream, **options).text
    assert text == complete(**options).text
    # Each of them changes what is drawn, by the same noise.
    for without in [dict(top_p=1.0), dict(presence_penalty=0.0, frequency_penalty=0.0), dict(temperature=1.0)]:
        assert text != complete(stream=stream, **{**options, **without}).text, without


@pytest.mark.parametrize("stop", ["is", ["is"], ["is", ".", ","]], ids=str)
def test_stop_strings_are_not_in_the_text_streamed_or_not(complete, stop):
    prompt = "Machine learning is a field. It is about data, and"
    texts = []
    for stream in [False, True]:
        text = complete(prompt, stop=stop, stream=stream, temperature=0.0, max_tokens=48).text
        assert not any(word in text for word in ([stop] if isinstance(stop, str) else stop)), text
        texts.append(text)
    assert texts[0] == texts[1]


def test_streamed_text_equals_the_whole_and_comes_in_more_than_one_chunk(complete):
    whole = complete(temperature=0.0, max_tokens=32)
    streamed = complete(stream=True, temperature=0.0, max_tokens=32)
    assert streamed.text == whole.text
    assert len([chunk for chunk in streamed.chunks if chunk]) > 1


def test_usage_adds_up_streamed_or_not(complete):
    whole = complete(temperature=0.0)
    streamed = complete(stream=True, temperature=0.0)
    assert whole.sum("num_output_tokens") == streamed.sum("num_output_tokens") == DEFAULT_MAX_TOKENS
    prompts = {int(reply.outputs["num_input_tokens"].reshape(-1)[0]) for reply in streamed.replies + whole.replies}
    assert len(prompts) == 1 and prompts.pop() > 0, "on every chunk, and the same on each"


def test_echo_puts_the_prompt_first(complete):
    echoed = complete(echo=True, temperature=0.0).text
    assert echoed == PROMPT + complete(echo=False, temperature=0.0).text


def test_a_chat_does_not_send_exclude_input_and_gets_no_prompt_back(server, reference):
    tensors = trtllm(MESSAGES, temperature=0.0, echo=None)
    text = validated(client.grpc_stream(server, "trtllm", tensors).good(), False).text
    assert "<|im_start|>" not in text and "What is machine learning" not in text
    assert text == reference.text(text_input=MESSAGES, max_tokens=DEFAULT_MAX_TOKENS)


def test_a_forced_tool_schema_is_refused_as_not_built(server):
    matrix = lambda value: np.array([[value.encode()]], dtype=np.object_)
    guide = {"guided_decoding_guide_type": matrix("json_schema"), "guided_decoding_guide": matrix('{"type": "object"}')}
    answer = client.grpc_stream(server, "trtllm", {**trtllm(PROMPT), **guide})
    assert "guided_decoding" in answer.error


GENAI_PERF = {
    "streaming": dict(text_input=PROMPT, max_tokens=24, exclude_input_in_output=True, stream=True),
    "deterministic": dict(text_input=PROMPT, max_tokens=24, exclude_input_in_output=True, min_length=24, stream=True),
    "empty words": dict(text_input=PROMPT, max_tokens=24, bad_words=[""], stop_words=[""], stream=True),
}


@pytest.mark.parametrize("what", GENAI_PERF)
def test_what_genai_perf_sends_is_answered(server, what):
    answer = client.grpc_stream(server, "trtllm", {**GENAI_PERF[what], "return_num_output_tokens": True}).good()
    assert answer.chunks[0], "the first response carries text, as the time to it is measured"
    assert answer.sum("num_output_tokens") == 24 or what != "deterministic"
