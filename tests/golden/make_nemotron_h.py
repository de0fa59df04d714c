"""Make the Nemotron-H models of tests/golden/hybrid, in the files that make_hybrid.py describes.

    torch-venv/bin/python tests/golden/make_nemotron_h.py

`nemotron_h` has every kind of layer, and experts one by one; `nemotron_h-latent` has experts of a projection, stacked.
transformers has no class of their MTP module. Here it is two blocks of the model, attention and experts, as NVIDIA's
checkpoints name them: `mtp.layers.0` begins with the norms and `eh_proj`, `mtp.layers.1` ends with a norm.
"""

from __future__ import annotations

import copy
import json
import shutil

import numpy as np
import torch
from make_hybrid import HERE, VOCAB, expected
from safetensors.torch import save_file
from torch import nn
from transformers import NemotronHConfig, NemotronHForCausalLM
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock, NemotronHRMSNorm

SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=1024,
    mamba_num_heads=8,
    mamba_head_dim=8,
    n_groups=4,
    ssm_state_size=16,
    conv_kernel=4,
    chunk_size=16,
    intermediate_size=40,
    moe_intermediate_size=16,
    moe_shared_expert_intermediate_size=24,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_group=2,
    topk_group=1,
    routed_scaling_factor=1.5,
    layer_norm_epsilon=0.01,  # large enough that leaving it out, or using another, shows
    time_step_min=1e-30,  # transformers' prompts have no steps below it, and its decoding has
    dtype="float32",
)
VARIANTS = {
    "nemotron_h": ("MEM*-ME", {}),
    "nemotron_h-latent": ("M*EM", dict(moe_latent_size=24, use_bias=True, mlp_bias=False, use_conv_bias=False)),
}


class Mtp(nn.Module):
    def __init__(self, model: NemotronHForCausalLM):
        super().__init__()
        config = copy.deepcopy(model.config)
        config.layers_block_type = ["full_attention", "moe"]
        config._attn_implementation = "sdpa"  # causal without a mask
        d, eps = config.hidden_size, config.layer_norm_epsilon
        self.layers = nn.ModuleList(NemotronHBlock(config, layer_idx=i) for i in range(2))
        for name in ("enorm", "hnorm"):
            setattr(self.layers[0], name, NemotronHRMSNorm(d, eps))
        self.layers[0].eh_proj = nn.Linear(2 * d, d, bias=False)
        self.layers[1].final_layernorm = NemotronHRMSNorm(d, eps)
        self.embed = [model.get_input_embeddings()]

    def forward_layer(self, _, hidden, positions, cache, input_ids):
        first, last = self.layers
        pair = torch.cat([first.enorm(self.embed[0](input_ids)), first.hnorm(hidden)], dim=-1)
        return last.final_layernorm(last(first(first.eh_proj(pair))))


def randomise(module: nn.Module) -> None:
    """Draw every parameter, to what bfloat16 holds: decays from nearly none to within a few tokens."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape)
            if name.endswith(("A_log", "dt_bias")):
                noise = noise - 1.5
            elif parameter.ndim == 1:
                noise = 0.3 * noise + (0.0 if name.endswith("bias") else 1.0)
            elif "embed" not in name:
                noise = noise * parameter.shape[-1] ** -0.5
            parameter.copy_(noise.bfloat16())
        for name, buffer in module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_((0.3 * torch.randn(buffer.shape)).bfloat16())


def one_by_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    split = {}
    for name, tensor in tensors.items():
        if name.endswith(("experts.up_proj", "experts.down_proj")):
            stem, part = name.rsplit(".", 1)
            split |= {f"{stem}.{e}.{part}.weight": matrix for e, matrix in enumerate(tensor)}
        else:
            split[name] = tensor
    return split


def main() -> None:
    for seed, (name, (pattern, more)) in enumerate(VARIANTS.items()):
        shutil.rmtree(HERE / name, ignore_errors=True)
        torch.manual_seed(seed)
        config = NemotronHConfig(hybrid_override_pattern=pattern, **SIZES, **more)
        config._attn_implementation = "eager"
        model = NemotronHForCausalLM(config).float().eval()
        mtp = Mtp(model).float().eval()
        randomise(model)
        randomise(mtp)
        body = {k.replace("model.", "backbone.", 1): v for k, v in model.state_dict().items()}
        body = body if more else one_by_one(body)
        module = one_by_one({f"mtp.{k}": v for k, v in mtp.state_dict().items()})
        saved = {k: v for k, v in config.to_dict().items() if k not in ("layers_block_type", "_name_or_path")}
        saved |= {"hybrid_override_pattern": pattern, "num_nextn_predict_layers": 1, "eos_token_id": 1}
        saved |= {"mtp_hybrid_override_pattern": "*E", "architectures": ["NemotronHForCausalLM"]}
        (HERE / name).mkdir(parents=True)
        (HERE / name / "config.json").write_text(json.dumps(saved, indent=1))
        exact = ("A_log", "dt_bias", ".D", "e_score_correction_bias")
        tensors = {
            k: (v if k.endswith(exact) else v.bfloat16()).contiguous().clone() for k, v in (body | module).items()
        }
        save_file(tensors, HERE / name / "model.safetensors", metadata={"format": "pt"})
        with torch.no_grad():
            np.savez_compressed(HERE / f"{name}.npz", **expected(model, mtp))
        print(name, "done")


if __name__ == "__main__":
    main()
