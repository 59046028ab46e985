"""Engines for GPUs in the real server: everything but the GPU is what it will be on one, down to the driver's
interface, under which the machine is emulated. What is served is what `spec-build try` writes on the same machine.
"""

import json
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness import client, emulated, places
from harness.repository import Model

PROMPTS = ["Hello there", "abc abc abc abc", "1 2 3 4 5 6 7 8 9", "The quick brown fox jumps over the lazy dog, " * 3]
CASES = [
    dict(text_input=text, max_tokens=20 + 3 * idx, ignore_eos=True, **sampling)
    for idx, text in enumerate(PROMPTS)
    for sampling in [{}, dict(temperature=1.0, seed=idx), dict(temperature=1.3, top_k=9, top_p=0.9, seed=7)]
]


@pytest.fixture(scope="module")
def folder(request):
    path = places.SCRATCH / f"{request.module.__name__}_engine"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


@pytest.fixture(scope="module")
def gpu_engine(folder):
    return emulated.engine(folder)


@pytest.fixture(scope="module")
def gpu(folder, gpu_engine):
    return emulated.environment(gpu_engine, folder)


@pytest.fixture(scope="module")
def server(serve, gpu_engine, gpu):
    pool = {"max_tokens_in_paged_kv_cache": 1024}
    return serve([
        Model("adaptive", gpu_engine, kind="KIND_MODEL", parameters=pool),
        Model("fixed", gpu_engine, kind="KIND_CPU", parameters={**pool, "draft_len": 3, "gpu_device_ids": "1"}),
    ], env=gpu)


@pytest.fixture(scope="module")
def expected(gpu_engine, gpu):
    """The text of `try` without drafts, on the same machine."""

    def text(case):
        options = {name.replace("_", "-"): value for name, value in case.items() if name not in ("text_input", "ignore_eos")}
        arguments = [f"--{name}={value}" for name, value in options.items()]
        command = [places.spec_build(), "try", gpu_engine, f"--prompt={case['text_input']}", "--ignore-eos", "--json"]
        run = subprocess.run([*command, "--draft-len=0", *arguments], capture_output=True, text=True, env={**os.environ, **gpu})
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout)["text"]

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(text, CASES))


@pytest.mark.parametrize("model", ["adaptive", "fixed"])
def test_served_text_is_that_of_try_alone_and_among_others(server, expected, model):
    def ask(case):
        return client.grpc_stream(server, model, {**case, "stream": True}).good().text

    assert [ask(case) for case in CASES[:3]] == expected[:3]
    with ThreadPoolExecutor(len(CASES)) as pool:
        assert list(pool.map(ask, CASES)) == expected


def test_drafts_are_verified_and_kept(server, expected):
    assert client.generate(server, "fixed", CASES[0]).good().text == expected[0]
    verified, kept = (
        server.metric(f"nv_spec_num_{what}_tokens_total", model="fixed") for what in ("draft", "accepted")
    )
    assert verified >= kept > 0


def test_no_call_of_the_driver_was_wrong(server):
    complaints = [line for line in server.log.splitlines() if "emulated libcuda:" in line]
    assert complaints == []


def test_a_gpu_that_is_not_there_is_named(serve, gpu_engine, gpu):
    model = Model("gpu", gpu_engine, kind="KIND_MODEL", parameters={"gpu_device_ids": "2"})
    error = serve([model], load=[], env=gpu).load("gpu")
    assert "GPU 2 was asked for, 2 are here" in error


def test_a_machine_without_a_driver_is_told_so(serve, gpu_engine):
    error = serve([Model("gpu", gpu_engine, kind="KIND_MODEL")], load=[]).load("gpu")
    assert "the CUDA driver (libcuda.so.1) is not installed" in error
