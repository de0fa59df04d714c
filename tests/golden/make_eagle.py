"""Make tests/golden/eagle: a tiny target, tiny EAGLE drafters as their trainers save them, and what those compute.

The expected tensors come from the drafters' own implementations, each of them run as it is: SafeAILab's (EAGLE-1 and
EAGLE-3, with its own cache), SpecForge's and speculators'. The target is transformers'. None of them is needed by
jaxspec and its tests. Once, make an environment for them and a copy of SafeAILab's repository, then run this:

    python3.12 -m venv torch-venv
    torch-venv/bin/pip install torch transformers safetensors speculators specforge
    git clone https://github.com/SafeAILab/EAGLE
    torch-venv/bin/python tests/golden/make_eagle.py EAGLE

`target` and `DRAFTER` are Hugging Face folders; weights are in bfloat16 for their size, and computed with in float32.
`DRAFTER.npz` holds `ids` i32[150] and, for the prompts `ids[:n]` of each n in `lengths`: `next`, the target's greedy
next token, `tokens` i32[lengths, 4], the greedy drafts as target ids, and `logits` f32[lengths, 4, draft vocabulary].
`DRAFTER-trees.npz`, of SafeAILab's two, has its trees after the same prompts, for each of `TREES`: with n drafts
`tokens_SHAPE` i32[lengths, n], `depth_SHAPE` i32[lengths, n + 1] and `mask_SHAPE` bool[lengths, n + 1, n + 1], the root
first; and `SHAPE` as in `2x3_6`.
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent / "eagle"
LENGTHS = (1, 2, 3, 16, 17, 64, 150)
DRAFTS = 4
TREES = ((2, 2, 4), (2, 3, 6), (4, 1, 3), (4, 2, 20), (4, 5, 8), (8, 6, 59))  # top-k, steps, drafts
VOCAB, DRAFT_VOCAB, HIDDEN, LAYERS = 96, 40, 32, 8
EPS = 0.02  # large enough that leaving it out, or using another, shows

TARGET = Qwen3Config(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    tie_word_embeddings=False,
    rms_norm_eps=0.001,
)
DRAFTER = {
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": EPS,
}
Step = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Draw every parameter, norms and biases too, to what bfloat16 holds."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if name.endswith(".bias"):
                noise = 0.3 * noise
            elif parameter.ndim == 1:
                noise = 1 + 0.3 * noise
            elif "embed_tokens" not in name:
                noise = noise * parameter.shape[1] ** -0.5
            parameter.copy_(noise.bfloat16().float())


def vocabulary(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`d2t` and `t2d` of a random choice of tokens."""
    known = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:DRAFT_VOCAB].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[known] = True
    return known - torch.arange(DRAFT_VOCAB), t2d


def write(folder: Path, tensors: dict[str, torch.Tensor], config: dict) -> None:
    folder.mkdir(parents=True)
    small = {k: (v.bfloat16() if v.is_floating_point() else v).contiguous() for k, v in tensors.items()}
    save_file(small, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def target_outputs(model: Qwen3ForCausalLM, ids: torch.Tensor) -> tuple[int, list[torch.Tensor], torch.Tensor]:
    """The next token, each layer's output (the residual stream), and the final norm's."""
    outputs: list[torch.Tensor] = []
    hooks = [layer.register_forward_hook(lambda m, a, out: outputs.append(out)) for layer in model.model.layers]
    last = model.model(ids[None]).last_hidden_state
    for hook in hooks:
        hook.remove()
    return int(model.lm_head(last[0, -1]).argmax()), outputs, last


def chain(start: Callable[[], Step], features: torch.Tensor, tokens: torch.Tensor, d2t: torch.Tensor | None):
    """Draft greedily: `step(hidden [1, t, d or 3d], tokens [1, t])` appends rows; the last one's output and logits."""
    step, drafts, all_logits = start(), [], []
    hidden, tokens = features, tokens[None]
    for _ in range(DRAFTS):
        hidden, logits = step(hidden, tokens)
        token = logits.argmax(-1)
        token = token if d2t is None else token + d2t[token]
        drafts.append(int(token))
        all_logits.append(logits[0])
        tokens = token[None]
    return np.array(drafts, np.int32), torch.stack(all_logits).numpy()


def record(name: str, target: Qwen3ForCausalLM, start: Callable[[], Step], layers: tuple[int, ...] | None, d2t) -> None:
    """Write `name.npz`. `layers`: of which target layers the drafter reads the outputs; None: the final norm's."""
    ids = torch.randint(0, VOCAB, (max(LENGTHS),), generator=torch.Generator().manual_seed(7))
    rows = []
    for n in LENGTHS:
        following, outputs, last = target_outputs(target, ids[:n])
        features = last if layers is None else torch.cat([outputs[i] for i in layers], dim=-1)
        shifted = torch.cat([ids[1:n], torch.tensor([following])])
        rows.append((following, *chain(start, features, shifted, d2t)))
    following, tokens, logits = (np.stack([row[i] for row in rows]) for i in range(3))
    np.savez_compressed(
        HERE / f"{name}.npz", ids=ids.int(), lengths=LENGTHS, next=following.astype(np.int32), tokens=tokens,
        logits=logits,
    )  # fmt: skip
    print(name, f"logits spread {logits.std():.2f}, {len(np.unique(tokens))} tokens drafted")


def record_trees(name: str, target: Qwen3ForCausalLM, model: torch.nn.Module, layers: tuple[int, ...] | None) -> None:
    """Write `name-trees.npz`, what SafeAILab's `topK_genrate` makes. Its depth is one less than the steps, the first of
    which needs no forward."""
    ids = torch.randint(0, VOCAB, (max(LENGTHS),), generator=torch.Generator().manual_seed(7))
    found: dict[str, list[np.ndarray]] = {}
    for topk, steps, drafts in TREES:
        model.top_k, model.depth, model.total_tokens = topk, steps - 1, drafts
        model.init_tree()
        for n in LENGTHS:
            following, outputs, last = target_outputs(target, ids[:n])
            features = last if layers is None else torch.cat([outputs[i] for i in layers], dim=-1)
            text = torch.cat([ids[:n], torch.tensor([following])])[None]
            model.reset_kv()
            tokens, _, mask, depth = model.topK_genrate(features, text, target.lm_head, None)
            tree = {"tokens": tokens[0, 1:].int(), "depth": depth.int(), "mask": mask[0, 0].bool()}
            for key, value in tree.items():
                found.setdefault(f"{key}_{topk}x{steps}_{drafts}", []).append(value.numpy())
    np.savez_compressed(HERE / f"{name}-trees.npz", **{key: np.stack(rows) for key, rows in found.items()})
    print(name, f"trees as deep as {max(int(d.max()) for d in found['depth_8x6_59'])}")


def safeailab_config(config: dict) -> SimpleNamespace:
    """Fields of a config that its models read; its own class of configs needs transformers 4."""
    return SimpleNamespace(**config, rope_scaling=None, pretraining_tp=1, pad_token_id=0)


def safeailab_eagle(target: Qwen3ForCausalLM) -> None:
    """EAGLE-1: the embedding and the head are the target's."""
    from eagle.model.cnets1 import Model

    config = {**DRAFTER, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 500.0}
    del config["draft_vocab_size"]
    model = Model(safeailab_config(config), bias=True).eval()
    randomise(model, 1)
    model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    write(HERE / "safeailab-eagle", model.state_dict(), config)

    def start() -> Step:
        cache = None

        def step(hidden, tokens):
            nonlocal cache
            out, cache = model(hidden, input_ids=tokens, past_key_values=cache, use_cache=True)
            return out[:, -1:], target.lm_head(out[:, -1])

        return step

    record("safeailab-eagle", target, start, None, None)
    record_trees("safeailab-eagle", target, model, None)


def safeailab_eagle3(target: Qwen3ForCausalLM) -> None:
    from eagle.model.cnets import Model

    config = {**DRAFTER, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 700.0}
    model = Model(safeailab_config(config)).eval()
    randomise(model, 2)
    model.d2t, model.t2d = vocabulary(2)
    model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "embed_tokens.weight"}
    write(HERE / "safeailab-eagle3", tensors, config)

    def start() -> Step:
        cache = None

        def step(hidden, tokens):
            nonlocal cache
            out, cache = model(hidden, input_ids=tokens, past_key_values=cache, use_cache=True)
            return out[:, -1:], model.lm_head(model.norm(out[:, -1]))

        return step

    layers = (1, LAYERS // 2 - 1, LAYERS - 4)
    record("safeailab-eagle3", target, start, layers, model.d2t)
    record_trees("safeailab-eagle3", target, model, layers)


def specforge_eagle3(target: Qwen3ForCausalLM) -> None:
    """With an embedding of its own, a norm for each feature, and target layers named in `eagle_config`."""
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

    layers = (0, 5, LAYERS - 1)
    settings = {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True}
    config = LlamaConfig(
        **DRAFTER, architectures=["LlamaForCausalLMEagle3"], head_dim=16, fc_norm=True, eagle_config=settings,
        rope_theta=300.0, tie_word_embeddings=False, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLMEagle3(config).eval()
    randomise(model, 3)
    d2t, t2d = vocabulary(3)
    model.d2t.copy_(d2t)
    model.t2d.copy_(t2d)
    saved = json.loads(config.to_json_string(use_diff=False))
    write(HERE / "specforge-eagle3", model.state_dict(), {k: v for k, v in saved.items() if v is not None})

    def start() -> Step:
        rows: list[torch.Tensor] = []
        read: list[torch.Tensor] = []

        def step(hidden, tokens):
            rows.append(hidden if rows else model.project_hidden_states(hidden))
            read.append(model.embed_input_ids(tokens))
            hidden, embedded = torch.cat(rows, dim=1), torch.cat(read, dim=1)
            position = torch.arange(hidden.shape[1])[None]
            out = model.backbone(embedded, hidden, None, None, position)
            return out[:, -1:], model.compute_logits(out[:, -1])

        return step

    record("specforge-eagle3", target, start, layers, d2t)


def speculators_eagle3(target: Qwen3ForCausalLM) -> None:
    """With Qwen3's decoder layer, every norm that speculators offers, and layers named by their inputs."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    inputs = (2, 5, LAYERS)
    sizes = {key: value for key, value in DRAFTER.items() if key != "draft_vocab_size"}
    rope = {"rope_type": "default", "rope_theta": 900.0}
    layer = Qwen3Config(**sizes, head_dim=8, rope_parameters=rope, attn_implementation="eager")
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCAB,
        norm_before_residual=True,
        norm_before_fc=True,
        norm_output=True,
        eagle_aux_hidden_state_layer_ids=list(inputs),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DRAFTS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
        ),
    )
    model = Eagle3DraftModel(config).eval()
    randomise(model, 4)
    d2t, t2d = vocabulary(4)
    model.load_vocab_mappings(t2d, d2t)
    model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    folder = HERE / "speculators-eagle3"
    copy.deepcopy(model).bfloat16().save_pretrained(folder)  # of the model itself, it would round the rope too
    (folder / "config.py").unlink()  # a copy of the class's own source

    def start() -> Step:
        rows: list[torch.Tensor] = []
        read: list[torch.Tensor] = []

        def step(hidden, tokens):
            rows.append(hidden if rows else model.fc(model.input_norm(hidden)))
            read.append(model.embed_tokens(tokens))
            pairs = torch.cat([torch.cat(read, dim=1), torch.cat(rows, dim=1)], dim=-1)
            t = pairs.shape[1]
            position = 1 + torch.arange(t)[None]
            mask = torch.full((t, t), torch.finfo(torch.float32).min).triu(1)[None, None]
            embedded = model.rotary_emb(pairs, position)
            out = model.layers[0](pairs, attention_mask=mask, position_ids=position, position_embeddings=embedded)
            out = model.norm(out[:, -1:])  # norm_output: what is fed back, and what the head reads
            return out, model.lm_head(out[:, -1])

        return step

    record("speculators-eagle3", target, start, tuple(i - 1 for i in inputs), d2t)


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    shutil.rmtree(HERE, ignore_errors=True)
    TARGET._attn_implementation = "eager"
    target = Qwen3ForCausalLM(TARGET).float().eval()
    randomise(target, 0)
    config = json.loads(TARGET.to_json_string())
    write(HERE / "target", target.state_dict(), {**config, "architectures": ["Qwen3ForCausalLM"]})
    with torch.no_grad():
        for make in (safeailab_eagle, safeailab_eagle3, specforge_eagle3, speculators_eagle3):
            make(target)


if __name__ == "__main__":
    main()
