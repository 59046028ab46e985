"""What a Deployment does, on one machine: starts real tritonservers, looks whether they are ready, drains those that go."""

import asyncio
import urllib.error
import urllib.request

from files import CONTAINER
from gateway import Front

NAMESPACE = "default"
# Instead of the seconds that gateways of a cluster get to see that an endpoint is gone.
SETTLE_SECONDS = 2


class Replica:
    """A pod: a server and what is in front of it."""

    def __init__(self, number, server):
        self.name, self.server, self.front = f"spec-triton-{number}", server, Front(server)
        self.is_ready = False
        self.going = None
        # Of the end: how its hook ended, and the server.
        self.drained = self.code = None


class Fleet:
    """As many replicas as `scale` was told last. `make` gives a server that is not started; `changed` is called whenever one is
    ready, goes, or is gone.
    """

    def __init__(self, overlay, make, changed):
        self.overlay, self.make, self.changed = overlay, make, changed
        self.replicas, self.gone = [], []
        self.number = 0

    @property
    def live(self):
        """Those that are not going."""
        return [one for one in self.replicas if not one.going]

    @property
    def ready(self):
        """Those that requests go to."""
        return [one for one in self.live if one.is_ready]

    async def scale(self, count, before_end=None):
        """Starts replicas, or lets the youngest go, those first that are not ready; `before_end(replica)` is awaited first."""
        while len(self.live) < count:
            self.number += 1
            replica = Replica(self.number, self.make(self.number))
            replica.server.start()
            await replica.front.start()
            self.replicas.append(replica)
            self.changed(self)
        for replica in self.leaving(count):
            if before_end and replica.is_ready:
                await before_end(replica)
            replica.going = asyncio.create_task(self.end(replica))

    def leaving(self, count):
        """Who goes for there to be no more than `count`."""
        order = sorted(self.live, key=lambda one: (one.is_ready, -int(one.name.rsplit("-", 1)[1])))
        return order[:max(len(order) - count, 0)]

    async def end(self, replica):
        """A pod's end: no endpoint any more, the hook of the Deployment, SIGTERM, and its process is waited for."""
        self.changed(self)
        program, limit = self.overlay.drain
        port = replica.server.ports[2]
        hook = await asyncio.create_subprocess_exec(str(CONTAINER / program), limit, str(SETTLE_SECONDS), str(port),
                                                    stderr=asyncio.subprocess.PIPE)
        _, words = await hook.communicate()
        replica.drained = words.decode().strip()
        replica.server.process.terminate()
        replica.code = await asyncio.to_thread(replica.server.process.wait)
        await replica.front.stop()
        replica.server.__exit__()
        self.replicas.remove(replica)
        self.gone.append(replica)
        self.changed(self)

    async def observe(self):
        """Asks each live replica whether it is ready, as the kubelet does."""
        path = self.overlay.container["readinessProbe"]["httpGet"]["path"]
        for replica in self.live:
            if replica.server.process.poll() is not None:
                tail = replica.server.log_path.read_text(errors="replace").splitlines()[-15:]
                raise RuntimeError("\n".join([*tail, f"{replica.name} has ended by itself"]))
            is_ready = await asyncio.to_thread(answers, f"http://{replica.server.http}{path}")
            if is_ready != replica.is_ready:
                replica.is_ready = is_ready
                self.changed(self)

    async def close(self):
        """Ends all of them, without a drain."""
        for replica in list(self.replicas):
            if replica.going:
                replica.going.cancel()
            replica.server.__exit__()
            await replica.front.stop()


def answers(url):
    """Whether there is something with status 200."""
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return reply.status == 200
    except (OSError, urllib.error.URLError):
        return False
