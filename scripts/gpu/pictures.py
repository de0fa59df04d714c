"""Time pictures beside rounds on a GPU: `python -m scripts.gpu.pictures --model FOLDER [--side 1024]`.

It prints the vision tower's time for a picture; the first token of a prompt that has one, and of as long a text; rounds
of N requests after pictures and after texts, by turns; and the longest gaps between tokens of requests that run while
pictures come, without a limit and with one. Weights are dummies, and drafts accepted at `--accept-rates`.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections import defaultdict
from statistics import median

import jax
import numpy as np

from jaxspec import SamplingParams
from jaxspec.bench import engines, steady
from jaxspec.bench.imposed import add_arguments as add_acceptance
from jaxspec.bench.imposed import imposed
from jaxspec.config.flags import engine_options
from jaxspec.engine.engine import Engine
from jaxspec.images.picture import Picture, PlacedPicture, Prompt

BEFORE, AFTER = 16, 48  # tokens of a prompt's text around its picture


class Bench:
    """Prompts for one engine, each of random tokens and perhaps a picture of random pixels."""

    def __init__(self, engine: Engine, side: int):
        self.engine, self.tower = engine, engine.model_config.tower
        self.patches = (side // 16) ** 2
        self.tokens, self.rng = self.patches // self.tower.per_token, np.random.default_rng(0)

    def picture(self) -> Picture:
        pixels = self.rng.random((self.patches, self.tower.patch), np.float32)
        side = int(self.patches**0.5)
        return Picture(pixels, (1, side, side), self.tokens, int(self.rng.integers(2**63)))

    def prompt(self, seen: bool) -> Prompt | list[int]:
        ids = self.rng.integers(0, self.engine.model_config.vocab_size, BEFORE + self.tokens + AFTER).tolist()
        return Prompt(ids, (PlacedPicture(self.picture(), BEFORE),)) if seen else ids

    def add(self, seen: bool, tokens: int, prompt: Prompt | None = None) -> str:
        """Queue a request for so many new tokens, by default of a prompt made for it; its id."""
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        request = self.engine.prepare(prompt or self.prompt(seen), params)
        request.added = time.monotonic()
        self.engine.add(request)
        return request.id

    def first_token(self, seen: bool) -> float:
        """Milliseconds to the first token of a request that is alone."""
        self.add(seen, 1)
        deltas = []
        while self.engine.busy:
            deltas += self.engine.step()
        return 1e3 * deltas[-1].metrics.ttft

    def rounds(self, seen: bool, count: int, tokens: int) -> dict:
        """Figures of rounds in which all of `count` requests decode."""
        start = steady.Sample.take(self.engine)
        gained = dict.fromkeys((self.add(seen, tokens) for _ in range(count)), 0)
        samples = []
        while self.engine.busy:
            deltas = self.engine.step()
            for delta in deltas:
                gained[delta.request_id] += len(delta.token_ids)
            if min(gained.values()) > 8 and max(gained.values()) < tokens - 8:
                samples.append(steady.Sample.take(self.engine))
        return steady.figures(samples, start, count, BEFORE + self.tokens + AFTER)

    def gaps(self, count: int, pictures: int, every: float, seconds: float) -> tuple[list[float], list[float]]:
        """Milliseconds between two results of `count` texts that run while pictures come, and pictures' first tokens.

        `every`: seconds between two pictures, the first of which comes after as long.
        """
        running = {self.add(False, 1500) for _ in range(count)}
        coming = [self.prompt(True) for _ in range(pictures)]  # so that making them holds up nobody
        last, gaps, firsts = defaultdict(float), [], []
        began, added = None, 0
        while self.engine.busy:
            deltas, now = self.engine.step(), time.monotonic()
            for delta in deltas:
                if delta.request_id not in running:
                    firsts += [1e3 * delta.metrics.ttft] if delta.finish_reason else []
                elif delta.token_ids:
                    if began is not None and delta.finish_reason is None:
                        gaps.append(1e3 * (now - last[delta.request_id]))
                    last[delta.request_id] = now
            if began is None and len(last) == count:
                began = now + 0.2  # they run
            if began is not None and added < pictures and now > began + every * (added + 1):
                self.add(True, 4, coming[added])
                added += 1
            if began is not None and now > began + seconds:
                for each in list(self.engine.requests):
                    self.engine.abort(each)
        return gaps, firsts


def warm_up(engine: Engine, patches: int) -> None:
    """Compile the programs that are needed here, side by side, and no others."""
    kinds = "prefill", "admit", "first_greedy", "round_greedy"
    engine.runner.programs.warm_up(engine.runner.state, lambda one: one[0] in kinds)
    tower = engine.runner.pictures.programs
    tower.get(next(size for size in tower.sizes if size >= patches), engine.config.dtype)


def tower_ms(engine: Engine, picture: Picture) -> float:
    """Milliseconds of one picture's program, its pixels' way to the GPU included."""
    runner, took = engine.runner, []
    for _ in range(6):
        runner.pictures.forget()
        started = time.perf_counter()
        held, _ = runner.pictures.read(runner.state.pictures, [picture], set())
        runner.state = runner.state.replace(pictures=jax.block_until_ready(held))
        took.append(1e3 * (time.perf_counter() - started))
    return median(took[1:])


def way_ms(picture: Picture) -> float:
    """Milliseconds of a picture's pixels' way to the GPU."""
    took = []
    for _ in range(6):
        started = time.perf_counter()
        jax.block_until_ready(jax.device_put(picture.pixels))
        took.append(1e3 * (time.perf_counter() - started))
    return median(took[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=1024, help="pixels of a picture's side")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run beside pictures")
    add_acceptance(parser)
    parser.set_defaults(accept_rates=[0.75, 0.5, 0.25])
    engines.add_arguments(parser, draft="mtp", few_programs=True, skip_warmup=True, disable_structured_output=True,
                          max_itl_ms=50)  # fmt: skip
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    began = time.perf_counter()
    engine = engines.make(args, args.requests, imposed(args))
    bench = Bench(engine, args.side)
    warm_up(engine, bench.patches)
    print(f"{engine_options(args)}\nprograms are ready after {time.perf_counter() - began:.0f} s", flush=True)
    what = f"{args.side} x {args.side} pixels, {bench.tokens} tokens"
    picture = bench.picture()
    print(f"tower: {tower_ms(engine, picture):.1f} ms for {what}, {way_ms(picture):.1f} on their way", flush=True)
    for seen in (True, False):
        times = [bench.first_token(seen) for _ in range(8)][2:]
        print(f"first token of a {'picture' if seen else 'text as long'}: {median(times):.1f} ms, {np.round(times, 1)}")
    rows = {True: [], False: []}
    bench.rounds(False, args.requests, 96)
    for turn in range(args.turns):
        for seen in (True, False):
            row = bench.rounds(seen, args.requests, 192)
            rows[seen].append(row["ms_per_round"])
            name = "pictures" if seen else "texts"
            print(f"turn {turn}, {args.requests} after {name}: {row['ms_per_round']:.3f} ms a round (mean "
                  f"{row['mean_ms']:.3f}), {row['accept_length']:.2f} tokens a round", flush=True)  # fmt: skip
    print(f"rounds: {median(rows[True]):.3f} ms after pictures, {median(rows[False]):.3f} after texts", flush=True)
    for limit in (None, args.max_itl_ms):
        engine.limit_between(limit)
        texts = args.requests - 1
        gaps, firsts = bench.gaps(texts, pictures=8, every=args.seconds / 10, seconds=args.seconds)
        print(
            f"--max-itl-ms {limit}: gaps of {texts} texts beside 8 pictures: median {median(gaps):.1f} ms, "
            f"99th percentile {np.percentile(gaps, 99):.1f}, longest {np.round(np.sort(gaps)[::-texts][:10], 1)}; "
            f"first token of a picture {median(firsts):.0f} ms, longest {max(firsts):.0f}",
            flush=True,
        )
    print(f"compiled meanwhile: {engine.stats()['compiles_total']} programs in all")


if __name__ == "__main__":
    main()
