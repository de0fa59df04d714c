"""Whether texts are the same whatever ran beside them: `python scripts/same_bits.py MODEL OUT.json [options]`.

Each prompt is completed so many at a time as `--at` says, by one engine; `--compare A.json B.json ...` counts the texts
that differ from the first run's. Engine options are `name=value`. Every fourth text is sampled under a seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec import LLM, SamplingParams
from jaxspec.scheduling.audit import audit
from jaxspec.text.prompts import in_turn
from jaxspec.text.prompts import read as read_prompts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("out", type=Path, nargs="+")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--prompts", type=Path, help="questions of a benchmark; otherwise tokens at random")
    parser.add_argument("--vocabulary", type=int, default=30000, help="that random prompts are made of")
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--longest", type=int, default=600, help="half of the most tokens that a random prompt has")
    parser.add_argument("--at", default="8", help="requests at a time; +off: no drafts, -: no overlap")
    parser.add_argument("--option", action="append", default=[])
    args = parser.parse_args()
    if args.compare:
        return compare([Path(args.model), *args.out])
    options = dict(pair.split("=", 1) for pair in args.option)
    options = {name: read(value) for name, value in options.items()}
    started = time.monotonic()
    llm = LLM(args.model, **options)
    print(f"{args.option}: ready in {time.monotonic() - started:.1f} s", flush=True)
    asked, runs = prompts(args), {}
    for at in args.at.split(","):
        number = int("".join(c for c in at if c.isdigit()))
        core, started = llm.engine, time.monotonic()
        core.config = dataclasses.replace(core.config, disable_overlap=at.endswith("-"))
        texts, cached, before, accepted = [], 0, core.scheduler.preemptions, sum(core.counts.accepted)
        for first in range(0, len(asked), number):
            some = range(first, min(first + number, len(asked)))
            outs = llm.generate([asked[i] for i in some], [settings(args, i, "off" not in at) for i in some])
            texts += [out.token_ids for out in outs]
            cached += sum(out.metrics.cached_tokens for out in outs)
        runs[f"{args.out[0].stem} {at}"] = texts
        audit(core.scheduler)
        preempted = core.scheduler.preemptions - before
        told = f"{at}: {time.monotonic() - started:.1f} s, {preempted} preemptions, {cached} prompt tokens cached,"
        told += f" {sum(core.counts.accepted) - accepted} drafts accepted,"
        print(told, f"{different(next(iter(runs.values())), texts)} of {len(texts)} differ", flush=True)
        args.out[0].write_text(json.dumps(runs))
    return 0


def read(value: str) -> Any:
    """An option's value: a number, true, false, or a name."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def prompts(args) -> list:
    if args.prompts is not None:
        return [each.turns[0] for each in in_turn(read_prompts(args.prompts)[1])[: args.count]]
    draw = np.random.default_rng(0)
    shared = draw.integers(0, args.vocabulary, args.longest).tolist()  # every other prompt begins with some of it
    lengths = draw.integers(5, args.longest, args.count).tolist()
    return [shared[: n if i % 2 else 0] + draw.integers(0, args.vocabulary, n).tolist() for i, n in enumerate(lengths)]


def settings(args, i: int, drafts: bool) -> SamplingParams:
    sampled = {"temperature": 0.8, "top_p": 0.95, "seed": i} if i % 4 == 3 else {"temperature": 0.0}
    return SamplingParams(max_tokens=args.tokens, ignore_eos=True, speculative=drafts, **sampled)


def different(one: list, other: list) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def compare(files: list[Path]) -> int:
    runs = {name: texts for file in files for name, texts in json.loads(file.read_text()).items()}
    (first, texts), *others = runs.items()
    counts = {name: different(texts, other) for name, other in others}
    print(f"{len(texts)} texts, against {first}:", *(f"\n  {count} differ: {name}" for name, count in counts.items()))
    return int(any(counts.values()))


if __name__ == "__main__":
    sys.exit(main())
