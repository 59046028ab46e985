"""Clients: the same question through each of Triton's doors, and what came back in one shape.

Options are named as the text profile's inputs. A scalar becomes a tensor of shape [1, 1], a list one of
[1, N]; `flat=True` leaves the batch dimension out, for models that have none.
"""

import http.client
import json
import queue
from dataclasses import dataclass, field

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

WAIT_SECONDS = 120

_BOOLS = """stream exclude_input_in_output ignore_eos use_draft_logits fixed_draft_tokens return_log_probs return_perf_metrics
    return_num_input_tokens return_num_output_tokens return_finish_reason return_context_logits
    return_generation_logits return_cumulative_logprob return_logprobs streaming stop""".split()
_FLOATS = """top_p min_p temperature length_penalty repetition_penalty presence_penalty frequency_penalty
    embedding_bias_weights runtime_top_p embedding_bias""".split()
_STRINGS = """text_input messages bad_words stop_words embedding_bias_words guided_decoding_guide_type
    guided_decoding_guide decoder_text_input sampling_parameters image cache_salt tools chat_template_kwargs""".split()
_LONGS = ["seed", "random_seed", "lora_task_id", "prompt_table_extra_id"]
NUMPY = {"BOOL": np.bool_, "FP32": np.float32, "BYTES": np.object_, "UINT64": np.uint64, "INT32": np.int32}


def datatype(name):
    for names, kind in [(_BOOLS, "BOOL"), (_FLOATS, "FP32"), (_STRINGS, "BYTES"), (_LONGS, "UINT64")]:
        if name in names:
            return kind
    return "INT32"


def array(name, value, flat=False):
    """An option as numpy has it."""
    kind = datatype(name)
    if isinstance(value, np.ndarray):
        return value
    if kind == "BYTES":
        encode = lambda one: one.encode() if isinstance(one, str) else one
        value = [encode(one) for one in value] if isinstance(value, list) else encode(value)
    values = np.array(value if isinstance(value, list) else [value], dtype=NUMPY[kind])
    return values if flat else values[None]


def tensors(module, options, flat=False):
    """Options as the inputs of a tritonclient module."""
    inputs = []
    for name, value in options.items():
        if value is None:
            continue
        values = array(name, value, flat)
        kind = next(kind for kind, dtype in NUMPY.items() if values.dtype == dtype)
        one = module.InferInput(name, list(values.shape), kind)
        one.set_data_from_numpy(values)
        inputs.append(one)
    return inputs


@dataclass
class Reply:
    """One response: its outputs by name, and whether it was marked as the last."""

    outputs: dict
    final: bool
    id: str = ""

    def text(self):
        value = self.outputs.get("text_output")
        return None if value is None else "".join(one.decode() for one in value.reshape(-1))


@dataclass
class Answer:
    """All responses to one request, in order, and the error that ended them, if one did."""

    replies: list = field(default_factory=list)
    error: str | None = None
    status: str | None = None

    @property
    def text(self):
        return "".join(reply.text() or "" for reply in self.replies)

    @property
    def chunks(self):
        return [reply.text() for reply in self.replies if reply.text() is not None]

    @property
    def finals(self):
        return sum(reply.final for reply in self.replies)

    def value(self, name):
        """The scalar of the last response that carries this output."""
        for reply in reversed(self.replies):
            if name in reply.outputs:
                return reply.outputs[name].reshape(-1)[0]
        return None

    def sum(self, name):
        return int(sum(r.outputs[name].sum() for r in self.replies if name in r.outputs))

    def good(self):
        assert self.error is None, f"{self.status}: {self.error}"
        return self


def reply_of(result, final=None):
    message = result.get_response()
    names = [output["name"] if isinstance(output, dict) else output.name for output in _outputs(message)]
    outputs = {name: result.as_numpy(name) for name in names}
    if final is None:
        final = message.parameters["triton_final_response"].bool_param
    return Reply(outputs, final, message.get("id", "") if isinstance(message, dict) else message.id)


def _outputs(message):
    return message.get("outputs", []) if isinstance(message, dict) else message.outputs


class Stream:
    """One request on its own gRPC stream, read response by response.

    Errors come without a code: the header `triton_grpc_error` would bring it, but makes tritonserver 2.51 end a
    stream in a way that now and then kills its gRPC front (signal 11, "HandleCancellation called even when ...").
    """

    def __init__(self, server, model, options, *, flat=False, client_timeout=None, **how):
        self.server, self.client = server, server.grpc()
        self.arrived = queue.Queue()
        self.answer = Answer()
        self.done = False
        self.client.start_stream(lambda result, error: self.arrived.put((result, error)), stream_timeout=client_timeout)
        how.setdefault("enable_empty_final_response", True)
        self.client.async_stream_infer(model, tensors(grpcclient, options, flat), **how)

    def next(self, timeout=WAIT_SECONDS):
        """The next response, or None when there are no more."""
        if self.done:
            return None
        result, error = self.arrived.get(timeout=timeout)
        if error is not None:
            self.answer.error, self.answer.status = error.message(), error.status()
            self.done = True
            return None
        reply = reply_of(result)
        self.answer.replies.append(reply)
        self.done = reply.final
        return reply

    def is_over_time(self):
        """Whether the next thing to be read is that it waited too long."""
        error = self.arrived.queue[0][1] if self.arrived.queue else None
        return error is not None and "timeout" in error.message().lower()

    def rest(self, timeout=WAIT_SECONDS):
        """Everything up to the last response."""
        while not self.done:
            self.next(timeout)
        return self.answer

    def cancel(self):
        """Cancels as a client that closes its stream does; what had arrived."""
        self.stop(True)
        while not self.arrived.empty() and not self.done:
            self.next()
        self.close()
        return self.answer

    def close(self):
        self.stop(not self.done)
        self.client.close()

    def stop(self, cancel):
        self.server.num_cancelled_streams += cancel
        self.client.stop_stream(cancel_requests=cancel)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def grpc_stream(server, model, options, **how):
    with Stream(server, model, options, **how) as stream:
        return stream.rest()


def grpc_infer(server, model, options, *, flat=False, **how):
    with server.grpc() as client:
        how.setdefault("client_timeout", WAIT_SECONDS)
        try:
            result = client.infer(model, tensors(grpcclient, options, flat), **how)
        except InferenceServerException as error:
            return Answer(error=error.message(), status=error.status())
        return Answer([reply_of(result, final=True)])


def http_infer(server, model, options, *, flat=False, **how):
    with httpclient.InferenceServerClient(server.http_url, network_timeout=WAIT_SECONDS) as client:
        try:
            result = client.infer(model, tensors(httpclient, options, flat), **how)
        except InferenceServerException as error:
            return Answer(error=error.message(), status=error.status())
        return Answer([reply_of(result, final=True)])


def _body(options):
    plain = lambda value: value.tolist() if isinstance(value, np.ndarray) else value
    return {name: plain(value) for name, value in options.items() if value is not None}


def _from_json(message, final):
    outputs = {}
    for name, value in message.items():
        if name not in ("model_name", "model_version", "id"):
            values = value if isinstance(value, list) else [value]
            encode = [one.encode() if isinstance(one, str) else one for one in values]
            outputs[name] = np.array(encode, dtype=np.object_ if isinstance(values[:1] and values[0], str) else None)
    return Reply(outputs, final, message.get("id", ""))


def generate(server, model, options, *, timeout=WAIT_SECONDS, headers=None):
    status, _, body = server.http("POST", f"/v2/models/{model}/generate", _body(options), headers, timeout=timeout)
    message = json.loads(body)
    if status != 200:
        return Answer(error=message["error"], status=str(status))
    return Answer([_from_json(message, True)])


def generate_stream(server, model, options, *, timeout=WAIT_SECONDS):
    """Server-sent events; which one was final is not told over HTTP, so the last one counts as it."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=timeout)
    connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(_body(options)))
    response = connection.getresponse()
    answer = Answer()
    if response.status != 200:
        # Of an error that a response brought, the body is an event.
        body = response.read().removeprefix(b"data: ")
        answer.error, answer.status = json.loads(body)["error"], str(response.status)
        connection.close()
        return answer
    for line in response:
        if line.startswith(b"data: "):
            message = json.loads(line[6:])
            if "error" in message:
                answer.error = message["error"]
            else:
                answer.replies.append(_from_json(message, False))
    if answer.replies and answer.error is None:
        answer.replies[-1].final = True
    connection.close()
    return answer


# Doors by what they need: a decoupled model, or one that answers once.
DECOUPLED = {"grpc_stream": grpc_stream, "generate": generate, "generate_stream": generate_stream}
WHOLE = {"grpc_infer": grpc_infer, "http_infer": http_infer, "generate": generate}
