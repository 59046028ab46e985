"""Serves one OpenVINO GenAI pipeline over stdin and stdout, a JSON object a line; run by engines.OpenVino.

    openvino_worker.py TARGET_DIR THREADS [DRAFT_DIR DRAFT_LEN]
"""

import json
import os
import sys
import time

import numpy
import openvino
import openvino_genai

target, threads, *draft = sys.argv[1:]
# The library prints to stdout: keep that for the answers alone.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

config = {"INFERENCE_NUM_THREADS": int(threads)}
if draft:
    drafter = openvino_genai.draft_model(draft[0], "CPU", **config)
    pipeline = openvino_genai.LLMPipeline(
        target, "CPU", draft_model=drafter, scheduler_config=openvino_genai.SchedulerConfig(), **config)
else:
    pipeline = openvino_genai.LLMPipeline(target, "CPU", **config)


def generate(ids, num_tokens):
    """Greedy tokens and times."""
    options = openvino_genai.GenerationConfig(os.path.join(target, "generation_config.json"))
    options.max_new_tokens = num_tokens
    options.do_sample = False
    options.apply_chat_template = False
    if draft:
        options.num_assistant_tokens = int(draft[1])
    inputs = openvino_genai.TokenizedInputs(
        openvino.Tensor(numpy.array([ids], numpy.int64)), openvino.Tensor(numpy.ones((1, len(ids)), numpy.int64)))
    begin = time.perf_counter()
    result = pipeline.generate(inputs, options)
    total_ms = 1e3 * (time.perf_counter() - begin)
    prefill_ms = result.perf_metrics.get_ttft().mean
    tokens = [int(token) for token in result.tokens[0]]
    answer = {"tokens": tokens, "prefill_ms": prefill_ms, "decode_ms": total_ms - prefill_ms}
    if draft:
        # Its own count leaves out the last step; a pass of the target beyond the first token gives one token itself.
        steps = result.extended_perf_metrics.main_model_metrics.raw_metrics.m_batch_sizes
        answer["drafted"] = int(result.extended_perf_metrics.get_num_draft_tokens())
        answer["accepted"] = len(tokens) - len(steps)
    return answer


print(json.dumps({"version": openvino_genai.__version__}), file=answers, flush=True)
for line in sys.stdin:
    request = json.loads(line)
    print(json.dumps(generate(request["ids"], request["num_tokens"])), file=answers, flush=True)
