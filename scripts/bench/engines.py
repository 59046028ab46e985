"""What scripts/bench/peers drives: spec-build, llama-server and llama-bench, and those of workers.py, behind one method.

`generate(ids, num_tokens)` gives a dict of tokens, prefill_ms (until the first token), decode_ms (after it) and,
when drafting, drafted and accepted; counts that an engine does not report are left out. Loading is never timed.
"""

import json
import os
import resource
import socket
import subprocess
import time
import urllib.error
import urllib.request

LOAD_SECONDS = 300
GENERATE_SECONDS = 900
# Tokens that a server makes room for: the longest prompt and its answer.
CONTEXT_LEN = 2048


class Missing(Exception):
    """A program or model that is not there, and how to get it."""


def need(path, how):
    """Checks that `path` is there."""
    if not os.path.exists(path):
        raise Missing(f"no {path} ({how})")


class Engine:
    """Common parts. A subclass with a long-lived process sets `process`."""

    process = None
    version = None
    # Whether there is only a prefill to measure.
    only_prefill = False

    def cpu_seconds(self):
        """CPU time of the engine so far: of its process, or of every child that has ended."""
        if self.process is None:
            usage = resource.getrusage(resource.RUSAGE_CHILDREN)
            return usage.ru_utime + usage.ru_stime
        with open(f"/proc/{self.process.pid}/stat") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self):
        """Ends the process."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()


class OtherCpu:
    """Measures the share of the machine's CPU time that went to anything but the engine."""

    def __init__(self, engine):
        self.engine = engine
        self.share = 0.0

    def sample(self):
        """Seconds by the clock, and CPU seconds of everything but the engine."""
        with open("/proc/stat") as stat:
            user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(int, stat.readline().split()[1:])
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy - self.engine.cpu_seconds()

    def __enter__(self):
        self.begin = self.sample()
        return self

    def __exit__(self, *_):
        clock, other = (end - begin for end, begin in zip(self.sample(), self.begin))
        self.share = max(0.0, other / (clock * os.cpu_count()))


class Ours(Engine):
    """`spec-build try`; a process, and so a load, for each prompt."""

    def __init__(self, spec_build, folder, draft_len, threads):
        need(spec_build, "cargo build --release")
        need(folder, "spec-build build, see --help")
        options = ["--json", "--draft-len", str(draft_len), "--threads", str(threads)]
        self.command = [str(spec_build), "try", str(folder), *options]
        self.version = "this tree"

    def generate(self, ids, num_tokens):
        """See the module."""
        prompt = ["--prompt-ids", ",".join(map(str, ids)), "--max-tokens", str(num_tokens)]
        done = subprocess.run(
            self.command + prompt, stdout=subprocess.PIPE, text=True, check=True, timeout=GENERATE_SECONDS)
        answer = json.loads(done.stdout)
        run = {"tokens": answer["output_ids"]}
        run.update((key, answer[key]) for key in ("prefill_ms", "decode_ms", "steps", "drafted", "accepted"))
        return run


class LlamaServer(Engine):
    """llama.cpp's server."""

    def __init__(self, binaries, target, draft, draft_len, threads):
        server = binaries / "llama-server"
        for path in [server, target, *([draft] if draft_len else [])]:
            need(path, "install-peers")
        self.version = llama_version(binaries)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = "http://127.0.0.1:%d" % free.getsockname()[1]
        command = [server, "-m", target, "-t", threads, "-tb", threads, "-c", CONTEXT_LEN, "-np", 1,
                   "--host", "127.0.0.1", "--port", self.address.rsplit(":", 1)[1]]
        if draft_len:
            command += ["--spec-type", "draft-simple", "-md", draft, "--spec-draft-n-max", draft_len]
        self.process = subprocess.Popen(
            [str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            self.wait()
        except BaseException:
            self.close()
            raise

    def wait(self):
        """Until the model is loaded."""
        deadline = time.monotonic() + LOAD_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise Missing("llama-server ended while loading")
            try:
                with urllib.request.urlopen(self.address + "/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise Missing(f"llama-server did not load in {LOAD_SECONDS} s")

    def generate(self, ids, num_tokens):
        """See the module."""
        body = {"prompt": ids, "n_predict": num_tokens, "temperature": 0, "top_k": 1, "samplers": ["top_k"],
                "cache_prompt": False, "return_tokens": True}
        request = urllib.request.Request(
            self.address + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=GENERATE_SECONDS) as response:
            answer = json.load(response)
        times = answer["timings"]
        run = {"tokens": answer["tokens"], "prefill_ms": times["prompt_ms"], "decode_ms": times["predicted_ms"]}
        if "draft_n" in times:
            run.update(drafted=times["draft_n"], accepted=times["draft_n_accepted"])
        return run


class LlamaBench(Engine):
    """llama.cpp's own measurement of a prefill; the ids given count only by their number."""

    only_prefill = True

    def __init__(self, binaries, target, threads):
        bench = binaries / "llama-bench"
        for path in (bench, target):
            need(path, "install-peers")
        self.command = [str(bench), "-m", str(target), "-t", str(threads), "-n", "0", "-r", "1", "-o", "json"]
        self.version = llama_version(binaries)

    def generate(self, ids, _num_tokens):
        """See the module."""
        done = subprocess.run([*self.command, "-p", str(len(ids))], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              text=True, check=True, timeout=GENERATE_SECONDS)
        return {"tokens": [], "prefill_ms": json.loads(done.stdout)[0]["avg_ns"] / 1e6, "decode_ms": 0.0}


def llama_version(binaries):
    """What install-peers noted: the copy that it builds knows no version of its own."""
    with open(binaries.parent.parent / "peer-version") as version:
        return version.read().strip()
