"""An emulated GPU for servers: the driver's interface over the emulator, and a small engine that is built for GPUs.

SPEC_EMU_DRIVER  the library; `scripts/test-server` builds it
"""

import json
import subprocess
from pathlib import Path

import pytest

from . import places

# How the emulated driver begins to say what was wrong.
COMPLAINT = "emulated libcuda:"

# As small as the kernels take, with the drafter's weights those of the target.
_SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 128,
    "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
    "rope_theta": 10000.0, "tie_word_embeddings": False,
}


def engine(folder):
    """A model folder for GPUs, built into a folder that is there. Skips where there is no compiler for kernels."""
    source = folder / "shape"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(_SHAPE))
    made_up = f"random:{source / 'config.json'}@1"
    built = folder / "built"
    command = [
        places.spec_build(), "build", f"--target={made_up}", f"--draft={made_up}", "--device=cuda:sm_90a", "--dtype=fp8",
        "--max-draft-len=3", "--max-seq-len=512", "--max-batch-size=4", f"--output={built}", "--quiet",
    ]
    run = subprocess.run(command, capture_output=True, text=True)
    if "NVRTC" in run.stderr and run.returncode != 0:
        pytest.skip(f"no compiler for kernels (scripts/setup-cuda): {run.stderr.strip()}", allow_module_level=True)
    assert run.returncode == 0, run.stderr
    return built


def environment(engine, folder):
    """Variables with which a process finds a GPU that knows the kernels of the engine."""
    library = places.place("SPEC_EMU_DRIVER", places.ROOT / "target/debug/libspec_emu_driver.so")
    code = folder / "code"
    code.write_text(_code(engine))
    # Triton itself, whose CUDA runtime wants more of a driver, goes on without one.
    return {"SPEC_CUDA_DRIVER": str(library), "EMU_DRIVER_CODE": str(code), "EMU_DRIVER_DEVICES": "2"}


def _code(engine):
    """A line for each kernel: the hash of its machine code, and the variant that the emulator runs for it."""
    command = [places.spec_build(), "inspect", engine, "--json"]
    parts = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    sections = [section for part in parts.values() for section in part["sections"]]
    kernels = [section for section in sections if section["name"].startswith("code.")]
    return "".join(f"{kernel['hash']} {kernel['name'].split('.', 2)[2]}\n" for kernel in kernels)


def cuda_runtime(folder):
    """A library for LD_PRELOAD: what Triton calls of the CUDA runtime to place a model on a GPU."""
    library = folder / "cuda_runtime.so"
    source = Path(__file__).with_name("cuda_runtime.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library
