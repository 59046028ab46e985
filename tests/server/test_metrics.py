"""What the metrics, the ORCA header and the statistics say is what clients saw."""

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from harness import client
from harness.cases import CASES, LIST, SYSTEM, options
from harness.held import Held
from harness.repository import Model
from harness.server import eventually, total

TELL = dict(
    stream=True, return_perf_metrics=True, return_num_input_tokens=True, return_num_output_tokens=True,
)
MODEL = dict(model="counted", version="1")
LONG = dict(text_input="x", max_tokens=300, ignore_eos=True, stream=True)


@pytest.fixture(scope="module")
def server(serve, engine):
    pool = {"max_tokens_in_paged_kv_cache": 4096}
    return serve([
        # Of a length that is given: what costs make of it depends on what else runs here.
        Model("counted", engine, parameters={**pool, "response_statistics": "all", "draft_len": 8}),
        Model("ends", engine, parameters=pool),
        Model("off", engine, parameters={**pool, "response_statistics": "off"}),
    ], gates=True)


class Seen:
    """What clients saw of a run, and what the metrics gained by it."""

    def __init__(self, server):
        before = server.metrics()
        with ThreadPoolExecutor(4) as pool:
            ask = lambda case: client.grpc_stream(server, "counted", {**options(case), **TELL}).good()
            self.answers = list(pool.map(ask, CASES))
        eventually(
            lambda: server.metric("nv_inference_request_success", **MODEL)
            == (total(before, "nv_inference_request_success", **MODEL) or 0) + len(CASES)
        )
        self.before, self.after = before, server.metrics()

    def gain(self, family, **labels):
        after = total(self.after, family, **MODEL, **labels)
        assert after is not None, f"there is no {family} with {labels}"
        return after - (total(self.before, family, **MODEL, **labels) or 0)

    def sum(self, output):
        return sum(int(answer.value(output)) for answer in self.answers)


@pytest.fixture(scope="module")
def seen(server):
    return Seen(server)


def test_requests_are_counted(seen):
    for family in ["request_success", "count", "exec_count"]:
        assert seen.gain(f"nv_inference_{family}") == len(CASES), family


def test_token_lengths_are_those_that_clients_saw(seen):
    outputs = sum(answer.sum("num_output_tokens") for answer in seen.answers)
    assert seen.gain("nv_llm_output_token_len_sum", response_metric_type="total_output_tokens") == outputs
    inputs = seen.sum("num_input_tokens")
    assert seen.gain("nv_llm_input_token_len_sum", response_metric_type="total_input_tokens") == inputs
    for family, kind in [("output", "total_output_tokens"), ("input", "total_input_tokens")]:
        assert seen.gain(f"nv_llm_{family}_token_len_count", response_metric_type=kind) == len(CASES)


def test_speculation_counters_are_the_sums_of_what_clients_were_told(seen):
    assert seen.gain("nv_spec_num_draft_tokens_total") == seen.sum("total_draft_tokens") > 0
    assert seen.gain("nv_spec_num_accepted_tokens_total") == seen.sum("total_accepted_draft_tokens") > 0
    assert 0 < seen.gain("nv_spec_num_drafts_total") <= seen.sum("num_spec_steps")


def test_acceptance_by_position_adds_up_and_falls(seen):
    family = "nv_spec_num_accepted_tokens_per_pos_total"
    positions = sorted({int(s.labels["position"]) for s in seen.after[family] if s.labels["model"] == "counted"})
    gains = [seen.gain(family, position=str(position)) for position in positions]
    assert sum(gains) == seen.sum("total_accepted_draft_tokens")
    assert gains == sorted(gains, reverse=True), "a position is accepted only with the one before it"


def test_each_answer_tells_its_acceptance(seen):
    for answer in seen.answers:
        drafted, accepted = (int(answer.value(f"total_{kind}_tokens")) for kind in ["draft", "accepted_draft"])
        assert 0 <= accepted <= drafted
        rate = float(answer.value("acceptance_rate"))
        assert rate == pytest.approx(accepted / drafted if drafted else 0)
        times = [int(answer.value(f"{name}_time_ns")) for name in ["arrival", "first_scheduled", "first_token", "last_token"]]
        assert times == sorted(times) and times[0] > 0


def test_copied_text_is_accepted(server):
    answer = client.grpc_stream(server, "counted", dict(text_input=LIST, max_tokens=40, num_draft_tokens=8, **TELL)).good()
    assert answer.value("acceptance_rate") > 0.3


def test_without_drafts_nothing_is_drafted(server):
    answer = client.grpc_stream(server, "counted", dict(text_input=LIST, max_tokens=8, num_draft_tokens=0, **TELL)).good()
    assert (answer.value("total_draft_tokens"), answer.value("acceptance_rate")) == (0, 0)


def test_generated_and_prompt_tokens_are_counted(seen):
    outputs = sum(answer.sum("num_output_tokens") for answer in seen.answers)
    assert seen.gain("nv_spec_generation_tokens_total") == outputs
    assert seen.gain("nv_spec_prompt_tokens_total") == seen.sum("num_input_tokens")


@pytest.mark.parametrize("name", ["time_to_first_token", "e2e_request_latency"])
def test_latency_histograms_count_every_request(seen, name):
    family = f"nv_spec_{name}_seconds"
    assert seen.gain(f"{family}_count") == len(CASES)
    assert total(seen.after, f"{family}_bucket", **MODEL, le="+Inf") == total(seen.after, f"{family}_count", **MODEL)
    assert seen.gain(f"{family}_sum") > 0


def test_time_per_output_token_is_observed(seen):
    assert seen.gain("nv_spec_time_per_output_token_seconds_count") > 0


def test_every_step_is_timed_and_drafting_is_a_part_of_it(server, seen):
    timed = lambda: server.metric("nv_spec_step_seconds_count", **MODEL)
    taken = lambda: server.metric("nv_trt_llm_general_metrics", general_type="iteration_counter", **MODEL)
    eventually(lambda: timed() == taken() > 0)
    assert 0 < seen.gain("nv_spec_draft_seconds_total") < seen.gain("nv_spec_step_seconds_sum")


def test_pages_that_were_found_computed_are_counted(server, seen):
    reused = lambda: server.pages("counted", "reused")
    before = reused()
    long = dict(text_input=SYSTEM, max_tokens=2, **TELL)
    told = [client.grpc_stream(server, "counted", long).good().value("kv_cache_reused_blocks") for _ in range(2)]
    assert told[1] > told[0]
    eventually(lambda: reused() - before == sum(told))


def test_pages_are_accounted_for(server):
    page = lambda kind: server.pages("counted", kind)
    assert page("max") * page("tokens_per") == 4096
    with Held(server, "counted", LONG):
        families = server.metrics()
        kinds = {
            kind: total(families, "nv_trt_llm_kv_cache_block_metrics", model="counted", kv_cache_block_type=kind)
            for kind in ["max", "used", "free", "cached", "fraction"]
        }
        assert abs(kinds["fraction"] - kinds["used"] / kinds["max"]) < 1e-6, kinds
        assert kinds["used"] > 0 and kinds["used"] + kinds["free"] + kinds["cached"] == kinds["max"], kinds


def test_requests_inside_are_told(server):
    request = lambda kind: server.requests("counted", kind)
    assert request("max") == 32
    with Held(server, "counted", LONG):
        assert (request("active"), request("scheduled"), request("waiting")) == (1, 1, 0)
        batcher = lambda kind: total(server.metrics(), "nv_trt_llm_inflight_batcher_metrics", model="counted",
                                     inflight_batcher_specific_metric=kind)
        # Its prompt is read, and it writes.
        eventually(lambda: (request("context"), batcher("generation_requests")) == (0, 1))
        assert batcher("paused_requests") == 0
    eventually(lambda: request("active") == 0)


def test_what_the_orca_header_is_made_of_is_there_in_plain_decimals(server):
    """Tritonserver 2.51 knows no ORCA header; newer ones compute it from this family by a regular expression."""
    text = server.http("GET", "/metrics", port=server.metrics_port)[2].decode()
    for kind in ["tokens_per", "used", "max"]:
        pattern = rf'nv_trt_llm_kv_cache_block_metrics{{[^}}]*kv_cache_block_type="{kind}"[^}}]*}} \d+(\.\d+)?$'
        assert re.search(pattern, text, re.MULTILINE), kind


def test_statistics_over_http_and_grpc_agree(server):
    with server.grpc() as grpc:
        over_grpc = grpc.get_inference_statistics("counted", as_json=True)["model_stats"][0]
    over_http = server.statistics("counted")
    stats = lambda one: {
        name: {key: int(value) for key, value in counts.items()} for name, counts in one["inference_stats"].items()
    }
    fill = lambda one: {name: {"count": 0, "ns": 0} | counts for name, counts in stats(one).items()}
    assert fill(over_grpc) == fill(over_http)
    assert int(over_grpc["inference_count"]) == over_http["inference_count"]


def test_statistics_add_up(server, seen):
    stats = server.statistics("counted")
    own = stats["inference_stats"]
    assert own["success"]["count"] >= len(CASES)
    for phase in ["queue", "compute_input", "compute_infer", "compute_output"]:
        assert own[phase]["count"] == own["success"]["count"], phase
    phases = sum(own[phase]["ns"] for phase in ["queue", "compute_input", "compute_infer", "compute_output"])
    assert 0 < phases <= own["success"]["ns"]
    assert own["compute_infer"]["ns"] > phases / 2, "most of the time is the model's"


def responses_by_index(server, model):
    return {int(i): one for i, one in server.statistics(model).get("response_stats", {}).items()}


def test_response_statistics_count_each_response(server):
    before = responses_by_index(server, "counted")
    answer = client.grpc_stream(server, "counted", {**CASES[2][1], "stream": True, "num_draft_tokens": 0}).good()
    count = lambda stats, i: stats.get(i, {}).get("success", {}).get("count", 0)
    gained = lambda: [
        count(responses_by_index(server, "counted"), i) - count(before, i) for i in range(len(answer.replies))
    ]
    eventually(lambda: gained() == [1] * len(answer.replies), what="one of each index")


def test_response_statistics_can_be_for_the_ends_only(server):
    answer = client.grpc_stream(server, "ends", {**CASES[2][1], "stream": True, "num_draft_tokens": 0}).good()
    assert len(answer.replies) > 2
    eventually(lambda: 0 in responses_by_index(server, "ends"))
    assert len(responses_by_index(server, "ends")) <= 2


def test_response_statistics_can_be_off(server):
    client.grpc_stream(server, "off", {**CASES[2][1], "stream": True}).good()
    assert responses_by_index(server, "off") == {}


def test_failures_are_counted_and_not_as_successes(server):
    own = lambda: server.statistics("counted")["inference_stats"]
    before = own()
    for wrong in [{"max_tokens": -1}, {"top_p": 3.0}, {"text_input": "x " * 5000}]:
        assert client.grpc_stream(server, "counted", {"text_input": "x", "max_tokens": 1, **wrong}).error
    eventually(lambda: own()["fail"]["count"] == before["fail"]["count"] + 3)
    assert own()["success"]["count"] == before["success"]["count"]
    assert server.metric("nv_inference_request_failure", reason="BACKEND", **MODEL) >= 3


def test_a_row_of_a_batch_is_an_inference(server):
    before = server.statistics("counted")
    rows = {"text_input": np.array([[b"a"], [b"b"], [b"c"]], dtype=np.object_), "max_tokens": np.full((3, 1), 2, np.int32)}
    client.grpc_stream(server, "counted", rows).good()
    eventually(lambda: server.statistics("counted")["inference_count"] == before["inference_count"] + 3)
