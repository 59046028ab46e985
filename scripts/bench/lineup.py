"""Which engines scripts/bench/peers can run, and of each: how to start it, what it reads and how to get its logits."""

import dataclasses
import json
import math
import pathlib
import struct
import sys
import typing

import engines
import workers

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TARGET, DRAFT = "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"
ENGINE_LOGITS = ROOT / "target/release/examples/engine_logits"


@dataclasses.dataclass
class Entry:
    """An engine in one setting."""

    label: str
    construct: typing.Callable
    # The file with the target's weights.
    weights: pathlib.Path
    # Reads texts and writes logits as llama_logits.cpp does; only of plain decoding, whose target is that of the rest.
    logits: list = dataclasses.field(default_factory=list)
    env: dict | None = None
    # Whether it stays in memory while others are measured.
    resident: bool = True


def engine_logits(folder, threads):
    """The command for a model folder of spec-build."""
    return [ENGINE_LOGITS, folder, threads]


def ours(args, suffix, draft_len):
    """spec-build with each of its folders."""
    for folder in args.ours or [args.models / "bench/qwen2.5-coder-int8"]:
        yield Entry(f"{folder.name}{suffix}",
                    lambda folder=folder: engines.Ours(args.spec_build, folder, draft_len, args.threads),
                    folder / "1/target.engine", [] if suffix else engine_logits(folder, args.threads))


def llama(args, name, target, draft, draft_len):
    """llama.cpp's server; `draft` is in the format of `target`."""
    binaries = args.peers / "llama/build/bin"
    suffix = f" + draft {draft_len}" if draft_len else ""
    yield Entry(f"llama.cpp {name}{suffix}",
                lambda: engines.LlamaServer(binaries, target, draft, draft_len, args.threads),
                target, [] if suffix else [binaries / "llama_logits", target, args.threads])


def llama_bench(args, name, target):
    """llama.cpp's own measurement of a prefill."""
    binaries = args.peers / "llama/build/bin"
    yield Entry(f"llama-bench {name}", lambda: engines.LlamaBench(binaries, target, args.threads), target)


def openvino(args, draft_len):
    """OpenVINO GenAI with int8 weights."""
    python, target, draft = (args.peers / part for part in ("venv/bin/python", f"ov/{TARGET}-int8", f"ov/{DRAFT}-int8"))
    suffix = f" + draft {draft_len}" if draft_len else ""
    yield Entry(f"OpenVINO int8{suffix}", lambda: workers.OpenVino(python, target, draft, draft_len, args.threads),
                target / "openvino_model.bin", [] if suffix else [python, HERE / "openvino_logits.py", target, args.threads])


def vllm(args, suffix="", *speculation):
    """vLLM in bf16, as the checkpoint is."""
    venv, target = args.peers / "vllm", args.peers / "hf" / TARGET
    yield Entry(f"vLLM bf16{suffix}", lambda: workers.Vllm(venv, target, speculation, args.threads),
                target / "model.safetensors", [] if suffix else [venv / "bin/python", HERE / "vllm_logits.py", target],
                workers.vllm_environment(venv, args.threads), resident=False)


def known(args):
    """{name for --runs: its entries}."""
    k, hf = args.draft_len, args.peers / "hf"
    q8 = [args.peers / "gguf" / f"{name}-q8_0.gguf" for name in (TARGET, DRAFT)]
    # The files of scripts/fetch-model, as they are.
    q4 = [args.models / f"{name}.gguf" for name in (TARGET, DRAFT)]
    return {
        "ours": ours(args, "", 0),
        "ours-draft": ours(args, f" + draft {k}", k),
        "ours-auto": ours(args, " + draft auto", "auto"),
        "llama": llama(args, "Q8_0", *q8, 0),
        "llama-draft": llama(args, "Q8_0", *q8, k),
        "llama-4bit": llama(args, "Q4_K_M", *q4, 0),
        "llama-4bit-draft": llama(args, "Q4_K_M", *q4, k),
        "ov": openvino(args, 0),
        "ov-draft": openvino(args, k),
        "vllm": vllm(args),
        "vllm-draft": vllm(args, f" + draft {k}", "draft", hf / DRAFT, k),
        "vllm-ngram": vllm(args, f" + ngram {k}", "ngram", k),
        "llama-bench": llama_bench(args, "Q8_0", q8[0]),
    }


def entries(args):
    """Those asked for, in order."""
    names = known(args)
    for name in args.runs.split(","):
        if name not in names:
            sys.exit(f"peers: --runs: {name} is none of {', '.join(names)}")
        yield from names[name]


def num_weights(args):
    """Parameters of the target, embedding and head both counted as in its file; None where no export of it is there."""
    path = args.peers / "hf" / TARGET / "model.safetensors"
    if not path.exists():
        return None
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        tensors = json.loads(file.read(length))
    return sum(math.prod(tensor["shape"]) for name, tensor in tensors.items() if name != "__metadata__")
