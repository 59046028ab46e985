"""Libraries that speak to Triton by themselves, and OpenAI's behind Triton's OpenAI frontend (harness/frontend.py)."""

import pytest

from harness import frontend, installed
from harness.cases import LIST
from harness.repository import Model
from harness.upstream import connector

LENGTH = 24
PROMPT = "Once upon a time"


def test_llama_index_reads_the_text(server, reference, tmp_path):
    """It drops what comes after as many pieces as it asks for tokens, less one: text that is drafted comes in fewer."""
    expected = reference.text(text_input=LIST, max_tokens=LENGTH)
    question = dict(url=server.grpc_url, prompt=LIST, tokens=LENGTH)
    answer = installed.ask("llama-index", "ask_llama_index.py", tmp_path, **question)
    assert answer["text"] == expected
    assert "".join(answer["pieces"]) == expected and len(answer["pieces"]) > 1
    assert answer["chat"]


def test_llama_index_without_drafts_reads_all_but_the_last_piece(server, reference, tmp_path):
    expected = reference.text(text_input=PROMPT, max_tokens=8)
    question = dict(url=server.grpc_url, prompt=PROMPT, tokens=8)
    answer = installed.ask("llama-index", "ask_llama_index.py", tmp_path, **question)
    assert answer["text"] and expected.startswith(answer["text"])


@pytest.fixture(scope="module")
def unsigned(serve, engine):
    return serve([Model("ensemble", engine, parameters={"max_tokens_in_paged_kv_cache": 4096}, extra=connector.UNSIGNED)])


def test_langchain_reads_the_text(unsigned, reference, tmp_path):
    expected = reference.text(text_input=LIST, max_tokens=LENGTH)
    question = dict(url=unsigned.grpc_url, prompt=LIST, tokens=LENGTH)
    answer = installed.ask("langchain", "ask_langchain.py", tmp_path, **question)
    assert answer["text"] == answer["batch"] == expected
    assert "".join(answer["pieces"]) == expected and len(answer["pieces"]) > 1


@pytest.mark.parametrize("model,form", [("ensemble", "trtllm"), ("vllm_model", "vllm")])
def test_openai_reads_completions_and_chats_whole_and_streamed(server, reference, model, form, tmp_path):
    said = ["Answer in one short sentence.", "What is machine learning?"]
    messages = [{"role": role, "content": text} for role, text in zip(["system", "user"], said)]
    question = dict(prompt=PROMPT, messages=messages, tokens=LENGTH, stop=[","])
    with frontend.serving(server, model, frontend.FORMATS[form], frontend.chatml) as url:
        answer = installed.ask("openai", "ask_openai.py", tmp_path, url=url, **question)
    completion, chat = reference.ask(text_input=PROMPT, max_tokens=LENGTH), reference.ask(chat=said, max_tokens=LENGTH)
    counts = len(completion["prompt_ids"]), len(completion["output_ids"])
    assert answer["completion"] == "".join(answer["pieces"]) == completion["text"]
    assert answer["chat"] == "".join(answer["chat_pieces"]) == chat["text"]
    assert len([piece for piece in answer["pieces"] if piece]) > 1
    assert answer["finish_reason"] == "stop"
    for usage in (answer["usage"], answer["streamed_usage"]):
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (*counts, sum(counts))
    assert answer["stopped"] == completion["text"].split(",")[0]
    assert answer["drawn"][0] == answer["drawn"][1] != answer["drawn"][2]
