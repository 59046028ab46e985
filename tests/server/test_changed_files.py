"""Engine files that change under a running server: cut off, overwritten in place, replaced, while their model is loaded
and while it is being loaded. Loads are refused in words; the server, its models and their texts are not harmed.
"""

import random
import shutil
import threading
import time

import pytest

from harness import client
from harness.cases import CASES
from harness.repository import Model
from harness.server import eventually

POOL = {"max_tokens_in_paged_kv_cache": 2048}
CHECKED = {**POOL, "verify_engine": "true"}
ASKED = CASES[0][1]
LONG = dict(text_input="A very long story:", max_tokens=60, ignore_eos=True, stream=True)
LOADS_WHILE_CHANGING = 12


@pytest.fixture(scope="module")
def server(serve, engine):
    return serve([Model(name, engine, parameters=POOL) for name in ["steady", "changing"]], load=["steady"])


@pytest.fixture
def file(server):
    """The engine file of the model `changing`, which is its own, whole and not loaded."""
    return own_file(server)


def own_file(server):
    file = server.repository.path / "changing" / "1" / "target.engine"
    whole = file.resolve() if file.is_symlink() else whole_file(server)
    file.unlink()
    shutil.copyfile(whole, file)
    return file


def whole_file(server):
    return (server.repository.path / "steady" / "1" / "target.engine").resolve()


def text(server, model="changing", asked=ASKED):
    return client.grpc_stream(server, model, asked).good().text


def unload(server):
    server.unload("changing")
    eventually(lambda: not server.is_ready("changing"))


def cut_off(file):
    with open(file, "r+b") as out:
        out.truncate(file.stat().st_size // 2)


def overwrite(file):
    """In place, from the first weights on: the manifest stays as it was."""
    with open(file, "r+b") as out:
        out.seek(file.stat().st_size // 4)
        out.write(bytes(file.stat().st_size // 2))


def replace(file):
    """By another file under the same name, which is no engine."""
    other = file.with_suffix(".new")
    other.write_bytes(b"not an engine" * 1000)
    other.rename(file)


@pytest.mark.parametrize("change", [cut_off, overwrite, replace])
def test_a_loaded_model_serves_on_whatever_becomes_of_its_file(server, file, reference, change):
    assert server.load("changing") is None
    whole = text(server, asked=LONG)
    with client.Stream(server, "changing", LONG) as stream:
        stream.next()
        change(file)
        assert stream.rest().good().text == whole
    assert text(server) == text(server, "steady") == reference.text(**ASKED)
    unload(server)


@pytest.mark.parametrize("change,words", [(cut_off, "ends at byte"), (replace, "not an engine file")])
def test_a_load_of_a_changed_file_says_what_is_wrong_with_it(server, file, reference, change, words):
    change(file)
    error = server.load("changing")
    assert "target.engine" in error and words in error, error
    own_file(server)
    assert server.load("changing") is None
    assert text(server) == reference.text(**ASKED)
    unload(server)


def test_files_that_change_while_they_are_loaded_do_no_harm(server, file, reference):
    """Whatever a load meets, it is refused in words or serves the right texts: what was hashed is what is loaded."""
    server.repository.configure("changing", Model("changing", reference.engine, parameters=CHECKED).config())
    whole = whole_file(server).read_bytes()
    chance = random.Random(1)
    ended = threading.Event()

    def go_on_changing():
        while not ended.is_set():
            chance.choice([cut_off, overwrite])(file)
            time.sleep(chance.uniform(0.02, 0.3))
            with open(file, "r+b") as out:
                out.write(whole)
            time.sleep(chance.uniform(0.02, 0.6))

    changing = threading.Thread(target=go_on_changing)
    changing.start()
    try:
        for _ in range(LOADS_WHILE_CHANGING):
            error = server.load("changing")
            if error is None:
                assert text(server) == reference.text(**ASKED)
            else:
                assert "target.engine" in error, error
            assert text(server, "steady") == reference.text(**ASKED)
            unload(server)
    finally:
        ended.set()
        changing.join()
    assert server.load("changing") is None
    assert text(server) == reference.text(**ASKED)
    unload(server)
