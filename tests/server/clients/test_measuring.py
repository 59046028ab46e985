"""Programs that measure a server: perf_analyzer, GenAI-Perf, AIPerf, Model Analyzer. What they measure is not looked at;
that every request was answered, and that they read as many tokens as they asked for, is.
"""

import json
import os

import pytest
from google.protobuf import text_format

from harness import frontend, installed, places

REQUESTS = 4
TOKENS = 8
PROMPT_TOKENS = 24


def questions(path, **inputs):
    """Input data of perf_analyzer: one question, over and over."""
    values = {name: value if isinstance(value, dict) else [value] for name, value in inputs.items()}
    path.write_text(json.dumps({"data": [values]}))
    return path


LOAD = ["--stability-percentage", 999, "--request-count", REQUESTS]
TEXT = dict(text_input="Once upon a time", max_tokens=TOKENS, ignore_eos=True)
IDS = dict(input_ids={"content": [504, 3575], "shape": [2]}, input_lengths=2, request_output_len=TOKENS)
STREAM = ["-i", "grpc", "--streaming", "--async"]
DOORS = {
    "grpc stream": ("ensemble", STREAM, TEXT),
    "grpc": ("whole", ["-i", "grpc"], TEXT),
    "http": ("whole", ["-i", "http"], TEXT),
    "tokens": ("tensorrt_llm", STREAM, IDS),
}


@pytest.mark.parametrize("door", DOORS)
def test_perf_analyzer_is_answered(server, counted, tmp_path, door):
    model, how, inputs = DOORS[door]
    url = server.http_url if door == "http" else server.grpc_url
    data, profile = questions(tmp_path / "input.json", **inputs), tmp_path / "profile.json"
    command = [installed.perf_analyzer(), "-m", model, "-u", url, *how, *LOAD, "--concurrency-range", 2]
    installed.run([*command, "--input-data", data, "--profile-export-file", profile], tmp_path)
    # Bytes of tensors stand in it as they are.
    requests = json.loads(profile.read_text(encoding="latin-1"))["experiments"][0]["requests"]
    assert len(requests) >= REQUESTS and all(request["response_timestamps"] for request in requests)
    well_answered(counted, model)


def well_answered(counted, model):
    """By what the server counts."""
    good, bad = counted(model)
    assert good >= REQUESTS and bad == 0


def in_process(server, model, where):
    """A repository and an installation of Triton as perf_analyzer wants them to run the server in its own process. It
    turns the completion of configurations off, so the model's has to say everything."""
    with server.grpc() as grpc:
        config = grpc.get_model_config(model).config
    folder = where / "repository" / model
    folder.mkdir(parents=True)
    (folder / "1").symlink_to(server.repository.path / model / "1")
    (folder / "config.pbtxt").write_text(text_format.MessageToString(config))
    libraries = places.tritonserver().parents[3] / "nvidia_pytriton.libs"
    triton = where / "triton"
    (triton / "lib").mkdir(parents=True)
    (triton / "lib/libtritonserver.so").symlink_to(next(libraries.glob("libtritonserver-*.so")))
    (triton / "backends").symlink_to(places.backends())
    perf = installed.perf_analyzer().parent / "perf"
    paths = {"LD_LIBRARY_PATH": f"{perf / 'lib'}:{libraries}"}
    return [perf / "perf_analyzer", "--triton-server-directory", triton, "--model-repository", folder.parent], paths


def test_perf_analyzer_runs_the_server_in_its_own_process(server, tmp_path):
    """As the OpenAI frontend and other users of Triton's in-process interfaces do."""
    program, paths = in_process(server, "whole", tmp_path)
    command = [*program, "-m", "whole", "--service-kind", "triton_c_api", *LOAD]
    said = installed.run([*command, "--input-data", questions(tmp_path / "input.json", **TEXT)], tmp_path, **paths)
    assert f"Successful request count: {REQUESTS}" in said


def genai_perf(server, where, environment, model, *how):
    """GenAI-Perf's own figures."""
    command = [
        installed.program("genai-perf", "genai-perf"), "profile", "-m", model, *how, "--tokenizer", installed.TOKENIZER,
        "--synthetic-input-tokens-mean", PROMPT_TOKENS, "--output-tokens-mean", TOKENS, "--concurrency", 2,
        "--request-count", REQUESTS, "--num-dataset-entries", REQUESTS, "--artifact-dir", where / "artifacts",
    ]
    installed.run(command, where, **environment)
    figures = list((where / "artifacts").glob("*/profile_export_genai_perf.json"))
    return json.loads(figures[0].read_text())


def check_figures(figures, exact):
    assert figures["request_count"]["avg"] == REQUESTS
    assert figures["input_sequence_length"]["avg"] == PROMPT_TOKENS
    lengths = figures["output_sequence_length"]
    assert 0 < lengths["min"] and (not exact or lengths["min"] == lengths["max"] == TOKENS)


KSERVE = ["--endpoint-type", "kserve", "--output-tokens-mean-deterministic"]


@pytest.mark.parametrize("streaming", [[], ["--streaming"]], ids=["whole", "streamed"])
@pytest.mark.parametrize("model,backend", [("ensemble", "tensorrtllm"), ("vllm_model", "vllm")])
def test_genai_perf_profiles_text(server, counted, offline, perf, tmp_path, model, backend, streaming):
    how = [*KSERVE, "--backend", backend, "-u", server.grpc_url, *streaming]
    check_figures(genai_perf(server, tmp_path, {**offline, **perf}, model, *how), exact=True)
    well_answered(counted, model)


def test_genai_perf_profiles_the_generate_endpoint(server, counted, offline, perf, tmp_path):
    how = ["--endpoint-type", "generate", "-u", f"http://{server.http_url}"]
    check_figures(genai_perf(server, tmp_path, {**offline, **perf}, "ensemble", *how), exact=False)
    well_answered(counted, "ensemble")


def test_genai_perf_profiles_tokens(server, counted, offline, tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    program = places.ROOT / "tests/server/clients/programs/perf_analyzer_of_tokens.py"
    (folder / "perf_analyzer").symlink_to(program)
    perf = {
        "PATH": f"{folder}:{os.environ['PATH']}", "SPEC_PERF_URL": server.grpc_url,
        "SPEC_PERF_ANALYZER": installed.perf_analyzer(),
    }
    how = ["--endpoint-type", "tensorrtllm_engine", "--streaming", "--output-tokens-mean-deterministic"]
    check_figures(genai_perf(server, tmp_path, {**offline, **perf}, "tensorrt_llm", *how), exact=True)
    well_answered(counted, "tensorrt_llm")


def aiperf(where, environment, url, *how):
    """Runs it, and checks its own figures."""
    command = [
        installed.program("aiperf", "aiperf"), "profile", "-m", "ensemble", "--url", url, *how, "--tokenizer",
        installed.TOKENIZER, "--isl", PROMPT_TOKENS, "--osl", TOKENS, "--concurrency", 2, "--request-count", REQUESTS,
        "--ui", "none", "--artifact-dir", where / "artifacts",
    ]
    installed.run(command, where, **environment)
    figures = json.loads((where / "artifacts/profile_export_aiperf.json").read_text())
    assert figures["request_count"]["avg"] == REQUESTS
    assert figures["output_sequence_length"]["avg"] > 0


@pytest.mark.parametrize("endpoint,streaming", [("generate", []), ("generate_stream", ["--streaming"])])
def test_aiperf_profiles_the_generate_endpoints(server, counted, offline, tmp_path, endpoint, streaming):
    template = '{"text_input": {{ text|tojson }}, "max_tokens": %d, "min_tokens": %d, "stream": %s}'
    payload = template % (TOKENS, TOKENS, "true" if streaming else "false")
    inputs = json.dumps({"payload_template": payload, "response_field": "text_output"})
    how = ["--endpoint-type", "template", "--endpoint", f"/v2/models/ensemble/{endpoint}", "--extra-inputs", inputs]
    aiperf(tmp_path, offline, f"http://{server.http_url}", *how, *streaming)
    well_answered(counted, "ensemble")


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_aiperf_profiles_the_openai_frontend(server, counted, offline, tmp_path, kind):
    with frontend.serving(server, "ensemble", frontend.trtllm, frontend.chatml) as url:
        aiperf(tmp_path, offline, url, "--endpoint-type", kind, "--streaming")
    well_answered(counted, "ensemble")


def test_model_analyzer_profiles_a_remote_server(server, counted, perf, tmp_path):
    """It loads the model anew with a configuration of its own, and measures it with perf_analyzer."""
    data = questions(tmp_path / "input.json", **TEXT)
    settings = {
        "profile_models": {"ensemble": {
            "perf_analyzer_flags": {"input-data": str(data), "streaming": True, "measurement-request-count": REQUESTS},
            "parameters": {"concurrency": [1], "batch_sizes": [1]},
        }},
        "triton_launch_mode": "remote", "client_protocol": "grpc", "run_config_search_disable": True,
        "triton_http_endpoint": server.http_url, "triton_grpc_endpoint": server.grpc_url,
        "triton_metrics_url": f"http://127.0.0.1:{server.metrics_port}/metrics",
        "checkpoint_directory": str(tmp_path / "checkpoints"), "export_path": str(tmp_path / "out"),
        "output_model_repository_path": str(tmp_path / "models"),
        "skip_summary_reports": True, "skip_detailed_reports": True, "always_report_gpu_metrics": False,
    }
    (tmp_path / "settings.yaml").write_text(json.dumps(settings))
    program = installed.program("model-analyzer", "model-analyzer")
    said = installed.run([program, "profile", "-f", tmp_path / "settings.yaml"], tmp_path, **perf)
    assert "Profile complete. Profiled 1 configurations for models: ['ensemble']" in said
    well_answered(counted, "ensemble")
