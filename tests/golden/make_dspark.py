"""Make tests/golden/dspark and tests/golden/expected/dspark-*.safetensors: what SpecForge and speculators draft.

Needs PyTorch (see make_llama_qwen3.py), tests/golden/dflash/target (see make_dflash.py) and both packages, whose models
are run with tiny random weights:

    torch-venv/bin/pip install --no-deps specforge==0.2.0 speculators==0.9.0 hs_connectors
    torch-venv/bin/pip install openai loguru pydantic-settings datasets deepmerge
    torch-venv/bin/python tests/golden/make_dspark.py

`dspark/VARIANT` are checkpoints in float32, one in each layout. DeepSpec itself isn't on PyPI; its models are
SpecForge's with another config. `expected/dspark-VARIANT.safetensors` holds, for each prompt length T in LENGTHS:
`ids_T` i32[T + 1], a prompt and the target's next token; of the block behind it `tokens_T` i32[n], as target ids,
`logits_T` f32[n, w] after the Markov head, and `confidence_T` f32[n] if there is a confidence head.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from drawn import randomise
from safetensors.torch import save_file
from specforge.modeling.draft.dspark import DSparkDraftModel as SpecForge
from speculators.models.dspark import DSparkDraftModel as Speculators
from speculators.models.dspark import DSparkSpeculatorConfig
from transformers import Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent
LENGTHS = (7, 33, 150)
VOCAB, WIDTH, BLOCK = 40, 32, 5
BACKBONE = dict(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    dtype="float32",
)
HEADS = dict(
    deepspec=dict(
        markov_rank=6, markov_head_type="vanilla", enable_confidence_head=True, confidence_head_with_markov=True
    ),
    specforge=dict(markov_rank=4, markov_head_type="gated", confidence_head_alpha=0.5),
)


def target_and_texts() -> tuple[Qwen3ForCausalLM, dict[int, torch.Tensor]]:
    """The target, and for each length a random prompt with the target's next token behind it."""
    target = Qwen3ForCausalLM.from_pretrained(HERE / "dflash" / "target", attn_implementation="eager").float().eval()
    ids = torch.randint(0, VOCAB - 3, (max(LENGTHS),))
    texts = {n: torch.cat([ids[:n], target(ids[None, :n]).logits[0, -1:].argmax(-1)]) for n in LENGTHS}
    return target, texts


def features(target: Qwen3ForCausalLM, text: torch.Tensor, states: list[int]) -> torch.Tensor:
    """Hidden states of all but the last token, side by side: 0 is the embedding's, i the output of layer i - 1."""
    hidden = target(text[None, :-1], output_hidden_states=True).hidden_states
    return torch.cat([hidden[i] for i in states], dim=-1)


def specforge(name: str, layers: list[int], mask: int) -> tuple[SpecForge, dict]:
    heads = HEADS[name]
    nested = {"mask_token_id": mask, "target_layer_ids": layers, "projector_type": "dspark", **heads}
    config = Qwen3Config(**BACKBONE, num_target_layers=6, block_size=BLOCK, dflash_config=nested)
    config._attn_implementation = "eager"
    drafter = SpecForge(config).float().eval()
    randomise(drafter)
    drafter.save_pretrained(HERE / "dspark" / name)
    config = json.loads((HERE / "dspark" / name / "config.json").read_text())
    return drafter, config


def deepspec_layout(drafter: SpecForge, config: dict, own: dict[str, torch.Tensor]) -> None:
    """Write the same as DeepSpec does: all keys at the top level, and an embedding and a head of its own."""
    folder = HERE / "dspark" / "deepspec"
    nested = config.pop("dflash_config")
    kept = ("mask_token_id", "target_layer_ids", *HEADS["deepspec"])
    config |= {key: nested[key] for key in kept} | {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512}
    config.pop("auto_map", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {key: tensor.contiguous() for key, tensor in (drafter.state_dict() | own).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def run_specforge(drafter: SpecForge, context: torch.Tensor, text: torch.Tensor, embed, head) -> dict:
    block = torch.full((1, BLOCK), drafter.mask_token_id)
    block[0, 0] = text[-1]
    positions = torch.arange(len(text) - 1 + BLOCK)[None]
    hidden = drafter(positions, noise_embedding=embed(block), target_hidden=context, is_causal=False)
    sampled = drafter.markov_head.sample_block_tokens(
        head(hidden), first_prev_token_ids=text[-1:], hidden_states=hidden, temperature=0.0
    )
    tokens, logits = sampled
    before = torch.cat([text[-1:][None], tokens[:, :-1]], dim=1)
    confidence = drafter.predict_confidence(hidden, prev_token_ids=before)
    return {"tokens": tokens[0], "logits": logits[0], "confidence": confidence[0].sigmoid(), "plain": head(hidden)[0]}


def speculators(
    name: str, states: list[int], mask: int, vocabulary: torch.Tensor | None, target, **more
) -> Speculators:
    layers = Qwen3Config(**BACKBONE)
    layers._attn_implementation = "eager"
    config = DSparkSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=VOCAB if vocabulary is None else len(vocabulary),
        block_size=BLOCK,
        aux_hidden_state_layer_ids=states,
        mask_token_id=mask,
        **more,
    )
    drafter = Speculators(config).float().eval()
    randomise(drafter)
    with torch.no_grad():
        drafter.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
        if vocabulary is None:
            drafter.lm_head.weight.copy_(target.lm_head.weight)
        else:
            known = torch.zeros(VOCAB, dtype=torch.bool)
            known[vocabulary] = True
            drafter.load_vocab_mappings(known, vocabulary - torch.arange(len(vocabulary)))
    drafter.save_pretrained(HERE / "dspark" / name)
    (HERE / "dspark" / name / "config.py").unlink()  # a copy of speculators' own code, which nothing here reads
    return drafter


def run_speculators(drafter: Speculators, context: torch.Tensor, text: torch.Tensor) -> dict:
    """Its forward is for training, over blocks at given anchors: here one, behind the prompt."""
    length = len(text) - 1
    total = length + 1 + 2 * BLOCK
    pad = torch.nn.functional.pad
    anchor = torch.zeros(1, total)
    anchor[0, length] = 1
    ids, wide = pad(text, (0, total - len(text)))[None], pad(context, (0, 0, 0, total - length))
    last = torch.zeros(1, total, WIDTH)
    hidden, base, *_ = drafter._backbone_forward(
        wide, ids, anchor, last, torch.zeros(1, total, dtype=torch.long), max_anchors=1
    )
    first = 0 if drafter.config.sample_from_anchor else 1
    before, logits, tokens = torch.full((1, BLOCK), int(text[-1])), base, []
    for row in range(first, BLOCK):  # a row's bias counts once the token before it is there
        bias = drafter.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
        logits = base + bias
        best = int(logits[0, row].argmax())
        tokens.append(best if drafter.d2t is None else best + int(drafter.d2t[best]))
        before[0, row + 1 :] = tokens[-1]
    made = {"tokens": torch.tensor(tokens), "logits": logits[0, first:], "plain": base[0, first:]}
    if drafter.confidence_head is None:
        return made
    rows = torch.cat([hidden, drafter.markov_head.prev_embeddings(before)], dim=-1)
    return made | {"confidence": drafter.confidence_head(rows)[0, first:].sigmoid()}


def keep(name: str, texts: dict[int, torch.Tensor], run) -> None:
    tensors, changed = {}, 0
    for length, text in texts.items():
        made = run(text)
        plain = made.pop("plain")
        changed += int((plain.argmax(-1) != made["logits"].argmax(-1)).sum())
        tensors[f"ids_{length}"] = text.to(torch.int32)
        for key, value in made.items():
            tensors[f"{key}_{length}"] = value.to(torch.int32 if key == "tokens" else torch.float32).contiguous()
    save_file(tensors, HERE / "expected" / f"dspark-{name}.safetensors")
    print(name, f"the Markov head changed {changed} drafts of {sum(len(t) for k, t in tensors.items() if 'tok' in k)}")


@torch.no_grad()
def main() -> None:
    shutil.rmtree(HERE / "dspark", ignore_errors=True)
    torch.manual_seed(0)
    target, texts = target_and_texts()

    drafter, config = specforge("deepspec", [-1, 2, 4], mask=39)
    own = {name: torch.randn(VOCAB, WIDTH) * scale for name, scale in (("embed_tokens", 1.0), ("lm_head", WIDTH**-0.5))}
    deepspec_layout(drafter, config, {f"{name}.weight": tensor for name, tensor in own.items()})
    of_own = lambda ids: own["embed_tokens"][ids]  # noqa: E731
    by_own = lambda hidden: hidden @ own["lm_head"].T  # noqa: E731
    keep("deepspec", texts, lambda t: run_specforge(drafter, features(target, t, [0, 3, 5]), t, of_own, by_own))

    gated, _ = specforge("specforge", [4, 1], mask=38)
    theirs = target.model.embed_tokens, target.lm_head
    keep("specforge", texts, lambda t: run_specforge(gated, features(target, t, [5, 2]), t, *theirs))

    some = torch.randperm(VOCAB)[:24].sort().values
    rnn = speculators("speculators", [1, 4], 37, some, target, markov_rank=6, markov_head_type="rnn")
    keep("speculators", texts, lambda t: run_speculators(rnn, features(target, t, [1, 4]), t))

    masks = dict(sample_from_anchor=False, enable_confidence_head=False, markov_rank=5)
    masked = speculators("masks", [2], 36, None, target, **masks)
    keep("masks", texts, lambda t: run_speculators(masked, features(target, t, [2]), t))


if __name__ == "__main__":
    main()
