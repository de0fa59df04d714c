"""Figures of docs/rollouts.md on this device: `python scripts/rollouts.py OUT [PART...]`.

Updates of a model of 8B and its drafter, with dummy weights, in memory and from a folder; log-probabilities of the
demo's texts, beside those of the same weights as a trainer computes them; what both cost; memory after releases.
`--small` tries the script on a CPU.
"""

import argparse
import gc
import json
import math
import time
from pathlib import Path

import configs
import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

import jaxspec
from jaxspec import LLM, SamplingParams
from jaxspec.models.weights import Param

TOPICS = ("rain", "bread", "the sea", "a dog", "music", "iron", "winter", "trains", "the moon", "salt")
KINDS = ("Write a paragraph about {}.", "What is {}? Answer in one sentence.", "List ten words that go with {}.",
         "Repeat five times: {} is here.")  # fmt: skip


def seconds(f) -> float:
    began = time.perf_counter()
    f()
    return time.perf_counter() - began


def updates(folder: Path, small: bool) -> dict[str, float]:
    """Milliseconds of an update by reference of the target, of its drafter, and of both; of one from a folder, beside
    loading it; programs compiled by them."""
    sizes = (configs.SMOLLM2, configs.EAGLE3_SMALL) if small else (configs.QWEN3_8B, configs.EAGLE3_8B)
    for name, config in zip(("target", "drafter"), sizes, strict=True):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    options = {"skip_warmup": True, "max_running_requests": 8, "context_length": 1024, "mem_fraction_static": 0.3}
    target, drafter = str(folder / "target"), f"eagle3:{folder / 'drafter'}"
    llm = LLM(target, drafter, dtype="bfloat16", load_format="dummy", draft_policy="fixed", **options)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm.generate([[1, 2, 3]], params)
    runner = llm.engine.runner
    copy = lambda tree: jax.block_until_ready(jax.tree.map(jnp.copy, tree))  # noqa: E731
    targets, drafts = ([tree, copy(tree)] for tree in (runner.model.params, runner.draft.params))
    out = {"bytes": sum(x.nbytes for x in jax.tree.leaves(targets[0]))}

    def update(*given):
        llm.update_weights(*given)
        jax.block_until_ready((runner.model.params, runner.draft.params))

    update(targets[1], drafts[1])  # compiles the check for finite numbers
    compiled = runner.compiles["compiles"]
    for name, trees in {"target": (targets,), "drafter": ([None] * 2, drafts), "both": (targets, drafts)}.items():
        times = [seconds(lambda i=i: update(*(tree[i % 2] for tree in trees))) for i in range(20)]  # noqa: B023
        out |= {f"{name}_ms": round(1e3 * float(np.median(times)), 2), f"{name}_most_ms": round(1e3 * max(times), 2)}
    assert runner.model.params["norm"].unsafe_buffer_pointer() == targets[1]["norm"].unsafe_buffer_pointer()
    llm.generate([[1, 2, 3]], params)
    out["compiles"] = runner.compiles["compiles"] - compiled
    targets.clear(), drafts.clear()
    size = write(folder / "target", llm.engine.runner.model)
    try:
        for _ in range(2):
            load = seconds(lambda: jax.block_until_ready(jaxspec.load_model(target, dtype="bfloat16").params))
            took = seconds(lambda: update(target))
        out |= {"folder_gb": round(size / 1e9, 2), "load_s": round(load, 2), "update_s": round(took, 2)}
    finally:
        (folder / "target" / "model.safetensors").unlink()
    return out


def write(folder: Path, model: jaxspec.Model) -> int:
    """Write a checkpoint of made-up weights; its bytes."""
    declared = jax.tree.leaves(model.family.tensors(model.config.decoder), is_leaf=lambda leaf: isinstance(leaf, Param))
    shapes = {name: shape for param in declared for name, shape in param.stored_values().items()}
    some = np.random.default_rng(0).normal(size=max(map(math.prod, shapes.values()))).astype(jnp.bfloat16)
    tensors = {name: some[: math.prod(shape)].reshape(shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return sum(each.nbytes for each in tensors.values())


def mismatches(draft: str, tokens: int, sizes: dict[int, int]) -> dict[str, float]:
    """Log-probabilities with other bits, over as many texts in batches of each size; seconds of the largest batch."""
    most = max(sizes)
    options = {"skip_warmup": True, "few_programs": True, "context_length": 256, "mem_fraction_static": 0.3}
    llm = LLM(
        "smollm2-135m-instruct", draft, dtype="bfloat16", deterministic=True, max_running_requests=most, **options
    )
    tokenizer = llm.engine.tokenizer
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": kind.format(topic)}])
        for kind in KINDS
        for topic in TOPICS
    ]
    size, texts, compared, differ = max(map(len, chats)) + tokens, 0, 0, 0
    heats = [SamplingParams(max_tokens=tokens, logprobs=0, temperature=(0, 0.7, 1)[i % 3], seed=i) for i in range(most)]
    for at, count in sizes.items():
        for first in range(0, count, at):
            prompts = [chats[(first + i) % len(chats)] for i in range(at)]
            outs = llm.generate(prompts, heats[:at])
            rows = [prompt + out.token_ids for prompt, out in zip(prompts, outs, strict=True)]
            padded = np.array([row + [0] * (size - len(row)) for row in rows + rows[:1] * (most - at)])
            lengths = np.array([len(prompt) for prompt in prompts + prompts[:1] * (most - at)])
            exact = np.asarray(scored(llm, padded, lengths))
            for out, row, n in zip(outs, exact, lengths, strict=False):
                own = np.float32([one.logprob for one in out.logprobs])
                differ += int((own != row[n - 1 :][: len(own)]).sum())
                compared += len(own)
            texts += at
    prompts = [chats[i % len(chats)] for i in range(most)]
    plain = [SamplingParams(max_tokens=tokens, temperature=(0, 0.7, 1)[i % 3], seed=i) for i in range(most)]
    llm.generate(prompts, plain)
    out = {"texts": texts, "logprobs": compared, "mismatches": differ}
    out |= {"accept_length": round(llm.engine.stats()["avg_spec_accept_length"], 2)}
    runs = {
        "plain": lambda: llm.generate(prompts, plain),
        "logprobs": lambda: llm.generate(prompts, heats),
        "scoring": lambda: jax.block_until_ready(scored(llm, padded, lengths)),
    }
    out |= {f"{name}_s": round(min(seconds(run) for _ in range(3)), 3) for name, run in runs.items()}
    return out | released(llm, prompts, plain)


def scored(llm: LLM, tokens: np.ndarray, prompt: np.ndarray) -> jax.Array:
    """Log-probabilities by the engine's weights, which nobody else holds: a release would leave them there."""
    return jaxspec.logprobs(llm.engine.runner.model, tokens, prompt, config=llm.engine.config)


def released(llm: LLM, prompts: list, params: list) -> dict[str, float]:
    """Bytes of the device before and after twenty releases, in between, and texts that are others."""
    used = lambda: (gc.collect(), (jax.local_devices()[0].memory_stats() or {}).get("bytes_in_use", 0))[1]  # noqa: E731
    texts = [out.token_ids for out in llm.generate(prompts, params)]
    before = used()
    for _ in range(20):
        llm.release_memory()
        away = used()
        llm.resume_memory()
    after = used()
    again = [out.token_ids for out in llm.generate(prompts, params)]
    others = sum(one != other for one, other in zip(texts, again, strict=True))
    return {"bytes": before, "bytes_released": away, "bytes_after": after, "other_texts": others}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("parts", nargs="*", help="of eagle3, ngram and updates; none is all")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    sizes = {1: 1, 4: 4} if args.small else {1: 8, 4: 16, 16: 48, 64: 128}
    for part in args.parts or ("eagle3", "ngram", "updates"):
        run = (args.out, args.small) if part == "updates" else (part, 8 if args.small else 64, sizes)
        found = updates(*run) if part == "updates" else mismatches(*run)
        print(part, json.dumps(found, default=int), flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
