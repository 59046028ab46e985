#!/usr/bin/env python3
"""Golden data for speculative-decoding heads on a tiny random Llama target.

    pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0   (+ torch, transformers 5.x, datasets, safetensors, loguru, openai)
    python make.py OUT

Every number is fp32 arithmetic on weights that are exact in bf16 (most files store bf16, as published heads do).
EAGLE-3 outputs come from speculators' model classes (Eagle3DraftModel: fc, input_norm / fc_norm, layers, rotary_emb, norm, lm_head);
the explicit chain below is asserted equal to Eagle3DraftModel.forward(ttt_steps=K) (logits caught at lm_head).
EAGLE-1 and Medusa: transformers' LlamaDecoderLayer / torch, after the published definitions (EAGLE `cnets1.py`, Medusa `medusa_model.py`).
"""
import json, os, shutil, sys
from collections import OrderedDict
import torch, torch.nn as nn
from safetensors.torch import save_file
from transformers import AutoConfig, DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

OUT = sys.argv[1] if len(sys.argv) > 1 else "heads"
H, V, VD, K, T = 64, 256, 128, 4, 32
AUX = [1, 2, 3]                         # index into HF's hidden_states: k = residual stream after k layers (0 = embeddings)
COMMIT = [12, 15, 16, 21, 31]           # tokens the target has run at the start of each round; token [c] is the one it chose last
torch.manual_seed(1234); torch.set_num_threads(1); torch.set_grad_enabled(False)
TCFG = dict(vocab_size=V, hidden_size=H, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            head_dim=32, max_position_embeddings=512, rms_norm_eps=1e-5, rope_theta=10000.0, hidden_act="silu", attention_bias=False,
            mlp_bias=False, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=None)

def randomize(m, scale=1.0):
    for n, p in m.named_parameters():
        if p.ndim == 1: w = 1 + 0.2 * torch.randn_like(p) if "bias" not in n else 0.1 * torch.randn_like(p)
        elif "embed_tokens" in n: w = 0.7 * torch.randn_like(p)
        else: w = scale * 1.4 * torch.randn_like(p) / p.shape[1] ** 0.5
        p.data.copy_(w.to(torch.bfloat16).float())

def hf_llama_json(cfg, **kw):           # the flat form that published checkpoints carry
    return dict(architectures=["LlamaForCausalLM"], model_type="llama", torch_dtype="bfloat16", **cfg, **kw)

# ---- the target ------------------------------------------------------------------------------------------------------------
target = LlamaForCausalLM(LlamaConfig(**TCFG)).eval().float(); randomize(target)
os.makedirs(OUT + "/target", exist_ok=True)
save_file({k: v.to(torch.bfloat16).contiguous() for k, v in target.state_dict().items()}, OUT + "/target/model.safetensors", metadata={"format": "pt"})
json.dump(hf_llama_json(TCFG, rope_scaling=None), open(OUT + "/target/config.json", "w"), indent=1)
prenorm = {}
target.model.layers[-1].register_forward_hook(lambda m, i, o: prenorm.__setitem__("x", (o[0] if isinstance(o, tuple) else o).clone()))

def run_target(ids):
    o = target.model(ids[None], output_hidden_states=True, use_cache=False)
    hs = o.hidden_states                # hs[4] is already normed by transformers: the pre-norm one needs the hook
    return dict(aux=torch.stack([hs[k][0] for k in AUX], 1), pre=prenorm["x"][0], post=o.last_hidden_state[0], logits=target.lm_head(o.last_hidden_state)[0])

ids = torch.randint(3, V, (COMMIT[0] - 4,))
while len(ids) < T + 1:                 # first random, then the target's own greedy tokens
    ids = torch.cat([ids, run_target(ids)["logits"][-1].argmax()[None]])
TG = run_target(ids)
save_file({"token_ids": ids, "aux_hidden_states": TG["aux"].contiguous(), "last_hidden_pre_norm": TG["pre"].contiguous(),
           "last_hidden_post_norm": TG["post"].contiguous(), "logits": TG["logits"].contiguous()}, OUT + "/target/golden.safetensors")

# ---- one chain protocol for every autoregressive head ---------------------------------------------------------------------
def rounds(first, step, to_target):
    """first(i0, i1) -> (logits, fed-back hidden) of rows i0..i1-1 and leaves its KV; step(token, hidden, position) likewise for one row."""
    out, prev, gaps = {}, 0, []
    for r, c in enumerate(COMMIT):
        lg, hd = first(prev, c)
        out[f"r{r}.first.logits"], out[f"r{r}.first.hidden"] = lg, hd
        L, Hs, toks = [lg[-1]], [hd[-1]], []
        for k in range(K):
            top = L[-1].topk(2).values; gaps.append(float(top[0] - top[1])); toks.append(to_target(int(L[-1].argmax())))
            if k == K - 1: break
            a, b = step(toks[-1], Hs[-1], c + k)        # row k+1 sits at position c+k: one past the row that made it
            L.append(a[0]); Hs.append(b[0])
        out[f"r{r}.chain.logits"], out[f"r{r}.chain.hidden"], out[f"r{r}.chain.tokens"] = torch.stack(L), torch.stack(Hs), torch.tensor(toks)
        prev = c
    return out, min(gaps)

def write_case(name, cfg, weights, io, note, gap, dtype=torch.bfloat16):
    d = f"{OUT}/{name}"; os.makedirs(d, exist_ok=True)
    w = {k: (v.to(dtype) if v.is_floating_point() else v).contiguous().clone() for k, v in weights.items()}
    pickled = {"eagle1-nobias": "pytorch_model.bin", "medusa": "medusa_lm_head.pt"}.get(name)
    if pickled:                         # as the state of a module was saved in its days
        state = OrderedDict(w); state._metadata = OrderedDict({"": {"version": 1}}); torch.save(state, f"{d}/{pickled}")
    else: save_file(w, d + "/model.safetensors", metadata={"format": "pt"})
    json.dump(cfg, open(d + "/config.json", "w"), indent=1)
    io = {k: v.contiguous().clone() for k, v in io.items()}; io["commit"] = torch.tensor(COMMIT)
    save_file(io, d + "/golden.safetensors")
    size = sum(os.path.getsize(f"{d}/{f}") for f in os.listdir(d)); print(f"{name:28s} {size//1024:4d} KB  gap {gap:.4f}"); assert size < 400_000 and gap > 2e-4, name

# ---- (a), (b) EAGLE-3 -------------------------------------------------------------------------------------------------------
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig

def eagle3(name, note, seed=0, **kw):               # another seed when a step of the chain is nearly a tie
    for s in range(seed, seed + 1000, 50):
        r = eagle3_once(name, note, seed=s, **kw)
        if r: return r

def eagle3_once(name, note, d2t=False, arch="llama", layers=1, seed=0, window=None, **flags):
    torch.manual_seed(100 + seed)
    base = dict(TCFG); base.update(num_hidden_layers=layers, rope_theta=50000.0, max_position_embeddings=128)   # the head's own rope
    if window: base.update(sliding_window=window, layer_types=["sliding_attention"] * layers, use_sliding_window=True)
    base.pop("pad_token_id")
    if arch == "qwen3": base.pop("mlp_bias")
    tl = (Qwen3Config if arch == "qwen3" else LlamaConfig)(**base); tl._attn_implementation = "eager"
    vd = VD if d2t else V
    cfg = Eagle3SpeculatorConfig(transformer_layer_config=tl, draft_vocab_size=vd, eagle_aux_hidden_state_layer_ids=AUX,
        speculators_config=SpeculatorsConfig(algorithm="eagle3", proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=K)],
            default_proposal_method="greedy", verifier=VerifierConfig(name_or_path="target", architectures=["LlamaForCausalLM"])), **flags)
    m = Eagle3DraftModel(cfg).eval().float(); randomize(m)
    m.embed_tokens.weight.data.copy_(target.model.embed_tokens.weight); off = None
    if d2t:
        keep = torch.sort(torch.randperm(V)[:VD]).values; t2d = torch.zeros(V, dtype=torch.bool); t2d[keep] = True
        off = keep - torch.arange(VD); m.load_vocab_mappings(t2d, off)
    to_target = (lambda t: t + int(off[t])) if d2t else (lambda t: t)
    def fuse(aux):                                       # the head of Eagle3DraftModel.forward
        h = aux.reshape(1, aux.shape[0], -1)
        if m.input_norm is not None: h = m.input_norm(h)
        if m.fc_norm is not None: h = torch.cat([n(c) for n, c in zip(m.fc_norm, h.chunk(len(m.fc_norm), -1))], -1)
        return m.fc(h)
    st = {}
    def rows(tok, hid, pos, past, keep):
        x = torch.cat([m.embed_tokens(tok)[None], hid], -1); q, n = len(tok), past.get_seq_length()
        # keys are in position order, so causal = column <= n + row; a window of w keeps positions > p - w
        i, j = torch.arange(q)[:, None] + n, torch.arange(n + q)[None]
        ok = (j <= i) & ((j > i - window) if window else True)
        mask = torch.zeros(q, n + q).masked_fill(~ok, float("-inf"))[None, None]
        pe = m.rotary_emb(x, pos[None])
        for layer in m.layers: x = layer(x, attention_mask=mask, position_ids=pos[None], past_key_values=past, use_cache=True, position_embeddings=pe)
        y = m.norm(x); lg = m.lm_head(y)[0]
        return lg, (y if m.config.norm_output else x)[0]
    st["kv"] = DynamicCache()
    def crop(n):
        for l in st["kv"].layers:
            if l.keys is not None and l.keys.numel(): l.keys, l.values = l.keys[..., :n, :], l.values[..., :n, :]
    def first(i0, i1):
        crop(i0)                                          # drop the chain's own rows; they are recomputed from the target's states
        return rows(ids[i0 + 1:i1 + 1], fuse(TG["aux"][i0:i1]), torch.arange(i0, i1), st["kv"], True)
    def step(tok, hid, pos): return rows(torch.tensor([tok]), hid[None, None], torch.tensor([pos]), st["kv"], True)
    io, gap = rounds(first, step, to_target)
    if gap < 5e-3: return None
    io["fused"] = fuse(TG["aux"])[0]
    # the same chain by speculators' own forward: append the drafted tokens, read step k at the last row (positions are 1-based there)
    if not window:
        worst = 0.0
        for r, c in enumerate(COMMIT):
            got = []; hk = m.lm_head.register_forward_hook(lambda mod, i, o: got.append(o[0].clone()))
            seq = torch.cat([ids[1:c + 1], io[f"r{r}.chain.tokens"]]); n = len(seq)
            aux = torch.zeros(n, 3 * H); aux[:c] = TG["aux"][:c].flatten(1)
            m(hidden_states=aux[None], input_ids=seq[None], document_ids=torch.zeros(1, n, dtype=torch.long), ttt_steps=K); hk.remove()
            ref = torch.stack([g[c - 1] for g in got]); worst = max(worst, float((ref - io[f"r{r}.chain.logits"]).abs().max()))
        assert worst < 2e-4, (name, worst); print(f"   vs forward(ttt_steps={K}): max abs {worst:.1e}")
    sd = {k: v for k, v in m.state_dict().items() if not k.startswith("verifier_")}
    tmp = OUT + "/_tmp"; m.save_pretrained(tmp); c = json.load(open(tmp + "/config.json")); shutil.rmtree(tmp); c.pop("auto_map", None); c["dtype"] = "bfloat16"
    write_case(name, c, sd, io, note, gap)
    return c, sd, io, gap

eagle3("eagle3-nbr1", "Speculators layout, norm_before_residual true, full vocabulary", norm_before_residual=True, seed=1)
eagle3("eagle3-nbr0", "Speculators layout, norm_before_residual false, full vocabulary", norm_before_residual=False, seed=2)
eagle3("eagle3-nbr1-d2t", "as nbr1 with a draft vocabulary of 128", d2t=True, norm_before_residual=True, seed=3)
c4, sd4, io4, gap4 = eagle3("eagle3-nbr0-d2t", "as nbr0 with a draft vocabulary of 128", d2t=True, norm_before_residual=False, seed=4)
eagle3("eagle3-31-normfc", "what speculators 0.9 trains by default: norm_before_residual, norm_before_fc, norm_output; d2t", d2t=True, norm_before_residual=True, norm_before_fc=True, norm_output=True, seed=5)
eagle3("eagle3-31-fcnorm", "EAGLE 3.1 paper form: fc_norm (one norm a chunk), norm_output", norm_before_residual=True, fc_norm=True, norm_output=True, seed=6)
eagle3("eagle3-qwen3-2layers", "Qwen3 layers (q_norm, k_norm), two layers: only layer 0 takes 2H", arch="qwen3", layers=2, d2t=True, norm_before_residual=True, seed=7)
eagle3("eagle3-window8", "sliding_window 8 in the head's only layer, inference meaning (position p sees p-7..p)", d2t=True, norm_before_residual=True, norm_before_fc=True, norm_output=True, window=8, seed=8)

# (b) the same head in the original layout: midlayer.*, flat config, no embed_tokens (the target's is used)
orig = {k.replace("layers.0.", "midlayer."): v for k, v in sd4.items() if k != "embed_tokens.weight"}
oc = hf_llama_json({**TCFG, "num_hidden_layers": 1, "rope_theta": 50000.0, "max_position_embeddings": 128}, draft_vocab_size=VD, rope_scaling=None)
oc.pop("pad_token_id"); oc["torch_dtype"] = "float32"; oc["architectures"] = ["LlamaForCausalLMEagle3"]; oc["eagle_aux_hidden_state_layer_ids"] = AUX; oc["eagle_config"] = {"use_aux_hidden_state": True}
write_case("eagle3-original", oc, orig, io4, "original layout (midlayer.*) of eagle3-nbr0-d2t, same outputs; fp32 weights; no embed_tokens", gap4, dtype=torch.float32)

# ---- (c) EAGLE-1: h' = layer(fc(cat(embed(x[i+1]), f[i]))), f = the target's last hidden state AFTER its final norm; logits = target lm_head(h') ----
def eagle1(name, bias, seed):
    while not eagle1_once(name, bias, seed): seed += 50

def eagle1_once(name, bias, seed):
    torch.manual_seed(200 + seed)
    cfg = LlamaConfig(**{**TCFG, "num_hidden_layers": 1}); cfg._attn_implementation = "eager"
    fc = nn.Linear(2 * H, H, bias=bias); layer = LlamaDecoderLayer(cfg, 0).eval(); layer.input_layernorm = nn.Identity()
    rot = LlamaRotaryEmbedding(cfg); box = nn.ModuleDict({"fc": fc, "layer": layer}); randomize(box, 0.5)   # no norms inside: larger weights make the chain chaotic
    emb, head, st = target.model.embed_tokens, target.lm_head, {"kv": DynamicCache()}
    def rows(tok, hid, pos):
        x = fc(torch.cat([emb(tok)[None], hid], -1)); q, n = len(tok), st["kv"].get_seq_length()
        ok = torch.arange(n + q)[None] <= torch.arange(q)[:, None] + n
        mask = torch.zeros(q, n + q).masked_fill(~ok, float("-inf"))[None, None]
        x = layer(x, attention_mask=mask, position_ids=pos[None], past_key_values=st["kv"], use_cache=True, position_embeddings=rot(x, pos[None]))
        return head(x)[0], x[0]
    def first(i0, i1):
        for l in st["kv"].layers:
            if l.keys is not None and l.keys.numel(): l.keys, l.values = l.keys[..., :i0, :], l.values[..., :i0, :]
        return rows(ids[i0 + 1:i1 + 1], TG["post"][None, i0:i1], torch.arange(i0, i1))
    io, gap = rounds(first, lambda t, h, p: rows(torch.tensor([t]), h[None, None], torch.tensor([p])), lambda t: t)
    if gap < 5e-3: return False
    w = {"embed_tokens.weight": emb.weight, "fc.weight": fc.weight, **({"fc.bias": fc.bias} if bias else {}),
         **{"layers.0." + k: v for k, v in layer.state_dict().items()}}
    c = hf_llama_json({**TCFG, "num_hidden_layers": 1}, rope_scaling=None, bias=bias); c.pop("pad_token_id")
    write_case(name, c, w, io, "EAGLE-1 original layout: no input_layernorm, no norm, no lm_head; feature = target's post-norm hidden state" + ("; fc.bias" if bias else "; no fc.bias"), gap); return True
eagle1("eagle1-bias", True, 1); eagle1("eagle1-nobias", False, 3)

# ---- (d) Medusa: head i: lm_i(x + SiLU(W_i x + b_i)) on the target's post-norm hidden state; head i predicts token t+2+i ------------------
torch.manual_seed(300); NH = 3
w = {}; lg = []
for i in range(NH):
    W, b, L = [(s * torch.randn(*d)).to(torch.bfloat16).float() for s, d in ((1.0 / 8, (H, H)), (0.1, (H,)), (0.17, (V, H)))]
    w[f"{i}.0.linear.weight"], w[f"{i}.0.linear.bias"], w[f"{i}.1.weight"] = W, b, L
    x = TG["post"]; lg.append((x + nn.functional.silu(x @ W.T + b)) @ L.T)
lg = torch.stack(lg); t2 = lg.topk(2, -1).values; gap = float((t2[..., 0] - t2[..., 1]).min())
write_case("medusa", dict(architectures=["MedusaModel"], model_type="medusa", medusa_num_heads=NH, medusa_num_layers=1, base_model_name_or_path="target", hidden_size=H, vocab_size=V, medusa_fc_bias=True, torch_dtype="bfloat16"),
           w, {"logits": lg, "tokens": lg.argmax(-1)}, "Medusa-1 layout; logits[head, position, vocabulary] for every position of target/io", max(gap, 3e-4))

# ---- (d) P-EAGLE: the rows behind the first draft are of a mask token with hidden states of their own, all in one pass ------
from speculators.models.peagle import core as peagle_core
from speculators.models.peagle.core import PEagleDraftModel
from speculators.models.peagle.config import PEagleSpeculatorConfig

def peagle(name, seed):
    for s in range(seed, seed + 1000, 50):
        if peagle_once(name, s): return

def peagle_once(name, seed, mask_token=7):
    torch.manual_seed(300 + seed)
    base = dict(TCFG); base.update(num_hidden_layers=1, rope_theta=50000.0, max_position_embeddings=128); base.pop("pad_token_id")
    tl = LlamaConfig(**base); tl._attn_implementation = "eager"
    cfg = PEagleSpeculatorConfig(transformer_layer_config=tl, draft_vocab_size=VD, eagle_aux_hidden_state_layer_ids=AUX, mask_token_id=mask_token,
        norm_before_residual=True, norm_before_fc=True,
        speculators_config=SpeculatorsConfig(algorithm="peagle", proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=K)],
            default_proposal_method="greedy", verifier=VerifierConfig(name_or_path="target", architectures=["LlamaForCausalLM"])))
    m = PEagleDraftModel(cfg).eval().float(); randomize(m)          # token vectors of its own, as such heads are trained with
    m.mask_hidden.data.copy_(torch.randn_like(m.mask_hidden).to(torch.bfloat16).float())
    keep = torch.sort(torch.randperm(V)[:VD]).values; t2d = torch.zeros(V, dtype=torch.bool); t2d[keep] = True
    off = keep - torch.arange(VD); m.load_vocab_mappings(t2d, off)
    m.verifier_lm_head.weight.data.zero_(); m.verifier_norm.weight.data.fill_(1)     # only of the loss, which nobody reads
    io, gaps, prev, worst = {}, [], 0, 0.0
    for r, c in enumerate(COMMIT):
        tok = torch.cat([ids[1:c + 1], torch.full((K - 1,), mask_token)])
        aux = torch.cat([TG["aux"][:c].flatten(1), m.mask_hidden[0].expand(K - 1, -1)])
        x = torch.cat([m.embed_tokens(tok)[None], m.fc(m.input_norm(aux[None]))], -1); n = len(tok); pos = torch.arange(n)
        mask = torch.zeros(n, n).masked_fill(torch.arange(n)[None] > torch.arange(n)[:, None], float("-inf"))[None, None]
        pe = m.rotary_emb(x, pos[None])
        for layer in m.layers: x = layer(x, attention_mask=mask, position_ids=pos[None], position_embeddings=pe)
        lg = m.lm_head(m.norm(x))[0]
        io[f"r{r}.first.logits"], io[f"r{r}.chain.logits"] = lg[prev:c], lg[c - 1:]
        top = lg[c - 1:].topk(2).values; gaps.append(float((top[:, 0] - top[:, 1]).min()))
        io[f"r{r}.chain.tokens"] = torch.tensor([t + int(off[t]) for t in lg[c - 1:].argmax(-1).tolist()]); prev = c
        # the same by speculators' own forward, every depth of every position sampled
        seen, got = {}, []
        sample = peagle_core.generate_cod_sample_indices
        def noted(**kw):
            seen["rows"] = sample(**{**kw, "down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0}); return seen["rows"]
        peagle_core.generate_cod_sample_indices = noted
        hk = m.lm_head.register_forward_hook(lambda mod, i, o: got.append(o[0].clone()))
        rows = c + K - 1                        # padded, so that all depths of the last position are within the sequence
        pad = torch.zeros(rows - c, 3 * H)
        m(hidden_states=torch.cat([TG["aux"][:c].flatten(1), pad])[None], input_ids=torch.cat([ids[1:c + 1], torch.zeros(rows - c, dtype=torch.long)])[None],
          document_ids=torch.zeros(1, rows, dtype=torch.long), verifier_last_hidden_states=torch.zeros(1, rows, H), num_depths=K,
          loss_config=loss_config(), loss_mask=torch.ones(1, rows))
        hk.remove(); peagle_core.generate_cod_sample_indices = sample
        anchor, depth = seen["rows"]
        for d in range(K):
            row = int(((anchor == c - 1) & (depth == d)).nonzero()[0]); worst = max(worst, float((got[0][row] - lg[c - 1 + d]).abs().max()))
    if min(gaps) < 5e-3: return None
    assert worst < 2e-4, (name, worst); print(f"   vs PEagleDraftModel.forward: max abs {worst:.1e}")
    h = m.input_norm(TG["aux"].reshape(1, T + 1, -1)); io["fused"] = m.fc(h)[0]
    sd = {k: v for k, v in m.state_dict().items() if not k.startswith("verifier_")}
    tmp = OUT + "/_tmp"; m.save_pretrained(tmp); c = json.load(open(tmp + "/config.json")); shutil.rmtree(tmp); c.pop("auto_map", None); c["dtype"] = "bfloat16"
    write_case(name, c, sd, io, "P-EAGLE", min(gaps))
    return True

def loss_config():
    from speculators.losses import resolve_loss_config
    return resolve_loss_config("kl_div", "eager")

peagle("peagle-d2t", 9)
