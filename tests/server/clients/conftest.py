"""Suites that run other people's clients themselves, as installed. They need hundreds of packages, so
scripts/test-server leaves them out; scripts/test-clients installs the packages and runs them.
"""

import os

import pytest

from harness import installed, places
from harness.repository import Model


@pytest.fixture(scope="session")
def offline(engine):
    """Environment of a client that looks for a tokenizer."""
    home = installed.cache(engine, places.SCRATCH / "huggingface")
    return {"HF_HOME": home, "HF_HUB_OFFLINE": 1, "TOKENIZERS_PARALLELISM": "false", "COLUMNS": 200}


@pytest.fixture(scope="session")
def perf(tmp_path_factory):
    """Environment of a client that starts perf_analyzer."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "perf_analyzer").symlink_to(installed.perf_analyzer())
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def server(serve, engine):
    """A model of each profile, under the names that the clients know."""
    pool = {"max_tokens_in_paged_kv_cache": 4096}
    return serve([
        Model("ensemble", engine, parameters={**pool, "draft_len": 4}),
        Model("whole", engine, decoupled=False, parameters=pool),
        Model("tensorrt_llm", engine, parameters={**pool, "profile": "token"}),
        Model("vllm_model", engine, max_batch_size=0, parameters={**pool, "profile": "vllm"}),
    ])


@pytest.fixture
def counted(server):
    """Requests that ended well and badly in a model since the test began: counted(model)."""
    names = ["nv_inference_request_success", "nv_inference_request_failure"]
    counts = lambda model: [server.metric(name, model=model) or 0 for name in names]
    before = {model: counts(model) for model in ["ensemble", "whole", "tensorrt_llm", "vllm_model"]}
    return lambda model: [int(now - then) for now, then in zip(counts(model), before[model])]
