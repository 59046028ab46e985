"""Where things are. `scripts/test-server` sets the variables; the defaults are where it puts things.

SPEC_BACKEND_DIR        holds spec/libtriton_spec.so
SPEC_FAULT_BACKEND_DIR  the same, built with the feature `fault-injection`
SPEC_ECHO_BACKEND_DIR   holds echo/libtriton_echo.so, the example of the crate triton-backend
SPEC_BUILD              the program spec-build
SPEC_BENCH              the program spec-bench
SPEC_TRITON_VENV        a Python environment with nvidia-pytriton and tritonclient
SPEC_MODELS             where scripts/fetch-model leaves models
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CACHE = ROOT / "target" / "test-models"
SCRATCH = ROOT / "target" / "test-server"
MODEL_FILE = "smollm2-135m-instruct-q4_1.gguf"


def place(variable, default):
    path = Path(os.environ.get(variable, default))
    if not path.exists():
        raise RuntimeError(f"there is no {path}: run the suites with scripts/test-server, or set {variable}")
    return path


def backends():
    return place("SPEC_BACKEND_DIR", ROOT / "target/backends-dev")


def fault_backends():
    return place("SPEC_FAULT_BACKEND_DIR", ROOT / "target/backends-fault")


def echo_backends():
    return place("SPEC_ECHO_BACKEND_DIR", ROOT / "target/backends-echo")


def spec_build():
    return place("SPEC_BUILD", ROOT / "target/debug/spec-build")


def spec_bench():
    return place("SPEC_BENCH", ROOT / "target/debug/spec-bench")


def tritonserver():
    """The server's program, out of the wheel in the environment that runs these tests unless told otherwise."""
    venv = Path(os.environ.get("SPEC_TRITON_VENV", sys.prefix))
    found = sorted(venv.glob("lib/python3*/site-packages/pytriton/tritonserver/bin/tritonserver"))
    if not found:
        raise RuntimeError(f"there is no tritonserver in {venv}: scripts/install-triton makes an environment with it")
    return found[0]


def checkpoint():
    """The small real model; suites say that they skip where it was not fetched."""
    path = Path(os.environ.get("SPEC_MODELS", ROOT / "models")) / MODEL_FILE
    if not path.is_file():
        pytest.skip(f"there is no {path} (scripts/fetch-model smollm2-135m)", allow_module_level=True)
    return path


def _code():
    """A hash over the sources that decide what an engine file holds."""
    digest = hashlib.sha256()
    for folder, suffix in [
        ("builder/src", "rs"), ("backend/core/src/engine", "rs"), ("backend/core/src/model", "rs"), ("kernels", "cu*"),
    ]:
        for file in sorted((ROOT / folder).rglob(f"*.{suffix}")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def engine(label, *, max_seq_len, max_batch_size=32, dtype="bf16", draft="ngram", max_draft_len=8, device="cpu", options=()):
    """A model folder built from the small model, kept until the builder's source or the arguments change."""
    arguments = [
        f"--draft={draft}", f"--dtype={dtype}", f"--max-draft-len={max_draft_len}",
        f"--max-seq-len={max_seq_len}", f"--max-batch-size={max_batch_size}", f"--device={device}", *options,
    ]
    source = checkpoint()
    key = hashlib.sha256("\0".join([_code(), source.name, *arguments]).encode()).hexdigest()[:16]
    folder = CACHE / f"server-{label}@{key}"
    if not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        for outdated in CACHE.glob(f"server-{label}@*"):
            shutil.rmtree(outdated)
        partial = CACHE / f"server-{label}@partial"
        command = [spec_build(), "build", f"--target={source}", *arguments, f"--output={partial}", "--quiet"]
        subprocess.run(command, check=True)
        partial.rename(folder)
    return folder
