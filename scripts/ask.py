"""A client of the text profile: one chat turn over a gRPC stream, then a line that says what speculation did."""

import argparse
import json
import queue
import sys
import time

import numpy as np
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException


def tensor(name, value, datatype, kind):
    given = grpc.InferInput(name, [1, 1], datatype)
    given.set_data_from_numpy(np.array([[value]], dtype=kind))
    return given


def inputs(args):
    messages = [{"role": "system", "content": args.system}] if args.system else []
    messages.append({"role": "user", "content": args.prompt})
    prompt = ("text_input", args.prompt) if args.raw else ("messages", json.dumps(messages))
    yield tensor(prompt[0], prompt[1].encode(), "BYTES", np.object_)
    yield tensor("max_tokens", args.max_tokens, "INT32", np.int32)
    yield tensor("temperature", args.temperature, "FP32", np.float32)
    if args.seed is not None:
        yield tensor("seed", args.seed, "UINT64", np.uint64)
    if args.draft_len is not None:
        yield tensor("num_draft_tokens", args.draft_len, "INT32", np.int32)
    for flag in ("stream", "return_perf_metrics", "return_num_output_tokens"):
        yield tensor(flag, True, "BOOL", np.bool_)


def responses(client, model, given):
    """The responses to one request; an error ends them."""
    came = queue.Queue()
    client.start_stream(callback=lambda result, error: came.put((result, error)))
    client.async_stream_infer(model, list(given), enable_empty_final_response=True)
    while True:
        result, error = came.get()
        if error is not None:
            raise error
        yield result
        if result.get_response().parameters["triton_final_response"].bool_param:
            return


def main():
    parser = argparse.ArgumentParser(prog="scripts/ask", description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--url", default="localhost:8001", help="gRPC address of the server")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--raw", action="store_true", help="the prompt as it is, without the chat template")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--draft-len", type=int, help="draft tokens in a step; 0 is plain decoding")
    args = parser.parse_args()

    client = grpc.InferenceServerClient(args.url)
    num_tokens, start, first, last = 0, time.monotonic(), None, None
    try:
        for result in responses(client, args.model, inputs(args)):
            text = result.as_numpy("text_output")
            if text is None:
                continue
            print(text.flat[0].decode(), end="", flush=True)
            num_tokens += int(result.as_numpy("num_output_tokens").flat[0])
            first, last = first or time.monotonic(), result
    except InferenceServerException as error:
        sys.exit(f"ask: {error.message()}")
    finally:
        client.stop_stream()
    number = lambda name: last.as_numpy(name).flat[0]
    rate = num_tokens / (time.monotonic() - start)
    print(
        f"\n[{num_tokens} tokens, {rate:.1f} tokens/s, first after {(first - start) * 1e3:.0f} ms; "
        f"{number('num_spec_steps')} steps, {number('total_accepted_draft_tokens')} of "
        f"{number('total_draft_tokens')} draft tokens accepted ({number('acceptance_rate'):.0%})]"
    )


if __name__ == "__main__":
    main()
