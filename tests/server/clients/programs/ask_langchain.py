"""langchain-nvidia-trt: an answer, the pieces of a streamed one, a batch."""

import json
import sys

from langchain_nvidia_trt import TritonTensorRTLLM

question = json.loads(sys.argv[1])
model = TritonTensorRTLLM(server_url=question["url"], model_name="ensemble", tokens=question["tokens"])
prompt = question["prompt"]
print(json.dumps({
    "text": model.invoke(prompt),
    "pieces": list(model.stream(prompt)),
    "batch": model.generate([prompt, prompt]).generations[1][0].text,
}))
