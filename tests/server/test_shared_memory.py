"""Prompts read from and texts written to system shared memory, over HTTP and gRPC."""

import itertools
import os
import struct
import threading

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from harness import client
from harness.cases import CASES
from harness.repository import Model
from harness.server import eventually

ASKED = CASES[0][1]
MODULES = {"grpc": grpcclient, "http": httpclient}
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server(serve, engine):
    pool = {"max_tokens_in_paged_kv_cache": 4096}
    models = [Model("whole", engine, decoupled=False, parameters=pool), Model("stream", engine, parameters=pool)]
    return serve(models, gates=True)


@pytest.fixture(params=MODULES)
def door(request, server):
    """A client module and a client of it."""
    module = MODULES[request.param]
    with module.InferenceServerClient(getattr(server, f"{request.param}_url")) as one:
        yield module, one
        one.unregister_system_shared_memory()


class Region:
    """A shared memory region, made and registered."""

    def __init__(self, one, size, register=True):
        # One of the whole machine's.
        self.name = f"spec_test_{os.getpid()}_{next(_numbers)}"
        self.size = size
        self.handle = shm.create_shared_memory_region(self.name, f"/{self.name}", size)
        if register:
            one.register_system_shared_memory(self.name, f"/{self.name}", size)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        shm.destroy_shared_memory_region(self.handle)

    def write(self, data, offset=0):
        shm.set_shared_memory_region(self.handle, [np.frombuffer(data, dtype=np.uint8)], offset=offset)

    def read(self, size, offset=0):
        return shm.get_contents_as_numpy(self.handle, np.uint8, [size], offset=offset).tobytes()


def unregistered(one, name):
    try:
        one.unregister_system_shared_memory(name)
        return True
    except InferenceServerException:
        return False


def release(one, region):
    """A request holds its region for a moment longer than it takes to answer it."""
    eventually(lambda: unregistered(one, region.name), what="nothing holds the region")


def serialized(text):
    data = text.encode()
    return struct.pack("<I", len(data)) + data


def deserialized(data):
    length = struct.unpack_from("<I", data)[0]
    return data[4 : 4 + length].decode()


def inputs(module, region=None, size=0, offset=0, asked=ASKED):
    """The request's inputs, with the prompt in a region if one is given."""
    tensors = client.tensors(module, {name: value for name, value in asked.items() if name != "text_input"})
    prompt = module.InferInput("text_input", [1, 1], "BYTES")
    if region is None:
        prompt.set_data_from_numpy(client.array("text_input", asked["text_input"]))
    else:
        prompt.set_shared_memory(region.name, size, offset=offset)
    return [prompt, *tensors]


def output(module, region, size, offset=0):
    one = module.InferRequestedOutput("text_output")
    one.set_shared_memory(region.name, size, offset=offset)
    return one


def plain(one, module):
    """The model still answers."""
    return one.infer("whole", inputs(module)).as_numpy("text_output").reshape(-1)[0].decode()


@pytest.mark.parametrize("offset", [0, 4, 1000])
def test_a_prompt_comes_from_shared_memory(door, reference, offset):
    module, one = door
    data = serialized(ASKED["text_input"])
    with Region(one, 4096) as region:
        region.write(data, offset)
        result = one.infer("whole", inputs(module, region, len(data), offset))
        assert result.as_numpy("text_output").reshape(-1)[0].decode() == reference.text(**ASKED)
        release(one, region)


@pytest.mark.parametrize("offset", [0, 64])
def test_a_text_goes_to_shared_memory(door, reference, offset):
    module, one = door
    with Region(one, 4096) as region:
        region.write(b"\xaa" * 4096)
        one.infer("whole", inputs(module), outputs=[output(module, region, 4096 - offset, offset)])
        assert deserialized(region.read(4096 - offset, offset)) == reference.text(**ASKED)
        assert region.read(offset) == b"\xaa" * offset, "nothing before the offset is touched"
        release(one, region)


def test_prompt_and_text_share_a_region(door, reference):
    module, one = door
    data = serialized(ASKED["text_input"])
    with Region(one, 8192) as region:
        region.write(data)
        one.infer("whole", inputs(module, region, len(data)), outputs=[output(module, region, 4096, 4096)])
        assert deserialized(region.read(4096, 4096)) == reference.text(**ASKED)
        assert deserialized(region.read(len(data))) == ASKED["text_input"], "the prompt is as it was"
        release(one, region)


def test_a_region_too_small_for_the_text_is_an_error_and_nothing_is_written_behind_it(door, reference):
    module, one = door
    with Region(one, 4096) as region:
        region.write(b"\xaa" * 4096)
        with pytest.raises(InferenceServerException):
            one.infer("whole", inputs(module), outputs=[output(module, region, 8)])
        assert region.read(4096 - 8, 8) == b"\xaa" * (4096 - 8)
        assert plain(one, module) == reference.text(**ASKED)
        release(one, region)


@pytest.mark.parametrize("size,offset", [(1 << 20, 0), (100, 4090), (2**40, 0)])
def test_a_tensor_outside_its_region_is_refused(door, reference, size, offset):
    module, one = door
    with Region(one, 4096) as region:
        with pytest.raises(InferenceServerException):
            one.infer("whole", inputs(module, region, size, offset))
        assert plain(one, module) == reference.text(**ASKED)
        release(one, region)


def test_a_length_that_points_outside_the_tensor_is_refused(door, reference):
    module, one = door
    with Region(one, 4096) as region:
        for length in [5, 4000, 2**32 - 1]:
            region.write(struct.pack("<I", length) + b"abcd")
            with pytest.raises(InferenceServerException, match="text_input"):
                one.infer("whole", inputs(module, region, 8))
        assert plain(one, module) == reference.text(**ASKED)
        release(one, region)


def test_an_unknown_region_is_refused(door, reference):
    module, one = door
    with Region(one, 4096, register=False) as region:
        with pytest.raises(InferenceServerException, match=region.name):
            one.infer("whole", inputs(module, region, 16))
        assert plain(one, module) == reference.text(**ASKED)


def test_a_region_unregistered_during_inference_serves_until_its_end(server, door, reference):
    """Some servers put it off to the end of the inference, 2.51 refuses it; the inference is not harmed."""
    module, one = door
    long = {**ASKED, "max_tokens": 60, "ignore_eos": True}
    data = serialized(long["text_input"])
    with Region(one, 8192) as region:
        region.write(data)
        results = []
        ask = lambda: results.append(asker.infer("whole", *request))
        request = (inputs(module, region, len(data), asked=long),)
        with type(one)(server.http_url if module is httpclient else server.grpc_url) as asker:
            thread = threading.Thread(target=ask)
            gate = server.gate("whole")
            gate.let_pass(1)
            thread.start()
            eventually(lambda: server.pages("whole", "used") > 0, what="it runs")
            try:
                one.unregister_system_shared_memory(region.name)
            except InferenceServerException as error:
                assert "in use" in str(error)
            region.write(b"\0" * 8192)
            gate.open()
            thread.join()
        assert results[0].as_numpy("text_output").reshape(-1)[0].decode() == reference.text(**long)
        # A request that was not released would hold it.
        release(one, region)


def test_a_stream_reads_its_prompt_from_shared_memory(server, reference):
    data = serialized(ASKED["text_input"])
    with grpcclient.InferenceServerClient(server.grpc_url) as one, Region(one, 4096) as region:
        region.write(data)
        with client.Stream(server, "stream", {**ASKED, "stream": True}) as stream:
            expected = stream.rest().good().text
        arrived = []
        done = threading.Event()

        def callback(result, error):
            arrived.append((result, error))
            if error or result.get_response().parameters["triton_final_response"].bool_param:
                done.set()

        one.start_stream(callback)
        asked = {**ASKED, "stream": True}
        one.async_stream_infer(
            "stream", inputs(grpcclient, region, len(data), asked=asked), enable_empty_final_response=True
        )
        assert done.wait(60)
        one.stop_stream()
        release(one, region)
    assert "".join(client.reply_of(result).text() or "" for result, _ in arrived) == expected == reference.text(**ASKED)
