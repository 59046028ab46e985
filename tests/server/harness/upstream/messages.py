"""Tensors as these clients make them, and what all of them do with results."""

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from .. import client

METRICS = """kv_cache_alloc_new_blocks kv_cache_reused_blocks kv_cache_alloc_total_blocks arrival_time_ns
    first_scheduled_time_ns first_token_time_ns last_token_time_ns acceptance_rate total_accepted_draft_tokens
    total_draft_tokens""".split()

# Nothing takes so long here; a client that waits for ever would hang the suite.
WAIT_SECONDS = client.WAIT_SECONDS

# Stop requests carry memory that was not initialised.
ANY_ID = -1717986919


def tensor(name, values):
    one = grpcclient.InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype))
    one.set_data_from_numpy(values)
    return one


def arrays(options):
    """Options by name: a scalar as [1, 1], a list as [1, N]."""
    return {name: client.array(name, value) for name, value in options.items() if value is not None}


def matrix(value, kind):
    return np.array([[value]], dtype=kind)


def requested(names):
    return [grpcclient.InferRequestedOutput(name) for name in names]


def stop_request(count=np.int32):
    """What ends the request of the same id."""
    values = {
        "input_ids": matrix(ANY_ID, np.int32), "input_lengths": matrix(0, np.int32),
        "request_output_len": matrix(0, count), "stop": matrix(True, np.bool_),
    }
    return [tensor(name, value) for name, value in values.items()]


def keep(results):
    """A callback that keeps what comes, a result or an error."""
    return lambda result, error: results.put(error or result)


def taken(results):
    """All that has come. An error ends the test: none of these clients can go on after one."""
    while not results.empty():
        result = results.get()
        if isinstance(result, InferenceServerException):
            raise result
        yield result


def index(result, name):
    """`batch_index` and `sequence_index` are read as matrices; left out they are 0."""
    value = result.as_numpy(name)
    return 0 if value is None else int(value[0][0])


def metrics(result):
    """Read of every response that carries output."""
    return {name: result.as_numpy(name)[0][0] for name in METRICS}
