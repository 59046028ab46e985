"""The loop with real parts: load, gateway, servers, Prometheus, autoscaler."""

import asyncio
import json
import os
import re
import signal
import statistics
import sys
import time
from types import SimpleNamespace

import files
import prometheus
import serving
from autoscaler import SYNC_SECONDS, Autoscaler
from checks import PATIENCE_SECONDS, POLL_SECONDS
from clients import Client, prompts
from fleet import NAMESPACE, Fleet
from gateway import Gateway

# The manifests' times are divided by it.
SPEED = 6
MIN_REPLICAS, MAX_REPLICAS = 1, 3
SLOTS = 4
LOW, HIGH = 1, 10
# With drain_timeout_ms a server that is told to end cuts off what still runs: nothing but the hook keeps a text whole.
LIMITS = {"max_running": SLOTS, "max_queue_size": 64, "threads": 1, "max_tokens_in_paged_kv_cache": 8192, "drain_timeout_ms": 1}
# The same tokens each time: greedy, and as many.
OPTIONS = {"max_tokens": 96, "ignore_eos": True}
LONG = {"text_input": "Tell me a very long story about a river and the people who live beside it.", **OPTIONS, "max_tokens": 400}
NUM_PROMPTS = 12
# Answers to look at once as many replicas are there as are needed.
NUM_SETTLED = 60
# How long the first token may take, as a multiple of the time that the text behind it takes in the same minutes. Where
# nobody waits it is a tenth; the gateway goes by reports, and now and then sends two too many to the same replica.
TAIL = 2.0


class Prometheus(prometheus.Prometheus):
    """Scrapes what its file of targets names, as often as the PodMonitor says."""

    def __init__(self, program, overlay):
        super().__init__(program)
        self.overlay = overlay

    def configure(self, place):
        """Writes its configuration into a folder."""
        endpoint = self.overlay.one("PodMonitor")["spec"]["podMetricsEndpoints"][0]
        seconds = max(round(int(endpoint["interval"].rstrip("s")) / SPEED), 1)
        self.targets = place / "targets.json"
        self.set_targets([])
        (place / "prometheus.yml").write_text(json.dumps({
            "global": {"scrape_interval": f"{seconds}s", "scrape_timeout": f"{seconds}s"},
            "scrape_configs": [{"job_name": endpoint["relabelings"][0]["replacement"], "file_sd_configs": [
                {"files": [str(self.targets)], "refresh_interval": "1s"}]}]}))

    def set_targets(self, replicas):
        """Who is scraped from now on, with the labels that the operator gives pods."""
        new = self.targets.with_suffix(".new")
        new.write_text(json.dumps([{"targets": [one.server.metrics_url], "labels": {"namespace": NAMESPACE, "pod": one.name}}
                                   for one in replicas]))
        os.replace(new, self.targets)


def shortened(text):
    """A query with its windows divided; a window holds a few scrapes all the same."""
    return re.sub(r"\[(\d+)s\]", lambda window: f"[{max(int(window[1]) // SPEED, 5)}s]", text)


class Load:
    """Clients that ask one question after the other, through the gateway."""

    def __init__(self, client, questions):
        self.client, self.questions = client, questions
        self.phase, self.num_workers, self.asked = "", 0, 0
        self.answers, self.tasks = [], []

    def set_workers(self, count, phase):
        """As many from now on; who is one too many ends its text first."""
        self.num_workers, self.phase = count, phase
        self.tasks = [task for task in self.tasks if not task.done()]
        self.tasks += [asyncio.create_task(self.work(idx)) for idx in range(len(self.tasks), count)]

    async def work(self, idx):
        """One client."""
        while idx < self.num_workers:
            phase, question = self.phase, self.asked % len(self.questions)
            self.asked += 1
            answer = await self.client.ask("generate_stream", {"text_input": self.questions[question], **OPTIONS})
            self.answers.append((phase, question, answer))

    def of(self, phase):
        """Answers to what was asked in a phase."""
        return [answer for one, _, answer in self.answers if one == phase]


class Loop:
    """All parts, and the checks of what they do together."""

    def __init__(self, check, overlay, program, folder, backends):
        self.check, self.overlay = check, overlay
        spec = overlay.one("HorizontalPodAutoscaler")["spec"]
        self.scaler = Autoscaler({**spec, "minReplicas": MIN_REPLICAS, "maxReplicas": MAX_REPLICAS}, SPEED)
        self.gateway, self.prometheus = Gateway(overlay), Prometheus(program, overlay)
        self.rules = files.rules()
        arguments = [f"--exit-timeout-secs={overlay.exit_seconds}"]
        self.fleet = Fleet(overlay, lambda number: serving.Server(folder, LIMITS, backends=backends, arguments=arguments,
                                                                  label=f"-{number}"), self.changed)
        self.pinned, self.weighed = [], {}
        self.control = None

    def changed(self, fleet):
        """Tells the gateway and Prometheus who is there."""
        self.gateway.set_endpoints([one.front.port for one in fleet.ready])
        self.prometheus.set_targets(fleet.replicas)

    async def eventually(self, what, holds):
        """Holds if it does before patience ends; `holds` gives None, or why not yet."""
        end = time.monotonic() + PATIENCE_SECONDS
        while (why := holds()) is not None and time.monotonic() < end:
            await asyncio.sleep(POLL_SECONDS)
            if self.control.done():
                self.control.result()
        self.check(what, why is None, why)

    def measured(self):
        """What the adapter would say of each metric: by pod."""
        names = [one.name for one in self.fleet.live]
        found = {}
        for metric in self.scaler.targets():
            query = shortened(files.query(self.rules[metric], namespace=NAMESPACE, pod="|".join(names)))
            found[metric] = {labels["pod"]: value for labels, value in self.prometheus.samples(query)}
        return found

    async def control_forever(self):
        """Kubelets and the autoscaler."""
        due = time.monotonic()
        while True:
            await self.fleet.observe()
            for port, weight in (await asyncio.to_thread(self.gateway.weights)).items():
                self.weighed.setdefault(port, set()).add(weight)
            if time.monotonic() >= due and self.fleet.ready:
                due = time.monotonic() + SYNC_SECONDS / SPEED
                await self.autoscale()
            await asyncio.sleep(POLL_SECONDS)

    async def autoscale(self):
        """One round of the autoscaler."""
        try:
            found = await asyncio.to_thread(self.measured)
        except OSError:
            return  # Prometheus does not listen yet
        live = len(self.fleet.live)
        values = {metric: list(by_pod.values()) for metric, by_pod in found.items()}
        wanted = self.scaler.decide(time.monotonic(), live, live, values)
        if wanted != live:
            said = ", ".join(f"{metric} {' '.join(f'{value:.2f}' for value in found[metric].values())}" for metric in found)
            print(f"    {live} -> {wanted} replicas: {said}", flush=True)
            await self.fleet.scale(wanted, self.pin)

    async def pin(self, replica):
        """Has a long text begin on a replica that is about to go."""
        door = SimpleNamespace(http=f"127.0.0.1:{replica.front.port}", grpc=replica.server.grpc, model=replica.server.model,
                               datatypes=replica.server.datatypes)
        client = await Client(door).__aenter__()
        task = asyncio.create_task(client.ask("generate_stream", LONG))
        while not task.done() and not self.requests(replica, "scheduled"):
            await asyncio.sleep(0.02)
        self.pinned.append((client, task, not task.done()))

    @staticmethod
    def requests(replica, kind):
        """Requests of a kind on a replica now."""
        return replica.server.metrics().get(f'nv_trt_llm_request_metrics{{request_type="{kind}"}}', 0)

    def waiting(self):
        """None if no request waits on any replica, else how many do."""
        count = [self.requests(one, "waiting") for one in self.fleet.ready]
        return f"{count} wait" if any(count) else None

    async def run(self):
        """From one replica to three and back."""
        with self.gateway, self.prometheus:
            try:
                await self.fleet.scale(1)
                self.control = asyncio.create_task(self.control_forever())
                await self.eventually("the first replica is ready", lambda: None if self.fleet.ready else "it is not ready")
                await self.rise_and_fall()
            finally:
                if self.control:
                    self.control.cancel()
                await self.fleet.close()

    async def rise_and_fall(self):
        """The load, and what must hold."""
        first = self.fleet.ready[0].server
        questions = prompts(300)[:NUM_PROMPTS]
        async with Client(first) as client:
            texts = [await client.ask("generate_stream", {"text_input": one, **OPTIONS}) for one in questions]
            long_text = await client.ask("generate_stream", LONG)
        problems = [one.problem for one in [*texts, long_text] if one.problem]
        self.check(f"an idle server answers {len(texts) + 1} questions", not problems and all(one.text for one in texts),
                   problems)
        door = SimpleNamespace(http=self.gateway.http, grpc=first.grpc, model=first.model, datatypes=first.datatypes)
        async with Client(door) as client:
            load = Load(client, questions)
            await self.phases(load)
        await self.check_pinned(long_text.text)
        self.check_answers(load, [one.text for one in texts])
        self.check_tail(load)

    async def phases(self, load):
        """Low, high, low."""
        fleet = self.fleet
        load.set_workers(LOW, "low")
        await self.eventually("a client is answered", lambda: None if len(load.of("low")) >= 5 else "it is not answered")
        self.check("one replica is enough for it", len(fleet.live) == 1, len(fleet.live))
        await self.eventually("Prometheus answers the adapter's queries for it", self.unmeasured)
        load.set_workers(HIGH, "rising")
        await self.eventually(f"with {HIGH // LOW} times the load there are {MAX_REPLICAS}, and all are ready",
                              lambda: None if len(fleet.ready) == MAX_REPLICAS else f"{len(fleet.ready)} are ready")
        await self.eventually("Prometheus answers the adapter's queries for each", self.unmeasured)
        await self.eventually("then nobody waits any more", self.waiting)
        ports = {one.front.port for one in fleet.ready}
        load.set_workers(HIGH, "high")
        await self.eventually(f"{NUM_SETTLED} texts are answered then",
                              lambda: None if len(load.of("high")) >= NUM_SETTLED else f"{len(load.of('high'))} are answered")
        self.check("the replicas stay as long as the load does", {one.front.port for one in fleet.ready} == ports, ports)
        wrong = {one.name: self.weighed.get(one.front.port) for one in fleet.ready
                 if not one.front.weights() & self.weighed.get(one.front.port, set())}
        self.check("Envoy weighs each by what it reports", not wrong, wrong)
        load.set_workers(LOW, "falling")
        await self.eventually("when the load falls there is one again, and the others are gone",
                              lambda: None if len(fleet.replicas) == 1 else f"{len(fleet.live)} and {len(fleet.gone)} gone")
        load.set_workers(LOW, "low again")
        await self.eventually("it answers", lambda: None if len(load.of("low again")) >= 5 else "it does not answer")
        load.set_workers(0, "")
        await asyncio.gather(*load.tasks)

    def unmeasured(self):
        """None if each live replica has each metric, else which has not."""
        found = self.measured()
        missing = [(metric, one.name) for metric in found for one in self.fleet.live if one.name not in found[metric]]
        return str(missing) if missing else None

    def check_answers(self, load, texts):
        """That nothing is lost, and that texts are right."""
        answers, count = load.answers, len(load.answers)
        lost = [f"{phase}: {answer.problem}" for phase, _, answer in answers if answer.problem]
        self.check(f"each of {count} requests is answered", count == load.asked and not lost, lost)
        wrong = [(phase, question) for phase, question, answer in answers if answer.text != texts[question]]
        self.check(f"{count} texts are those of an idle server", not wrong, wrong)
        ended = {one.name: (one.code, one.drained) for one in self.fleet.gone}
        self.check(f"{len(ended)} replicas went, idle and with code 0",
                   len(ended) == MAX_REPLICAS - 1 and all(one == (0, "") for one in ended.values()), ended)

    async def check_pinned(self, text):
        """That what ran on a replica when it was told to go came to its end."""
        answers = []
        for client, task, began in self.pinned:
            answers.append((await task, began))
            await client.__aexit__()
        wrong = [(began, one.problem, one.text == text) for one, began in answers if not began or one.problem or one.text != text]
        self.check(f"{len(answers)} long texts, begun on replicas that were about to go, are whole",
                   len(answers) == MAX_REPLICAS - 1 and not wrong, wrong)

    def check_tail(self, load):
        """How long the first token takes."""
        tail = {}
        for phase in ("low", "rising", "high", "falling", "low again"):
            found = [one for one in load.of(phase) if one.problem is None]
            if len(found) > 1:
                text = statistics.median(one.last - one.first for one in found)
                waited = sorted(one.first - one.sent for one in found)
                at = lambda share: waited[min(int(share * len(waited)), len(waited) - 1)]
                tail[phase] = at(0.95) / text
                print(f"    {phase}: {len(found)} texts, first token p50 {at(0.5):.2f} p95 {at(0.95):.2f} p99 {at(0.99):.2f} s, "
                      f"the text behind it {text:.2f} s", flush=True)
        self.check(f"with enough replicas the first token's p95 is within {TAIL} texts", tail["high"] <= TAIL, tail)


def run(check, overlay, program, folder, backends):
    """Runs the loop once."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are ended too
    asyncio.run(Loop(check, overlay, program, folder, backends).run())
