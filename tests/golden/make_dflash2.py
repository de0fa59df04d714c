"""Make tests/golden/dflash2 and tests/golden/expected/dflash2-*.safetensors: what the `dflash` package drafts.

Its second generation, that is: see make_dflash.py for the first.

Needs PyTorch (see make_llama_qwen3.py), tests/golden/dflash/target and the package (see make_dflash.py):

    torch-venv/bin/python tests/golden/make_dflash2.py

`dflash2/VARIANT` are checkpoints in float32. `expected/dflash2-VARIANT.safetensors` holds, for each prompt length T in
LENGTHS: `ids_T` i32[T + 1], a prompt and the target's next token; of the block behind it `tokens_T` i32[n], the row's
`candidates_T` i32[n, k] and their `scores_T` f32[n, k], of which the highest is drafted.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import dflash.model as package
import torch
from drawn import randomise
from make_dspark import LENGTHS, features, target_and_texts
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

HERE = Path(__file__).resolve().parent
BACKBONE = dict(
    architectures=["DFlash2DraftModel"],
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_target_layers=6,
    max_position_embeddings=512,
    use_sliding_window=True,
    dtype="float32",
)
VARIANTS = {
    # as the public ones are: every layer slides and sees both ways
    "sliding": dict(
        num_hidden_layers=2,
        layer_types=["sliding_attention"] * 2,
        sliding_window=9,
        is_causal=False,
        dflash_config=dict(
            block_size=6,
            conv_kernel_size=2,
            conv_group_size=8,
            selector_rank=6,
            selector_top_k=5,
            mask_token_id=39,
            target_layer_ids=[1, 4],
            output_multiplier=0.7,
            final_logit_softcapping=4.0,
            input_embedding_scale=1.7,
        ),
    ),
    # layers of both kinds, the sliding one causal and narrower than a block; more taps; keys at the top level
    "causal": dict(
        num_hidden_layers=2,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=4,
        block_size=7,
        conv_kernel_size=3,
        conv_group_size=16,
        selector_rank=4,
        selector_top_k=8,
        mask_token_id=38,
        target_layer_ids=[3],
    ),
}


def draft(drafter: package.DFlash2DraftModel, context: torch.Tensor, text: torch.Tensor, target) -> dict:
    """One block. Sampling is made to take the likeliest, since the scores of greedy drafts aren't kept."""
    scores, size = [], drafter.block_size
    block = torch.full((1, size), drafter.mask_token_id)
    block[0, 0] = text[-1]
    scale = float(package._draft_value(drafter.config, "input_embedding_scale", 1.0))
    embedded = package._raw_input_embeddings(target, block, scale)
    positions = torch.arange(len(text) - 1 + size)[None]
    hidden = drafter(positions, noise_embedding=embedded, target_hidden=context)[:, 1:]
    original = package._sampling_probs

    def recorded(values, temperature):
        scores.append(values[0, 0])
        return original(values, temperature)

    package._sampling_probs, package._sample_probs = recorded, lambda q: q.argmax(-1)
    tokens, candidates, _ = drafter.propose(hidden, text[-1:], target.lm_head, 1.0)
    package._sampling_probs = original
    greedy, _, _ = drafter.propose(hidden, text[-1:], target.lm_head, 0.0)
    assert greedy.tolist() == tokens.tolist()
    alone = drafter.compute_logits(hidden, target.lm_head).argmax(-1)
    print(f"the selector changed {int((alone != tokens).sum())} drafts of {tokens.shape[1]}")
    return {"tokens": tokens[0], "candidates": candidates[0], "scores": torch.stack(scores)}


@torch.no_grad()
def main() -> None:
    shutil.rmtree(HERE / "dflash2", ignore_errors=True)
    torch.manual_seed(1)
    target, texts = target_and_texts()
    for name, settings in VARIANTS.items():
        drafter = package.DFlash2DraftModel(Qwen3Config(**BACKBONE, **settings)).float().eval()
        randomise(drafter)
        with torch.no_grad():
            for layer in drafter.layers:
                for conv in (layer.attention_conv, layer.mlp_conv):
                    conv.base_kernel.copy_(torch.randn(conv.base_kernel.shape) * 0.5)
            for book in ("predecessor_codebook", "successor_codebook"):
                weight = getattr(drafter.candidate_selector, book).weight
                weight.copy_(torch.randn(weight.shape))
        folder = HERE / "dflash2" / name
        drafter.save_pretrained(folder)
        if name == "sliding":  # public files name the codebooks without `.weight`, the package saves them with it
            path = folder / "model.safetensors"
            tensors = {key.replace("codebook.weight", "codebook"): tensor for key, tensor in load_file(path).items()}
            save_file(tensors, path, metadata={"format": "pt"})
        layers = package._draft_value(drafter.config, "target_layer_ids")
        tensors = {}
        for length in LENGTHS:
            text = texts[length]
            made = draft(drafter, features(target, text, [i + 1 for i in layers]), text, target)
            tensors[f"ids_{length}"] = text.to(torch.int32)
            for key, value in made.items():
                dtype = torch.float32 if key == "scores" else torch.int32
                tensors[f"{key}_{length}"] = value.to(dtype).contiguous()
        save_file(tensors, HERE / "expected" / f"dflash2-{name}.safetensors")


if __name__ == "__main__":
    main()
