"""Logits of OpenVINO behind every token of some texts, in the format of llama_logits.cpp: openvino_logits.py TARGET_DIR THREADS

The model is compiled as OpenVINO GenAI compiles it by default, but with the logits of all positions.
"""

import os
import struct
import sys

import numpy
import openvino


def texts():
    """The lists of ids on stdin."""
    while head := sys.stdin.buffer.read(4):
        (count,) = struct.unpack("<I", head)
        yield list(struct.unpack(f"<{count}I", sys.stdin.buffer.read(4 * count)))


def main():
    """Reads texts, writes logits."""
    target, threads = sys.argv[1:]
    # The library may print to stdout: keep that for the logits alone.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    model = openvino.Core().compile_model(
        os.path.join(target, "openvino_model.xml"), "CPU", {"INFERENCE_NUM_THREADS": int(threads)})
    request = model.create_infer_request()
    for ids in texts():
        request.reset_state()
        outputs = request.infer({
            "input_ids": numpy.array([ids], numpy.int64),
            "attention_mask": numpy.ones((1, len(ids)), numpy.int64),
            "position_ids": numpy.arange(len(ids), dtype=numpy.int64)[None],
            "beam_idx": numpy.zeros(1, numpy.int32),
        })
        output.write(outputs["logits"][0].astype("<f4").tobytes())
    output.close()


if __name__ == "__main__":
    main()
