#!/usr/bin/env python3
"""perf_analyzer as GenAI-Perf's kind `tensorrtllm_engine` wants it, made of release 2.48, the last on PyPI: that one
does not stream in the process of the server, and tells of a tensor its first element or its bytes. So it is run over
gRPC ($SPEC_PERF_ANALYZER, $SPEC_PERF_URL), and what it exports is completed.
"""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

arguments = sys.argv[1:]
url = ["--service-kind", "triton", "-i", "grpc", "-u", os.environ["SPEC_PERF_URL"]]
code = subprocess.run([os.environ["SPEC_PERF_ANALYZER"], *arguments, *url]).returncode
if code != 0:
    sys.exit(code)
path = Path(arguments[arguments.index("--profile-export-file") + 1])
profile = json.loads(path.read_text(encoding="latin-1"))
profile["service_kind"] = "triton_c_api"
for request in (request for experiment in profile["experiments"] for request in experiment["requests"]):
    inputs = request["request_inputs"]
    inputs["input_ids"] = inputs["input_lengths"] * [inputs["input_ids"]]
    for outputs in request["response_outputs"]:
        raw = outputs["output_ids"].encode("latin-1")
        outputs["output_ids"] = list(struct.unpack(f"<{len(raw) // 4}i", raw))
path.write_text(json.dumps(profile))
