"""Make tests/golden/dflash and tests/golden/expected/dflash-*.safetensors: what the `dflash` package drafts, and when.

Needs PyTorch (see make_llama_qwen3.py) and the package, whose own generation loop is run with tiny random models:

    torch-venv/bin/pip install --no-deps dflash==0.1.0
    torch-venv/bin/python tests/golden/make_dflash.py

`dflash/target` and `dflash/VARIANT` are checkpoints in float32. `expected/dflash-VARIANT.safetensors` holds, for each
prompt length T in LENGTHS: `ids_T` i32[T]; of the first ROUNDS rounds of greedy generation the drafter's `logits_T`
f32[ROUNDS, n, v] and `yielded_T` i32[ROUNDS], the tokens that stood, the target's own included; `output_T`, all of them
behind the prompt's first; and `fewer_T` f32[FEWER, v], the first round's logits in blocks of that many masks only.

A random drafter never guesses what a random target says. So that rounds yield more than a token, the first `help(p, B)`
drafts of a round whose newest token stands at position p are replaced with the right ones, B being the block size.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import dflash.model as package
import torch
from drawn import randomise
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent
LENGTHS = (1, 2, 7, 16, 17, 33, 64, 150)
ROUNDS = 5
FEWER = 3

SIZES = dict(
    vocab_size=40,
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    dtype="float32",
)
TARGET = Qwen3Config(**SIZES, num_hidden_layers=6, intermediate_size=32, head_dim=8, tie_word_embeddings=False)
DRAFT = dict(**SIZES, num_target_layers=6, intermediate_size=48, architectures=["DFlashDraftModel"])
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
VARIANTS = {
    # the layout of the public ones, with layer ids in an order of their own
    "full": dict(
        num_hidden_layers=2, head_dim=16, dflash_config={"mask_token_id": 39, "target_layer_ids": [4, 0]}, block_size=8
    ),
    # sliding layers, causal by default; the default layers, of which there are three; biases
    "sliding": dict(
        num_hidden_layers=3,
        head_dim=12,
        attention_bias=True,
        rms_norm_eps=0.02,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        use_sliding_window=True,
        sliding_window=9,
        dflash_config={"mask_token_id": 38, "block_size": 5},
    ),
    # a window that looks both ways and is shorter than a block; scaled positions; one layer
    "window": dict(
        num_hidden_layers=1,
        head_dim=8,
        rope_parameters=LLAMA3,
        layer_types=["sliding_attention"],
        use_sliding_window=True,
        sliding_window=3,
        is_causal=False,
        dflash_config={"mask_token_id": 37, "block_size": 6},
    ),
}


def help(position: int, block_size: int) -> int:
    return position * 37 // 8 % block_size


class Record:
    """Stands between a drafter and the package's loop: keeps the logits of each round, and helps its drafts."""

    def __init__(self, drafter: torch.nn.Module):
        self.drafter, self.logits, self.text, self.end = drafter, [], None, 0
        drafter.register_forward_pre_hook(self.see, with_kwargs=True)
        drafter.compute_logits = self.compute_logits

    def see(self, module, args, kwargs):
        self.end = kwargs["position_ids"][0, -1].item() + 1

    def compute_logits(self, hidden, head):
        logits = type(self.drafter).compute_logits(self.drafter, hidden, head)
        self.logits.append(logits)
        helped, start = logits.clone(), self.end - logits.shape[1]
        for i in range(min(help(start - 1, self.drafter.block_size), logits.shape[1])):
            helped[0, i, self.text[start + i]] = 1e4
        return helped


def expected(drafter: torch.nn.Module, target: torch.nn.Module) -> dict[str, torch.Tensor]:
    record = Record(drafter)
    package._cuda_time = time.perf_counter  # the package times itself, on a GPU
    ids = torch.randint(0, 37, (max(LENGTHS),))
    tensors = {}
    for length in LENGTHS:
        new_tokens = (ROUNDS + 1) * drafter.block_size
        record.text = target.generate(ids[None, :length], max_new_tokens=new_tokens, do_sample=False)[0].tolist()
        record.logits.clear()
        out = package.dflash_generate(drafter, target, ids[None, :length], new_tokens, None, return_stats=True)
        yielded = out.acceptance_lengths[:ROUNDS]
        tensors[f"ids_{length}"] = ids[:length].to(torch.int32).clone()
        tensors[f"logits_{length}"] = torch.cat(record.logits[:ROUNDS])
        tensors[f"yielded_{length}"] = torch.tensor(yielded, dtype=torch.int32)
        tensors[f"output_{length}"] = out.output_ids[0, length : length + 1 + sum(yielded)].to(torch.int32).clone()
        assert out.output_ids[0].tolist() == record.text
        record.logits.clear()
        package.dflash_generate(drafter, target, ids[None, :length], FEWER + 2, None, block_size=FEWER + 1)
        tensors[f"fewer_{length}"] = record.logits[0][0].clone()
        print(length, yielded)
    return tensors


def save(model: torch.nn.Module, folder: Path) -> None:
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def main() -> None:
    shutil.rmtree(HERE / "dflash", ignore_errors=True)
    torch.manual_seed(0)
    TARGET._attn_implementation = "eager"
    target = Qwen3ForCausalLM(TARGET).float().eval()
    randomise(target)
    save(target, HERE / "dflash" / "target")
    for name, settings in VARIANTS.items():
        drafter = package.DFlashDraftModel(Qwen3Config(**DRAFT, **settings)).float().eval()
        randomise(drafter)
        save(drafter, HERE / "dflash" / name)
        tensors = expected(drafter, target)
        save_file(tensors, HERE / "expected" / f"dflash-{name}.safetensors")
        config = json.loads((HERE / "dflash" / name / "config.json").read_text())
        print(name, f"logits spread {tensors['logits_150'].std():.2f}", config)


if __name__ == "__main__":
    main()
