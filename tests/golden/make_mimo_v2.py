"""Make tests/golden/hybrid/mimo_v2_flash, in the files that make_hybrid.py describes.

    torch-venv/bin/python tests/golden/make_mimo_v2.py

transformers has no class of its three MTP modules. Here each is a layer of the model that sees a window, with a dense
MLP. They are run as SGLang does (`mimo_v2_flash_nextn.py`, `multi_layer_eagle_worker_v2.py`): draft j is module j's,
and module j pairs the target's own hidden states with tokens that are j + 1 positions ahead.
"""

from __future__ import annotations

import copy
import json
import shutil

import make_hybrid
import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import MiMoV2FlashConfig, MiMoV2FlashForCausalLM
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import MiMoV2FlashDecoderLayer, MiMoV2FlashRMSNorm

CONFIG = dict(
    vocab_size=make_hybrid.VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=1, head_dim=24, v_head_dim=16, sliding_window=21, max_position_embeddings=1024,
    layer_types=["full_attention", "sliding_attention", "sliding_attention"], n_routed_experts=8, num_experts_per_tok=3,
    moe_intermediate_size=16, rms_norm_eps=0.01, dtype="float32",
)  # fmt: skip
NAMES = {"post_attention_layernorm": "pre_mlp_layernorm", "attn.sinks": "attn.attention_sink_bias"}


class Mtp(nn.Module):
    def __init__(self, model: MiMoV2FlashForCausalLM):
        super().__init__()
        config, (d, eps) = copy.deepcopy(model.config), (model.config.hidden_size, model.config.rms_norm_eps)
        config.layer_types, config.mlp_layer_types = ["sliding_attention"] * 3, ["dense"] * 3
        self.layers = nn.ModuleList(MiMoV2FlashDecoderLayer(config, layer_idx=i) for i in range(3))
        for layer in self.layers:
            layer.eh_proj = nn.Linear(2 * d, d, bias=False)
            for name in ("enorm", "hnorm", "final_layernorm"):
                setattr(layer, name, MiMoV2FlashRMSNorm(d, eps))
        self.model = [model]

    def forward(self, j: int, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        (model,), layer, at = self.model, self.layers[j], torch.arange(hidden.shape[1])[None]
        embedded = layer.enorm(model.model.embed_tokens(tokens[None]))
        x = layer.eh_proj(torch.cat([embedded, layer.hnorm(hidden)], dim=-1))
        named = dict(config=model.config, inputs_embeds=x, attention_mask=None, past_key_values=None, position_ids=at)
        ropes = model.model.rotary_emb(x, at, "sliding_attention")
        mask = create_sliding_window_causal_mask(**named)
        return layer.final_layernorm(layer(x, attention_mask=mask, position_embeddings=ropes))


def chain(model: MiMoV2FlashForCausalLM, mtp: Mtp, ids: torch.Tensor) -> tuple[int, list[int], list[np.ndarray]]:
    """The target's next token, and drafts after it."""
    hidden = model.model(ids[None], use_cache=False).last_hidden_state
    following = int(model.lm_head(hidden)[0, -1].argmax())
    tokens, drafts, logits = [*ids[1:].tolist(), following], [], []
    for j in range(make_hybrid.DRAFTS):
        logits.append(model.lm_head(mtp(j, hidden, torch.tensor(tokens[j:])))[0, -1].numpy())
        drafts.append(int(logits[-1].argmax()))
        tokens.append(drafts[-1])
    return following, drafts, logits


def named(state: dict[str, torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors under Xiaomi's names, experts one by one."""
    tensors = {}
    for name, tensor in state.items():
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs) if prefix or ours.startswith("attn") else name
        tensors[prefix + name] = tensor
    return make_hybrid.one_by_one(tensors)


def main() -> None:
    folder = make_hybrid.HERE / "mimo_v2_flash"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    config = MiMoV2FlashConfig(**CONFIG)
    config._attn_implementation = config._experts_implementation = "eager"
    model = MiMoV2FlashForCausalLM(config).float().eval()
    mtp = Mtp(model).float().eval()
    for each in (model, mtp):
        make_hybrid.randomise(each, False, plain=True)
    saved = {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}
    saved |= {"eos_token_id": 1, "architectures": ["MiMoV2FlashForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(saved, indent=1))
    tensors = named(model.state_dict()) | named(mtp.state_dict(), "model.mtp.")
    tensors = {name: tensor.bfloat16().contiguous().clone() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    make_hybrid.chain = chain
    with torch.no_grad():
        made = make_hybrid.expected(model, mtp)
    np.savez_compressed(make_hybrid.HERE / "mimo_v2_flash.npz", **made)
    print(f"logits spread {made['logits'].std():.2f}, drafts {made['drafts'].tolist()}")


if __name__ == "__main__":
    main()
