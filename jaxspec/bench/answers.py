"""Answers to the same prompts by one drafter after the other, plain decoding first, over devices and concurrencies.

Each drafter has an engine of its own. In between prefixes are forgotten, and by a drafter all other requests.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tqdm import tqdm

from jaxspec.bench import engines, traffic
from jaxspec.bench.acceptance import Counts
from jaxspec.bench.client import Reply
from jaxspec.bench.datasets import Prompt
from jaxspec.bench.results import BenchError, Result, Row, counts
from jaxspec.config.request import SamplingParams
from jaxspec.engine.engine import Engine
from jaxspec.text import prompts as files

PLAIN = "none"


@dataclass(frozen=True)
class Benchmark:
    """`asked[i]` is answered first by what follows `opening[i]`, token ids, then turn by turn."""

    name: str
    asked: list[files.Prompt]
    opening: list[list[int]]

    @classmethod
    def that_fit(
        cls, engine: Engine, name: str, asked: Sequence[files.Prompt], opening: Sequence[list[int]], room: int,
        result: Result,
    ) -> Benchmark:  # fmt: skip
        """Leave out prompts without room for `room` new tokens in the context.

        **Raises:** `BenchError` if none has any.
        """
        context = engine.config.context_length
        fitting = [i for i, tokens in enumerate(opening) if len(tokens) <= context - room]
        if not fitting:
            raise BenchError(
                f"no question of {name} leaves room for {room} new tokens in a context of {context}; raise "
                "--context-length or lower --output-len"
            )
        left = f"{len(asked) - len(fitting)} of {len(asked)} questions of {name} are left out: too long for the context"
        if len(fitting) < len(asked) and left not in result.document["notes"]:
            result.note(left)
        return cls(name, [asked[i] for i in fitting], [opening[i] for i in fitting])


@dataclass(frozen=True, eq=False)
class Run:
    """A benchmark's answers: the replies to each prompt's turns. `seconds`: the time that all took, that of compiling
    `compiles` programs included."""

    draft: str
    drafts: int
    tp_size: int
    concurrency: int
    benchmark: Benchmark
    answers: list[list[Reply]]
    seconds: float
    compiles: int

    @cached_property
    def row(self) -> Row:
        """Tokens and speed. `each`: (tokens, seconds) of each prompt."""
        each = [(sum(r.output_tokens for r in a), sum(r.ended - r.sent for r in a)) for a in self.answers]
        tokens = sum(count for count, _ in each)
        return {
            "draft": self.draft,
            "drafts": self.drafts,
            "tp_size": self.tp_size,
            "data": self.benchmark.name,
            "concurrency": self.concurrency,
            "prompts": len(each),
            "output_tokens": tokens,
            "seconds": self.seconds,
            "tokens_per_s": tokens / self.seconds,
            "compiles": self.compiles,
            "each": each,
        }

    def counted(self) -> list[Counts]:
        return [Counts.of(*(reply.metrics for reply in replies)) for replies in self.answers]


def add_arguments(parser: argparse.ArgumentParser, several: bool = True) -> None:
    """The engine's flags, of which `--draft` may be repeated and `--tp-size` is a list."""
    said = "a drafter, as the server takes it; several are compared"
    parser.add_argument("--draft", action="append", metavar="D", help=f"{said} ({'auto' if several else 'none'})")
    kept = "let a drafter draft from its answers to the loads before, as suffix does and a long-running server's would"
    parser.add_argument("--keep-memory", action="store_true", help=kept)
    sizes = "numbers of devices of a model, one after the other (%(default)s)"
    parser.add_argument("--tp-size", type=counts("1,2"), default="1", metavar="N,N,...", help=sizes)
    engines.add_arguments(parser, without=("draft", "tp_size"), load_format="auto")


def drafters(args: argparse.Namespace, plain: bool) -> list[str]:
    """The drafters of the command line, `auto` if it names none, after plain decoding if that is wanted.

    **Raises:** as `engines.check`, for options or a drafter that can't work.
    """
    drafts = list(dict.fromkeys(args.draft or ["auto"]))
    if plain:
        drafts = [PLAIN, *(draft for draft in drafts if draft != PLAIN)]
    for size in args.tp_size:
        for draft in drafts:
            engines.check(engines.with_drafter(args, draft, size))
    return drafts


def sweep(
    args: argparse.Namespace, drafts: Sequence[str], params: SamplingParams, result: Result,
    prepare: Callable[[Engine], list[Benchmark]],
) -> Iterator[Run]:  # fmt: skip
    """Answer each benchmark with each number of devices, drafter and concurrency. `prepare` gives an engine's
    benchmarks."""
    cases = [(size, draft) for size in args.tp_size for draft in drafts]
    with tqdm(total=len(cases) * len(args.concurrency), desc="answers", unit="load", disable=None) as bar:
        for size, draft in cases:
            engine = engines.start(engines.with_drafter(args, draft, size), result, max(args.concurrency))
            benchmarks = prepare(engine)
            for concurrency in args.concurrency:
                if engine.config.skip_warmup:
                    _answer(engine, args, benchmarks[0], params, concurrency, concurrency)
                for benchmark in benchmarks:
                    bar.set_postfix_str(f"{draft}, {benchmark.name}, {concurrency} at a time")
                    compiled = engine.stats()["compiles_total"]
                    answers, seconds = _answer(engine, args, benchmark, params, concurrency)
                    drafted = engine.runner.draft.drafter.num_draft_tokens
                    compiled = engine.stats()["compiles_total"] - compiled
                    yield Run(draft, drafted, size, concurrency, benchmark, answers, seconds, compiled)
                bar.update()
            del engine
            gc.collect()  # its memory is the next one's
    if (note := compiling(result.rows)) is not None:
        result.note(note)


def compiling(rows: Sequence[Row]) -> str | None:
    """Say whose speeds include compiling, in one note; None if no program was compiled meanwhile."""
    found = [row for row in rows if row.get("compiles")]
    if not found:
        return None
    if len(found) == len(rows):
        return "programs were compiled meanwhile, and every speed includes that"
    loads = "; ".join(f"{row['draft']}, {row['data']}, {row['concurrency']} at a time" for row in found)
    return (
        f"programs were compiled meanwhile, and the speeds of {len(found)} of {len(rows)} loads include that: {loads}"
    )


def _answer(
    engine: Engine, args: argparse.Namespace, benchmark: Benchmark, params: SamplingParams, concurrency: int,
    most: int | None = None,
) -> tuple[list[list[Reply]], float]:  # fmt: skip
    """Replies to all turns of each prompt, of the first `most` prompts, and the time that they took. Turn by turn, so
    that all prompts' first turns are answered before any second."""
    (engine.flush_cache if args.keep_memory else engine.recover)()  # the second makes a drafter's state anew, too
    asked = benchmark.asked[:most]
    chats: list[list[dict[str, Any]]] = [prompt.opening() for prompt in asked]
    now, seconds = dict(enumerate(benchmark.opening[:most])), 0.0
    answers: list[list[Reply]] = [[] for _ in asked]
    turns = max(len(prompt.turns) for prompt in asked)
    for turn in range(1, turns + 1):
        load = traffic.Load.closed([Prompt(tuple(ids)) for ids in now.values()], concurrency, params)
        replies = traffic.serve(engine, load)
        seconds += max(reply.ended for reply in replies) - min(reply.sent for reply in replies)
        for i, reply in zip(now, replies, strict=True):
            answers[i].append(reply)
            chats[i].append({"role": "assistant", "content": reply.text})
            chats[i].extend(asked[i].opening(turn + 1)[len(asked[i].opening(turn)) :])
        going = [i for i in now if len(asked[i].turns) > turn]
        now = {i: chat_ids(engine, args, chats[i]) for i in going}
        now = {i: ids for i, ids in now.items() if len(ids) + params.max_tokens <= engine.config.context_length}
        if not now:
            break
    return answers, seconds


def chat_ids(engine: Engine, args: argparse.Namespace, chat: Sequence[dict[str, Any]]) -> list[int]:
    """Token ids of a chat that the model is to go on with."""
    template = tuple(args.chat_template_kwargs.items())
    return Prompt(messages=tuple(chat), template=template).ids(engine.tokenizer)
