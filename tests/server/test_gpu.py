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
from harness.reference import Reference
from harness.repository import Model
from harness.server import eventually

PROMPTS = ["Hello there", "abc abc abc abc", "1 2 3 4 5 6 7 8 9", "The quick brown fox jumps over the lazy dog, " * 3]
CASES = [
    dict(text_input=text, max_tokens=20 + 3 * idx, ignore_eos=True, **sampling)
    for idx, text in enumerate(PROMPTS)
    for sampling in [{}, dict(temperature=1.0, seed=idx), dict(temperature=1.3, top_k=9, top_p=0.9, seed=7)]
]


POOL = {"max_tokens_in_paged_kv_cache": 1024}
REAL = {"text_input": "One, two,", "max_tokens": 4}


def complaints(server):
    return [line for line in server.log.splitlines() if emulated.COMPLAINT in line]


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
def placing_gpu(folder, gpu):
    """The same, with a CUDA runtime by which Triton sees the first GPU too."""
    return {**gpu, "LD_PRELOAD": str(emulated.cuda_runtime(folder))}


@pytest.fixture(scope="module")
def server(serve, gpu_engine, gpu):
    return serve([
        Model("adaptive", gpu_engine, kind="KIND_MODEL", parameters=POOL),
        Model("fixed", gpu_engine, kind="KIND_CPU", parameters={**POOL, "draft_len": 3, "gpu_device_ids": "1"}),
        Model("branching", gpu_engine, kind="KIND_MODEL", parameters={**POOL, "draft_len": 3, "draft_branches": 3}),
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


@pytest.mark.parametrize("model", ["adaptive", "fixed", "branching"])
def test_served_text_is_that_of_try_alone_and_among_others(server, expected, model):
    def ask(case):
        return client.grpc_stream(server, model, {**case, "stream": True}).good().text

    assert [ask(case) for case in CASES[:3]] == expected[:3]
    with ThreadPoolExecutor(len(CASES)) as pool:
        assert list(pool.map(ask, CASES)) == expected


@pytest.mark.parametrize("model,branches", [("fixed", 1), ("branching", 3)])
def test_drafts_are_verified_and_kept(server, expected, model, branches):
    count = lambda: [server.metric(f"nv_spec_num_{what}_tokens_total", model=model) for what in ("draft", "accepted")]
    before = count()
    assert client.generate(server, model, CASES[0]).good().text == expected[0]
    verified, kept = (now - then for now, then in zip(count(), before))
    # Each first draft has others beside it but at the end of the text, and none of them is right: the drafter is the target itself.
    assert kept > 0 and verified > (branches - 1) * kept


@pytest.mark.parametrize("model,number", [("adaptive", 0), ("fixed", 1)])
def test_memory_is_told_as_that_of_its_gpu(server, model, number):
    told = lambda of: server.metric("nv_trt_llm_runtime_memory_metrics", model=model, memory_type=of)
    assert told("gpu") > 0 and told("pinned") > 0 and told("cpu") == 0
    reported = {(one["type"], one["id"]): one["byte_size"] for one in server.statistics(model)["memory_usage"]}
    assert reported == {("GPU", number): told("gpu"), ("CPU_PINNED", 0): told("pinned")}


def test_no_call_of_the_driver_was_wrong(server, expected):
    assert client.generate(server, "adaptive", CASES[0]).good().text == expected[0]
    assert complaints(server) == []


def test_a_gpu_that_is_not_there_is_named(serve, gpu_engine, gpu):
    model = Model("gpu", gpu_engine, kind="KIND_MODEL", parameters={"gpu_device_ids": "2"})
    error = serve([model], load=[], env=gpu).load("gpu")
    assert "GPU 2 was asked for, 2 are here" in error


def test_a_machine_without_a_driver_is_told_so(serve, gpu_engine):
    nowhere = {"SPEC_CUDA_DRIVER": "/there/is/no/libcuda.so.1"}
    error = serve([Model("gpu", gpu_engine, kind="KIND_MODEL")], load=[], env=nowhere).load("gpu")
    assert "the CUDA driver (libcuda.so.1) is not installed" in error


def load_again(server):
    """The server has unloaded a model some time after it has said so."""
    assert server.unload("gpu") is None
    eventually(lambda: "successfully unloaded 'gpu'" in server.log)
    assert server.load("gpu") is None


def test_a_model_that_triton_places_is_unloaded_and_everything_is_freed(serve, gpu_engine, placing_gpu, expected):
    server = serve([Model("gpu", gpu_engine, kind="KIND_GPU", parameters=POOL)], env=placing_gpu)
    assert client.generate(server, "gpu", CASES[0]).good().text == expected[0]
    load_again(server)
    assert client.generate(server, "gpu", CASES[0]).good().text == expected[0]
    assert server.stop() == 0 and complaints(server) == []


def test_a_gpu_that_fails_is_told_and_a_model_that_is_loaded_again_runs(serve, gpu_engine, placing_gpu, expected):
    failing = {"EMU_DRIVER_FAIL": "kernel=719@200"}
    server = serve([Model("gpu", gpu_engine, kind="KIND_GPU", parameters=POOL)], env={**placing_gpu, **failing})
    assert "restart the server, or, where nothing else uses the GPU, unload" in client.generate(server, "gpu", CASES[0]).error
    assert "the GPU failed before (CUDA_ERROR_LAUNCH_FAILED)" in client.generate(server, "gpu", CASES[0]).error
    load_again(server)
    assert client.generate(server, "gpu", CASES[0]).good().text == expected[0]
    assert server.stop() == 0 and complaints(server) == []


def test_a_real_model_is_served(serve, folder):
    engine = places.engine("gpu", max_seq_len=128, max_batch_size=4, dtype="fp16", device="cuda:sm_90a")
    here = folder / "real"
    here.mkdir()
    gpu = emulated.environment(engine, here)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in gpu.items():
            patch.setenv(name, value)
        expected = Reference(engine).text(**REAL)
    server = serve([Model("real", engine, kind="KIND_MODEL", parameters=POOL)], env=gpu)
    assert client.generate(server, "real", REAL).good().text == expected
