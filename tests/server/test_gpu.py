"""An engine for GPUs in the real server, down to the driver's interface, below which the GPU is emulated: texts are
those of `spec-build try` on the same GPU, everything is freed, and what a GPU that fails leads to.
"""

import os

import pytest

from harness import client, emulated, places
from harness.reference import Reference
from harness.repository import Model
from harness.server import eventually

ASKED = {"text_input": "One, two,", "max_tokens": 4}
PLACED = {"kind": "KIND_GPU", "parameters": {"max_tokens_in_paged_kv_cache": 512}}


@pytest.fixture(scope="module")
def engine():
    if not ((places.ROOT / "target/cuda/venv").is_dir() or "SPEC_CUDA_LIB" in os.environ):
        pytest.skip("there is no NVRTC to compile kernels with (scripts/setup-cuda)")
    return places.engine("gpu", max_seq_len=128, max_batch_size=4, dtype="fp16", device="cuda:sm_90a")


@pytest.fixture(scope="module")
def gpu(engine):
    """Makes this process and its children find the GPU; gives what servers need besides."""
    variables, of_servers = emulated.prepare(places.SCRATCH / "emulated", engine)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield of_servers


def complaints(server):
    return [line for line in server.log.splitlines() if emulated.COMPLAINT in line]


def load_again(server):
    """The server has unloaded a model some time after it has said so."""
    assert server.unload("gpu") is None
    eventually(lambda: "successfully unloaded 'gpu'" in server.log)
    assert server.load("gpu") is None


def test_text_is_that_of_try_and_everything_is_freed(serve, engine, gpu):
    server = serve([Model("gpu", engine, **PLACED)], env=gpu)
    expected = Reference(engine).text(**ASKED)
    assert client.generate(server, "gpu", ASKED).good().text == expected
    assert client.grpc_stream(server, "gpu", {**ASKED, "stream": True, "num_draft_tokens": 0}).good().text == expected
    load_again(server)
    assert client.generate(server, "gpu", ASKED).good().text == expected
    assert server.stop() == 0 and not complaints(server)


def test_a_gpu_that_fails_is_told_and_a_model_that_is_loaded_again_runs(serve, engine, gpu):
    server = serve([Model("gpu", engine, **PLACED)], env={**gpu, "EMU_DRIVER_FAIL": "kernel=719@200"})
    assert "unload every model on it and load them again" in client.generate(server, "gpu", ASKED).error
    assert "the GPU failed before (CUDA_ERROR_LAUNCH_FAILED)" in client.generate(server, "gpu", ASKED).error
    load_again(server)
    assert client.generate(server, "gpu", ASKED).good().text == Reference(engine).text(**ASKED)
    assert server.stop() == 0 and not complaints(server)
