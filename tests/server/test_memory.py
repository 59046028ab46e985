"""What models take of the memory there is: told truly, shared among instances, and never promised twice. Some suites run
the server in a control group; they skip where none can be made.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from harness import cgroup, client
from harness.cases import CASES
from harness.repository import Model
from harness.server import eventually

ASKED = CASES[0][1]
KV_TOKENS = 2048
POOL = {"max_tokens_in_paged_kv_cache": KV_TOKENS}
MIB = 1 << 20
# Of a control group: room for a model with its cache, not for four.
LIMIT = 800 * MIB
# Room for a model with a cache of a few thousand tokens.
SMALL_LIMIT = 580 * MIB


def told(server, model, of="cpu"):
    return server.metric("nv_trt_llm_runtime_memory_metrics", model=model, memory_type=of)


def text(server, model):
    return client.grpc_stream(server, model, ASKED).good().text


def page_bytes(server):
    """Of the small model: 30 layers, 3 key heads of 64, keys and values in 16 bits."""
    return server.pages("one", "tokens_per") * 30 * 3 * 64 * 2 * 2


@pytest.fixture(scope="module")
def server(serve, engine):
    return serve([Model("one", engine, parameters=POOL), Model("two", engine, instances=2, parameters=POOL)])


def test_instances_share_the_weights_and_have_caches_of_their_own(server, engine, reference):
    weights = (engine / "1" / "target.engine").stat().st_size
    one, two = told(server, "one"), told(server, "two")
    assert abs(2 * one - two - weights) < weights / 100
    caches = server.pages("one", "max") * page_bytes(server)
    assert weights + caches < one < weights + caches + 64 * MIB, "the rest is workspace"
    assert server.pages("two", "max") == 2 * server.pages("one", "max")
    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(lambda _: text(server, "two"), range(6))) == {reference.text(**ASKED)}


def test_without_a_gpu_no_memory_of_one_is_told(server):
    assert told(server, "one", "gpu") == told(server, "one", "pinned") == 0


def test_triton_is_told_what_the_metrics_tell(server):
    reported = server.statistics("one")["memory_usage"]
    assert [(one["type"], one["byte_size"]) for one in reported] == [("CPU", told(server, "one"))]
    both = server.statistics("two")["memory_usage"]
    assert sum(one["byte_size"] for one in both) == told(server, "two")


@pytest.fixture
def grouped(serve, engine):
    """Starts a server in a control group of its own, with models that are not loaded yet."""
    with ExitStack() as stack:

        def start(names, limit=LIMIT, **parameters):
            try:
                group = stack.enter_context(cgroup.MemoryGroup(limit))
            except cgroup.Missing as missing:
                pytest.skip(str(missing))
            models = [Model(name, engine, parameters=parameters) for name in names]
            server = serve(models, load=[], group=group)
            stack.callback(check, server, group)
            return server

        def check(server, group):
            assert (group.num_kills(), server.stop()) == (0, 0)

        yield start


def test_what_does_not_fit_is_refused_with_the_sum_and_harms_nobody(grouped, reference):
    server = grouped("abcd")
    loaded = []
    for name in "abcd":
        error = server.load(name)
        if error:
            break
        loaded.append(name)
    assert loaded and error, "a group of this size holds one model and not four"
    for part in ["does not fit", "weights", "workspace", "KV cache", "max_num_tokens", "max_running", "--dtype", "control group"]:
        assert part in error, error
    for name in loaded:
        assert text(server, name) == reference.text(**ASKED)
    assert sum(told(server, name) for name in loaded) < LIMIT
    # What is given up is there for others.
    assert server.unload(loaded[0]) is None
    eventually(lambda: "successfully unloaded" in server.log)
    assert server.load("d") is None
    assert text(server, "d") == reference.text(**ASKED)


def test_models_that_load_at_once_are_not_promised_the_same_bytes(grouped, reference):
    """Each may have nine tenths of what is free; together they must not."""
    server = grouped("abc", kv_cache_free_gpu_mem_fraction=0.9)
    with ThreadPoolExecutor(3) as pool:
        errors = list(pool.map(server.load, "abc"))
    loaded = [name for name, error in zip("abc", errors) if error is None]
    assert loaded and all("does not fit" in error or "are allowed" in error for error in errors if error), errors
    assert sum(told(server, name) for name in loaded) < LIMIT
    for name in loaded:
        assert text(server, name) == reference.text(**ASKED)


def test_a_cache_of_all_that_is_allowed_can_be_filled(grouped):
    """Prompts that share no beginning, until each page was written; then the process is as large as it said."""
    server = grouped("a", SMALL_LIMIT, kv_cache_free_gpu_mem_fraction=1.0)
    before = server.rss()
    assert server.load("a") is None
    prompt = lambda number: f"{number}: " + "one two three four five six seven eight nine ten " * 85
    # Figures are published by the engine's thread, behind the load.
    eventually(lambda: server.pages("a", "max") > 0)
    most = int(server.pages("a", "max"))
    asked = [dict(text_input=prompt(number), max_tokens=2, stream=True) for number in range(most // 50)]
    with ThreadPoolExecutor(8) as pool:
        for answer in pool.map(lambda one: client.grpc_stream(server, "a", one), asked):
            answer.good()
    eventually(lambda: server.pages("a", "cached") > 0.9 * most, what="the pages of all answers are told")
    grown = server.rss() - before
    assert abs(grown - told(server, "a")) < 0.06 * told(server, "a"), (grown, told(server, "a"))
