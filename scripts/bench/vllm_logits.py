"""Logits of vLLM behind every token of some texts, in the format of llama_logits.cpp: vllm_logits.py TARGET_DIR

They are taken where vLLM computes them, so with its own kernels and number formats, in one pass over a text.
"""

import os
import struct
import sys

import numpy
import vllm
import vllm_worker

taken = []


def record(model):
    """Keeps what the model's head gives from now on."""
    compute = model.compute_logits

    def compute_and_keep(*args, **kwargs):
        logits = compute(*args, **kwargs)
        taken.append(logits.float().numpy().copy())
        return logits

    model.compute_logits = compute_and_keep


def texts():
    """The lists of ids on stdin."""
    while head := sys.stdin.buffer.read(4):
        (count,) = struct.unpack("<I", head)
        yield list(struct.unpack(f"<{count}I", sys.stdin.buffer.read(4 * count)))


def rows(llm, ids):
    """A text's logits, [tokens, vocabulary]."""
    taken.clear()
    # To tell the probabilities of the prompt's tokens, vLLM runs the head on all rows but the last; to sample, on that one.
    params = vllm.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    behind_last, *before = sorted(taken, key=len)
    result = numpy.concatenate([*before, behind_last])
    if len(result) != len(ids):
        sys.exit(f"vllm_logits: {len(result)} rows of logits for {len(ids)} tokens")
    return result


def main():
    """Reads texts, writes logits."""
    # The library prints to stdout: keep that for the logits alone.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    llm = vllm_worker.load(sys.argv[1], None, enforce_eager=True)
    llm.apply_model(record)
    for ids in texts():
        output.write(rows(llm, ids).astype("<f4").tobytes())
    output.close()


if __name__ == "__main__":
    main()
