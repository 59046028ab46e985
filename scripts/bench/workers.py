"""Engines of scripts/bench/peers that are Python libraries: each is a worker in a Python of its own."""

import json
import os
import pathlib
import subprocess

from engines import Engine, Missing, need

HERE = pathlib.Path(__file__).resolve().parent
# Memory for keys and values, in GiB, the least that vLLM takes: far more than one sequence needs.
VLLM_KV_GIB = 1


class Worker(Engine):
    """A process that answers a JSON object a line; it sends its version first."""

    def __init__(self, command, env=None):
        self.process = subprocess.Popen([str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, env=env)
        try:
            self.version = self.answer()["version"]
        except BaseException:
            self.close()
            raise

    def answer(self):
        """The worker's next line."""
        line = self.process.stdout.readline()
        if not line:
            raise Missing(f"{pathlib.Path(self.process.args[1]).name} ended, see above")
        return json.loads(line)

    def generate(self, ids, num_tokens):
        """See engines."""
        print(json.dumps({"ids": ids, "num_tokens": num_tokens}), file=self.process.stdin, flush=True)
        return self.answer()


class OpenVino(Worker):
    """OpenVINO GenAI."""

    def __init__(self, python, target, draft, draft_len, threads):
        for path in [python, target, *([draft] if draft_len else [])]:
            need(path, "install-peers")
        super().__init__([python, HERE / "openvino_worker.py", target, threads, *([draft, draft_len] if draft_len else [])])


class Vllm(Worker):
    """vLLM on a CPU, inside one process; `speculation` as vllm_worker.py takes it."""

    def __init__(self, venv, target, speculation, threads):
        paths = [part for part in speculation if isinstance(part, pathlib.Path)]
        for path in [venv / "bin/python", target, *paths]:
            need(path, "install-peers")
        super().__init__([venv / "bin/python", HERE / "vllm_worker.py", target, *speculation], vllm_environment(venv, threads))


def vllm_environment(venv, threads):
    """As vLLM's documentation asks for speculation on a CPU: Intel's OpenMP, with what vLLM sets for worker processes."""
    venv = venv.absolute()
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {
        **os.environ,
        "LD_PRELOAD": str(venv / "lib/libiomp5.so"),
        "OMP_NUM_THREADS": str(len(cores)),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{','.join(map(str, cores))}]",
        # Threads spin for so many milliseconds between passes, then sleep: idle, it takes nothing from the others.
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_GIB),
        "VLLM_CACHE_ROOT": str(venv / "cache"),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # torch.compile needs a ninja.
        "PATH": f"{venv}/bin:{os.environ['PATH']}",
    }
