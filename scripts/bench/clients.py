"""Clients that ask as users do, over each of Triton's doors, and what came back in one shape."""

import asyncio
import json
import pathlib
import time

import aiohttp
import grpc
import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcaio
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DATA = ROOT / "tests/data"
# Longer than any answer should take; an answer that takes longer counts as lost.
WAIT_SECONDS = 300


def prompts(max_chars):
    """Questions of Spec-Bench, no longer than that."""
    lines = (DATA / "spec_bench_dev.jsonl").read_text().splitlines()
    texts = [json.loads(line)["turns"][0] for line in lines]
    return [text for text in texts if len(text) <= max_chars]


class Answer:
    """What one request brought; `problem` is None, "cancelled", "refused" or what went wrong."""

    def __init__(self):
        self.text = ""
        self.num_tokens = 0
        self.problem = None
        self.sent = time.perf_counter()
        self.first = self.last = None

    def add(self, text, num_tokens):
        """Takes in one response."""
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.text += text
        self.num_tokens += num_tokens

    @property
    def seconds(self):
        """From sending to the last response."""
        return self.last - self.sent


def is_refusal(status, message):
    """Whether the server had no room. Within a stream an error may have no status code, and the generate endpoint gives
    all that come from a backend the same one."""
    return "UNAVAILABLE" in str(status) or status == 503 or "Exceeds maximum queue size" in message


class Client:
    """Connections to a server, for one of its models; it waits so long for an answer. Use it as
    `async with Client(server) as client`.
    """

    def __init__(self, server, model=None, wait_seconds=WAIT_SECONDS):
        self.wait_seconds = wait_seconds
        self.model, self.http_url, self.grpc_url = model or server.model, server.http, server.grpc
        self.datatypes = server.datatypes(self.model)

    async def __aenter__(self):
        connector = aiohttp.TCPConnector(limit=0)
        self.session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        self.channel = grpcaio.InferenceServerClient(self.grpc_url)
        return self

    async def __aexit__(self, *_):
        await self.session.close()
        await self.channel.close()

    async def ask(self, door, options, cancel_after=None):
        """One request through one of DOORS, cancelled after so many seconds."""
        answer = Answer()
        try:
            await asyncio.wait_for(DOORS[door](self, answer, options), cancel_after or self.wait_seconds)
        except asyncio.TimeoutError:
            answer.problem = "cancelled" if cancel_after else f"no end after {self.wait_seconds} s"
        except InferenceServerException as error:
            answer.problem = "refused" if is_refusal(error.status(), error.message()) else f"{error.status()}: {error.message()}"
        except (aiohttp.ClientError, UnicodeDecodeError) as error:
            answer.problem = f"{type(error).__name__}: {error}"
        if answer.problem is None and answer.last is None:
            answer.problem = "an end without a response"
        return answer

    async def generate(self, answer, options):
        """HTTP, one response."""
        async with self.session.post(self.url("generate"), json=options) as reply:
            body = await reply.text()
            if reply.status != 200:
                answer.problem = "refused" if is_refusal(reply.status, body) else f"HTTP {reply.status}: {body}"
                return
            fields = json.loads(body)
            answer.add(fields["text_output"], fields.get("num_output_tokens", 0))

    async def generate_stream(self, answer, options):
        """HTTP, server-sent events."""
        async with self.session.post(self.url("generate_stream"), json={**options, "stream": True}) as reply:
            if reply.status != 200:
                body = await reply.text()
                answer.problem = "refused" if is_refusal(reply.status, body) else f"HTTP {reply.status}: {body}"
                return
            async for line in reply.content:
                if not line.startswith(b"data:"):
                    continue
                fields = json.loads(line[5:])
                if "error" in fields:
                    answer.problem = fields["error"]
                    return
                answer.add(fields["text_output"], fields.get("num_output_tokens", 0))

    async def grpc(self, answer, options):
        """gRPC, one response."""
        await self.grpc_stream(answer, {**options, "stream": False})

    async def grpc_stream(self, answer, options):
        """gRPC, a response as tokens come; a stream of its own, so that closing it cancels."""
        request = {"model_name": self.model, "inputs": self.tensors({"stream": True, **options})}

        async def requests():
            yield request

        # Errors are a text alone: with the header triton_grpc_error they have status codes, but where a backend answers many
        # requests with errors, tritonserver 2.51 dies of it now and then (signal 11 in its gRPC frontend).
        responses = self.channel.stream_infer(requests())
        try:
            async for result, error in responses:
                if error is not None:
                    raise error
                num_tokens = result.as_numpy("num_output_tokens")
                text = b"".join(result.as_numpy("text_output").reshape(-1))
                answer.add(text.decode(), int(num_tokens.sum()) if num_tokens is not None else 0)
        except grpc.RpcError as error:
            raise InferenceServerException(error.details(), str(error.code())) from error
        finally:
            responses.cancel()

    def url(self, endpoint):
        return f"http://{self.http_url}/v2/models/{self.model}/{endpoint}"

    def tensors(self, options):
        """Options as inputs with a batch of one."""
        inputs = []
        for name, value in options.items():
            kind = self.datatypes[name]
            value = value.encode() if isinstance(value, str) else value
            one = grpcclient.InferInput(name, [1, 1], kind)
            one.set_data_from_numpy(np.array([[value]], dtype=triton_to_np_dtype(kind)))
            inputs.append(one)
        return inputs


DOORS = {"generate": Client.generate, "generate_stream": Client.generate_stream, "grpc": Client.grpc,
         "grpc_stream": Client.grpc_stream}
