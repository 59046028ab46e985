"""Clients of NVIDIA's and vLLM's backends, which know nothing of this one: each sends what it always sends, and has to
be able to read what comes. They are written down in harness/upstream.
"""

import asyncio

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as httpclient
import tritonclient.http.aio as http_aio

from harness import client
from harness.cases import CASES, LIST
from harness.repository import Model
from harness.server import eventually
from harness.upstream import connector, text, tokens, vllm

PROMPT, OTHER = "The capital of France is", "Once upon a time"
LENGTH = 12
BOTH = pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])


@pytest.fixture(scope="module")
def server(serve, engine):
    """The names are those that the clients ask for."""
    pool = {"max_tokens_in_paged_kv_cache": 4096}
    token = {**pool, "profile": "token"}
    return serve([
        # How many drafts pay depends on the machine; here there are always some.
        Model("ensemble", engine, parameters={**pool, "draft_len": 4}),
        Model("tensorrt_llm_bls", engine, decoupled=False, parameters=pool),
        Model("ensemble_of_2023", engine, parameters=pool, extra=connector.UNSIGNED),
        Model("tensorrt_llm", engine, parameters=token),
        Model("tensorrt_llm_whole", engine, decoupled=False, parameters=token),
        Model("vllm_model", engine, max_batch_size=0, parameters={**pool, "profile": "vllm"}),
    ], gates=True)


def greedy(reference, prompt, length=LENGTH, **options):
    return reference.text(text_input=prompt, max_tokens=length, **options)


def ask(server, *prompts, **options):
    options = {"output_len": LENGTH, "temperature": 0.0, **options}
    return text.ask(server, list(prompts), **options)


def echoed(streaming, prompt, text):
    """What the text client expects of a prompt that it did not ask to be left out: it never comes in a stream."""
    return text if streaming else prompt + text


@pytest.mark.parametrize("model,streaming", [("ensemble", False), ("ensemble", True), ("tensorrt_llm_bls", False)])
def test_the_text_client_reads_the_text(server, reference, model, streaming):
    told = ask(server, PROMPT, OTHER, model=model, streaming=streaming)
    assert told.texts == [[echoed(streaming, prompt, greedy(reference, prompt))] for prompt in (PROMPT, OTHER)]
    told = ask(server, PROMPT, model=model, streaming=streaming, exclude_input_in_output=True)
    assert told.texts == [[greedy(reference, PROMPT)]]


@BOTH
def test_the_text_client_reads_every_row_of_a_batch(server, reference, streaming):
    prompts = [PROMPT, OTHER, LIST]
    told = ask(server, *prompts, batched=True, streaming=streaming)
    assert told.texts == [[echoed(streaming, prompt, greedy(reference, prompt))] for prompt in prompts]


@BOTH
@pytest.mark.parametrize("batched", [False, True], ids=["one", "batch"])
def test_the_text_client_reads_every_sequence(server, reference, streaming, batched):
    prompts = [PROMPT, OTHER]
    told = ask(server, *prompts, sequences=3, streaming=streaming, batched=batched)
    assert told.texts == [3 * [echoed(streaming, prompt, greedy(reference, prompt))] for prompt in prompts]


def test_sequences_of_the_text_client_differ_where_they_are_drawn(server):
    drawn = dict(temperature=1.0, top_p=1.0, top_k=0)
    told = ask(server, OTHER, sequences=4, output_len=32, exclude_input_in_output=True, **drawn)
    assert len(set(told.texts[0])) > 1 and all(told.texts[0])


@BOTH
def test_the_text_client_reads_metrics_of_every_response(server, streaming):
    told = ask(server, LIST, streaming=streaming, return_perf_metrics=True, output_len=24)
    assert len(told.metrics) > 1 or not streaming
    for before, after in zip(told.metrics, told.metrics[1:]):
        assert before["total_draft_tokens"] <= after["total_draft_tokens"]
        assert before["last_token_time_ns"] <= after["last_token_time_ns"]
        assert before["arrival_time_ns"] == after["arrival_time_ns"]
    last = told.metrics[-1]
    assert 0 < last["arrival_time_ns"] <= last["first_scheduled_time_ns"] <= last["first_token_time_ns"]
    assert last["first_token_time_ns"] <= last["last_token_time_ns"]
    assert last["kv_cache_alloc_total_blocks"] == last["kv_cache_alloc_new_blocks"] + last["kv_cache_reused_blocks"]
    assert 0 < last["total_accepted_draft_tokens"] <= last["total_draft_tokens"]


@BOTH
def test_the_text_client_reads_log_probabilities(server, streaming):
    told = ask(server, PROMPT, streaming=streaming, return_log_probs=True)
    assert sum(values.size for values in told.log_probs) == LENGTH
    assert all((values <= 0).all() for values in told.log_probs)


@BOTH
def test_options_of_the_text_client_are_taken(server, reference, streaming):
    words = dict(stop_words=[" end"], bad_words=[" apple", " banana"])
    told = ask(server, "The end. The end. The", streaming=streaming, exclude_input_in_output=True, **words)
    assert told.texts == [[greedy(reference, "The end. The end. The", **words)]]
    penalties = dict(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3)
    told = ask(server, LIST, streaming=streaming, exclude_input_in_output=True, **penalties)
    assert told.texts == [[greedy(reference, LIST, **penalties)]]
    drafts = dict(num_draft_tokens=4, use_draft_logits=True)
    told = ask(server, PROMPT, streaming=streaming, exclude_input_in_output=True, **drafts)
    assert told.texts == [[greedy(reference, PROMPT)]]
    bias = dict(embedding_bias_words=[" London"], embedding_bias_weights=[100.0])
    told = ask(server, PROMPT, streaming=streaming, exclude_input_in_output=True, output_len=1, **bias)
    assert told.texts == [[" London"]]


@BOTH
def test_an_end_id_that_no_token_has_ends_nothing(server, reference, streaming):
    told = ask(server, PROMPT, streaming=streaming, exclude_input_in_output=True, end_id=50256, pad_id=50256)
    assert told.texts == [[greedy(reference, PROMPT)]]


def run_of(reference, case):
    return reference.ask(**CASES[case][1])


def generate(server, prompt, **options):
    """The decoupled model where the client opens a stream; one that is not, where it does not."""
    streams = options.get("streaming") or options.get("sequences") is not None
    model = "tensorrt_llm" if streams else "tensorrt_llm_whole"
    return tokens.ask(server, prompt, **{"model": model, **options})


@BOTH
@pytest.mark.parametrize("excluded", [None, True], ids=["with prompt", "without"])
def test_the_token_client_reads_the_tokens(server, reference, streaming, excluded):
    run = run_of(reference, 0)
    told = generate(server, run["prompt_ids"], streaming=streaming, exclude_input_in_output=excluded)
    assert told.ids == [run["output_ids"]]
    assert told.prompts == [[] if excluded else run["prompt_ids"]]


@pytest.mark.parametrize("excluded", [None, True], ids=["with prompt", "without"])
@BOTH
def test_the_token_client_reads_every_sequence(server, reference, streaming, excluded):
    run = run_of(reference, 0)
    told = generate(server, run["prompt_ids"], streaming=streaming, sequences=3, exclude_input_in_output=excluded)
    assert told.ids == 3 * [run["output_ids"]]


def test_sequences_of_the_token_client_differ_where_they_are_drawn(server, reference):
    told = generate(server, run_of(reference, 1)["prompt_ids"], sequences=4, top_k=0, top_p=1.0, output_len=32)
    assert len({tuple(ids) for ids in told.ids}) > 1 and all(told.ids)


def test_drafts_of_the_token_client_change_no_token(server, reference):
    run = run_of(reference, 0)
    told = generate(server, run["prompt_ids"], draft_input_ids=run["output_ids"][:5], return_perf_metrics=True)
    assert told.ids == [run["output_ids"]]
    assert told.metrics[-1]["total_accepted_draft_tokens"] >= 5


@BOTH
def test_the_token_client_reads_what_it_asked_to_be_returned(server, reference, streaming):
    run = run_of(reference, 0)
    returned = ["log_probs", "perf_metrics", "num_input_tokens", "num_output_tokens"]
    told = generate(server, run["prompt_ids"], streaming=streaming, **{f"return_{name}": True for name in returned})
    assert told.ids == [run["output_ids"]]
    assert len(told.log_probs) == len(told.metrics) == told.responses
    total = sum(step.sum() for _, step in told.log_probs)
    assert told.log_probs[-1][0] == pytest.approx(total, abs=1e-3) and total < 0
    assert set(told.counts["num_input_tokens"]) == {len(run["prompt_ids"])}
    assert sum(told.counts["num_output_tokens"]) == 16


@BOTH
def test_the_token_client_gets_the_outputs_that_it_names_and_no_others(server, reference, streaming):
    run = run_of(reference, 0)
    told = generate(server, run["prompt_ids"], streaming=streaming, outputs=["output_ids", "sequence_length"])
    assert told.ids == [run["output_ids"]]


LONG = dict(output_len=900, request_id="12345")


class Begun:
    """Within the block a model runs two steps of what it is asked, and no more. Calling it returns when a request has
    begun: when its first response is there, or, where it has only one, when it holds pages."""

    def __init__(self, server, model, streaming):
        self.server, self.model, self.streaming = server, model, streaming

    def __call__(self, results):
        holds_pages = lambda: not self.streaming and self.server.pages(self.model, "used") > 0
        eventually(lambda: holds_pages() or not results.empty(), what=f"a request runs in {self.model}")

    def __enter__(self):
        self.gate = self.server.gate(self.model)
        self.gate.let_pass(2)
        return self

    def __exit__(self, *_):
        self.gate.open()
        eventually(lambda: self.server.pages(self.model, "used") == 0, what=f"{self.model}: empty again")


@BOTH
@pytest.mark.parametrize("how", ["stop", "cancel"])
def test_the_token_client_ends_its_request(server, reference, streaming, how):
    """By a request that says so, or by cancelling: neither needs another step of the model."""
    model = "tensorrt_llm" if streaming else "tensorrt_llm_whole"
    with Begun(server, model, streaming) as begun:
        told = generate(server, run_of(reference, 1)["prompt_ids"], streaming=streaming, **{how: begun}, **LONG)
    assert len(told.ids[0]) < 30 and told.empty <= 1
    assert told.cancelled == (how == "cancel") and (told.ids[0] or told.cancelled)


PROMPTS = [f"{PROMPT}\n", "\n", "Ein Fluß fließt\n"]


def test_the_vllm_sample_reads_every_prompt_of_its_stream(server, reference):
    greedily = {"temperature": "0", "top_p": "0.95", "max_tokens": str(LENGTH)}
    expected = [greedy(reference, prompt) for prompt in PROMPTS]
    told = vllm.ask(server, PROMPTS, sampling=greedily)
    assert told == [prompt + text for prompt, text in zip(PROMPTS, expected)]
    for stream in [False, True]:
        assert vllm.ask(server, PROMPTS, sampling=greedily, exclude_input_in_output=True, stream=stream) == expected


def test_the_vllm_sample_runs_as_it_is(server):
    told = vllm.ask(server, PROMPTS[:1])
    assert told[0].startswith(PROMPTS[0]) and len(told[0]) > len(PROMPTS[0])


@BOTH
def test_connectors_of_libraries_read_the_text_and_end_their_stream(server, reference, streaming):
    for model, count in [("ensemble", np.int32), ("ensemble_of_2023", np.uint32)]:
        texts = connector.ask(server, OTHER, model=model, tokens=LENGTH, stream=streaming, count=count)
        assert "".join(texts) == greedy(reference, OTHER)
        assert len(texts) > 1 or not streaming


def test_tritonclient_asks_from_an_event_loop(server, reference):
    asked = dict(text_input=PROMPT, max_tokens=LENGTH)

    async def ask(library, module, url):
        async with library.InferenceServerClient(url) as door:
            texts = [door.infer("tensorrt_llm_bls", client.tensors(module, asked)) for _ in range(3)]
            return [result.as_numpy("text_output").reshape(-1)[0].decode() for result in await asyncio.gather(*texts)]

    expected = 3 * [greedy(reference, PROMPT)]
    assert asyncio.run(ask(grpc_aio, grpcclient, server.grpc_url)) == expected
    assert asyncio.run(ask(http_aio, httpclient, server.http_url)) == expected
