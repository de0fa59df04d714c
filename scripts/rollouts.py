"""Figures of docs/rollouts.md on this device: `python scripts/rollouts.py OUT`.

Updates of a model of 8B with dummy weights; log-probabilities of the demo's texts, beside those of the same weights as
a trainer computes them; what both cost; memory after releases. `--small` tries the script on a CPU.
"""

import argparse
import gc
import json
import time
from pathlib import Path

import configs
import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec import LLM, SamplingParams

TOPICS = ("rain", "bread", "the sea", "a dog", "music", "iron", "winter", "trains", "the moon", "salt")
KINDS = ("Write a paragraph about {}.", "What is {}? Answer in one sentence.", "List ten words that go with {}.",
         "Repeat five times: {} is here.")  # fmt: skip


def seconds(f) -> float:
    began = time.perf_counter()
    f()
    return time.perf_counter() - began


def updates(folder: Path, small: bool) -> dict[str, float]:
    """Milliseconds of an update by reference, and by a cast from float32; programs compiled by them."""
    config = configs.SMOLLM2 if small else configs.QWEN3_8B
    (folder / "config.json").write_text(json.dumps(config))
    options = {"skip_warmup": True, "max_running_requests": 8, "context_length": 1024, "mem_fraction_static": 0.3}
    llm = LLM(str(folder), "none", dtype="bfloat16", load_format="dummy", **options)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm.generate([[1, 2, 3]], params)
    runner = llm.engine.runner
    trees = [runner.model.params, jax.block_until_ready(jax.tree.map(jnp.copy, runner.model.params))]

    def update(tree):
        llm.update_weights(tree)
        jax.block_until_ready(runner.model.params)

    compiled = runner.compiles["compiles"]
    times = [seconds(lambda i=i: update(trees[i % 2])) for i in range(20)]
    assert runner.model.params["norm"] is trees[1]["norm"]
    llm.generate([[1, 2, 3]], params)
    return {
        "bytes": sum(x.nbytes for x in jax.tree.leaves(trees[0])),
        "by_reference_ms": round(1e3 * float(np.median(times)), 2),
        "by_reference_most_ms": round(1e3 * max(times), 2),
        "compiles": runner.compiles["compiles"] - compiled,
    }


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
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    sizes = {1: 1, 4: 4} if args.small else {1: 8, 4: 16, 16: 48, 64: 128}
    for draft in ("eagle3", "ngram"):
        print(draft, json.dumps(mismatches(draft, 8 if args.small else 64, sizes), default=int), flush=True)
        gc.collect()
    print("updates", json.dumps(updates(args.out, args.small)), flush=True)


if __name__ == "__main__":
    main()
