"""A real Prometheus: that of PATH, or of Debian's package, which is unpacked into target/prometheus, not installed."""

import json
import math
import pathlib
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request

import serving


def programs():
    """prometheus and promtool."""
    names = "prometheus", "promtool"
    found = [shutil.which(name) for name in names]
    if all(found):
        return found
    place = serving.ROOT / "target/prometheus"
    if not (place / "usr/bin/promtool").exists():
        place.mkdir(parents=True, exist_ok=True)
        print("fetching Debian's prometheus", file=sys.stderr)
        for old in place.glob("*.deb"):
            old.unlink()
        if subprocess.run(["apt-get", "download", "-q", "prometheus"], cwd=place, stdout=sys.stderr).returncode:
            sys.exit("there is no prometheus in PATH, and apt-get download prometheus failed (apt-get update?)")
        subprocess.run(["dpkg-deb", "-x", *place.glob("*.deb"), place], check=True)
    return [str(place / "usr/bin" / name) for name in names]


class Prometheus:
    """A Prometheus with the files that `configure` writes, prometheus.yml among them."""

    def __init__(self, program):
        self.program = program
        self.address = f"127.0.0.1:{serving.free_ports(1)[0]}"

    def configure(self, place):
        """Writes the files into a folder."""
        raise NotImplementedError

    def __enter__(self):
        self.scratch = tempfile.TemporaryDirectory(prefix="spec-prometheus-")
        place = pathlib.Path(self.scratch.name)
        self.configure(place)
        self.log = open(place / "log", "w+b")
        self.process = subprocess.Popen(
            [self.program, f"--config.file={place / 'prometheus.yml'}", f"--storage.tsdb.path={place / 'data'}",
             f"--web.listen-address={self.address}"], stdout=self.log, stderr=self.log)
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()
        self.log.close()
        self.scratch.cleanup()

    def get(self, path, **parameters):
        """The data of an answer of the interface; an error's message is raised."""
        if self.process.poll() is not None:
            self.log.seek(0)
            sys.exit(f"prometheus has ended:\n{self.log.read().decode()[-2000:]}")
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as reply:
                return json.loads(reply.read())["data"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode()) from error

    def samples(self, expr):
        """A query's answer, (labels, number), without NaN."""
        found = [(one["metric"], float(one["value"][1])) for one in self.get("query", query=expr)["result"]]
        return [(labels, value) for labels, value in found if math.isfinite(value)]

    def values(self, expr):
        """The numbers of a query's answer."""
        return [value for _, value in self.samples(expr)]
