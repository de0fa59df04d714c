"""Make mixtures with an MTP module that transformers has no class for, in the files that make_hybrid.py describes.

    torch-venv/bin/python tests/golden/make_mtp.py [NAME ...]

A module pairs the model's final hidden state, after its last norm, with the token that follows: norms of both, one
projection (the embedding's half first), a layer, a norm. The layer is transformers' own of the family. Published code
says what differs:

- `hy_v3`: experts; a layer behind the last, with `final_layernorm` (vLLM's `hy_v3_mtp.py`, SGLang's
  `hunyuan_v3_nextn.py`).
- `bailing_moe`: the same with other names (inclusionAI's `modeling_bailing_moe_v2.py`, SGLang's
  `bailing_moe_nextn.py`). The model is GLM-4.5's class.
- `exaone_moe`: a dense MLP, and attention to all of the text, without rotation; Qwen's names (vLLM's
  `exaone_moe_mtp.py`, Megatron Bridge's `exaone_moe_bridge.py`).
- `ernie4_5_moe`: a dense MLP, and the model's own last norm (Baidu's FastDeploy, `ernie4_5_mtp.py`).
"""

from __future__ import annotations

import copy
import json
import shutil
import sys

import make_hybrid
import numpy as np
import torch
from make_qwen3_moe import BAILING, LAYOUTS
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5_MoeConfig,
    ExaoneMoeConfig,
    Glm4MoeConfig,
    HYV3Config,
    PreTrainedModel,
)

SIZES = dict(
    vocab_size=make_hybrid.VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, moe_intermediate_size=16, rms_norm_eps=0.01, max_position_embeddings=1024,
    dtype="float32", rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
)  # fmt: skip
ROUTED = dict(num_experts_per_tok=3, first_k_dense_replace=1)
# name: (config, what the module's config has differently, its layer's number, a file's names of it)
BEHIND = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "final_layernorm", "layer.": ""}
BEHIND = {ours: f"model.layers.{SIZES['num_hidden_layers']}.{theirs}" for ours, theirs in BEHIND.items()}
VARIANTS = {
    "hy_v3": (HYV3Config(**SIZES, **ROUTED, num_experts=8, num_shared_experts=2), {}, 2, BEHIND),
    "bailing_moe": (
        Glm4MoeConfig(
            **{**SIZES, "rope_parameters": {**SIZES["rope_parameters"], "partial_rotary_factor": 0.5}}, **ROUTED,
            n_routed_experts=8, n_shared_experts=1, n_group=4, topk_group=2, use_qk_norm=True, num_mtp_layers=0,
            routed_scaling_factor=1.5,
        ),
        {}, 2, BEHIND,
    ),
    "exaone_moe": (
        ExaoneMoeConfig(
            **SIZES, **ROUTED, num_experts=8, num_shared_experts=1, sliding_window=21,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        ),
        {"layer_types": ["full_attention"], "mlp_layer_types": ["dense"]}, 0,
        {
            "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "eh_proj": "mtp.fc",
            "post_norm": "mtp.norm", "layer.": "mtp.layers.0.",
        },
    ),
    "ernie4_5_moe": (
        Ernie4_5_MoeConfig(**SIZES, moe_num_experts=8, moe_k=3, tie_word_embeddings=True), {}, 0,
        {
            "enorm": "model.mtp_emb_norm.0", "hnorm": "model.mtp_hidden_norm.0", "eh_proj": "model.mtp_linear_proj.0",
            "layer.": "model.mtp_block.0.",
        },
    ),
}  # fmt: skip
NAMES = {"hy_v3": "hy_v3", "bailing_moe": "bailing", "exaone_moe": "exaone", "ernie4_5_moe": "ernie"}


class Mtp(nn.Module):
    """A module of a model, whose layer has a config of its own. `own_norm`: behind the layer, or the model's is."""

    def __init__(self, model: PreTrainedModel, changes: dict, number: int, own_norm: bool):
        super().__init__()
        config, d = copy.deepcopy(model.config), model.config.hidden_size
        for key, value in changes.items():
            setattr(config, key, value)
        config._attn_implementation = config._experts_implementation = "eager"
        norm = lambda: type(model.model.norm)(d, model.config.rms_norm_eps)  # noqa: E731
        self.enorm, self.hnorm, self.eh_proj = norm(), norm(), nn.Linear(2 * d, d, bias=False)
        self.layer = type(model.model.layers[0])(config, number)
        if own_norm:
            self.post_norm = norm()
        self.model = [model.model]  # not its own

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The normed outputs [1, t, d], of the model's hidden states and the tokens after them."""
        (model,), t = self.model, hidden.shape[1]
        x = self.eh_proj(torch.cat([self.enorm(model.embed_tokens(tokens[None])), self.hnorm(hidden)], dim=-1))
        ropes, mask = model.rotary_emb(x, torch.arange(t)[None]), torch.full((t, t), float("-inf")).triu(1)
        out = self.layer(x, attention_mask=mask[None, None], position_embeddings=ropes)
        return getattr(self, "post_norm", model.norm)(out)


def chain(model: PreTrainedModel, mtp: Mtp, ids: torch.Tensor) -> tuple[int, list[int], list[np.ndarray]]:
    """The target's next token, and drafts after it: the one module fed with its own output from then on."""
    hidden = model.model(ids[None], use_cache=False).last_hidden_state
    following = int(model.lm_head(hidden)[0, -1].argmax())
    tokens, drafts, logits = [*ids[1:].tolist(), following], [], []
    for _ in range(make_hybrid.DRAFTS):
        out = mtp(hidden, torch.tensor(tokens))
        logits.append(model.lm_head(out)[0, -1].numpy())
        drafts.append(int(logits[-1].argmax()))
        tokens.append(drafts[-1])
        hidden = torch.cat([hidden, out[:, -1:]], dim=1)
    return following, drafts, logits


def published(state: dict[str, torch.Tensor], layout: str) -> dict[str, torch.Tensor]:
    """The tensors under the publisher's names, experts one by one."""
    tensors = make_hybrid.one_by_one(state)
    for name in [name for name in tensors if layout == "bailing" and name.endswith("q_proj.weight")]:
        parts = [tensors.pop(name.replace("q_proj", each)) for each in ("q_proj", "k_proj", "v_proj")]
        tensors[name.replace("self_attn.q_proj", "attention.query_key_value")] = torch.cat(parts)
    for ours, theirs in LAYOUTS[layout].items():
        tensors = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
    return tensors


def saved_config(model: PreTrainedModel, name: str) -> dict:
    saved = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
    saved |= {"architectures": [type(model).__name__], "num_nextn_predict_layers": 1, "eos_token_id": 1}
    if name == "bailing_moe":
        saved = {key: value for key, value in saved.items() if key not in ("n_routed_experts", "n_shared_experts")}
        saved |= BAILING | {"num_experts": model.config.n_routed_experts}
    return saved


def randomise(module: nn.Module, tied: bool) -> None:
    make_hybrid.randomise(module, tied, plain=True)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("e_score_correction_bias"):  # of whose softmax scores one in eight is the mean
                parameter.copy_((0.1 * torch.randn(parameter.shape)).bfloat16())


def main() -> None:
    for seed, (name, (config, changes, number, names)) in enumerate(VARIANTS.items()):
        if name not in (sys.argv[1:] or VARIANTS):
            continue
        folder, tied = make_hybrid.HERE / name, config.tie_word_embeddings
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        torch.manual_seed(seed)
        config._attn_implementation = config._experts_implementation = "eager"
        model = AutoModelForCausalLM.from_config(config).float().eval()
        mtp = Mtp(model, changes, number, "post_norm" in names).float().eval()
        for each in (model, mtp):
            randomise(each, tied)
        (folder / "config.json").write_text(json.dumps(saved_config(model, name), indent=1))
        body = {key: tensor for key, tensor in model.state_dict().items() if not (tied and key == "lm_head.weight")}
        for key, tensor in mtp.state_dict().items():
            ours = next(ours for ours in names if key.startswith(ours))
            body[names[ours] + key.removeprefix(ours)] = tensor
        tensors = {key: tensor.bfloat16().contiguous().clone() for key, tensor in published(body, NAMES[name]).items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        make_hybrid.chain = chain
        with torch.no_grad():
            made = make_hybrid.expected(model, mtp)
        np.savez_compressed(make_hybrid.HERE / f"{name}.npz", **made)
        print(name, f"logits spread {made['logits'].std():.2f}, drafts {made['drafts'].tolist()}")


if __name__ == "__main__":
    main()
