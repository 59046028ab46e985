"""A Llama or Qwen2 checkpoint in PyTorch whose attention and MLP blocks can be left out one by one.

Sublayer 2i is the attention of layer i, 2i + 1 its MLP. Rows of many texts are computed together; a draft's rows see what
the whole model has cached of the tokens before the draft, and their own keys and values of the draft's rows, as an engine
that drafts with its own layers would have it.
"""

import json
import pathlib

import torch
from safetensors import safe_open
from torch.nn import functional

# Rows of logits at a time: 64 rows of 152,000 tokens in fp32 are 39 MB.
LOGIT_ROWS = 64


class Text:
    """Tokens of a prompt and its answer, and what the whole model has cached of them."""

    def __init__(self, model, tokens, num_prompt, name=""):
        self.name, self.tokens, self.num_prompt = name, list(tokens), num_prompt
        # [layer, keys or values, key head, position, head size]
        self.cache = torch.zeros(model.num_layers, 2, model.num_key_heads, 0, model.head_size, dtype=torch.bfloat16)

    def room(self, num_tokens):
        missing = num_tokens - self.cache.shape[3]
        if missing > 0:
            self.cache = functional.pad(self.cache, (0, 0, 0, missing))


class Rows:
    """Tokens at positions of texts, ordered by text; `first` is where each row's draft began."""

    def __init__(self, texts, places):
        """`places`: a list of positions for each text, in any number."""
        self.texts = texts
        self.spans, at = [], 0
        for text, positions in zip(texts, places):
            if positions:
                self.spans.append((text, slice(at, at + len(positions))))
                at += len(positions)
        self.positions = torch.tensor([position for positions in places for position in positions])
        self.first = self.positions.clone()
        self.owners = [text for text, positions in zip(texts, places) for _ in positions]
        self.earlier = {}  # layer -> [(keys, values)] of the draft's rows before this one, [row, key head, head size]

    def tokens(self, ahead=0):
        pairs = zip(self.owners, self.positions.tolist())
        return torch.tensor([text.tokens[position + ahead] for text, position in pairs])

    def next(self, alive):
        """The rows after those for which `alive` holds, in the same drafts."""
        kept = alive.tolist()
        places = {id(text): [] for text in self.texts}
        for owner, position, keep in zip(self.owners, self.positions.tolist(), kept):
            if keep:
                places[id(owner)].append(position + 1)
        rows = Rows(self.texts, [places[id(text)] for text in self.texts])
        rows.first = self.first[alive]
        rows.earlier = {layer: [(k[alive], v[alive]) for k, v in pairs] for layer, pairs in self.earlier.items()}
        return rows


class Model:
    def __init__(self, folder):
        folder = pathlib.Path(folder)
        config = json.loads((folder / "config.json").read_text())
        if config["model_type"] not in ("llama", "qwen2"):
            raise SystemExit(f"{folder}: model_type `{config['model_type']}` is neither `llama` nor `qwen2`")
        self.num_layers, self.width = config["num_hidden_layers"], config["hidden_size"]
        self.num_heads, self.num_key_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_size = config.get("head_dim") or self.width // self.num_heads
        self.epsilon = config["rms_norm_eps"]
        self.weights = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as tensors:
                self.weights |= {name: tensors.get_tensor(name).to(torch.bfloat16) for name in tensors.keys()}
        self.embedding = self.weights["model.embed_tokens.weight"]
        self.head = self.weights.get("lm_head.weight", self.embedding)
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        self.frequencies = theta ** (-torch.arange(0, self.head_size, 2, dtype=torch.float32) / self.head_size)
        self.num_sublayers = 2 * self.num_layers

    def sizes(self):
        """Weights that a pass reads: of each sublayer, and of the head."""
        of = lambda layer, part: sum(tensor.numel() for name, tensor in self.weights.items()
                                     if name.startswith(f"model.layers.{layer}.{part}."))
        parts = [of(i // 2, "mlp" if i % 2 else "self_attn") for i in range(self.num_sublayers)]
        return parts, self.head.numel()

    def norm(self, x, name):
        x = x.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)
        return x.to(torch.bfloat16) * self.weights[name]

    def rotate(self, x, positions):
        """[row, head, head size], in the order of halves."""
        angles = (positions[:, None].float() * self.frequencies)[:, None]
        low, high = x.float().chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(torch.bfloat16)

    def project(self, x, name):
        return functional.linear(x, self.weights[name + ".weight"], self.weights.get(name + ".bias"))

    def attention(self, x, layer, rows, is_draft):
        base = f"model.layers.{layer}"
        x = self.norm(x, f"{base}.input_layernorm.weight")
        heads = lambda name, num: self.project(x, f"{base}.self_attn.{name}").view(len(x), num, self.head_size)
        queries = self.rotate(heads("q_proj", self.num_heads), rows.positions)
        keys = self.rotate(heads("k_proj", self.num_key_heads), rows.positions)
        values = heads("v_proj", self.num_key_heads)
        # [key head, row, heads of it, head size]
        queries = queries.view(len(x), self.num_key_heads, -1, self.head_size).transpose(0, 1) * self.head_size**-0.5
        if is_draft:
            rows.earlier.setdefault(layer, []).append((keys, values))
            own_keys = torch.stack([pair[0] for pair in rows.earlier[layer]], 2).transpose(0, 1)
            own_values = torch.stack([pair[1] for pair in rows.earlier[layer]], 2).transpose(0, 1)
        mixed = torch.empty_like(queries)
        for text, span in rows.spans:
            if not is_draft:
                text.cache[layer, 0][:, rows.positions[span]] = keys[span].transpose(0, 1)
                text.cache[layer, 1][:, rows.positions[span]] = values[span].transpose(0, 1)
            cached, of_values = text.cache[layer, 0], text.cache[layer, 1]
            here = queries[:, span]
            num_kept = cached.shape[1]
            scores = here.flatten(1, 2) @ cached.transpose(1, 2)
            scores = scores.view(self.num_key_heads, here.shape[1], -1, num_kept).float()
            # A draft's cached tokens are those before it; else a row is in the cache itself.
            last = rows.first[span] - 1 if is_draft else rows.positions[span]
            hidden = torch.arange(num_kept) > last[:, None]
            scores = scores.masked_fill(hidden[:, None], -torch.inf)
            if is_draft:
                own = here @ own_keys[:, span].transpose(2, 3)
                scores = torch.cat([scores, own.float()], -1)
            shares = scores.softmax(-1).to(torch.bfloat16)
            out = (shares[..., :num_kept].flatten(1, 2) @ of_values).view_as(here)
            if is_draft:
                out = out + shares[..., num_kept:] @ own_values[:, span]
            mixed[:, span] = out
        return self.project(mixed.transpose(0, 1).reshape(len(x), -1), f"{base}.self_attn.o_proj")

    def mlp(self, x, layer):
        base = f"model.layers.{layer}"
        x = self.norm(x, f"{base}.post_attention_layernorm.weight")
        gate = functional.silu(self.project(x, f"{base}.mlp.gate_proj"))
        return self.project(gate * self.project(x, f"{base}.mlp.up_proj"), f"{base}.mlp.down_proj")

    def forward(self, rows, skipped=(), is_draft=True, start=0, x=None, states=None):
        """The rows' last hidden states; from sublayer `start` on with `x`; `states` takes what goes into each sublayer."""
        if x is None:
            x = self.embedding[rows.tokens()]
        for sublayer in range(start, self.num_sublayers):
            if states is not None:
                states.append(x)
            if sublayer in skipped:
                continue
            if sublayer % 2:
                x = x + self.mlp(x, sublayer // 2)
            else:
                x = x + self.attention(x, sublayer // 2, rows, is_draft)
        return x

    def logits(self, x):
        """Of a few rows at a time."""
        for part in self.norm(x, "model.norm.weight").split(LOGIT_ROWS):
            yield functional.linear(part, self.head).float()

    def likeliest(self, x):
        return torch.cat([logits.argmax(-1) for logits in self.logits(x)])

    def judge(self, x, expected):
        """For each row: whether the likeliest token is the expected one, its probability, that of the likeliest."""
        right, probability, confidence = [], [], []
        for logits, tokens in zip(self.logits(x), expected.split(LOGIT_ROWS)):
            most, likeliest = logits.max(-1)
            total = logits.logsumexp(-1)
            right.append(likeliest == tokens)
            probability.append((logits.gather(1, tokens[:, None])[:, 0] - total).exp())
            confidence.append((most - total).exp())
        return torch.cat(right), torch.cat(probability), torch.cat(confidence)

    def read(self, texts):
        """Fills the texts' caches; the share of answers' tokens that are this model's likeliest."""
        for text in texts:
            text.room(len(text.tokens))
        rows = Rows(texts, [list(range(len(text.tokens))) for text in texts])
        x = self.forward(rows, is_draft=False)
        asked = [position >= text.num_prompt - 1 and position < len(text.tokens) - 1
                 for text, position in zip(rows.owners, rows.positions.tolist())]
        expected = [text.tokens[position + 1] for text, position, is_asked in
                    zip(rows.owners, rows.positions.tolist(), asked) if is_asked]
        if not expected:
            return 1.0
        return (self.likeliest(x[torch.tensor(asked)]) == torch.tensor(expected)).float().mean().item()

    def answer(self, texts, num_tokens, ends):
        """Goes on with the texts, greedily, at most so far, or to one of the tokens that end one."""
        for text in texts:
            text.room(len(text.tokens) + num_tokens)
        rows = Rows(texts, [list(range(len(text.tokens))) for text in texts])
        x = self.forward(rows, is_draft=False)
        going = texts
        x = x[torch.tensor([span.stop - 1 for _, span in rows.spans])]
        for _ in range(num_tokens):
            for text, token in zip(going, self.likeliest(x).tolist()):
                text.tokens.append(token)
            going = [text for text in going if text.tokens[-1] not in ends]
            if not going:
                break
            x = self.forward(Rows(going, [[len(text.tokens) - 1] for text in going]), is_draft=False)
