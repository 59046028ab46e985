"""The quality that scripts/bench/peers tells beside speed: bits a weight, and divergence from fp32."""

import json
import pathlib
import subprocess
import sys

import lineup

HERE = pathlib.Path(__file__).resolve().parent
# Tokens of a text, as in scripts/bench/quality.
MAX_LEN = 256


def bits(entries, num_weights):
    """{label: bits a weight} of the files with the targets' weights, everything in them counted."""
    return {entry.label: 8 * entry.weights.stat().st_size / num_weights
            for entry in entries if num_weights and entry.weights.is_file()}


def divergences(args, entries, prompts):
    """{label: what divergence.py measured} of every entry that can be asked for logits and is there."""
    asked = {}
    for entry in entries:
        missing = [part for part in entry.logits if isinstance(part, pathlib.Path) and not part.exists()]
        if missing:
            print(f"peers: the divergence of {entry.label} is not measured: no {missing[0]}")
        elif entry.logits:
            asked[entry.label] = {"command": [str(part) for part in entry.logits], "env": entry.env}
    reference = lineup.engine_logits(args.quality, args.threads)
    for part, how in zip(reference, ("cargo build --release -p spec-core --example engine_logits", "spec-build build --dtype fp32")):
        if not part.exists():
            sys.exit(f"peers: --quality: no {part} ({how}, see --help)")
    request = {"texts": [prompt["ids"][:MAX_LEN] for prompt in prompts], "reference": [str(part) for part in reference],
               "engines": asked}
    python = next((path for venv in ("venv", "vllm") if (path := args.peers / venv / "bin/python").exists()
                   and has_numpy(path)), None)
    if python is None:
        sys.exit(f"peers: --quality: neither Python in {args.peers} has numpy (install-peers)")
    done = subprocess.run([python, HERE / "divergence.py"], input=json.dumps(request), stdout=subprocess.PIPE, text=True,
                          check=True)
    answers = json.loads(done.stdout)
    for label, answer in answers.items():
        if "error" in answer:
            print(f"peers: the divergence of {label} is not measured: {answer['error']}")
    return {label: answer for label, answer in answers.items() if "error" not in answer}


def has_numpy(python):
    """Whether it is installed."""
    return subprocess.run([python, "-c", "import numpy"], stderr=subprocess.DEVNULL).returncode == 0
