"""Serves one vLLM engine over stdin and stdout, a JSON object a line; run by workers.Vllm, which sets the environment.

    vllm_worker.py TARGET_DIR [draft DRAFT_DIR | eagle3 HEAD_DIR | ngram] [DRAFT_LEN]
"""

import ctypes
import json
import os
import sys
import time

import vllm

# Tokens of a prompt and its answer, as the other engines have room for.
CONTEXT_LEN = 2048
# The n-grams that look-up searches the text for, longest first.
MAX_NGRAM, MIN_NGRAM = 4, 2


def speculation(kind=None, *rest):
    """vLLM's speculative_config; None for plain decoding."""
    if kind is None:
        return None
    if kind == "ngram":
        return {"method": "ngram", "num_speculative_tokens": int(rest[0]),
                "prompt_lookup_max": MAX_NGRAM, "prompt_lookup_min": MIN_NGRAM}
    draft, draft_len = rest
    method = "draft_model" if kind == "draft" else kind
    return {"method": method, "model": draft, "num_speculative_tokens": int(draft_len)}


def load(target, speculative_config, **options):
    """A model in bf16 for one sequence at a time, nothing kept from one prompt to the next."""
    return vllm.LLM(model=target, dtype="bfloat16", max_model_len=CONTEXT_LEN, max_num_seqs=1,
                    speculative_config=speculative_config, enable_prefix_caching=False,
                    disable_log_stats=speculative_config is None, **options)


class Counters:
    """What vLLM has counted of its drafts since it began."""

    NAMES = {"vllm:spec_decode_num_draft_tokens": "drafted", "vllm:spec_decode_num_drafts": "drafts"}
    BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"

    def __init__(self, llm):
        metrics = {metric.name: metric for metric in llm.get_metrics()}
        self.values = {ours: metrics[name].value for name, ours in self.NAMES.items() if name in metrics}
        self.by_position = list(metrics[self.BY_POSITION].values) if self.BY_POSITION in metrics else []

    def since(self, earlier):
        """The difference."""
        found = {name: int(value - earlier.values.get(name, 0)) for name, value in self.values.items()}
        before = earlier.by_position or [0] * len(self.by_position)
        return {**found, "accepted_per_position": [int(now - then) for now, then in zip(self.by_position, before)]}


def generate(llm, request_id, ids, num_tokens):
    """Greedy tokens, the time until the first, the time after it and its steps."""
    engine = llm.llm_engine
    params = vllm.SamplingParams(temperature=0, max_tokens=num_tokens, detokenize=False)
    tokens, prefill_ms, steps = [], None, 0
    begin = time.perf_counter()
    engine.add_request(request_id, {"prompt_token_ids": ids}, params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        steps += prefill_ms is not None
        for output in outputs:
            tokens = list(output.outputs[0].token_ids)
            if tokens and prefill_ms is None:
                prefill_ms = 1e3 * (time.perf_counter() - begin)
    total_ms = 1e3 * (time.perf_counter() - begin)
    return {"tokens": tokens, "prefill_ms": prefill_ms, "decode_ms": total_ms - prefill_ms, "steps": steps}


def main():
    """Answers until the input ends."""
    target, *draft = sys.argv[1:]
    # The library prints to stdout: keep that for the answers alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    llm = load(target, speculation(*draft))
    # Weights were repacked: what held the old ones goes back to the system.
    ctypes.CDLL(None).malloc_trim(0)
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    for number, line in enumerate(sys.stdin):
        request = json.loads(line)
        before = Counters(llm) if draft else None
        answer = generate(llm, str(number), request["ids"], request["num_tokens"])
        if draft:
            answer.update(Counters(llm).since(before))
            # Its own count has those that would have come behind the last token.
            answer["accepted"] = max(len(answer["tokens"]) - 1 - answer["steps"], 0)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
