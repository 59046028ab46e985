"""Checks of deploy/container and deploy/kubernetes that need no server: they render, fit the schemas, and fit each other."""

import json
import pathlib
import re
import subprocess
import tempfile

import tools
from autoscaler import Autoscaler, wanted_by_metric
from serving import ROOT

CONTAINER = ROOT / "deploy/container"
KUBERNETES = ROOT / "deploy/kubernetes"
OVERLAYS = ["gpu-one", "gpus-several", "cpu"]
# Kinds of Kubernetes itself; the others are of CustomResourceDefinitions.
BUILT_IN = {"v1", "apps/v1", "autoscaling/v2", "policy/v1"}
# What Envoy Gateway 1.9 knows below loadBalancer.backendUtilization, from its documentation.
UTILIZATION = {"blackoutPeriod", "weightExpirationPeriod", "weightUpdatePeriod", "errorUtilizationPenaltyPercent",
               "metricNamesForComputingUtilization", "keepResponseHeaders"}
# A server that is told to end is gone this long after its exit timeout.
OVERTIME_SECONDS = 2


class Rendered:
    """An overlay as kustomize makes it."""

    def __init__(self, overlay):
        self.overlay = overlay
        self.text = tools.rendered(KUBERNETES / "overlays" / overlay)
        self.documents = tools.documents(self.text)

    def all(self, kind):
        """Documents of a kind."""
        return [one for one in self.documents if one["kind"] == kind]

    def one(self, kind, name="spec-triton"):
        """The document of a kind and name."""
        return next(one for one in self.all(kind) if one["metadata"]["name"] == name)

    @property
    def pod(self):
        """What the Deployment makes."""
        return self.one("Deployment")["spec"]["template"]

    @property
    def container(self):
        """The container of a pod."""
        return self.pod["spec"]["containers"][0]

    @property
    def exit_seconds(self):
        """The server's exit timeout."""
        return int(next(one for one in self.container["args"] if "exit-timeout" in one).split("=")[1])

    @property
    def drain(self):
        """The command of the hook that drains a pod."""
        return self.container["lifecycle"]["preStop"]["exec"]["command"]

    @property
    def alive(self):
        """The command that tells whether a pod is to be started again."""
        return self.container["livenessProbe"]["exec"]["command"]


def rules():
    """The adapter's rules by the name of the metric."""
    config = (KUBERNETES / "adapter/config.yaml").read_text()
    return {rule["name"]["as"]: rule for rule in tools.documents(config)[0]["rules"]}


def query(rule, **labels):
    """The query that the adapter makes of a rule for pods: their labels as regular expressions or as they are."""
    matchers = ",".join(f'{name}{"=~" if "|" in value else "="}"{value}"' for name, value in labels.items())
    return rule["metricsQuery"].replace("<<.LabelMatchers>>", matchers).replace("<<.GroupBy>>", "pod")


def check_container(check):
    """What can be told of a container file where there is nothing to build it with."""
    dockerfile = (CONTAINER / "Dockerfile").read_text()
    check.command("hadolint finds nothing in the Dockerfile", tools.program("hadolint"), CONTAINER / "Dockerfile")
    for script in ("alive", "drain"):
        check.command(f"the script {script} is in bash's syntax", "bash", "-n", CONTAINER / script)
    lines = re.findall(r"(?m)^COPY (?!--from)(.*)$", dockerfile)
    sources = sorted({source for line in lines for source in line.split()[:-1]})
    missing = [source for source in sources if not (ROOT / source).exists()]
    check(f"each of {len(sources)} sources of COPY exists", sources and not missing, missing)
    kept = re.findall(r"(?m)^!(.*)$", (CONTAINER / "Dockerfile.dockerignore").read_text())
    check("the ignore file lets those and no others through", set(kept) == set(sources), set(kept) ^ set(sources))
    with tempfile.TemporaryDirectory() as scratch:
        for source in sources:
            place = pathlib.Path(scratch) / source
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(ROOT / source)
        check.command("what is copied is a whole workspace", "cargo", "metadata", "--quiet", "--no-deps", "--locked",
                      "--offline", "--format-version=1", "--manifest-path", pathlib.Path(scratch) / "Cargo.toml")
    rust = re.search(r"(?m)^ARG RUST=(.*)$", dockerfile)[1]
    needed = re.search(r'(?m)^rust-version = "(.*)"$', (ROOT / "Cargo.toml").read_text())[1]
    check("it builds with the Rust that the workspace asks for", rust == needed, f"{rust}, {needed}")
    server = re.search(r'server_package="(.*)"', (ROOT / "scripts/install-triton").read_text())[1]
    check("the server from PyPI is the one that is tested", f" {server} " in dockerfile, server)


def check_schemas(check, overlay):
    """Each document by the schema of its kind."""
    name, documents = overlay.overlay, overlay.documents
    own = [one for one in documents if one["apiVersion"] in BUILT_IN]
    others = [one for one in documents if one["apiVersion"] not in BUILT_IN]
    run = subprocess.run([tools.program("kubernetes-validate"), "--strict", "-"], input="\n---\n".join(map(json.dumps, own)),
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    check(f"{name}: {len(own)} documents fit Kubernetes' schemas", own and run.returncode == 0, run.stdout)
    packages = tools.schemas()
    if packages is None:
        print(f"--  {name}: {len(others)} documents of other projects are not validated: there is no npm")
        return
    # Its schemas were taken before there was BackendUtilization.
    newer = json.loads(json.dumps(others))
    for one in newer:
        if one["kind"] == "BackendTrafficPolicy" and one["spec"]["loadBalancer"]["type"] == "BackendUtilization":
            known = one["spec"]["loadBalancer"].pop("backendUtilization")
            one["spec"]["loadBalancer"]["type"] = "RoundRobin"
            check(f"{name}: Envoy Gateway knows what is said of the utilization", known.keys() <= UTILIZATION, known)
    run = subprocess.run(["node", ROOT / "scripts/scaling/validate.mjs", packages], input=json.dumps(newer),
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    check(f"{name}: {len(others)} documents fit the schemas of their projects",
          others and run.returncode == 0 and not run.stdout, run.stdout)


def check_overlay(check, overlay):
    """Names that documents of an overlay have for each other, and times that must fit into one another."""
    name, pod, container = overlay.overlay, overlay.pod, overlay.container
    labels = pod["metadata"]["labels"]
    selectors = [overlay.one("Deployment")["spec"]["selector"]["matchLabels"], overlay.one("Service")["spec"]["selector"],
                 overlay.one("PodMonitor")["spec"]["selector"]["matchLabels"],
                 *(one["spec"]["selector"]["matchLabels"] for one in overlay.all("PodDisruptionBudget"))]
    check(f"{name}: all select the pods", all(one and one.items() <= labels.items() for one in selectors), selectors)
    ports = {one["name"] for one in container["ports"]}
    named = [container[probe]["httpGet"]["port"] for probe in ("startupProbe", "readinessProbe")]
    named += [one["targetPort"] for one in overlay.one("Service")["spec"]["ports"]]
    named += [one["port"] for one in overlay.one("PodMonitor")["spec"]["podMetricsEndpoints"]]
    check(f"{name}: probes, Service and PodMonitor name ports of the container", set(named) <= ports, set(named) - ports)
    open_ports = {one["port"] for one in overlay.one("Service")["spec"]["ports"]}
    routes = [*overlay.all("HTTPRoute"), *overlay.all("GRPCRoute")]
    behind = {ref["port"] for route in routes for rule in route["spec"]["rules"] for ref in rule["backendRefs"]}
    check(f"{name}: routes lead to ports of the Service", behind <= open_ports, behind)
    policies = [*overlay.all("BackendTrafficPolicy"), *overlay.all("ClientTrafficPolicy")]
    targets = [(one["kind"], one["name"]) for policy in policies for one in policy["spec"]["targetRefs"]]
    there = {(one["kind"], one["metadata"]["name"]) for one in overlay.documents}
    check(f"{name}: policies are for what is there", targets and set(targets) <= there, targets)
    patched = {one["name"] for policy in overlay.all("EnvoyPatchPolicy") for one in policy["spec"]["jsonPatches"]}
    clusters = {f"httproute/default/{route['metadata']['name']}/rule/{idx}" for route in overlay.all("HTTPRoute")
                for idx, _ in enumerate(route["spec"]["rules"])}
    check(f"{name}: what Envoy makes of each HTTPRoute is patched", patched == clusters, patched ^ clusters)
    program, limit = overlay.drain
    grace, needed = pod["spec"]["terminationGracePeriodSeconds"], int(limit) + overlay.exit_seconds + OVERTIME_SECONDS
    check(f"{name}: draining and the exit timeout fit into the grace period", needed < grace, f"{needed} of {grace} s")
    longest = int(re.search(r'"request_timeout_ms", "(\d+)"', (ROOT / "builder/src/folder.rs").read_text())[1]) / 1000
    idle = overlay.one("ClientTrafficPolicy")["spec"]["timeout"]["http"]["streamIdleTimeout"]
    check(f"{name}: draining may take as long as a request of spec-build's configurations, and the gateway waits as long",
          longest < min(int(limit), int(idle.removesuffix("s"))), f"{limit}, {idle}, {longest} s")
    copied = (CONTAINER / "Dockerfile").read_text()
    for one in (program, *overlay.alive):
        check(f"{name}: the program {one} is in the container", f"deploy/container/{one} " in copied)
    scalers = overlay.all("HorizontalPodAutoscaler")
    if scalers:
        spec = scalers[0]["spec"]
        asked, made = Autoscaler(spec).targets(), rules()
        check(f"{name}: the adapter makes each metric that the autoscaler asks for", asked.keys() <= made.keys(), asked.keys())
        check(f"{name}: the autoscaler scales the Deployment, which has no number of its own",
              spec["scaleTargetRef"]["name"] == overlay.one("Deployment")["metadata"]["name"]
              and "replicas" not in overlay.one("Deployment")["spec"])
    else:
        check(f"{name}: without an autoscaler it says how many pods there are", "replicas" in overlay.one("Deployment")["spec"])
    image = container["image"]
    check(f"{name}: the image is one of a registry, with a tag", re.fullmatch(r"[^/]+\.[^/]+/.+:.+", image), image)


def check_queries(check, promtool):
    """The adapter's queries are in Prometheus' language."""
    rule_list = [{"record": metric, "expr": query(rule, namespace="a", pod="b|c")} for metric, rule in rules().items()]
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
        json.dump({"groups": [{"name": "adapter", "rules": rule_list}]}, file)
        file.flush()
        check.command(f"promtool check rules: the adapter's {len(rule_list)} queries", promtool, "check", "rules", file.name)
    made = tools.documents(tools.rendered(KUBERNETES / "adapter"))[0]
    check("the adapter's rules become a ConfigMap", made["kind"] == "ConfigMap" and made["metadata"]["name"] == "adapter-config"
          and made["data"]["config.yaml"] == (KUBERNETES / "adapter/config.yaml").read_text(), made["metadata"])


# (replicas, values of pods that have the metric, pods, target, what Kubernetes makes of it)
EXAMPLES = [
    (1, [2.0], 1, 0.8, 3), (2, [0.8, 0.8], 2, 0.8, 2), (2, [0.85, 0.85], 2, 0.8, 2), (2, [0.9, 0.9], 2, 0.8, 3),
    (3, [0.1, 0.1, 0.1], 3, 0.8, 1), (2, [2.0], 2, 0.8, 3), (2, [0.1], 2, 0.8, 2), (3, [0.7], 3, 0.8, 3), (2, [], 2, 0.8, None),
]


def check_formula(check, spec):
    """The autoscaler's formula on cases whose results are known."""
    wrong = [(case, got) for case in EXAMPLES if (got := wanted_by_metric(*case[:4])) != case[4]]
    check(f"the autoscaler's formula: {len(EXAMPLES)} cases", not wrong, wrong)
    names = list(Autoscaler(spec).targets())
    values = lambda full: {name: [1.4 if name == full else 0.1] * 2 for name in names}
    alone = {name: Autoscaler(spec).decide(0, 2, 2, values(name)) for name in names}
    check("the autoscaler goes by the metric that asks for most", all(count == 4 for count in alone.values()), alone)
    scaler, seen, count = Autoscaler({**spec, "minReplicas": 1, "maxReplicas": 10}), [], 1
    for now in range(0, 700, 15):
        values = {name: [10.0 if now < 100 else 0.0] * count for name in scaler.targets()}
        count = scaler.decide(now, count, count, values)
        seen.append(count)
    # Full for 100 s: two more or twice as many at once and after a minute. Then, after five minutes, one less a minute.
    expected = [3] * 4 + [6] * 23 + [5] * 4 + [4] * 4 + [3] * 4 + [2] * 4 + [1] * 4
    check("the autoscaler's behaviour: up at once, down late and one by one", seen == expected, seen)


def check_all(check, promtool):
    """All of it; the overlays by name."""
    overlays = {name: Rendered(name) for name in OVERLAYS}
    check_container(check)
    for overlay in overlays.values():
        check_schemas(check, overlay)
        check_overlay(check, overlay)
    check_queries(check, promtool)
    check_formula(check, overlays["cpu"].one("HorizontalPodAutoscaler")["spec"])
    return overlays
