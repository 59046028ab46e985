"""Served text is that of `spec-build try` for the same parameters: alone and among others, whole and streamed,
over HTTP and gRPC, with reused prefixes and with sequences that were preempted on the way.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness import client, places
from harness.cases import CASES, LIST, QUESTIONS, SYSTEM, name, options
from harness.repository import Model
from harness.server import eventually

# Pages for one sequence of full length, or about three of the eight that are asked for at once at their beginning.
TIGHT_TOKENS = 256


@pytest.fixture(scope="module")
def server(serve, engine):
    short = places.engine("tight", max_seq_len=TIGHT_TOKENS)
    pool = {"max_tokens_in_paged_kv_cache": 8192}
    tight = {"max_tokens_in_paged_kv_cache": TIGHT_TOKENS, "batch_scheduler_policy": "max_utilization"}
    return serve([
        Model("stream", engine, parameters=pool),
        Model("whole", engine, decoupled=False, parameters=pool),
        Model("tight", short, parameters=tight),
        Model("skipping", skipping(), parameters={**pool, "draft_len": 4, "lookup": "off"}),
        Model("small-draft", small_draft(), parameters={**pool, "draft_len": 4, "lookup": "off"}),
        Model("suffix", engine, parameters={**pool, "lookup": "suffix", "draft_len": 8}),
    ], gates=True)


def skipping():
    """The small model, which drafts by itself without some of its MLPs."""
    layers = places.CACHE / "skip_layers.json"
    places.CACHE.mkdir(parents=True, exist_ok=True)
    layers.write_text(json.dumps({"attention": [], "mlp": [2, 5, 7, 12, 16, 20, 24]}))
    return places.engine("skipping", max_seq_len=1024, draft=f"skip:{layers}")


def small_draft():
    """The small model, whose drafter is itself in 4 bits and with a third of its tokens."""
    options = ["--draft-dtype=int4", "--draft-head-dtype=int4", "--draft-vocab=16384"]
    return places.engine("small-draft", max_seq_len=1024, draft=places.checkpoint(), options=options)


def doors():
    """Every way in: (model, door, streams)."""
    streamed = [("stream", "grpc_stream", True), ("stream", "generate_stream", True)]
    whole = [("stream", "grpc_stream", False), ("stream", "generate", False), ("whole", "generate", False)]
    return streamed + whole + [("whole", "grpc_infer", False), ("whole", "http_infer", False)]


DOORS = {**client.DECOUPLED, **client.WHOLE}


def ask(server, model, door, streams, case):
    asked = dict(options(case))
    if streams:
        asked["stream"] = True
    return DOORS[door](server, model, asked).good()


@pytest.mark.parametrize("case", CASES, ids=name)
def test_alone_streamed_text_is_that_of_try(server, reference, case):
    answer = ask(server, "stream", "grpc_stream", True, case)
    assert answer.text == reference.text(**case[1])
    assert answer.finals == 1


@pytest.mark.parametrize("model,door,streams", doors(), ids=lambda value: str(value))
def test_alone_every_door_gives_the_text_of_try(server, reference, model, door, streams):
    for case in CASES[2:5]:
        assert ask(server, model, door, streams, case).text == reference.text(**case[1]), name(case)


@pytest.mark.parametrize("draft_len", range(9))
def test_the_draft_length_changes_no_text(server, reference, draft_len):
    for case in [CASES[2], CASES[3]]:
        answer = ask(server, "stream", "grpc_stream", True, (draft_len, case[1]))
        assert answer.text == reference.text(**case[1])


@pytest.mark.parametrize("model", ["skipping", "small-draft"])
def test_drafts_of_a_smaller_model_change_no_text(server, reference, model):
    asked = [dict(text_input=SYSTEM + question, max_tokens=24, return_perf_metrics=True) for question in QUESTIONS]
    asked += [{**one, "temperature": 0.8, "seed": 4} for one in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda one: client.grpc_stream(server, model, one).good(), asked))
    for one, answer in zip(asked, answers):
        plain = {key: value for key, value in one.items() if key != "return_perf_metrics"}
        assert answer.text == reference.text(**plain)
    assert any(answer.value("total_accepted_draft_tokens") > 0 for answer in answers)


def test_try_itself_gives_the_same_text_with_drafts(reference):
    for case in CASES[2:4]:
        assert reference.ask(draft_len=8, **case[1])["text"] == reference.text(**case[1])


@pytest.mark.parametrize("num_clients", [1, 8, 32])
def test_clients_at_once_get_the_text_of_try(server, reference, num_clients):
    all_doors = doors()
    work = [(all_doors[(7 * i + i // 5) % len(all_doors)], CASES[(5 * i) % len(CASES)]) for i in range(2 * num_clients)]
    for _, case in work:
        reference.text(**case[1])
    with ThreadPoolExecutor(num_clients) as pool:
        answers = list(pool.map(lambda one: ask(server, *one[0], one[1]), work))
    wrong = [
        f"{where} {name(case)}: {answer.text!r} and not {reference.text(**case[1])!r}"
        for (where, case), answer in zip(work, answers)
        if answer.text != reference.text(**case[1])
    ]
    assert not wrong, "\n".join(wrong)


def test_a_shared_prefix_is_reused_and_changes_no_text(server, reference):
    asked = [dict(text_input=SYSTEM + question, max_tokens=12) for question in QUESTIONS]
    asked += [{**one, "temperature": 0.8, "seed": 4} for one in asked]
    measured = lambda one: client.grpc_stream(server, "stream", {**one, "stream": True, "return_perf_metrics": True})
    first = measured(asked[0]).good()
    with ThreadPoolExecutor(4) as pool:
        answers = [first, *pool.map(measured, asked[1:])]
    for one, answer in zip(asked, answers):
        assert answer.good().text == reference.text(**one)
    reused = [answer.value("kv_cache_reused_blocks") for answer in answers[1:]]
    assert all(blocks > 0 for blocks in reused), reused


def test_a_prompt_asked_again_reuses_all_but_its_end(server, reference):
    asked = dict(text_input=SYSTEM + "Do you sell glue?", max_tokens=8)
    answers = [client.grpc_stream(server, "stream", {**asked, "return_perf_metrics": True}).good() for _ in range(2)]
    assert [answer.text for answer in answers] == [reference.text(**asked)] * 2
    reused, new = (answers[1].value(f"kv_cache_{kind}_blocks") for kind in ["reused", "alloc_new"])
    assert reused > 0 and reused >= new, (reused, new)


def test_preempted_sequences_give_the_text_of_try(server, reference):
    prompts = [f"{LIST[:-len('part: aluminium bracket')]}Order number {i}: part:" for i in range(8)]
    asked = [dict(text_input=prompt, max_tokens=70, ignore_eos=True) for prompt in prompts]
    asked = [{**one, "temperature": 0.8, "seed": i} if i % 2 else one for i, one in enumerate(asked)]
    for one in asked:
        reference.text(**one)
    before = preempted(server, "tight")
    with ThreadPoolExecutor(len(asked)) as pool:
        with server.gate("tight"):
            answers = pool.map(lambda one: client.grpc_stream(server, "tight", {**one, "stream": True}), asked)
            eventually(lambda: server.requests("tight", "waiting") == len(asked), what="all are there")
        answers = list(answers)
    for one, answer in zip(asked, answers):
        assert answer.good().text == reference.text(**one)
    eventually(lambda: preempted(server, "tight") > before, what="something was preempted")


def preempted(server, model):
    return server.metric("nv_spec_engine_metrics", model=model, engine_metric_type="preemptions")


def test_answers_are_drafted_from_answers_to_the_same_salt(server, reference):
    asked = dict(text_input=SYSTEM + QUESTIONS[0], max_tokens=40, ignore_eos=True)

    def accepted(salt):
        measured = {**asked, "return_perf_metrics": True, **({"cache_salt": salt} if salt else {})}
        answer = client.grpc_stream(server, "suffix", measured).good()
        assert answer.text == reference.text(**asked)
        return answer.value("acceptance_rate"), answer.value("total_accepted_draft_tokens")

    first, again, other, other_again = [accepted(salt) for salt in [None, None, "a tenant", "a tenant"]]
    assert again[0] > first[0] and again[1] > first[1], (first, again)
    assert other == first and other_again == again, (first, again, other, other_again)
