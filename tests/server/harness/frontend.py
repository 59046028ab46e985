"""Triton's OpenAI frontend (python/openai of triton-inference-server/server), which is not on any package index,
written down: the tensors that it makes of a request, what it demands of the responses, and, for OpenAI clients, the HTTP
side.

Tensors are those of `_create_trtllm_generate_request` and `_create_vllm_generate_request`, shape for shape. The
frontend runs the server in its own process; here the same requests go over a gRPC stream.
"""

import contextlib
import http.server
import json
import threading

import numpy as np

from . import client

DEFAULT_MAX_TOKENS = 16
# Of a completion; a chat has the same.
SAMPLING = {"top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "temperature": 1.0}


def trtllm(prompt, *, stream=False, max_tokens=DEFAULT_MAX_TOKENS, stop=None, seed=None, echo=None, **sampling):
    """`echo` is None for chats, which never send `exclude_input_in_output`."""
    matrix = lambda value, kind: np.array([[value]], dtype=kind)
    tensors = {
        "text_input": matrix(prompt.encode(), np.object_), "stream": matrix(stream, np.bool_),
        "max_tokens": matrix(max_tokens, np.int32),
    }
    if stop:
        words = [stop] if isinstance(stop, str) else stop
        tensors["stop_words"] = np.array([[word.encode() for word in words]], dtype=np.object_)
    for name, value in {**SAMPLING, **sampling}.items():
        tensors[name] = matrix(value, np.float32)
    if seed is not None:
        tensors["seed"] = matrix(seed, np.uint64)
    if echo is not None:
        tensors["exclude_input_in_output"] = matrix(not echo, np.bool_)
    for name in ["return_num_input_tokens", "return_num_output_tokens"]:
        tensors[name] = matrix(True, np.bool_)
    return tensors


def vllm(prompt, *, stream=False, max_tokens=DEFAULT_MAX_TOKENS, echo=False, **sampling):
    vector = lambda value, kind: np.array([value], dtype=kind)
    given = {key: value for key, value in sampling.items() if value is not None}
    return {
        "text_input": vector(prompt.encode(), np.object_), "stream": vector(stream, np.bool_),
        "exclude_input_in_output": vector(not echo, np.bool_),
        "sampling_parameters": vector(json.dumps({**SAMPLING, "max_tokens": max_tokens, **given}).encode(), np.object_),
        "return_logprobs": vector(False, np.bool_), "return_num_input_tokens": vector(True, np.bool_),
        "return_num_output_tokens": vector(True, np.bool_),
    }


FORMATS = {"trtllm": trtllm, "vllm": vllm}


def text_of(reply):
    """One string of valid UTF-8 in each response."""
    text = reply.outputs["text_output"]
    assert text.size == 1, f"expected to find 1 string in the output, found {text.size}"
    return text.reshape(-1)[0].decode("utf-8")


def usage_of(replies):
    """Prompt tokens are on every response, and the first counts; completion tokens are those of each response."""
    counts = []
    for reply in replies:
        values = [reply.outputs[name] for name in ("num_input_tokens", "num_output_tokens")]
        assert all(value.dtype in (np.int32, np.uint32) and value.size == 1 for value in values)
        counts.append([int(value.reshape(-1)[0]) for value in values])
    prompt, completion = counts[0][0], sum(count for _, count in counts)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def validated(answer, stream):
    """What the frontend demands of the responses to one request."""
    if not stream:
        assert 1 <= len(answer.replies) <= 2 and answer.replies[-1].final
    for reply in answer.replies:
        text_of(reply)
    usage_of(answer.replies)
    assert answer.finals == 1
    return answer


def chatml(messages):
    """The prompt that the small model's chat template makes of a conversation which begins with the system's words."""
    turns = [f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages]
    return "".join(turns) + "<|im_start|>assistant\n"


def sampling_of(body):
    """Options of an OpenAI request that become tensors."""
    names = [*SAMPLING, "stop", "seed", "max_tokens", "echo"]
    options = {name: body[name] for name in names if body.get(name) is not None}
    if body.get("max_completion_tokens") is not None:
        options["max_tokens"] = body["max_completion_tokens"]
    return options


def choice(chat, text, finish_reason, *, streamed, role=None):
    """One alternative of an answer, or what is new in it."""
    if not chat:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
    message = {"content": text} if role is None else {"role": role, "content": text}
    return {"index": 0, "delta" if streamed else "message": message, "logprobs": None, "finish_reason": finish_reason}


def chunks(chat, replies, body, done):
    """The events of a streamed answer. Whatever ended it, the frontend calls it `stop`."""
    if chat:
        yield {"choices": [choice(chat, "", None, streamed=True, role="assistant")]}
    for reply in replies:
        yield {"choices": [choice(chat, text_of(reply), "stop" if reply.final else None, streamed=True)]}
    if (body.get("stream_options") or {}).get("include_usage"):
        yield {"choices": [], "usage": usage_of(done)}


def answer_of(server, model, make, path, body, prompt_of):
    """(whether it is streamed, the objects of the answer), made as they are taken."""
    chat, stream = path == "/v1/chat/completions", bool(body.get("stream"))
    prompt = prompt_of(body["messages"]) if chat else body["prompt"]
    common = {"id": "cmpl-1", "created": 0, "model": body["model"]}
    kind = "chat.completion" if chat else "text_completion"

    def objects():
        with client.Stream(server, model, make(prompt, stream=stream, **sampling_of(body))) as asked:
            if stream:
                done = asked.answer.replies
                kind_of_chunk = "chat.completion.chunk" if chat else kind
                for chunk in chunks(chat, iter(asked.next, None), body, done):
                    yield {**common, "object": kind_of_chunk, **chunk}
                asked.answer.good()
            else:
                answer = validated(asked.rest().good(), stream)
                text = "".join(text_of(reply) for reply in answer.replies)
                one = choice(chat, text, "stop", streamed=False, role="assistant")
                yield {**common, "object": kind, "choices": [one], "usage": usage_of(answer.replies)}

    return stream, objects()


@contextlib.contextmanager
def serving(server, model, make, prompt_of):
    """The address of an OpenAI server in front of a model. `prompt_of` applies the chat template."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            stream, objects = answer_of(server, model, make, self.path, body, prompt_of)
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream" if stream else "application/json")
            self.end_headers()
            for one in objects:
                line = json.dumps(one)
                self.wfile.write((f"data: {line}\n\n" if stream else line).encode())
            if stream:
                self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_):
            pass

    door = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=door.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{door.server_port}/v1"
    finally:
        door.shutdown()
        thread.join()
        door.server_close()
