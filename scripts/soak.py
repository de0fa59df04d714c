"""Load that tries to change a text: `python scripts/soak.py MODEL [options]`, deterministic unless an option says not.

Clients stream requests one after the other, with changing settings; a third leave early. A case that completes must
say what it said before, whatever ran beside it. Afterwards pages and slots must balance, and each case that completed
runs once more by itself, without drafts and with an empty prefix cache. With several drafters, each has an engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

import jax
import numpy as np

from jaxspec import AsyncLLM, SamplingParams
from jaxspec.scheduling.audit import audit
from jaxspec.text.prompts import in_turn
from jaxspec.text.prompts import read as read_prompts
from scripts.same_bits import read

DEADLINE = 120  # seconds without an event after which a request counts as stuck
SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "speculative": False},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.7, "frequency_penalty": 0.5, "speculative": False},
]
Case = tuple[str | list[int], SamplingParams]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, help="questions of a benchmark; otherwise tokens at random")
    parser.add_argument("--vocabulary", type=int, default=30000, help="that random prompts are made of")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128, help="the most that a request has")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=600, help="of load, divided among the drafters")
    parser.add_argument("--drafts", default="ngram", help="drafters, one after the other: ngram,suffix,none")
    parser.add_argument("--option", action="append", default=[], help="of the engine, name=value")
    parser.add_argument("--texts", type=Path, help="where to leave what each case said, as JSON")
    args = parser.parse_args()
    options = {name: read(value) for name, value in (pair.split("=", 1) for pair in args.option)}
    work, drafts, known = cases(args), args.drafts.split(","), {}
    for draft in drafts:
        llm = AsyncLLM(args.model, draft, **{"deterministic": True} | options)
        try:
            wrong = asyncio.run(soak(llm, work, args.clients, args.seconds / len(drafts), known))
        finally:
            llm.close()
        if args.texts is not None:
            args.texts.write_text(json.dumps({case: known[case] for case in sorted(known)}))
        if wrong:
            return 1
    return 0


def cases(args) -> list[Case]:
    draw = np.random.default_rng(0)
    if args.prompts is not None:
        asked = [each.turns[0] for each in in_turn(read_prompts(args.prompts)[1])[: args.cases]]
    else:
        shared = draw.integers(0, args.vocabulary, 64).tolist()
        lengths = draw.integers(4, 64, args.cases)
        asked = [shared[: n * (i % 2)] + draw.integers(0, args.vocabulary, n).tolist() for i, n in enumerate(lengths)]
    lengths = draw.integers(1, args.tokens, len(asked), endpoint=True).tolist()
    return [
        (prompt, SamplingParams(max_tokens=length, ignore_eos=True, seed=i, **SETTINGS[i % len(SETTINGS)]))
        for i, (prompt, length) in enumerate(zip(asked, lengths, strict=True))
    ]


async def soak(llm: AsyncLLM, work: list[Case], clients: int, seconds: float, known: dict[int, list[int]]) -> int:
    """Load, then the checks. Returns how many cases said two things; `known` is what each case said first."""
    counts, wrong, memory, end = Counter(), set(), [], time.monotonic() + seconds

    def compare(case: int, text: list[int]) -> None:
        if known.setdefault(case, text) != text:
            wrong.add(case)

    async def client(number: int) -> None:
        draw = np.random.default_rng([1, number])
        while time.monotonic() < end:
            case, mood = int(draw.integers(len(work))), draw.random()
            events = int(draw.integers(1, 12)) if mood < 0.2 else None
            patience = float(draw.uniform(0, 0.5)) if mood > 0.87 else None
            try:
                async with asyncio.timeout(patience):
                    text = await answer(llm, work[case], events)
            except TimeoutError:
                text = None
            counts["completed" if text is not None else "left"] += 1
            if text is not None:
                counts["tokens"] += len(text)
                compare(case, text)

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(client(number))
        for _ in range(10):
            await asyncio.sleep(seconds / 10)
            memory.append((resident(), on_device()))
            print(f"{counts['completed']} completed, {counts['left']} left", flush=True)
    done = list(known)
    while llm.engine.busy:
        await asyncio.sleep(0.05)
    balanced(llm)
    preemptions = llm.stats()["preemptions_total"]
    print(f"after {counts['completed']} requests {len(wrong)} of {len(done)} cases had said two things", flush=True)
    for i, case in enumerate(done):
        prompt, params = work[case]
        assert await llm.flush_cache(), "the prefix cache can't be emptied with no request there"
        alone = SamplingParams(**vars(params) | {"speculative": False})
        compare(case, await answer(llm, (prompt, alone), None))
        if i % 20 == 19:
            print(f"{i + 1} ran alone, {len(wrong)} cases differ", flush=True)
    balanced(llm)
    (host, device), (host_after, device_after) = memory[2], memory[-1]
    print(
        f"{llm.config.draft}: {seconds:.0f} s, {clients} clients, {counts['completed']} requests completed, "
        f"{counts['left']} left, {counts['tokens']} tokens, {sum(llm.engine.counts.accepted)} drafts accepted, "
        f"{preemptions} preemptions, memory {host:.0f} -> {host_after:.0f} MiB, on the device {device:.1f} -> "
        f"{device_after:.1f}; {len(wrong)} of {len(done)} cases differ",
        flush=True,
    )
    return len(wrong)


async def answer(llm: AsyncLLM, case: Case, events: int | None) -> list[int] | None:
    """The tokens of a request; None if it was left after so many `events`."""
    text, stream = [], llm.generate(*case)
    try:
        while True:
            try:
                async with asyncio.timeout(DEADLINE) as late:
                    delta = await anext(stream)
            except StopAsyncIteration:
                return text
            except TimeoutError:
                if late.expired():
                    raise RuntimeError(f"no event in {DEADLINE} s: stuck with {case}") from None
                raise
            text += delta.token_ids
            if events is not None and (events := events - 1) == 0:
                return None
    finally:
        await stream.aclose()


def balanced(llm: AsyncLLM) -> None:
    """No request is left, and every page is free or the prefix tree's."""
    stats = llm.stats()
    if llm.error is not None or stats["num_running"] or stats["num_waiting"]:
        raise RuntimeError(f"not idle after the load: {llm.error}, {stats['num_running']} running")
    audit(llm.engine.scheduler)
    if stats["free_pages"] + stats["cached_pages"] != stats["total_pages"]:
        raise RuntimeError(
            f"pages leaked: {stats['free_pages']} free, {stats['cached_pages']} cached of all {stats['total_pages']}"
        )


def resident() -> float:
    """MiB of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def on_device() -> float:
    """MiB in use there, 0 where nobody counts them."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_in_use", 0) / 2**20


if __name__ == "__main__":
    sys.exit(main())
