"""Make the Kimi Linear models of tests/golden/hybrid, in the files that make_hybrid.py describes, without chains.

    torch-venv/bin/python tests/golden/make_kimi_linear.py

They have Moonshot's names and config, with experts in groups, and with heads of linear attention and of latent
attention whose numbers differ. The family has no MTP module.
"""

from __future__ import annotations

import json
import shutil
import sys

import numpy as np
import torch
from make_hybrid import GREEDY, HERE, LENGTH, PROMPTS, VOCAB
from safetensors.torch import save_file
from transformers import KimiLinearConfig, KimiLinearForCausalLM

SIZES = dict(
    model_type="kimi_linear",
    architectures=["KimiLinearForCausalLM"],
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=72,  # which nothing has
    kv_lora_rank=16,
    q_lora_rank=None,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    mla_use_nope=True,
    rope_theta=10000.0,
    model_max_length=1024,
    linear_attn_config=dict(
        full_attn_layers=[2, 4], kda_layers=[1, 3], head_dim=16, num_heads=3, short_conv_kernel_size=4
    ),
    moe_intermediate_size=16,
    num_experts=8,
    num_experts_per_token=3,
    num_shared_experts=2,
    num_expert_group=2,
    topk_group=1,
    moe_renormalize=True,
    moe_router_activation_func="sigmoid",
    first_k_dense_replace=1,
    routed_scaling_factor=1.5,
    rms_norm_eps=0.01,  # large enough that leaving it out, or using another, shows
    num_nextn_predict_layers=0,
    tie_word_embeddings=False,
    hidden_act="silu",
    eos_token_id=1,
    pad_token_id=0,
)
VARIANTS = {
    "kimi_linear": {},
    "kimi_linear-one-group": dict(num_expert_group=1, moe_renormalize=False, num_shared_experts=1, q_lora_rank=20),
}


def randomise(model: torch.nn.Module) -> None:
    """Draw every parameter, to what bfloat16 holds: decays from nearly none to within a few tokens."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if name.endswith(("A_log", "dt_bias")):
                noise = noise - 1.5
            elif parameter.ndim == 1:
                noise = 1 + 0.3 * noise
            elif "embed_tokens" not in name:
                noise = noise * parameter.shape[-1] ** -0.5
            parameter.copy_(noise.bfloat16())
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_((0.3 * torch.randn(buffer.shape)).bfloat16())


def published(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors under Moonshot's names, experts one by one."""
    tensors = {}
    for name, tensor in state.items():
        name = name.replace("forget_gate.", "")
        if any(part in name for part in (".mlp.gate.", ".mlp.experts.", ".mlp.shared_experts.")):
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if name.endswith("conv1d.weight"):
            stem = name.removesuffix("conv1d.weight")
            tensors |= {f"{stem}{x}_conv1d.weight": part for x, part in zip("qkv", tensor.chunk(3), strict=True)}
        elif name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            for e, both in enumerate(tensor):
                gate, up = both.chunk(2)
                tensors |= {f"{stem}{e}.w1.weight": gate, f"{stem}{e}.w3.weight": up}
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            tensors |= {f"{stem}{e}.w2.weight": matrix for e, matrix in enumerate(tensor)}
        else:
            tensors[name] = tensor
    return tensors


def expected(model: KimiLinearForCausalLM) -> dict[str, np.ndarray]:
    ids = torch.randint(0, VOCAB, (LENGTH,))
    greedy = []
    for n in PROMPTS:
        text = ids[:n].tolist()
        for _ in range(GREEDY):
            text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        greedy.append(text[n:])
    logits = model(ids[None], use_cache=False).logits[0].numpy()
    return {"ids": ids.int().numpy(), "logits": logits, "greedy": np.array(greedy, np.int32)}


def main() -> None:
    for seed, (name, more) in enumerate(VARIANTS.items()):
        if name not in (sys.argv[1:] or VARIANTS):
            continue
        shutil.rmtree(HERE / name, ignore_errors=True)
        torch.manual_seed(seed)
        saved = SIZES | more
        config = KimiLinearConfig(**{k: v for k, v in saved.items() if k not in ("model_type", "architectures")})
        config._attn_implementation = "eager"
        model = KimiLinearForCausalLM(config).float().eval()
        randomise(model)
        (HERE / name).mkdir(parents=True)
        (HERE / name / "config.json").write_text(json.dumps(saved, indent=1))
        exact = ("A_log", "dt_bias", "e_score_correction_bias")
        tensors = {
            k: (v if k.endswith(exact) else v.bfloat16()).contiguous().clone()
            for k, v in published(model.state_dict()).items()
        }
        save_file(tensors, HERE / name / "model.safetensors", metadata={"format": "pt"})
        with torch.no_grad():
            np.savez_compressed(HERE / f"{name}.npz", **expected(model))
        print(name, "done")


if __name__ == "__main__":
    main()
