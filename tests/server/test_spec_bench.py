"""spec-bench against the real server: its figures are the server's own, whichever profile it asks through, and those of the
same engine in its own process."""

import contextlib
import json
import os
import subprocess

import pytest

from harness import frontend, places, tls
from harness.repository import Model
from harness.server import eventually, total

DRAFT_LEN = 4
TOKENS = 24
# What the small model's chat template puts ahead of a conversation without a system's message.
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
PROMPTS = [
    {"category": "copy", "prompt": "Repeat ten times: the cat sat on the mat. the cat sat on the mat. the cat sat on"},
    {"category": "copy", "prompt": "1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2,"},
    {"category": "tell", "prompt": "Once upon a time"},
    {"category": "tell", "prompt": "The capital of France is"},
]


@pytest.fixture(scope="module")
def server(serve, engine):
    parameters = {"max_tokens_in_paged_kv_cache": 4096, "draft_len": DRAFT_LEN}
    return serve([
        Model("text", engine, parameters=parameters),
        Model("adapts", engine, parameters={**parameters, "draft_len": "auto"}),
        Model("vllm", engine, max_batch_size=0, parameters={**parameters, "profile": "vllm"}),
    ])


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return path


def measure(where, prompts, endpoint, *arguments, ok=True):
    """Its results, its table and the report."""
    files = {kind: where / f"results.{kind}" for kind in ("json", "html")}
    command = [places.spec_bench(), *arguments[:1], endpoint, "--prompts", prompts, "--raw", "--max-tokens", TOKENS,
               "--ignore-eos", "--rounds", 2, "--quiet", "--json", files["json"], "--html", files["html"], *arguments[1:]]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert (done.returncode == 0) == ok, done.stderr
    return json.loads(files["json"].read_text()), done.stdout, files["html"].read_text()


def address(server, model):
    return f"triton://{server.grpc_url}/{model}"


def of(runs, draft_len, concurrency=1):
    """The run of a draft length."""
    [run] = [run for run in runs if run["setting"]["draft_len"] == draft_len
             and run["setting"]["load"] == {"concurrency": concurrency}]
    return run


def test_figures_are_the_servers_own(server, prompts, tmp_path):
    labels = dict(model="text", version="1")
    before = server.metrics()
    results, table, page = measure(tmp_path, prompts, address(server, "text"), "compare", "--concurrency", "1,2",
                                   "--warm-up", 0)
    runs = results["runs"]
    asked = 2 * len(PROMPTS) * len(runs)
    gain = lambda family, **more: total(server.metrics(), family, **labels, **more) - (total(before, family, **labels, **more) or 0)
    eventually(lambda: gain("nv_inference_request_success") == asked)
    assert sum(run["answered"] for run in runs) == asked and not any(run["failed"] for run in runs)
    assert sum(run["output_tokens"] for run in runs) == gain("nv_spec_generation_tokens_total") == asked * TOKENS
    assert sum(run["input_tokens"] for run in runs) == gain("nv_spec_prompt_tokens_total")
    drafting = [run["speculation"] for run in runs if run["setting"]["draft_len"] == "auto"]
    assert sum(one["drafted"] for one in drafting) == gain("nv_spec_num_draft_tokens_total") > 0
    assert sum(one["accepted"] for one in drafting) == gain("nv_spec_num_accepted_tokens_total") > 0
    for position in range(DRAFT_LEN):
        reached = sum(sum(one["histogram"][position + 1:]) for one in drafting)
        family = "nv_spec_num_accepted_tokens_per_pos_total"
        assert reached == gain(family, position=str(position)), position
    assert all(run["speculation"]["drafted"] == 0 for run in runs if run["setting"]["draft_len"] == "0")
    assert all(run["same_text"] == 1 for run in runs), "lossless"
    # The terminal and the report tell the same.
    for run in runs:
        speed = run["tokens_per_second"]
        assert f"{speed:.1f}" in table
        assert f">{speed:.1f}<" in page or f">{speed:,.0f}<" in page or f">{speed:.2f}<" in page
    assert all(sentence in table for sentence in results["advice"]) and results["advice"]


def test_categories_add_up(server, prompts, tmp_path):
    results, _, _ = measure(tmp_path, prompts, address(server, "text"), "compare")
    run = of(results["runs"], "auto")
    assert [(one["name"], one["answered"]) for one in run["categories"]] == [("copy", 4), ("tell", 4)]
    for what in ("drafted", "accepted", "steps"):
        assert sum(one["speculation"][what] for one in run["categories"]) == run["speculation"][what]


def test_the_vllm_profile_tells_the_same(server, prompts, tmp_path):
    text, vllm = (
        of(measure(tmp_path, prompts, address(server, model), "run", "--warm-up", 0)[0]["runs"], "auto")
        for model in ("text", "vllm")
    )
    same = ("answered", "input_tokens", "output_tokens", "speculation")
    assert {name: text[name] for name in same} == {name: vllm[name] for name in same}


@pytest.mark.parametrize("model", ["text", "adapts"])
def test_an_engine_in_process_tells_the_same(server, engine, prompts, tmp_path, model):
    # A text of its own for each request, so that no cache of prompts differs; draws have seeds.
    how = ["run", "--draft-len", f"0,{DRAFT_LEN}", "--temperature", 0.8]
    served, own = (measure(tmp_path, prompts, endpoint, *how)[0]["runs"] for endpoint in (address(server, model), engine))
    for draft_len in ("0", str(DRAFT_LEN)):
        one, other = of(served, draft_len), of(own, draft_len)
        assert one["speculation"] == other["speculation"] and one["output_tokens"] == other["output_tokens"]
        assert one["same_text"] == other["same_text"] == 1


@pytest.mark.parametrize("how", [["--raw"], []])
def test_a_server_with_openais_completions_is_asked_the_same(server, prompts, tmp_path, how):
    def tokens(endpoint):
        out = tmp_path / "results.json"
        command = [places.spec_bench(), "run", endpoint, "--prompts", prompts, *how, "--max-tokens", TOKENS, "--rounds", 1,
                   "--quiet", "--json", out]
        subprocess.run([str(part) for part in command], check=True, capture_output=True)
        [run] = json.loads(out.read_text())["runs"]
        assert not run["failed"] and run["latency"]["per_token"]["count"] == len(PROMPTS)
        return run["input_tokens"], run["output_tokens"]

    chat = lambda messages: frontend.chatml([{"role": "system", "content": SYSTEM}, *messages])
    with frontend.serving(server, "text", frontend.trtllm, chat) as url:
        host = url.removeprefix("http://").removesuffix("/v1")
        assert tokens(f"openai://{host}/text") == tokens(address(server, "text"))


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return tls.Authority(tmp_path_factory.mktemp("certificates"))


@pytest.mark.parametrize("kind", ["triton", "openai"])
def test_servers_are_asked_over_tls(server, authority, prompts, tmp_path, kind):
    def run(endpoint, **env):
        command = [places.spec_bench(), "run", endpoint, "--prompts", prompts, "--raw", "--max-tokens", TOKENS, "--rounds", 1,
                   "--quiet", "--json", tmp_path / "results.json"]
        return subprocess.run([str(part) for part in command], capture_output=True, text=True, env={**os.environ, **env})

    with contextlib.ExitStack() as stack:
        if kind == "triton":
            behind, protocols = server.grpc_url, ["h2"]
        else:
            behind = stack.enter_context(frontend.serving(server, "text", frontend.trtllm, frontend.chatml))
            behind, protocols = behind.removeprefix("http://").removesuffix("/v1"), ["http/1.1"]
        endpoint = f"{kind}+https://{stack.enter_context(tls.door(authority, behind, protocols))}/text"
        done = run(endpoint, SSL_CERT_FILE=str(authority.root))
        assert done.returncode == 0, done.stderr
        [result] = json.loads((tmp_path / "results.json").read_text())["runs"]
        assert not result["failed"] and result["answered"] == len(PROMPTS)
        # Who does not know the authority does not trust the server.
        assert run(endpoint).returncode == 1


def test_requests_at_a_rate_are_all_answered(server, prompts, tmp_path):
    results, _, _ = measure(tmp_path, prompts, address(server, "text"), "run", "--rate", 50, "--requests", 12)
    [run] = results["runs"]
    assert (run["answered"], run["setting"]["load"]) == (2 * 12, {"rate": 50})


def test_what_fails_is_told_with_its_reason(server, prompts, tmp_path):
    results, table, page = measure(tmp_path, prompts, address(server, "text"), "run", "--temperature", 101, ok=False)
    [[why, count]] = results["runs"][0]["failed"]
    assert "temperature" in why and count == 2 * len(PROMPTS)
    assert why in table and "temperature" in page


@pytest.mark.parametrize("endpoint, said", [
    ("triton://{grpc}/none", "none"),
    ("triton://127.0.0.1:1/text", "connecting to 127.0.0.1:1"),
])
def test_an_endpoint_that_is_not_there_is_named(server, prompts, endpoint, said):
    command = [places.spec_bench(), "run", endpoint.format(grpc=server.grpc_url), "--prompts", prompts, "--quiet"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 1 and said in done.stderr
