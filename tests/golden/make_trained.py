"""Make tests/golden/trained: drafters that our trainer wrote, and what other people's code makes of them.

    python tests/golden/make_trained.py train                              # with jaxspec: the two checkpoints
    torch-venv/bin/python tests/golden/make_trained.py expect              # with PyTorch: the expected tensors

The second needs `specforge` and `dflash` (see make_eagle.py and make_dflash.py), whose own classes read config and
tensors under the names that they have in the files. The target is tests/golden/eagle/target. Written are, as
`eagle3.npz` and `dflash.npz`:

- `ids` i32[64], `lengths`, and for the prompts `ids[:n]` of each n in `lengths`: `next`, the target's greedy next
  token, `tokens` i32[lengths, drafts], and `logits` f32[lengths, drafts, draft vocabulary];
- of EAGLE-3 also `losses` f32[steps], SpecForge's training loss on `ids` by step of the unrolled chain, summed over
  rows, and `right` i32[steps], how many rows it counts as rightly guessed.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

import numpy as np

HERE = Path(__file__).resolve().parent
TARGET, OUT = HERE / "eagle" / "target", HERE / "trained"
LENGTHS = (1, 2, 17, 64)
STEPS = 4  # of the unrolled chain, and as many drafts
DRAFT_VOCAB, BLOCK = 40, 6


def train() -> None:
    """A few steps on random texts: the checkpoints matter, not what they know."""
    import tempfile

    from jaxspec.train.__main__ import main
    from jaxspec.train.data import Text

    rng = np.random.default_rng(0)
    sizes = ["--mlp-size", "24", "--num-heads", "2", "--num-kv-heads", "1", "--dtype", "float32"]
    runs = {
        "eagle3": ["--draft-vocab-size", str(DRAFT_VOCAB), "--unroll", str(STEPS), "--target-layers", "0,3,6"],
        "dflash": ["--num-layers", "2", "--block-size", str(BLOCK), "--target-layers", "1,5", "--mask-token-id", "95"],
    }
    for method, options in runs.items():
        with tempfile.TemporaryDirectory() as scratch:
            texts = Path(scratch) / "texts.jsonl"
            texts.write_text("".join(Text(rng.integers(0, 95, 40), ((8, 40),)).line() for _ in range(40)))
            arguments = ["--model", str(TARGET), "--data", str(texts), "--output", scratch, "--steps", "16"]
            rows = ["--row-length", "40", "--batch-size", "8", "--warm-up", "4", "--learning-rate", "0.003"]
            main([method, *arguments, *rows, *sizes, *options, "--no-evaluation", "--no-plots"])
            shutil.rmtree(OUT / method, ignore_errors=True)
            shutil.copytree(Path(scratch) / "drafter", OUT / method)


def expect() -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # nothing here is worth compiling
    import torch
    from transformers import Qwen3ForCausalLM

    target = Qwen3ForCausalLM.from_pretrained(TARGET, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.randint(0, 95, (max(LENGTHS),), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expect_eagle3(target, ids)
        expect_dflash(target, ids)


def expect_eagle3(target, ids) -> None:
    import torch

    # Its loss kernel is Triton's and needs a GPU; this is the formula that its own file gives for reference.
    kernel = sys.modules["specforge.core.loss"] = ModuleType("specforge.core.loss")
    kernel.LogSoftmaxLoss = type("LogSoftmaxLoss", (), {"apply": staticmethod(soft_cross_entropy)})
    from safetensors.torch import load_file
    from specforge.algorithms.eagle3 import model as specforge
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from transformers import LlamaConfig

    # Not by from_pretrained, which leaves its rotation tables unfilled under transformers 5.
    drafter = LlamaForCausalLMEagle3(LlamaConfig.from_pretrained(OUT / "eagle3", pad_token_id=0)).eval()
    lacking = drafter.load_state_dict(load_file(OUT / "eagle3" / "model.safetensors"), strict=False)
    assert lacking.missing_keys == ["embed_tokens.weight"] and not lacking.unexpected_keys, lacking
    drafter.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    layers = drafter.config.eagle_config["eagle_aux_hidden_state_layer_ids"]
    rows = []
    for n in LENGTHS:
        out = target(ids[None, :n], output_hidden_states=True)
        following = out.logits[0, -1].argmax()
        hidden = drafter.project_hidden_states(torch.cat([out.hidden_states[i + 1] for i in layers], dim=-1))
        tokens, drafts, logits = torch.cat([ids[1:n], following[None]]), [], []
        for _ in range(STEPS):
            embedded = drafter.embed_input_ids(tokens[None])
            position = torch.arange(len(tokens))[None]
            last = drafter.backbone(embedded, hidden, None, None, position)[:, -1:]
            logits.append(drafter.compute_logits(last)[0, 0])
            guess = logits[-1].argmax()
            drafts.append(guess + drafter.d2t[guess])
            tokens, hidden = torch.cat([tokens, drafts[-1][None]]), torch.cat([hidden, last], dim=1)
        rows.append((following, torch.stack(drafts), torch.stack(logits)))
    out = target(ids[None], output_hidden_states=True)
    shifted = lambda x: torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], dim=1)  # noqa: E731
    losses, _, _, right, *_ = specforge.OnlineEagle3Model(drafter, length=STEPS, attention_backend="sdpa")(
        input_ids=shifted(ids[None]),
        attention_mask=torch.ones(1, len(ids)),
        target=shifted(out.logits),
        loss_mask=shifted(shifted(torch.ones(1, len(ids), 1))),  # rows that have a token two ahead
        hidden_states=torch.cat([out.hidden_states[i + 1] for i in layers], dim=-1),
    )
    save("eagle3", ids, rows, losses=torch.stack(losses) * len(ids), right=torch.stack(right).int())


def soft_cross_entropy(logits, target_p, position_mask):
    return -(position_mask * target_p * logits.float().log_softmax(2)).sum(2).mean()


def expect_dflash(target, ids) -> None:
    import dflash.model as package
    import torch

    drafter = package.DFlashDraftModel.from_pretrained(OUT / "dflash", dtype=torch.float32).eval()
    rows = []
    for n in LENGTHS:
        out = target(ids[None, :n], output_hidden_states=True)
        following = out.logits[0, -1].argmax()
        block = torch.full((1, BLOCK), drafter.mask_token_id)
        block[0, 0] = following
        hidden = drafter(
            target_hidden=package.extract_context_feature(out.hidden_states, drafter.target_layer_ids),
            noise_embedding=target.model.embed_tokens(block),
            position_ids=torch.arange(n + BLOCK)[None],
            past_key_values=package._make_cache(drafter.config),
            use_cache=True,
        )
        logits = drafter.compute_logits(hidden[:, 1:], target.lm_head)[0]
        rows.append((following, logits.argmax(-1), logits))
    save("dflash", ids, rows)


def save(name: str, ids, rows, **more) -> None:
    following, tokens, logits = (np.stack([row[i].numpy() for row in rows]) for i in range(3))
    arrays = {"next": following.astype(np.int32), "tokens": tokens.astype(np.int32), "logits": logits}
    more = {key: value.numpy() for key, value in more.items()}
    np.savez_compressed(OUT / f"{name}.npz", ids=ids.numpy().astype(np.int32), lengths=LENGTHS, **arrays, **more)
    print(name, f"logits spread {logits.std():.2f}, {len(np.unique(tokens))} tokens drafted", more)


if __name__ == "__main__":
    {"train": train, "expect": expect}[sys.argv[1]]()
