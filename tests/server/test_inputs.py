"""What may be put into a request: every option alone and with others, several rows in one request, and inputs
that are wrong in type, shape, size, encoding or value, which are refused by name.
"""

import itertools
import json
import random

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from harness import client, raw
from harness.cases import CASES, LIST
from harness.repository import Model

ASKED = CASES[0][1]
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def server(serve, engine):
    pool = {"max_tokens_in_paged_kv_cache": 4096}
    return serve([
        Model("stream", engine, parameters=pool), Model("whole", engine, decoupled=False, parameters=pool),
        Model("hiding", engine, decoupled=False, parameters={**pool, "report_kv_cache_reuse": "false"}),
    ])


def ask(server, **options):
    return client.grpc_stream(server, "stream", options)


def answered(server, **options):
    return ask(server, **options).good()


def refused(server, word, **options):
    """Refused as invalid, whether it streams or not; the text of the error."""
    answer = client.grpc_infer(server, "whole", options)
    assert answer.status == "StatusCode.INVALID_ARGUMENT", (answer.status, answer.error, answer.text)
    assert word in answer.error, answer.error
    streamed = ask(server, **options, stream=True)
    assert streamed.error == answer.error and streamed.replies == [], streamed
    return answer.error


# Options that ask for nothing: with each subset of them the text is the same.
NEUTRAL = dict(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0,
    length_penalty=1.0, beam_width=1, num_return_sequences=1, min_tokens=0, min_length=0, seed=9, bad_words=[""],
    stop_words=[""], exclude_input_in_output=True, ignore_eos=False, return_log_probs=False, return_perf_metrics=False,
    return_context_logits=False, return_generation_logits=False, return_num_input_tokens=False,
    return_num_output_tokens=False, return_finish_reason=False, num_draft_tokens=3, use_draft_logits=False, stream=False,
    fixed_draft_tokens=True,
)


@pytest.mark.parametrize("name", NEUTRAL)
def test_each_optional_input_alone(server, reference, name):
    asked = {**ASKED, "max_tokens": 4}
    assert answered(server, **asked, **{name: NEUTRAL[name]}).text == reference.text(**asked)


def test_optional_inputs_in_random_combinations(server, reference):
    draw = random.Random(1)
    asked = {**ASKED, "max_tokens": 3}
    for _ in range(40):
        chosen = draw.sample(list(NEUTRAL), draw.randrange(2, len(NEUTRAL)))
        answer = ask(server, **asked, **{name: NEUTRAL[name] for name in chosen})
        assert answer.error is None and answer.text == reference.text(**asked), (chosen, answer)


def test_optional_outputs_in_every_combination(server, reference):
    outputs = {
        "return_log_probs": {"cum_log_probs", "output_log_probs"}, "return_num_input_tokens": {"num_input_tokens"},
        "return_num_output_tokens": {"num_output_tokens"}, "return_finish_reason": {"finish_reason"},
        "return_perf_metrics": {"acceptance_rate", "total_draft_tokens", "total_accepted_draft_tokens"},
    }
    asked = {**ASKED, "max_tokens": 2}
    for chosen in itertools.product([False, True], repeat=len(outputs)):
        flags = dict(zip(outputs, chosen))
        told = set(answered(server, **asked, **flags).replies[0].outputs)
        for flag, names in outputs.items():
            assert (names <= told) if flags[flag] else not (names & told), (flags, told)


@pytest.mark.parametrize(
    "word,options",
    [
        ("max_tokens", dict(max_tokens=0)), ("max_tokens", dict(max_tokens=-5)), ("priority", dict(priority=-1)),
        ("temperature", dict(temperature=-0.5)), ("temperature", dict(temperature=float("nan"))),
        ("temperature", dict(temperature=float("inf"))), ("top_k", dict(top_k=-2)), ("top_p", dict(top_p=1.5)),
        ("top_p", dict(top_p=float("nan"))), ("min_p", dict(min_p=-0.1)), ("min_p", dict(min_p=1.1)),
        ("repetition_penalty", dict(repetition_penalty=0.0)), ("repetition_penalty", dict(repetition_penalty=float("inf"))),
        ("presence_penalty", dict(presence_penalty=float("nan"))),
        ("num_draft_tokens", dict(num_draft_tokens=9)), ("num_draft_tokens", dict(num_draft_tokens=-1)),
        ("min_tokens", dict(min_tokens=-1)),
        ("embedding_bias", dict(embedding_bias_words=[" a", " b"], embedding_bias_weights=[1.0])),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_values_out_of_range_are_refused_by_name(server, word, options):
    refused(server, word, **{"text_input": "x", "max_tokens": 2, **options})


@pytest.mark.parametrize(
    "word,options",
    [
        ("return_context_logits", dict(return_context_logits=True)),
        ("return_generation_logits", dict(return_generation_logits=True)),
        ("guided_decoding", dict(guided_decoding_guide_type="json", guided_decoding_guide="{}")),
        ("lora_task_id", dict(lora_task_id=1)), ("decoder_text_input", dict(decoder_text_input="x")),
        ("prompt_vocab_size", dict(prompt_vocab_size=4)), ("beam_width", dict(beam_width=4)),
        ("length_penalty", dict(length_penalty=0.5)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_are_not_built_are_refused_as_such(server, word, options):
    answer = client.grpc_infer(server, "whole", dict(text_input="x", max_tokens=2, **options))
    assert answer.status == "StatusCode.UNIMPLEMENTED", (answer.status, answer.error)
    assert word in answer.error


def test_a_prompt_that_does_not_fit_is_refused_with_both_lengths(server):
    assert "5500 bytes are more than 1023 tokens" in refused(server, "1024", text_input="word " * 1100, max_tokens=4)


def test_of_an_output_that_does_not_fit_what_fits_is_sent(server):
    prompt = "word " * 1000
    answer = answered(server, text_input=prompt, max_tokens=2000, ignore_eos=True, return_finish_reason=True,
                      return_num_input_tokens=True, return_num_output_tokens=True)
    assert answer.value("num_input_tokens") + answer.sum("num_output_tokens") == 1024
    assert answer.value("finish_reason") == b"length"


def test_only_requests_of_one_salt_share_pages(server):
    """Of a salt nothing is told to others, not even whether it was there."""
    def found(**options):
        asked = {"text_input": "tenant " * 100, "max_tokens": 1, "return_perf_metrics": True, **options}
        return answered(server, **asked).value("kv_cache_reused_blocks")

    assert (found(cache_salt="one"), found(cache_salt="two"), found()) == (0, 0, 0)
    assert min(found(cache_salt="one"), found(cache_salt="two"), found()) > 0
    assert found(cache_salt="three") == 0


def test_counts_of_found_pages_can_be_hidden(server):
    asked = {"text_input": "hidden " * 100, "max_tokens": 1, "return_perf_metrics": True}
    told = {}
    for _ in range(2):
        told = client.grpc_infer(server, "hiding", asked).good().replies[0].outputs
    assert [name for name in told if name.startswith("kv_cache")] == ["kv_cache_alloc_total_blocks"]


def test_a_seed_has_two_names(server):
    drawn = {"text_input": PROMPT, "max_tokens": 12, "temperature": 1.0}
    texts = [answered(server, **drawn, **{name: 5}).text for name in ["seed", "random_seed"]]
    assert texts[0] == texts[1] != answered(server, **drawn, seed=6).text


def test_a_prompt_of_a_megabyte_is_refused(server, reference):
    refused(server, "text_input", text_input="word " * 210_000, max_tokens=4)
    refused(server, "text_input", text_input="😀" * 300_000, max_tokens=4)
    status, _, text = server.http(
        "POST", "/v2/models/stream/generate", {"text_input": "a" * (1 << 20), "max_tokens": 4}
    )
    assert status == 400, text
    assert answered(server, **ASKED).text == reference.text(**ASKED)


def test_the_default_length_is_cut_to_what_fits(server):
    asked = dict(text_input="word " * 1000, ignore_eos=True)
    answer = answered(server, **asked, return_num_output_tokens=True, return_num_input_tokens=True)
    assert answer.value("num_input_tokens") + answer.value("num_output_tokens") == 1024


def whole(*tensors, max_tokens=True):
    more = [("max_tokens", "INT32", [1, 1], raw.int32(2))] if max_tokens else []
    return raw.request("whole", [*tensors, *more])


MALFORMED = {
    "a length beyond the tensor": ("text_input", "BYTES", [1, 1], b"\xff\xff\xff\xffabc"),
    "a length cut off": ("text_input", "BYTES", [1, 1], b"\x01\x00"),
    "no bytes at all": ("text_input", "BYTES", [1, 1], b""),
    "bytes after the last element": ("text_input", "BYTES", [1, 1], raw.strings("x") + b"tail"),
    "more elements than the shape": ("text_input", "BYTES", [1, 1], raw.strings("x", "y")),
    "fewer elements than the shape": ("stop_words", "BYTES", [1, 3], raw.strings("x", "y")),
    "invalid UTF-8": ("text_input", "BYTES", [1, 1], raw.strings(b"\xff\xfe")),
    "half a surrogate": ("text_input", "BYTES", [1, 1], raw.strings(b"\xed\xa0\x80")),
    "an overlong NUL": ("text_input", "BYTES", [1, 1], raw.strings(b"\xc0\x80")),
    "another datatype": ("text_input", "INT32", [1, 1], raw.int32(7)),
    "strings for numbers": ("top_k", "BYTES", [1, 1], raw.strings("5")),
    "wide numbers for narrow ones": ("top_k", "INT64", [1, 1], bytes(8)),
    "too few bytes for a number": ("top_k", "INT32", [1, 1], b"\x01\x00"),
    "too many bytes for a number": ("top_k", "INT32", [1, 1], bytes(8)),
    "a scalar of two": ("top_k", "INT32", [1, 2], raw.int32(1, 2)),
    "a scalar of none": ("top_k", "INT32", [1, 0], b""),
    "no batch dimension": ("top_k", "INT32", [1], raw.int32(1)),
    "another batch size": ("top_k", "INT32", [2, 1], raw.int32(1, 1)),
    "one dimension more": ("top_k", "INT32", [1, 1, 1], raw.int32(1)),
    "a batch beyond the largest": ("text_input", "BYTES", [33, 1], raw.strings(*["x"] * 33)),
    "a negative dimension": ("stop_words", "BYTES", [1, -1], raw.strings("x")),
    "a dimension past all memory": ("stop_words", "BYTES", [1, 2**62], raw.strings("x")),
    "dimensions whose product overflows": ("stop_words", "BYTES", [2**33, 2**33], raw.strings("x")),
    "an input nobody knows": ("text_inptu", "BYTES", [1, 1], raw.strings("x")),
    "an empty prompt": ("text_input", "BYTES", [1, 1], raw.strings("")),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_tensors_are_refused_by_name(server, reference, what):
    name, *rest = MALFORMED[what]
    tensors = [(name, *rest)]
    if name != "text_input":
        tensors.append(("text_input", "BYTES", [1, 1], raw.strings("x")))
    with raw.Raw(server) as connection:
        code, error = connection.ask(whole(*tensors))
        assert code == "INVALID_ARGUMENT" and name in error, (code, error)
        assert client.grpc_infer(server, "whole", ASKED).good().text == reference.text(**ASKED)


def test_an_input_given_twice_is_refused(server):
    with raw.Raw(server) as connection:
        x = ("text_input", "BYTES", [1, 1], raw.strings("x"))
        code, error = connection.ask(whole(x, x))
        assert code == "INVALID_ARGUMENT", (code, error)
        code, error = connection.ask(whole(max_tokens=True))
        assert code == "INVALID_ARGUMENT" and "text_input" in error


def test_text_and_messages_exclude_each_other(server):
    messages = json.dumps([{"role": "user", "content": "x"}])
    refused(server, "messages", text_input="x", messages=messages, max_tokens=2)


@pytest.mark.parametrize(
    "messages", ["", "{", "[]", "{}", '[{"role": "user"}]', '[{"role": 1, "content": "x"}]', "[1]", "[" * 5000], ids=repr
)
def test_messages_that_are_no_chat_are_refused(server, messages):
    refused(server, "messages", messages=messages, max_tokens=2)


@pytest.mark.parametrize("messages", [["You answer in one word.", "Which animal barks?"], ["Name one colour."]])
def test_chat_messages_are_rendered_as_try_does(server, reference, messages):
    roles = ["system", "user"] if len(messages) == 2 else ["user"]
    text = json.dumps([{"role": role, "content": content} for role, content in zip(roles, messages)])
    assert answered(server, messages=text, max_tokens=10).text == reference.text(chat=messages, max_tokens=10)


def test_a_string_with_nul_is_a_prompt_like_others(server):
    first = answered(server, text_input="a\0b", max_tokens=4, return_num_input_tokens=True)
    assert first.value("num_input_tokens") > answered(
        server, text_input="a", max_tokens=4, return_num_input_tokens=True
    ).value("num_input_tokens"), "what follows the NUL is not lost"
    refused_or_not = ask(server, text_input="a", max_tokens=4, stop_words=["\0"])
    assert refused_or_not.error is None or "stop_words" in refused_or_not.error


def test_empty_stop_and_bad_words_are_ignored(server, reference):
    answer = answered(server, **ASKED, stop_words=["", ""], bad_words=["", "", ""])
    assert answer.text == reference.text(**ASKED)


def test_an_empty_list_is_as_good_as_none(server, reference):
    nothing = np.zeros((1, 0), dtype=np.object_)
    answer = answered(server, **ASKED, stop_words=nothing, bad_words=nothing)
    assert answer.text == reference.text(**ASKED)


def test_stop_words_cut_the_text_before_them_streamed_or_not(server, reference):
    text = reference.text(text_input=LIST, max_tokens=40)
    # Spans of text that cross what is generated at once: words, parts of words, line ends, characters.
    for stop in ["wing 77", "m, r", " mm,", text[-3:]]:
        expected = text[: text.index(stop)]
        for stream in [False, True]:
            answer = answered(
                server, text_input=LIST, max_tokens=40, stop_words=[stop, "never to be seen"], stream=stream,
                num_draft_tokens=8, return_finish_reason=True,
            )
            assert answer.text == expected, stop
            assert answer.finals == 1
            assert answer.value("finish_reason").decode() == "stop"
        assert reference.text(text_input=LIST, max_tokens=40, stop_words=[stop]) == expected


def test_the_earliest_of_several_stop_words_counts(server, reference):
    asked = dict(text_input=LIST, max_tokens=40, stop_words=["drawing", "mm", "side"])
    assert answered(server, **asked, stream=True).text == reference.text(**asked)


def test_bad_words_do_not_appear(server, reference):
    plain = reference.text(**ASKED)
    word = " Paris"
    assert word in plain
    asked = {**ASKED, "bad_words": [word, " the city"]}
    assert word not in answered(server, **asked).text
    assert answered(server, **asked, stream=True).text == reference.text(**asked)


def test_streamed_chunks_are_whole_characters(server, reference):
    asked = dict(text_input="😀😃😄😁😆 日本の首都は東京です。😀😃", max_tokens=24, temperature=1.3, seed=8)
    answer = answered(server, **asked, stream=True, num_draft_tokens=0)
    assert answer.text == reference.text(**asked)


def test_min_tokens_holds_the_end_back(server):
    chat = json.dumps([{"role": "user", "content": "Say only the word yes."}])
    tokens = lambda **more: answered(
        server, messages=chat, max_tokens=40, return_num_output_tokens=True, **more
    ).value("num_output_tokens")
    short = tokens()
    assert short < 40, "the answer ends on its own"
    assert tokens(min_tokens=short + 5) >= short + 5
    assert tokens(min_length=short + 5) >= short + 5
    assert tokens(ignore_eos=True) == 40


def test_seeds_decide_texts(server, reference):
    asked = dict(text_input=PROMPT, max_tokens=16, temperature=1.0)
    texts = [answered(server, **asked, seed=seed).text for seed in (1, 1, 2, 2**64 - 1)]
    assert texts[0] == texts[1] and len(set(texts)) == 3
    assert texts[0] == reference.text(**asked, seed=1)


def test_unseeded_texts_differ(server):
    asked = dict(text_input=PROMPT, max_tokens=24, temperature=1.0)
    assert len({answered(server, **asked).text for _ in range(4)}) > 1


def test_the_prompt_is_put_first_when_it_is_not_excluded_and_never_streamed(server, reference):
    for stream, prompt in [(False, ASKED["text_input"]), (True, "")]:
        answer = answered(server, **ASKED, exclude_input_in_output=False, stream=stream)
        assert answer.text == prompt + reference.text(**ASKED)
    assert answered(server, **ASKED).text == reference.text(**ASKED), "excluded unless asked for"


def test_usage_counts_are_those_of_try(server, reference):
    for _, asked in CASES[:1] + CASES[3:4]:
        run = reference.ask(**asked)
        for stream in [False, True]:
            answer = answered(
                server, **asked, stream=stream, return_num_input_tokens=True, return_num_output_tokens=True
            )
            assert answer.value("num_input_tokens") == len(run["prompt_ids"])
            assert answer.sum("num_output_tokens") == len(run["output_ids"])


def test_log_probs_are_those_of_try(server, reference):
    expected = reference.ask(**ASKED, logprobs=0)["logprobs"]
    for stream in [False, True]:
        answer = answered(server, **ASKED, return_log_probs=True, stream=stream)
        parts = [reply.outputs["output_log_probs"].reshape(-1) for reply in answer.replies]
        told = np.concatenate(parts)
        assert told.tolist() == pytest.approx(expected, abs=1e-5)
        assert answer.value("cum_log_probs") == pytest.approx(sum(expected), abs=1e-3)


def test_finish_reasons_are_told(server):
    reason = lambda **more: answered(server, **more, return_finish_reason=True).value("finish_reason").decode()
    assert reason(text_input=PROMPT, max_tokens=3) == "length"
    assert reason(**{**ASKED, "stop_words": [" Paris"]}) == "stop"


def test_a_biased_word_is_chosen(server):
    answer = answered(
        server, text_input=PROMPT, max_tokens=3, embedding_bias_words=[" the"], embedding_bias_weights=[100.0]
    )
    assert answer.text == " the the the"


@pytest.mark.parametrize("num_rows", [2, 3, 4])
def test_rows_of_one_request_are_answered_as_alone(server, reference, num_rows):
    cases = [dict(text_input=text, max_tokens=8 + i) for i, text in enumerate(["A cat", PROMPT, "1 2 3 1 2 3 1", "x"])]
    cases = cases[:num_rows]
    column = lambda name, kind: np.array([[one[name]] for one in cases], dtype=kind)
    asked = {
        "text_input": np.array([[one["text_input"].encode()] for one in cases], dtype=np.object_),
        "max_tokens": column("max_tokens", np.int32),
    }
    expected = [reference.text(**one) for one in cases]
    for door in [client.grpc_infer, client.http_infer]:
        answer = door(server, "whole", asked).good()
        assert [one.decode() for one in answer.replies[0].outputs["text_output"]] == expected
    for stream in [False, True]:
        answer = client.grpc_stream(server, "stream", {**asked, "stream": np.full((num_rows, 1), stream)}).good()
        texts = [""] * num_rows
        for reply in answer.replies:
            texts[int(reply.outputs["batch_index"].reshape(-1)[0])] += reply.text() or ""
        assert texts == expected and answer.finals == 1
        assert stream or len(answer.replies) == num_rows


def test_requested_outputs_are_the_only_ones(server):
    with server.grpc() as grpc:
        wanted = [grpcclient.InferRequestedOutput("num_output_tokens")]
        result = grpc.infer(
            "whole", client.tensors(grpcclient, {**ASKED, "return_num_output_tokens": True}), outputs=wanted
        )
        assert [one.name for one in result.get_response().outputs] == ["num_output_tokens"]
        wrong = [grpcclient.InferRequestedOutput("text_outptu")]
        with pytest.raises(Exception, match="text_outptu"):
            grpc.infer("whole", client.tensors(grpcclient, ASKED), outputs=wrong)


def test_options_may_be_request_parameters_of_any_type(server, reference):
    case = CASES[3][1]
    parameters = {name: str(value) for name, value in case.items() if name != "text_input"}
    answer = client.grpc_stream(server, "stream", {"text_input": case["text_input"]}, parameters=parameters).good()
    assert answer.text == reference.text(**case)


def test_a_tensor_wins_over_a_parameter(server, reference):
    answer = client.grpc_stream(server, "stream", ASKED, parameters={"max_tokens": 2}).good()
    assert answer.text == reference.text(**ASKED)
