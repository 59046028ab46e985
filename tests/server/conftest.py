"""Suites against the real tritonserver with real clients; `scripts/test-server` prepares and runs them.

A module shares one server. Every server that a test does not end itself must end with code 0 when asked to,
and must not have panicked.
"""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harness import places  # noqa: E402
from harness.reference import Reference  # noqa: E402
from harness.repository import Repository  # noqa: E402
from harness.server import Server, eventually  # noqa: E402

# They need clients that scripts/test-clients installs.
collect_ignore = [] if os.environ.get("SPEC_CLIENTS") else ["clients"]


@pytest.fixture(scope="session")
def engine():
    """The small model in bf16 with look-up drafts of up to 8 tokens."""
    return places.engine("base", max_seq_len=1024)


@pytest.fixture(scope="session")
def small_engine():
    """The same for sequences of up to 128 tokens, so that a few pages hold only one."""
    return places.engine("small", max_seq_len=128)


@pytest.fixture(scope="session")
def reference(engine):
    return Reference(engine)


@pytest.fixture(scope="module")
def serve(request):
    """Starts servers: serve([Model, ...], load=names, args=..., env=..., gates=True).

    `panics` says that a thread of it may panic, `ends=False` that tritonserver itself is known not to end well after
    what the test does; it is killed instead.
    """
    folder = places.SCRATCH / request.module.__name__
    shutil.rmtree(folder, ignore_errors=True)
    servers = []

    def start(models, *, load=None, panics=False, ends=True, **how):
        here = folder / str(len(servers))
        repository = Repository(here / "repository")
        for model in models:
            repository.add(model)
        names = [model.name for model in models] if load is None else load
        server = Server(repository, here / "log", load=names, **how)
        server.may_panic, server.must_end = panics, ends
        servers.append(server)
        return server

    yield start
    problems = [problem for server in servers for problem in ending(server)]
    assert not problems, "\n".join(problems)


def ending(server):
    """Ends a server; what was wrong with it."""
    if not server.must_end:
        server.kill()
    elif server.process.poll() is None:
        try:
            eventually(lambda: server.num_requests() == 0, what="no request left in the backend")
        except AssertionError as error:
            yield f"{error}; its log: {server.log_path}"
        code = server.stop()
        if code != 0 and not server.keeps_streams(code):
            yield f"tritonserver ended with {code}; its log, {server.log_path}, ends:\n{server.log[-1500:]}"
    if not server.may_panic and re.search(r"panicked at", server.log):
        yield f"a thread panicked; its log: {server.log_path}"
