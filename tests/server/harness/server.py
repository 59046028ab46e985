"""One run of the real tritonserver: started on free ports, waited for, watched, and stopped."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections import namedtuple

import tritonclient.grpc as grpcclient

from . import places

Sample = namedtuple("Sample", "labels value")


class Gate:
    """Holds the engine threads of a model between two steps, in a server that was started with `gates`. They go on looking
    after requests that come, leave or run out of time; a request that runs neither gets further nor ends. What a test
    needs to be busy is held by this, so that it does not depend on how fast a machine is.
    """

    def __init__(self, folder, model):
        self.file = folder / model

    def let_pass(self, steps):
        """From now on so many steps more."""
        partial = self.file.with_suffix(".partial")
        partial.write_text(f"{uuid.uuid4()} {steps}")
        partial.rename(self.file)

    def shut(self):
        self.let_pass(0)

    def open(self):
        self.file.unlink(missing_ok=True)

    def __enter__(self):
        self.shut()
        return self

    def __exit__(self, *_):
        self.open()

# Loading reads an engine of 270 MB; on two busy cores that takes seconds, not minutes.
START_SECONDS = 120
STOP_SECONDS = 60


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Server:
    """A tritonserver process. `load` names the models to load at the start; with `gates` they can be held; `group` is a
    control group to run in.
    """

    def __init__(
        self, repository, log, *, load=(), args=(), env=None, backends=None, gates=False, wait=True, group=None
    ):
        self.repository = repository
        self.gates = log.parent / "gates"
        if gates:
            shutil.rmtree(self.gates, ignore_errors=True)
            self.gates.mkdir(parents=True)
            backends, env = places.fault_backends(), {**(env or {}), "SPEC_GATES": str(self.gates)}
        self.num_cancelled_streams = 0
        self.log_path = log
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        command = [
            places.tritonserver(), f"--model-repository={repository.path}",
            f"--backend-directory={backends or places.backends()}",
            "--model-control-mode=explicit", *(f"--load-model={name}" for name in load),
            f"--http-port={self.http_port}", f"--grpc-port={self.grpc_port}",
            f"--metrics-port={self.metrics_port}", "--http-address=127.0.0.1", "--grpc-address=127.0.0.1",
            "--allow-gpu-metrics=false", "--metrics-config=histogram_latencies=true", *args,
        ]
        command = group.command(command) if group else command
        with open(log, "ab") as out:
            self.process = subprocess.Popen(
                [str(part) for part in command], stdout=out, stderr=out, env={**os.environ, **(env or {})}
            )
        if wait:
            self.wait_ready()

    @property
    def pid(self):
        return self.process.pid

    @property
    def log(self):
        return self.log_path.read_text(errors="replace")

    @property
    def grpc_url(self):
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def http_url(self):
        return f"127.0.0.1:{self.http_port}"

    def grpc(self):
        """A new gRPC client; use it in a `with`."""
        self.check_runs()
        return grpcclient.InferenceServerClient(self.grpc_url)

    def wait_ready(self, seconds=START_SECONDS):
        deadline = time.monotonic() + seconds
        while not (self.is_ready() and self.tells_metrics()):
            if time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"tritonserver is not ready after {seconds} s:\n{self.log[-4000:]}")
            time.sleep(0.1)

    def is_ready(self, model=None):
        path = f"/v2/models/{model}/ready" if model else "/v2/health/ready"
        try:
            return self.http("GET", path)[0] == 200
        except OSError:
            return False

    def tells_metrics(self):
        """Their port opens a moment after the others."""
        try:
            return self.http("GET", "/metrics", port=self.metrics_port)[0] == 200
        except OSError:
            return False

    def is_live(self):
        return self.http("GET", "/v2/health/live")[0] == 200

    def check_runs(self):
        """What killed it is in its log, not in the refused connections that follow."""
        code = self.process.poll()
        if code is not None:
            raise RuntimeError(f"tritonserver ended with {code}; its log, {self.log_path}, ends:\n{self.log[-1500:]}")

    def http(self, method, path, body=None, headers=None, *, port=None, timeout=120):
        """One HTTP exchange: status, headers, body. Objects are sent as JSON."""
        self.check_runs()
        connection = http.client.HTTPConnection("127.0.0.1", port or self.http_port, timeout=timeout)
        try:
            payload = body if body is None or isinstance(body, (bytes, str)) else json.dumps(body)
            connection.request(method, path, payload, headers or {})
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def rss(self):
        """Resident bytes that are not of files: libraries that are mapped come and go with the page cache."""
        status = open(f"/proc/{self.pid}/status").read()
        return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024

    def metrics(self):
        """Every sample by family: {name: [Sample(labels, value)]}."""
        text = self.http("GET", "/metrics", port=self.metrics_port)[2].decode()
        families = {}
        for line in text.splitlines():
            match = re.match(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$", line)
            if match:
                labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2] or ""))
                families.setdefault(match[1], []).append(Sample(labels, float(match[3])))
        return families

    def metric(self, family, **labels):
        """The sum over the samples of a family that carry these labels; None where there is none."""
        return total(self.metrics(), family, **labels)

    def statistics(self, model):
        """The statistics endpoint over HTTP."""
        body = self.http("GET", f"/v2/models/{model}/versions/1/stats")[2]
        return json.loads(body)["model_stats"][0]

    def gate(self, model):
        return Gate(self.gates, model)

    def requests(self, model, kind):
        return self.metric("nv_trt_llm_request_metrics", model=model, request_type=kind)

    def pages(self, model, kind):
        return self.metric("nv_trt_llm_kv_cache_block_metrics", model=model, kv_cache_block_type=kind)

    def load(self, model, config=None):
        """Loads through the repository API; None, or the error's text."""
        body = {"parameters": {"config": json.dumps(config)}} if config else {}
        return self._control(model, "load", body)

    def unload(self, model):
        return self._control(model, "unload", {})

    def _control(self, model, what, body):
        status, _, text = self.http("POST", f"/v2/repository/models/{model}/{what}", body, timeout=STOP_SECONDS)
        return None if status == 200 else json.loads(text)["error"]

    def num_requests(self):
        """Requests that are in the backend."""
        kinds = ["active", "waiting"]
        return sum(self.metric("nv_trt_llm_request_metrics", request_type=kind) or 0 for kind in kinds)

    def keeps_streams(self, code):
        """Whether it ended with this code because it waited for gRPC streams that were cancelled: tritonserver 2.51 forgets
        one in hundreds of them, more on a busy machine, and with it the model, whatever backend that has; see
        scripts/bench/left-streams.
        """
        return code == 1 and self.num_cancelled_streams > 0 and "Exit timeout expired" in self.log

    def stop(self):
        """Ends it as an operator does; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RuntimeError(f"tritonserver did not end in {STOP_SECONDS} s:\n{self.log[-4000:]}") from None

    def kill(self):
        self.process.kill()
        self.process.wait()


def total(families, family, **labels):
    """The sum over the samples of a family that carry these labels; None where there is none."""
    found = [s.value for s in families.get(family, []) if labels.items() <= s.labels.items()]
    return sum(found) if found else None


def eventually(condition, seconds=120, what="it"):
    """Waits until a condition holds; its value. Never so long, unless the condition never comes."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what}: not so after {seconds} s"
        time.sleep(0.05)
