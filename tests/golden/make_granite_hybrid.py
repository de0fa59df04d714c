"""Make the Granite 4 models of tests/golden/hybrid, in the files that make_hybrid.py describes, without an MTP module.

    torch-venv/bin/python tests/golden/make_granite_hybrid.py

`granitemoehybrid` has experts; `granitemoehybrid-dense` has MLPs, and attention that rotates.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import torch
from make_hybrid import HERE, VOCAB
from make_kimi_linear import expected
from make_nemotron_h import randomise
from safetensors.torch import save_file
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=24,
    shared_intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    num_local_experts=8,
    num_experts_per_tok=3,
    mamba_n_heads=8,
    mamba_d_head=8,
    mamba_d_state=16,
    mamba_chunk_size=16,
    embedding_multiplier=3.0,
    attention_multiplier=0.4,
    residual_multiplier=0.7,
    logits_scaling=0.5,
    rms_norm_eps=0.01,  # large enough that leaving it out, or using another, shows
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    bos_token_id=0,
    eos_token_id=1,
    dtype="float32",
)
DENSE = dict(
    num_local_experts=0, position_embedding_type="rope", mamba_proj_bias=True, mamba_conv_bias=False,
    attention_bias=True, tie_word_embeddings=True,
)  # fmt: skip
VARIANTS = {"granitemoehybrid": {}, "granitemoehybrid-dense": DENSE}
PUBLISHED = {"experts.gate_up_proj": "input_linear.weight", "experts.down_proj": "output_linear.weight"}
PUBLISHED |= {"moe.router.weight": "moe.router.layer.weight"}


def main() -> None:
    for seed, (name, more) in enumerate(VARIANTS.items()):
        shutil.rmtree(HERE / name, ignore_errors=True)
        torch.manual_seed(seed)
        config = GraniteMoeHybridConfig(**SIZES | more)
        config._attn_implementation = config._experts_implementation = "eager"
        model = GraniteMoeHybridForCausalLM(config).float().eval()
        randomise(model)
        config.save_pretrained(HERE / name)
        tensors = {}
        for key, tensor in model.state_dict().items():
            if key == "lm_head.weight" and config.tie_word_embeddings:
                continue
            for ours, theirs in PUBLISHED.items():
                key = key.replace(ours, theirs)
            exact = key.endswith(("A_log", "dt_bias", ".D"))
            tensors[key] = (tensor if exact else tensor.bfloat16()).contiguous().clone()
        save_file(tensors, HERE / name / "model.safetensors", metadata={"format": "pt"})
        with torch.no_grad():
            np.savez_compressed(HERE / f"{name}.npz", **expected(model))
        print(name, json.dumps(config.layer_types))


if __name__ == "__main__":
    main()
