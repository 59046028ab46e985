"""openai: a completion and a chat, each whole and streamed; one that is stopped, and some that are drawn."""

import json
import sys

from openai import OpenAI

question = json.loads(sys.argv[1])
client = OpenAI(base_url=question["url"], api_key="none", max_retries=0)
common = {"model": "ensemble", "temperature": 0.0, "max_tokens": question["tokens"]}
streamed = {"stream": True, "stream_options": {"include_usage": True}}
completions, chats = client.completions.create, client.chat.completions.create
prompt, messages = question["prompt"], question["messages"]

completion = completions(prompt=prompt, **common)
chat = chats(messages=messages, **common)
chunks = list(completions(prompt=prompt, **common, **streamed))
chat_chunks = list(chats(messages=messages, **common, **streamed))
stopped = completions(prompt=prompt, **common, stop=question["stop"])
drawn = [completions(prompt=prompt, **{**common, "temperature": 1.0}, seed=seed).choices[0].text for seed in (1, 1, 2)]
print(json.dumps({
    "completion": completion.choices[0].text,
    "usage": completion.usage.model_dump(),
    "pieces": [chunk.choices[0].text for chunk in chunks if chunk.choices],
    "streamed_usage": chunks[-1].usage.model_dump(),
    "chat": chat.choices[0].message.content,
    "finish_reason": chat.choices[0].finish_reason,
    "chat_pieces": [chunk.choices[0].delta.content for chunk in chat_chunks if chunk.choices],
    "stopped": stopped.choices[0].text,
    "drawn": drawn,
}))
