"""The way in: a real Envoy, configured as Envoy Gateway would from deploy/kubernetes, and the load reports of servers that are
too old to send any.

Envoy's configuration is made of the HTTPRoute, the policies of traffic and the EnvoyPatchPolicy, in the shape in which Envoy
Gateway translates them. Endpoints come from a file, as they come over the network there.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import urllib.request

import aiohttp
from aiohttp import web

import serving
import tools

TYPES = "type.googleapis.com/envoy"
# Longer than Envoy keeps a connection that is not used, so that none is closed just as a request comes.
KEEPALIVE_SECONDS = 7200
ASKS_FOR_REPORT, REPORT = "endpoint-load-metrics-format", "endpoint-load-metrics"


def typed(kind, **fields):
    """A message of Envoy's with its type."""
    return {"@type": f"{TYPES}.{kind}", **fields}


def seconds(duration):
    """A duration of the Gateway API, such as 500ms, as Envoy reads it."""
    number, unit = re.fullmatch(r"(\d+)(ms|s|m)", duration).groups()
    return f"{int(number) * {'ms': 0.001, 's': 1, 'm': 60}[unit]:g}s"


def snake(name):
    """fieldName as field_name."""
    return re.sub(r"[A-Z]", lambda letter: "_" + letter[0].lower(), name)


def cluster(overlay, endpoints):
    """Envoy's cluster of the HTTPRoute's first rule; `endpoints` is the file that lists them."""
    route = overlay.one("HTTPRoute")
    name = f"httproute/default/{route['metadata']['name']}/rule/0"
    utilization = overlay.one("BackendTrafficPolicy")["spec"]["loadBalancer"]["backendUtilization"]
    policy = {snake(key): seconds(value) if key.endswith("Period") else value for key, value in utilization.items()}
    kind = "extensions.load_balancing_policies.client_side_weighted_round_robin.v3.ClientSideWeightedRoundRobin"
    found = {
        "name": name, "type": "EDS", "connect_timeout": "10s", "ignore_health_on_host_removal": True,
        "eds_cluster_config": {"eds_config": {"path_config_source": {"path": str(endpoints)}}, "service_name": name},
        "load_balancing_policy": {"policies": [{"typed_extension_config": {
            "name": "envoy.load_balancing_policies.client_side_weighted_round_robin", "typed_config": typed(kind, **policy)}}]},
    }
    for patch in overlay.one("EnvoyPatchPolicy")["spec"]["jsonPatches"]:
        operation = patch["operation"]
        if (patch["name"], operation["op"], operation["path"].count("/")) != (name, "add", 1):
            raise ValueError(f"{operation['op']} {operation['path']} of {patch['name']}: only an addition to {name} is known")
        found[operation["path"][1:]] = operation["value"]
    return found


def configuration(overlay, port, admin_port, endpoints):
    """Envoy's bootstrap."""
    rule, policy = overlay.one("HTTPRoute")["spec"]["rules"][0], overlay.one("BackendTrafficPolicy")["spec"]
    retry = policy["retry"]
    to = cluster(overlay, endpoints)
    headers = [one for filter in rule["filters"] for one in filter["requestHeaderModifier"]["set"]]
    route = {
        "match": {"path_separated_prefix": rule["matches"][0]["path"]["value"]},
        "route": {
            "cluster": to["name"], "timeout": rule["timeouts"]["request"],
            "retry_policy": {"num_retries": retry["numRetries"], "retry_on": ",".join(retry["retryOn"]["triggers"]),
                             "retriable_status_codes": retry["retryOn"]["httpStatusCodes"]}},
        "request_headers_to_add": [{"header": {"key": one["name"], "value": one["value"]},
                                    "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"} for one in headers],
    }
    manager = typed(
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager", stat_prefix="way-in",
        stream_idle_timeout=seconds(overlay.one("ClientTrafficPolicy")["spec"]["timeout"]["http"]["streamIdleTimeout"]),
        route_config={"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        http_filters=[{"name": "envoy.filters.http.router", "typed_config": typed("extensions.filters.http.router.v3.Router")}])
    at = lambda port: {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    return {
        "node": {"id": "test", "cluster": "test"},
        "admin": {"address": at(admin_port)},
        "static_resources": {
            "listeners": [{"name": "http", "address": at(port), "filter_chains": [{"filters": [
                {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}]}],
            "clusters": [to]},
    }


class Gateway:
    """An Envoy; `set_endpoints` says which servers there are."""

    def __init__(self, overlay):
        self.overlay = overlay
        self.port, self.admin_port = serving.free_ports(2)
        self.http = f"127.0.0.1:{self.port}"
        self.version = 0

    def __enter__(self):
        self.scratch = tempfile.TemporaryDirectory(prefix="spec-gateway-")
        self.place = pathlib.Path(self.scratch.name)
        self.endpoints = self.place / "endpoints.json"
        found = configuration(self.overlay, self.port, self.admin_port, self.endpoints)
        self.cluster = found["static_resources"]["clusters"][0]["name"]
        self.set_endpoints([])
        (self.place / "envoy.json").write_text(json.dumps(found))
        self.log = open(self.place / "log", "w+b")
        command = [tools.program("envoy"), "-c", self.place / "envoy.json", "--concurrency", "1", "-l", "warning",
                   "--use-dynamic-base-id"]
        self.process = subprocess.Popen([str(part) for part in command], stdout=self.log, stderr=self.log)
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()
        self.log.close()
        self.scratch.cleanup()

    def set_endpoints(self, ports):
        """Requests go to these ports from now on; those that have begun stay where they are."""
        self.version += 1
        hosts = [{"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}} for port in ports]
        assignment = typed("config.endpoint.v3.ClusterLoadAssignment", cluster_name=self.cluster,
                           endpoints=[{"lb_endpoints": hosts}])
        # Envoy looks at the file when it is moved to its place.
        new = self.endpoints.with_suffix(".new")
        new.write_text(json.dumps({"version_info": str(self.version), "resources": [assignment]}))
        os.replace(new, self.endpoints)

    def weights(self):
        """How Envoy weighs each port."""
        if self.process.poll() is not None:
            self.log.seek(0)
            sys.exit(f"envoy has ended:\n{self.log.read().decode()[-3000:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/clusters?format=json", timeout=60) as reply:
                statuses = json.loads(reply.read())["cluster_statuses"]
        except OSError:
            return {}
        hosts = next(one for one in statuses if one["name"] == self.cluster).get("host_statuses", [])
        return {one["address"]["socket_address"]["port_value"]: one["weight"] for one in hosts}


def report(metrics):
    """What servers newer than 2.51 say of their metrics, in Triton's text format (server: orca_http.cc); None if nothing."""
    pages = {}
    for labels, value in re.findall(r"nv_trt_llm_kv_cache_block_metrics(?:{(.*?)})?\s*(\d+(?:\.\d+)?)", metrics):
        kind = dict(re.findall(r'(\w+)="([^"]*)"', labels)).get("kv_cache_block_type")
        pages[kind] = float(value)
    if not {"tokens_per", "used", "max"} <= pages.keys():
        return None
    used = pages["used"] / pages["max"] if pages["max"] else 0
    return (f"TEXT named_metrics.kv_cache_utilization={used:.6f}, "
            f"named_metrics.max_token_capacity={int(pages['max'] * pages['tokens_per'])}")


class Front:
    """In front of a server: adds the load report to responses of one that sends none, as tritonserver 2.51, the newest on PyPI.
    All else it hands on as it comes.
    """

    def __init__(self, server):
        self.server = server
        self.port = serving.free_ports(1)[0]
        self.reports = set()

    async def start(self):
        """Begins to listen."""
        connector, timeout = aiohttp.TCPConnector(limit=0, force_close=True), aiohttp.ClientTimeout(total=None)
        self.session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{path:.*}", self.handle)
        self.runner = web.AppRunner(application, access_log=None, handler_cancellation=True, keepalive_timeout=KEEPALIVE_SECONDS)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()

    async def stop(self):
        """No more."""
        await self.runner.cleanup()
        await self.session.close()

    async def handle(self, request):
        """One request."""
        body = await request.read()
        headers = {name: request.headers[name] for name in ("Content-Type", ASKS_FOR_REPORT) if name in request.headers}
        try:
            url = f"http://{self.server.http}{request.rel_url}"
            reply = await self.session.request(request.method, url, data=body, headers=headers)
        except aiohttp.ClientConnectorError:
            return web.Response(status=503)
        async with reply:
            headers = {name: reply.headers[name] for name in ("Content-Type", REPORT) if name in reply.headers}
            if ASKS_FOR_REPORT in request.headers and REPORT not in headers and (found := await self.report()):
                headers[REPORT] = found
            if REPORT in headers:
                self.reports.add(headers[REPORT])
            response = web.StreamResponse(status=reply.status, headers=headers)
            await response.prepare(request)
            async for chunk in reply.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
        return response

    def weights(self):
        """What Envoy should make of the reports so far: a thousand requests a second over the utilization."""
        used = [float(re.search(r"kv_cache_utilization=([\d.]+)", one)[1]) for one in self.reports]
        return {int(1000 / one) for one in used if one > 0}

    async def report(self):
        """The server's load now."""
        async with self.session.get(f"http://{self.server.metrics_url}/metrics") as reply:
            return report(await reply.text())
