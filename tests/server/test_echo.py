"""The example of the crate `triton-backend`, a backend that shares nothing else with this project's: what clients send
comes back over HTTP and gRPC, whatever its type; errors, parameters, metrics, statistics, loads and the end of the server
are those of any backend.
"""

import json

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from harness import client, places
from harness.cases import CASES
from harness.repository import Model
from harness.server import eventually

limits = lambda kind: np.array([np.iinfo(kind).min, 7, np.iinfo(kind).max], kind)
floats = lambda kind: np.array([1.5, -0.0, np.inf, np.nan, np.finfo(kind).tiny], kind)
VALUES = {
    "BOOL": np.array([True, False, True]),
    "UINT8": limits(np.uint8), "UINT16": limits(np.uint16), "UINT32": limits(np.uint32), "UINT64": limits(np.uint64),
    "INT8": limits(np.int8), "INT16": limits(np.int16), "INT32": limits(np.int32), "INT64": limits(np.int64),
    "FP16": floats(np.float16), "FP32": floats(np.float32), "FP64": floats(np.float64),
    "BF16": np.array([1.5, -0.0, np.inf, np.nan, 3e38], ml_dtypes.bfloat16),
    "BYTES": np.array([b"", b"\xff\x00\xfe", "ß日本😀".encode(), b"x" * 3000], np.object_),
}
DOORS = {
    "http": (httpclient, lambda server: httpclient.InferenceServerClient(server.http_url)),
    "grpc": (grpcclient, lambda server: server.grpc()),
}
FAMILY = "echo_elements_total"

doors = pytest.mark.parametrize("door", DOORS)


def model(name, kinds=("INT32",), dims="[ -1 ]", **parameters):
    """A model with an optional input and an output for each type. Outputs are declared after all inputs, so that their
    order is what ties them together."""

    def declared(what, prefix, more=""):
        kind = lambda one: "STRING" if one == "BYTES" else one
        each = [f'{{ name: "{prefix}_{one}" data_type: TYPE_{kind(one)} dims: {dims} {more}}}' for one in kinds]
        return f"{what} [ {', '.join(each)} ]"

    extra = "\n".join([declared("input", "IN", "optional: true "), declared("output", "OUT")])
    return Model(
        name, None, backend="echo", decoupled=False, max_batch_size=0, parameters=parameters, extra=extra
    )


@pytest.fixture(scope="module")
def server(serve):
    models = [
        model("types", VALUES), model("tables", dims="[ -1, 2 ]"), model("large", max_elements=1 << 20),
        model("limited", max_elements=3), model("wrong", max_elements="many"), model("again"),
    ]
    return serve(models, load=["types", "tables", "large", "limited"], backends=places.echo_backends())


def ask(server, door, model, values, outputs=None):
    """The answer's arrays by output."""
    module, connect = DOORS[door]
    inputs = []
    for kind, array in values.items():
        one = module.InferInput(f"IN_{kind}", list(array.shape), kind)
        one.set_data_from_numpy(array)
        inputs.append(one)
    wanted = outputs and [module.InferRequestedOutput(name) for name in outputs]
    with connect(server) as connection:
        result = connection.infer(model, inputs, outputs=wanted)
        answer = result.get_response()
    told = answer["outputs"] if door == "http" else answer.outputs
    names = [one["name"] if door == "http" else one.name for one in told]
    return {name: result.as_numpy(name) for name in names}


def bits(array):
    """What an array is, to the bit: NaN is NaN, and -0 is not 0."""
    values = array.tolist() if array.dtype == np.object_ else array.tobytes()
    return str(array.dtype), array.shape, values


def numbers(count):
    return {"INT32": np.arange(count, dtype=np.int32)}


def refusal(server, door, model, values):
    with pytest.raises(InferenceServerException) as refused:
        ask(server, door, model, values)
    return refused.value.status(), refused.value.message()


def echoed(server, model):
    return server.metric(FAMILY, model=model)


@doors
@pytest.mark.parametrize("kind", VALUES)
def test_each_type_comes_back_to_the_bit(server, door, kind):
    answer = ask(server, door, "types", {kind: VALUES[kind]})
    assert {name: bits(array) for name, array in answer.items()} == {f"OUT_{kind}": bits(VALUES[kind])}


@doors
def test_all_types_at_once_come_back_each_under_its_name(server, door):
    answer = ask(server, door, "types", VALUES)
    assert {name: bits(array) for name, array in answer.items()} == {
        f"OUT_{kind}": bits(array) for kind, array in VALUES.items()
    }


@doors
def test_only_the_outputs_that_are_asked_for_come_back(server, door):
    some = {kind: VALUES[kind] for kind in ["INT32", "BYTES", "BOOL"]}
    assert list(ask(server, door, "types", some, outputs=["OUT_BYTES"])) == ["OUT_BYTES"]


@doors
@pytest.mark.parametrize("shape", [(3, 2), (1, 2), (0, 2)], ids=str)
def test_shapes_are_kept(server, door, shape):
    table = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    assert bits(ask(server, door, "tables", {"INT32": table})["OUT_INT32"]) == bits(table)


@doors
def test_a_large_tensor_comes_back_whole(server, door):
    large = numbers(1 << 20)
    assert bits(ask(server, door, "large", large)["OUT_INT32"]) == bits(large["INT32"])


def test_json_comes_back_as_it_was_sent(server):
    sent = {"INT32": [-1, 0, 7], "BOOL": [True, False, True], "FP64": [0.1, -2.5e300, 0.0], "BYTES": ["", "ß日本😀", '"\\']}
    inputs = [{"name": f"IN_{kind}", "datatype": kind, "shape": [3], "data": data} for kind, data in sent.items()]
    status, _, body = server.http("POST", "/v2/models/types/infer", {"inputs": inputs, "id": "one"})
    answer = json.loads(body)
    assert (status, answer["id"]) == (200, "one")
    told = {one["name"]: (one["datatype"], one["shape"], one["data"]) for one in answer["outputs"]}
    assert told == {f"OUT_{kind}": (kind, [3], data) for kind, data in sent.items()}


@pytest.mark.parametrize("door,status", [("http", "400"), ("grpc", "StatusCode.INVALID_ARGUMENT")])
def test_an_error_of_the_backend_reaches_the_client_and_harms_nobody(server, door, status):
    assert refusal(server, door, "limited", numbers(4)) == (status, "4 elements, max_elements is 3")
    assert ask(server, door, "limited", numbers(3))["OUT_INT32"].tolist() == [0, 1, 2]


def test_metrics_and_statistics_count_what_was_answered(server):
    before, counts = echoed(server, "limited"), server.statistics("limited")["inference_stats"]
    ask(server, "grpc", "limited", numbers(2))
    ask(server, "http", "limited", numbers(3))
    refusal(server, "grpc", "limited", numbers(9))
    assert echoed(server, "limited") == before + 5

    def told():
        after = server.statistics("limited")["inference_stats"]
        return [after[what]["count"] - counts[what]["count"] for what in ["success", "fail"]]

    # The answer is out before it is reported.
    eventually(lambda: told() == [2, 1], seconds=20, what="two successes and a failure are reported")


def test_an_error_of_load_is_what_the_operator_reads(server):
    for _ in range(2):
        assert "parameter 'max_elements' is 'many'" in server.load("wrong")
    assert not server.is_ready("wrong")
    assert ask(server, "grpc", "limited", numbers(1))


def unloaded(server, model):
    """How often a model was unloaded, or one that another took the place of."""
    return server.log.count(f"successfully unloaded '{model}' version 1")


def test_a_model_comes_and_goes_with_its_metric(server):
    for cycle in range(3):
        assert echoed(server, "again") is None
        assert server.load("again") is None
        ask(server, "grpc", "again", numbers(5))
        assert echoed(server, "again") == 5
        assert server.unload("again") is None
        eventually(lambda: unloaded(server, "again") == cycle + 1, what="unloaded")
        assert "again" in refusal(server, "grpc", "again", numbers(1))[1]


def test_a_reloaded_model_has_its_new_parameter_and_the_metric_it_had(server):
    """For a moment there are two, which share a line of the metrics; the old one must not take it away."""
    for limit in [6, 2, 4, 3]:
        before, gone = echoed(server, "limited"), unloaded(server, "limited")
        server.repository.add(model("limited", max_elements=limit))
        assert server.load("limited") is None
        assert ask(server, "http", "limited", numbers(limit))["OUT_INT32"].size == limit
        told = refusal(server, "http", "limited", numbers(limit + 1))[1]
        assert told == f"{limit + 1} elements, max_elements is {limit}"
        eventually(lambda: unloaded(server, "limited") == gone + 1, what="the old one is gone")
        assert echoed(server, "limited") == before + limit
        ask(server, "grpc", "limited", numbers(1))
        assert echoed(server, "limited") == before + limit + 1


def test_lines_of_the_log_carry_the_name_of_the_backend(server):
    line = next(line for line in server.log.splitlines() if "model 'limited' echoes up to" in line)
    assert " echo:0] " in line, line


def test_the_server_ends_with_0_when_asked_to(serve):
    server = serve([model("one"), model("two")], backends=places.echo_backends())
    with server.grpc() as idle:
        assert idle.is_server_live()
        for name in ["one", "two"] * 20:
            ask(server, "grpc", name, numbers(3))
        assert server.stop() == 0, server.log[-3000:]


def test_two_backends_in_one_server_do_not_disturb_each_other(serve, engine, reference, tmp_path):
    """Each has its own copy of the crate, with its own handlers of signals and exit."""
    (tmp_path / "spec").symlink_to(places.backends() / "spec")
    (tmp_path / "echo").symlink_to(places.echo_backends() / "echo")
    texts = Model("texts", engine, parameters={"max_tokens_in_paged_kv_cache": 2048})
    server = serve([texts, model("numbers")], backends=tmp_path)
    asked = CASES[0][1]
    for _ in range(2):
        assert client.grpc_stream(server, "texts", asked).good().text == reference.text(**asked)
        assert ask(server, "grpc", "numbers", numbers(3))["OUT_INT32"].tolist() == [0, 1, 2]
    assert server.unload("numbers") is None
    eventually(lambda: unloaded(server, "numbers") == 1, what="unloaded")
    assert client.grpc_stream(server, "texts", asked).good().text == reference.text(**asked)
    assert server.load("numbers") is None
    assert ask(server, "http", "numbers", numbers(2))["OUT_INT32"].tolist() == [0, 1]
    assert server.stop() == 0, server.log[-3000:]
