"""Requests as protobuf messages, for what client libraries would not send."""

import struct

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from .client import WAIT_SECONDS


def strings(*values):
    """BYTES elements as they go over the wire."""
    encoded = [value.encode() if isinstance(value, str) else value for value in values]
    return b"".join(struct.pack("<I", len(value)) + value for value in encoded)


def int32(*values):
    return struct.pack(f"<{len(values)}i", *values)


def fp32(*values):
    return struct.pack(f"<{len(values)}f", *values)


def request(model, tensors, parameters=None, request_id=""):
    """A request from (name, datatype, shape, bytes) tuples, whether they agree or not."""
    message = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for name, kind, shape, data in tensors:
        tensor = message.inputs.add()
        tensor.name, tensor.datatype = name, kind
        tensor.shape.extend(shape)
        message.raw_input_contents.append(data)
    for key, value in (parameters or {}).items():
        kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
        setattr(message.parameters[key], kinds[type(value)], value)
    return message


class Raw:
    """A connection for such requests. `ask` gives (code, text of the error or None)."""

    def __init__(self, server):
        limits = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        self.channel = grpc.insecure_channel(server.grpc_url, options=limits)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.channel.close()

    def ask(self, message, timeout=WAIT_SECONDS):
        """Asks an ordinary model."""
        try:
            self.stub.ModelInfer(message, timeout=timeout)
            return "OK", None
        except grpc.RpcError as error:
            return error.code().name, error.details()

    def stream(self, message, timeout=WAIT_SECONDS):
        """Asks a decoupled model on a stream of its own. It is read to its end: one that is dropped after Triton's
        core refused its request keeps the model of a tritonserver 2.51 for ever."""
        try:
            responses = list(self.stub.ModelStreamInfer(iter([message]), timeout=timeout))
            errors = [response.error_message for response in responses if response.error_message]
            return ("ERROR", errors[0]) if errors else ("OK", None)
        except grpc.RpcError as error:
            return error.code().name, error.details()
