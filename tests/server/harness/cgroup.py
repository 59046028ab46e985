"""A control group of a test's own, of version 1 or 2, whose memory is limited; the kernel kills in it what needs more."""

import os
import shutil
import time
from pathlib import Path

ROOTS = [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")]


class Missing(Exception):
    """Why there can be no group here."""


class MemoryGroup:
    """A group below that of this process, if one may be made; use it in a `with`."""

    def __init__(self, limit_bytes):
        self.limit = limit_bytes

    def __enter__(self):
        self.folder, self.is_v1 = make()
        try:
            self.write("memory.limit_in_bytes" if self.is_v1 else "memory.max", self.limit)
            # Where there is swap it must not hide what does not fit.
            for name in ["memory.memsw.limit_in_bytes", "memory.swap.max"]:
                if (self.folder / name).exists():
                    self.write(name, self.limit if self.is_v1 else 0)
        except OSError as error:
            self.folder.rmdir()
            raise Missing(f"{self.folder} cannot be limited: {error}") from None
        return self

    def __exit__(self, *_):
        for _ in range(100):
            try:
                self.folder.rmdir()
                return
            except OSError:
                # A process that was killed is in it for a moment.
                time.sleep(0.1)

    def command(self, command):
        """A command that runs in the group."""
        return [shutil.which("sh"), "-c", 'echo $$ > "$0" && exec "$@"', self.folder / "cgroup.procs", *command]

    def write(self, name, value):
        (self.folder / name).write_text(str(value))

    def number(self, name):
        return int((self.folder / name).read_text())

    def events(self, name):
        found = dict(line.split() for line in (self.folder / name).read_text().splitlines())
        return {key: int(value) for key, value in found.items()}

    def in_use(self):
        """Bytes, pages of files among them."""
        return self.number("memory.usage_in_bytes" if self.is_v1 else "memory.current")

    def most_in_use(self):
        return self.number("memory.max_usage_in_bytes" if self.is_v1 else "memory.peak")

    def num_kills(self):
        """Processes that were killed for memory."""
        return self.events("memory.oom_control" if self.is_v1 else "memory.events")["oom_kill"]

    def num_limited(self):
        """How often the limit was met, and pages of files were dropped or something worse was done."""
        return self.number("memory.failcnt") if self.is_v1 else self.events("memory.events")["max"]


def make():
    """A new group: its folder, and whether it is one of version 1."""
    for root in ROOTS:
        is_v1 = (root / "memory.limit_in_bytes").exists()
        if not is_v1 and "memory" not in read(root / "cgroup.subtree_control").split():
            continue
        folder = root / f"spec-{os.getpid()}-{time.monotonic_ns()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        return folder, is_v1
    raise Missing(f"no control group for memory can be made below {' or '.join(map(str, ROOTS))}")


def read(path):
    return path.read_text() if path.exists() else ""
