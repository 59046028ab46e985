"""Where the threads that compute on a CPU run: each on a core of its own as long as models and instances have different
ones, anywhere as soon as they do not, and with the same texts in any case. The server has two cores, whatever there are.
"""

import os
from pathlib import Path

import pytest

from harness import client
from harness.cases import CASES
from harness.repository import Model
from harness.server import eventually

ASKED = CASES[0][1]
ON = {"max_tokens_in_paged_kv_cache": 2048, "pin_threads": "on"}
TWO = {**ON, "threads": 2}


def two_cores():
    """A processor of each of two cores that this process may use, or None."""
    seen = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        seen.setdefault(siblings.read_text() if siblings.exists() else cpu, cpu)
    return set(list(seen.values())[:2]) if len(seen) > 1 else None


@pytest.fixture(scope="module")
def server(serve, engine):
    cores, before = two_cores(), os.sched_getaffinity(0)
    if not cores:
        pytest.skip("there is one core")
    models = [
        Model("one", engine, parameters=TWO),
        Model("two", engine, parameters=TWO),
        Model("apart", engine, instances=2, parameters=ON),
        Model("free", engine, parameters={**TWO, "pin_threads": "off"}),
    ]
    os.sched_setaffinity(0, cores)
    try:
        return serve(models, load=[])
    finally:
        os.sched_setaffinity(0, before)


@pytest.fixture
def loaded(server):
    """Loads models, and unloads them at the end."""
    names = []

    def load(*more):
        names.extend(more)
        assert [server.load(name) for name in more] == [None] * len(more)

    def unload(name):
        names.remove(name)
        assert server.unload(name) is None

    load.unload = unload
    yield load
    for name in list(names):
        unload(name)
    eventually(lambda: not placed(server), what="no thread of a model")


def placed(server):
    """Processors of each thread that computes."""
    masks = []
    for task in Path(f"/proc/{server.pid}/task").iterdir():
        try:
            if (task / "comm").read_text().startswith(("spec-engine", "spec-cpu-")):
                masks.append(frozenset(os.sched_getaffinity(int(task.name))))
        except (FileNotFoundError, ProcessLookupError):
            pass  # It has ended meanwhile.
    return sorted(masks, key=sorted)


def eventually_placed(server, expected):
    expected = sorted(map(frozenset, expected), key=sorted)
    eventually(lambda: placed(server) == expected, what=f"threads on {list(map(set, expected))}")


def cores_of(server):
    return sorted(os.sched_getaffinity(server.pid))


def text(server, model):
    return client.grpc_stream(server, model, ASKED).good().text


def test_threads_have_cores_of_their_own_until_others_come(server, loaded, reference):
    first, second = cores_of(server)
    loaded("one")
    eventually_placed(server, [{first}, {second}])
    assert text(server, "one") == reference.text(**ASKED)
    loaded("two")
    eventually_placed(server, [{first, second}] * 4)
    assert text(server, "one") == text(server, "two") == reference.text(**ASKED)
    loaded.unload("one")
    eventually_placed(server, [{first}, {second}])
    assert text(server, "two") == reference.text(**ASKED)


def test_instances_of_a_model_get_different_cores(server, loaded, reference):
    first, second = cores_of(server)
    loaded("apart")
    eventually_placed(server, [{first}, {second}])
    assert {text(server, "apart") for _ in range(4)} == {reference.text(**ASKED)}


def test_pinning_can_be_turned_off(server, loaded, reference):
    loaded("free")
    eventually_placed(server, [set(cores_of(server))] * 2)
    assert text(server, "free") == reference.text(**ASKED)
    loaded("one")
    eventually_placed(server, [set(cores_of(server))] * 4)


def test_a_word_that_is_none_of_the_three_is_refused(serve, engine):
    server = serve([Model("wrong", engine, parameters={**ON, "pin_threads": "true"})], load=[])
    assert "parameter 'pin_threads' is 'true', expected auto, on or off" in server.load("wrong")


def test_the_instruction_set_can_be_chosen(serve, engine):
    server = serve([
        Model("plain", engine, parameters={**ON, "isa": "portable"}),
        Model("wrong", engine, parameters={**ON, "isa": "mmx"}),
    ], load=["plain"])
    assert text(server, "plain")
    expected = "parameter 'isa' is 'mmx', expected auto or an instruction set of this machine"
    assert expected in server.load("wrong")
