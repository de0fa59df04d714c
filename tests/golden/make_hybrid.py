"""Make tests/golden/hybrid: tiny models with an MTP module in each public layout, and what transformers computes.

Needs PyTorch, which jaxspec and its tests do not. Make an environment for it once, then run this from anywhere:

    python3.12 -m venv torch-venv
    torch-venv/bin/pip install torch transformers==5.23.0 safetensors
    torch-venv/bin/python tests/golden/make_hybrid.py

`hybrid/NAME` is a Hugging Face folder; weights are in bfloat16 for their size, and computed with in float32. Layouts:
Qwen3-Next has experts one by one and interleaved projections; the Qwen3.5s have their text model below
`model.language_model` beside a vision tower (a stand-in of one tensor), or alone; Qwen3.5-MoE's experts are fused in
the body and one by one in the MTP module, or the other way round. Each has an MTP module; GLM-4.5's and DeepSeek-V3's
are one layer more of the model, with copies of its embedding and head.

`hybrid/NAME.npz` holds `ids` i32[150]; `logits` f32[150, v], those after each of them (every shorter prompt's are the
same); `greedy` i32[len(PROMPTS), 48], how `ids[:n]` goes on, for each n in PROMPTS; and of the MTP module, run as one
chain after `ids[:n]` and the target's next token, `next` i32[CHAINS], `drafts` i32[CHAINS, 3], `draft_logits`
f32[CHAINS, 3, v].
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.modeling_layers import MtpModel

HERE = Path(__file__).resolve().parent / "hybrid"
LENGTH, PROMPTS, GREEDY = 150, (1, 7, 33, 64), 48
CHAINS, DRAFTS = (1, 2, 7, 33, 150), 3
VOCAB = 64

SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,  # a quarter of it rotates
    max_position_embeddings=1024,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_conv_kernel_dim=4,
    rms_norm_eps=0.01,  # large enough that leaving it out, or using another, shows
    dtype="float32",
)
EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, shared_expert_intermediate_size=24)
ROPE = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25}
MROPE = {**ROPE, "mrope_section": [1, 1, 0], "mrope_interleaved": True}
# name: (class, config, its text model is part of a multimodal one, experts of the body and of MTP are fused)
VARIANTS = {
    "qwen3_next": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig(**SIZES, **EXPERTS, intermediate_size=40, num_hidden_layers=4, rope_parameters=ROPE),
        False, False, False,
    ),
    "qwen3_5-text-tied": (
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig(
            **SIZES, intermediate_size=40, num_hidden_layers=3, rope_parameters=MROPE, tie_word_embeddings=True,
            layer_types=["full_attention", "linear_attention", "full_attention"],
        ),
        False, False, False,
    ),
    "qwen3_5": (
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig(**SIZES, intermediate_size=40, num_hidden_layers=4, rope_parameters=MROPE),
        True, False, False,
    ),
    "qwen3_5_moe": (
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeTextConfig(**SIZES, **EXPERTS, num_hidden_layers=4, rope_parameters=MROPE),
        True, True, False,
    ),
    "qwen3_5_moe-text": (
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeTextConfig(
            **SIZES, **EXPERTS, num_hidden_layers=2, rope_parameters=MROPE,
            layer_types=["linear_attention", "full_attention"],
        ),
        False, False, True,
    ),
    "glm4_moe": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig(
            **{key: value for key, value in SIZES.items() if not key.startswith("linear")}, intermediate_size=40,
            num_hidden_layers=3, moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=3, n_group=2,
            topk_group=1, routed_scaling_factor=1.5, use_qk_norm=True,
            rope_parameters={**ROPE, "partial_rotary_factor": 0.5},
        ),
        False, False, False,
    ),
    "deepseek_v3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(
            **{key: value for key, value in SIZES.items() if not key.startswith(("linear", "head_dim", "num_key"))},
            num_key_value_heads=4, intermediate_size=40, num_hidden_layers=3, first_k_dense_replace=1,
            moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2,
            routed_scaling_factor=1.5, q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8,
            v_head_dim=10,
            rope_parameters={
                "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64,
                "mscale": 1.0, "mscale_all_dim": 1.0,
            },
        ),
        False, False, False,
    ),
}  # fmt: skip
LAYERS = Glm4MoeForCausalLM, DeepseekV3ForCausalLM  # whose MTP module is a layer, and whose norms aren't offsets
MTP_NAMES = {
    "layers.0.eh_proj.": "fc.",
    "layers.0.enorm.": "pre_fc_norm_embedding.",
    "layers.0.hnorm.": "pre_fc_norm_hidden.",
    "layers.0.post_norm.": "norm.",
    "layers.0.mtp_block.": "layers.0.",
}


def randomise(module: torch.nn.Module, tied: bool, plain: bool = False) -> None:
    """Draw every parameter, to what bfloat16 holds. A fresh model has norms at 0 or 1, where mistakes go unnoticed."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape)
            if name.endswith("linear_attn.norm.weight") or (plain and parameter.ndim == 1):
                noise = 1 + 0.3 * noise  # the norms whose weight isn't an offset from 1
            elif parameter.ndim == 1:  # other norms, A_log, dt_bias: decays from nearly none to within a few tokens
                noise = 0.3 * noise - (2.0 if name.endswith(("A_log", "dt_bias")) else 0.0)
            elif "embed_tokens" in name:
                noise = noise * (0.3 if tied else 1.0)
            else:
                noise = noise * parameter.shape[-1] ** -0.5
            parameter.copy_(noise.bfloat16())
        for name, buffer in module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_((0.3 * torch.randn(buffer.shape)).bfloat16())


def mtp_module(model: PreTrainedModel) -> MtpModel:
    model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    module = MtpModel(model, 1).float().eval()
    randomise(module.layers, False, plain=isinstance(model, LAYERS))
    return module


def expected(model: PreTrainedModel, mtp: MtpModel) -> dict[str, np.ndarray]:
    ids = torch.randint(0, VOCAB, (LENGTH,))
    hidden = model.model(ids[None], use_cache=False).last_hidden_state
    tensors = {"ids": ids.int().numpy(), "logits": model.lm_head(hidden)[0].numpy()}
    greedy = []
    for n in PROMPTS:
        text = ids[:n].tolist()
        for _ in range(GREEDY):
            text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        greedy.append(text[n:])
    tensors["greedy"] = np.array(greedy, np.int32)
    chains = [chain(model, mtp, ids[:n]) for n in CHAINS]
    names = zip(("next", "drafts", "draft_logits"), (np.int32, np.int32, np.float32), strict=True)
    for (name, dtype), values in zip(names, zip(*chains, strict=True), strict=True):
        tensors[name] = np.array(values, dtype)
    return tensors


def chain(model: PreTrainedModel, mtp: MtpModel, ids: torch.Tensor) -> tuple[int, list[int], list[np.ndarray]]:
    """The target's next token, and drafts after it: the one MTP layer fed with its own output from then on."""
    hidden = model.model(ids[None], use_cache=False).last_hidden_state
    following = int(model.lm_head(hidden)[0, -1].argmax())
    tokens, drafts, logits = [*ids[1:].tolist(), following], [], []
    for _ in range(DRAFTS):
        positions = torch.arange(1, len(tokens) + 1)[None]
        out = mtp.forward_layer(0, hidden, positions, None, input_ids=torch.tensor([tokens]))
        logits.append(model.lm_head(out)[0, -1].numpy())
        drafts.append(int(logits[-1].argmax()))
        tokens.append(drafts[-1])
        hidden = torch.cat([hidden, out[:, -1:]], dim=1)
    return following, drafts, logits


def as_a_layer(module: dict[str, torch.Tensor], prefix: str, body: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The module under DeepSeek's names, with copies of the model's embedding and head."""
    names = {
        ours: theirs.removeprefix("layers.0.").replace("post_norm", "shared_head.norm")
        for theirs, ours in MTP_NAMES.items()
    }
    names["layers.0."] = ""
    renamed = {}
    for key, tensor in module.items():
        ours = next(ours for ours in names if key.removeprefix("mtp.").startswith(ours))
        renamed[prefix + names[ours] + key.removeprefix("mtp." + ours)] = tensor
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    return renamed | {f"{prefix}{theirs}.weight": body[f"{ours}.weight"] for theirs, ours in copies.items()}


def one_by_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fused experts as older checkpoints have them: a tensor for each and each of its matrices."""
    split = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(tensor):
                for part, matrix in zip(("gate", "up"), both.chunk(2), strict=True):
                    split[name.replace("gate_up_proj", f"{e}.{part}_proj.weight")] = matrix
        elif name.endswith("experts.down_proj"):
            split |= {name.replace("down_proj", f"{e}.down_proj.weight"): matrix for e, matrix in enumerate(tensor)}
        else:
            split[name] = tensor
    return split


def save(name: str, model: PreTrainedModel, mtp: MtpModel, multimodal: bool, fused: bool, fused_mtp: bool) -> None:
    tied = model.config.tie_word_embeddings
    body = {k: v for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}
    module = {}
    for key, tensor in mtp.state_dict().items():
        for ours, theirs in MTP_NAMES.items():
            if key.startswith(ours):
                module["mtp." + theirs + key.removeprefix(ours)] = tensor
    if isinstance(model, LAYERS):
        module = as_a_layer(module, f"model.layers.{model.config.num_hidden_layers}.", body)
    config = {**model.config.to_dict(), "mtp_num_hidden_layers": 1, "eos_token_id": 1}
    for key in ("num_mtp_layers", "mtp_layer_types", "_name_or_path"):
        config.pop(key, None)
    config["architectures"] = [type(model).__name__]
    body, module = (x if keep else one_by_one(x) for x, keep in ((body, fused), (module, fused_mtp)))
    if multimodal:
        body = {k.replace("model.", "model.language_model.", 1): v for k, v in body.items()}
        body["model.visual.patch_embed.proj.weight"] = torch.zeros(4, 3)
        kind = config["model_type"].removesuffix("_text")
        config = {
            "architectures": [type(model).__name__.replace("CausalLM", "ConditionalGeneration")],
            "model_type": kind,
            "text_config": config,
            "vision_config": {"model_type": kind},
            "tie_word_embeddings": tied,
        }
    folder = HERE / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = {k: v.bfloat16().contiguous().clone() for k, v in (body | module).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    for seed, (name, (kind, config, multimodal, fused, fused_mtp)) in enumerate(VARIANTS.items()):
        if name not in (sys.argv[1:] or VARIANTS):
            continue
        shutil.rmtree(HERE / name, ignore_errors=True)
        torch.manual_seed(seed)
        config._attn_implementation = "eager"
        model = kind(config).float().eval()
        randomise(model, config.tie_word_embeddings, plain=kind in LAYERS)
        mtp = mtp_module(model)
        save(name, model, mtp, multimodal, fused, fused_mtp)
        with torch.no_grad():
            tensors = expected(model, mtp)
        np.savez_compressed(HERE / f"{name}.npz", **tensors)
        print(name, f"logits spread {tensors['logits'].std():.2f}, drafts {tensors['drafts'].tolist()}")


if __name__ == "__main__":
    main()
