"""llama-index-llms-nvidia-triton: a completion, the pieces of a streamed one, a chat."""

import json
import sys

from llama_index.core.base.llms.types import ChatMessage
from llama_index.llms.nvidia_triton import NvidiaTriton

question = json.loads(sys.argv[1])
model = NvidiaTriton(server_url=question["url"], tokens=question["tokens"])
print(json.dumps({
    "text": model.complete(question["prompt"]).text,
    "pieces": [piece.delta for piece in model.stream_complete(question["prompt"])],
    "chat": model.chat([ChatMessage(role="user", content=question["prompt"])]).message.content,
}))
