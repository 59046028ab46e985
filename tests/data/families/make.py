"""Makes the tiny checkpoints of this folder and what the reference says to them: `python make.py`, with torch and
transformers. Weights are random and stored in BF16; logits are computed from them in FP32.
"""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
# Heads of 64, which both devices take.
SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=1024, rms_norm_eps=1e-5, tie_word_embeddings=False,
    bos_token_id=None, eos_token_id=63, pad_token_id=None, hidden_act="silu",
)
# Phi derives the size of its heads.
PHI = {**SIZES, "hidden_size": 128, "intermediate_size": 32}
FAMILIES = {
    "llama": dict(head_dim=64, attention_bias=True, mlp_bias=True),
    "mistral": dict(head_dim=64, sliding_window=None),
    "qwen2": dict(head_dim=64),
    "qwen3": dict(head_dim=64),
    "phi3": dict(rope_theta=250000.0, sliding_window=None, original_max_position_embeddings=1024),
}
PROMPT = [(7 * idx * idx + 3 * idx + 1) % 61 for idx in range(24)]


def make(family, own):
    torch.manual_seed(len(family))
    sizes = PHI if family == "phi3" else SIZES
    config = AutoConfig.for_model(family, **{**sizes, **own})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            # Norms near 1, biases and matrices large enough to matter.
            deviation = 0.1 if value.dim() == 1 else 1.5 / value.shape[-1] ** 0.5
            value.normal_(1.0 if name.endswith("norm.weight") else 0.0, deviation)
            value.copy_(value.bfloat16().float())
        last = []
        model.model.layers[-1].register_forward_hook(lambda layer, inputs, output: last.append(output))
        output = model(torch.tensor([PROMPT]), output_hidden_states=True)
    # The residual stream behind 0, 1, ... layers; the library's own last one is behind the final norm.
    behind = [*output.hidden_states[:-1], last[0][0] if isinstance(last[0], tuple) else last[0]]
    hidden = torch.stack([states[0] for states in behind], dim=1)
    folder = HERE / family
    folder.mkdir(exist_ok=True)
    stored = {name: value.bfloat16().contiguous() for name, value in model.state_dict().items()}
    save_file(stored, folder / "model.safetensors")
    golden = {"logits": output.logits[0].contiguous(), "hidden_states": hidden.contiguous()}
    save_file(golden, folder / "golden.safetensors")
    config.architectures = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=1, default=str) + "\n")
    print(family, f"{output.logits.std():.2f} spread of the logits")


print("transformers", transformers.__version__, "torch", torch.__version__)
(HERE / "prompt.json").write_text(json.dumps(PROMPT) + "\n")
for family, own in FAMILIES.items():
    make(family, own)
