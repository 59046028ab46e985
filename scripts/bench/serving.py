"""A real tritonserver to measure: its Python environment, a model folder of its own, its process.

A script calls `in_environment()` before it imports `clients`, then serves with `with Server(...) as server`.
"""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# The backend may have to be built first.
START_SECONDS = 900
# A server that drains what it serves; Triton's own limit is 30 s.
STOP_SECONDS = 45
PORTS = ("SPEC_HTTP_PORT", "SPEC_GRPC_PORT", "SPEC_METRICS_PORT")


def in_environment():
    """Goes on in the environment of scripts/install-triton, which is made if it is not there."""
    venv = pathlib.Path(output(ROOT / "scripts/install-triton"))
    if pathlib.Path(sys.prefix).resolve() != venv.resolve():
        python = str(venv / "bin/python")
        os.execv(python, [python, *sys.argv])


def output(*command):
    """What a command prints; ends the script if it fails."""
    run = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, text=True)
    if run.returncode:
        sys.exit(f"{pathlib.Path(sys.argv[0]).name}: {command[0]} failed")
    return run.stdout.strip()


def built(package):
    """Has a package of this source built in release, if it is not up to date."""
    output("cargo", "build", "--release", "--quiet", "--manifest-path", ROOT / "Cargo.toml", "--target-dir", ROOT / "target", "-p", package)


def spec_build():
    """The builder, up to date."""
    built("spec-build")
    return ROOT / "target/release/spec-build"


def model_folder(name, dtype, max_batch_size=64, max_seq_len=None):
    """A model of scripts/fetch-model with the n-gram drafter, built once."""
    label = "-".join(str(part) for part in (name, dtype, max_batch_size, max_seq_len) if part)
    folder = ROOT / "target/bench-models" / label
    if not (folder / "config.pbtxt").exists():
        gguf = output(ROOT / "scripts/fetch-model", name)
        bound = ["--max-seq-len", max_seq_len] if max_seq_len else []
        output(spec_build(), "--quiet", "--target", gguf, "--draft", "ngram", "--max-draft-len", 8, "--dtype", dtype,
               "--max-batch-size", max_batch_size, *bound, "--output", folder)
    return folder


def free_ports(count):
    """Ports that nothing listens on at the moment."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def total(metrics, family):
    """Sum of a family's members."""
    return sum(value for name, value in metrics.items() if name.split("{")[0] == family)


class Server:
    """tritonserver with one model: the engines of `folder`, served with `parameters` and more lines of config.pbtxt, by the
    library in `backends` or else the one of this source, built first. With `models` there are as many of those engines
    as names, and none is loaded before `load`. `group` is a control group to run in; `label` tells the logs of servers apart.
    """

    def __init__(self, folder, parameters=None, config="", backends=None, arguments=(), models=(), group=None, label=""):
        self.backends, self.arguments, self.group = backends, list(arguments), group
        self.models = list(models) or [folder.name]
        self.model = self.models[0]
        self.is_explicit = bool(models)
        if self.is_explicit:
            self.arguments.append("--model-control-mode=explicit")
        self.scratch = tempfile.TemporaryDirectory(prefix="spec-bench-")
        config = "".join(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
                         for key, value in (parameters or {}).items()) + config
        for model in self.models:
            place = pathlib.Path(self.scratch.name) / model
            place.mkdir()
            (place / "1").symlink_to((folder / "1").resolve())
            text = re.sub(r"(?m)^name:.*$", f'name: "{model}"', (folder / "config.pbtxt").read_text())
            (place / "config.pbtxt").write_text(text + config)
        self.log_path = ROOT / f"target/bench-server{label}.log"
        self.log_path.parent.mkdir(exist_ok=True)
        self.ports = free_ports(len(PORTS))
        self.http, self.grpc, self.metrics_url = (f"127.0.0.1:{port}" for port in self.ports)

    def __enter__(self):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is ended too
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self):
        """Has the process begin; its models are not loaded yet."""
        environment = {**os.environ, **{name: str(port) for name, port in zip(PORTS, self.ports)}}
        if self.backends:
            environment["SPEC_BACKEND_DIR"] = str(pathlib.Path(self.backends).resolve())
        command = [ROOT / "scripts/serve", self.scratch.name, *self.arguments]
        command = self.group.command(command) if self.group else command
        with open(self.log_path, "wb") as log:
            # serve becomes the server, so its process is the server's.
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"the server did not end within {STOP_SECONDS} s of SIGTERM: killed", file=sys.stderr)
            self.process.kill()
            self.process.wait()
        self.scratch.cleanup()

    def wait_ready(self):
        """Returns when requests can be sent."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                self.get(self.http, "v2/health/ready" if self.is_explicit else f"v2/models/{self.model}/ready")
                return
            except (OSError, urllib.error.URLError):
                time.sleep(0.2)
        tail = self.log_path.read_text(errors="replace").splitlines()[-15:]
        sys.exit("\n".join([*tail, f"the server did not get ready; the whole log is {self.log_path.relative_to(ROOT)}"]))

    @staticmethod
    def get(address, path):
        """The body behind an address."""
        with urllib.request.urlopen(f"http://{address}/{path}", timeout=30) as reply:
            return reply.read().decode()

    def load(self, model):
        """Has a model loaded; None, or why it is not."""
        try:
            self.control(f"models/{model}/load")
        except urllib.error.HTTPError as error:
            return json.loads(error.read())["error"]

    def unload(self, model):
        """Has a model unloaded, and waits until its requests have ended and it is gone; None, or that it is not."""
        self.control(f"models/{model}/unload")
        deadline = time.monotonic() + START_SECONDS
        while any(one["name"] == model and one.get("reason") != "unloaded" for one in self.control("index")):
            if time.monotonic() > deadline:
                return f"{model} is not unloaded after {START_SECONDS} s"
            time.sleep(0.1)

    def control(self, what):
        """The model repository's endpoint."""
        request = urllib.request.Request(f"http://{self.http}/v2/repository/{what}", b"{}", method="POST")
        with urllib.request.urlopen(request, timeout=START_SECONDS) as reply:
            return json.loads(reply.read() or "null")

    def datatypes(self, model=None):
        """Triton's name of each input's type."""
        inputs = json.loads(self.get(self.http, f"v2/models/{model or self.model}"))["inputs"]
        return {one["name"]: one["datatype"] for one in inputs}

    def metrics(self, model=None):
        """Metrics of a model, {name{further labels}: value}, without the buckets of histograms."""
        found = {}
        for line in self.get(self.metrics_url, "metrics").splitlines():
            metric = re.match(r"(\w+)\{(.*)\} (\S+)$", line)
            if metric and f'model="{model or self.model}"' in metric[2] and 'le="' not in metric[2]:
                labels = ",".join(one for one in metric[2].split(",") if not one.startswith(("model=", "version=")))
                found[metric[1] + (f"{{{labels}}}" if labels else "")] = float(metric[3])
        return found

    def memory(self):
        """Resident bytes of the process: (all, without the pages of files)."""
        fields = dict(line.split(":", 1) for line in open(f"/proc/{self.process.pid}/status"))
        resident, anonymous = (int(fields[name].split()[0]) << 10 for name in ("VmRSS", "RssAnon"))
        return resident, anonymous
