"""Clients of others that scripts/install-clients installed: programs, each in an environment of its own, which run as
their users run them. They find the model's tokenizer by name in a Hugging Face cache on disk, and no network.
"""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from . import places

TOKENIZER = "spec/smollm2"
SECONDS = 300


def folder():
    return Path(os.environ.get("SPEC_CLIENTS", places.ROOT / "target/clients"))


def program(client, name="python"):
    path = folder() / client / "bin" / name
    if not path.exists():
        pytest.skip(f"there is no {path} (scripts/install-clients {client})")
    return path


def perf_analyzer():
    path = places.ROOT / "target/triton/perf_analyzer"
    if not path.exists():
        pytest.skip(f"there is no {path} (scripts/install-triton --perf)")
    return path


def cache(engine, where):
    """A Hugging Face cache that holds the tokenizer of an engine under the name TOKENIZER."""
    repository = where / "hub" / f"models--{TOKENIZER.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0"
    snapshot.mkdir(parents=True, exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text("0")
    for file in (engine / "1").glob("*.json"):
        shutil.copy(file, snapshot)
    # Transformers looks for the model's configuration before it loads a tokenizer.
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    return where


def run(command, where, *, seconds=SECONDS, **environment):
    """Runs a program in a folder, to its end: what it printed. Whatever it has started ends with it."""
    where.mkdir(parents=True, exist_ok=True)
    log = where / "log"
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [str(part) for part in command], cwd=where, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
    text = log.read_text(errors="replace")
    ended = f"did not end in {seconds} s" if code is None else f"ended with {code}"
    assert code == 0, f"{command[0]} {ended}; its log, {log}, ends:\n{text[-3000:]}"
    return text


def end_group(process):
    """A client that is killed leaves the programs that it runs behind."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def ask(client, script, where, **question):
    """Runs one of clients/programs in the environment of a client: what it answers to a question, both in JSON."""
    path = places.ROOT / "tests/server/clients/programs" / script
    text = run([program(client), "-W", "ignore", path, json.dumps(question)], where)
    return json.loads(text.splitlines()[-1])
