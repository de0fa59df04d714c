"""Structured output: time of a round with and without grammars, and what masks cost the host.

Offline and greedy, as `decode`: N requests are queued at once, and rounds are timed while all decode. Each N runs
twice, without grammars and with one for every request, an endless JSON array of small objects. `masks` is the host's
time in making a round's masks, from the drafts' arrival to their dispatch, which the forward hides where it takes
longer. `forced` is the share of tokens that the grammar left no choice about.

After that, masks alone: one request at a time walks through a text drawn from each grammar, and each row is timed with
all that a round does for it: forced text, the mask, the step to the next row and back.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxspec.bench import engines, plots
from jaxspec.bench.results import BenchError, Column, Document, Result, Row, Table, counts
from jaxspec.bench.steady import Load, tell
from jaxspec.checkpoint import Model
from jaxspec.config.flags import positive
from jaxspec.config.request import SamplingParams, StructuredOutput
from jaxspec.engine import engine as engines_module
from jaxspec.engine.engine import Engine
from jaxspec.structured.grammar import Grammars, round_masks
from jaxspec.text.tokenizer import Tokenizer

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "kind": {"enum": ["person", "place", "thing"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
        "seen": {"type": "boolean"},
    },
    "required": ["name", "kind", "count", "tags", "seen"],
    "additionalProperties": False,
}
ITEMS = {"type": "array", "items": ITEM, "minItems": 1000}  # no text comes to its end
GRAMMARS = {
    "array of objects": StructuredOutput(json=ITEMS),
    "the same, compact": StructuredOutput(json=ITEMS, whitespace_pattern=""),
    "any JSON": StructuredOutput(json=True),
    "regex": StructuredOutput(regex=r"([a-z]{1,12}@[a-z]{1,12}\.(com|org), )*"),
}
ROUND_COLUMNS = (
    Column("concurrency", "requests"),
    Column("constrained", "grammars", ".0%"),
    Column("ms_per_round", "ms/round", ".3f"),
    Column("overhead", "more", "+.1%"),
    Column("masks_ms", "masks ms", ".3f"),
    Column("forced", "forced", ".1%"),
    Column("accept_length", "accept len", ".2f"),
    Column("tokens_per_s", "tok/s", ".0f"),
)
MASK_COLUMNS = (
    Column("grammar", "grammar", "<20", 20),
    Column("vocab", "vocabulary"),
    Column("median_us", "us/row", ".0f"),
    Column("mean_us", "mean", ".0f"),
    Column("p99_us", "p99", ".0f"),
    Column("compile_ms", "compile ms", ".1f"),
)
TABLES = (
    Table("time per round with grammars, ms", ROUND_COLUMNS, lambda row: [row] if "concurrency" in row else []),
    Table("masks on the host", MASK_COLUMNS, lambda row: [row] if "grammar" in row else []),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--concurrency", type=counts("1,32"), default="1,32,128", metavar="N,N,...", help="(%(default)s)")
    add("--prompt-len", type=positive, default=256, metavar="TOKENS", help="of every request (%(default)s)")
    add("--output-len", type=positive, default=192, metavar="TOKENS", help="of every request (%(default)s)")
    add("--rows", type=positive, default=400, help="timed of each grammar (%(default)s)")
    add("--tokenizer", metavar="FOLDER", help="of a model whose folder has none, such as a config alone")
    engines.add_arguments(parser)


def run(args: argparse.Namespace, result: Result) -> None:
    """Measure every concurrency without grammars and with them, then masks.

    **Raises:** `BenchError` for a model that serves no structured output; as `engines.start`.
    """

    def with_tokenizer(model: Model) -> Model:
        if args.tokenizer is None:
            return model
        return dataclasses.replace(model, tokenizer=Tokenizer.from_folder(args.tokenizer))

    lengths = args.prompt_len, args.output_len
    engine = engines.start(args, result, max(args.concurrency), alter=with_tokenizer, lengths=lengths)
    if engine.grammars is None:
        raise BenchError(
            f"{args.model} serves no structured output: give --tokenizer, and no --disable-structured-output"
        )
    rng = np.random.default_rng(args.seed or 0)
    for count in tqdm(args.concurrency, desc="structured", unit="load", disable=None):
        plain = None
        for structured in (None, GRAMMARS["array of objects"]):
            load = StructuredLoad(engine, rng, count, args.prompt_len, structured)
            if engine.config.skip_warmup:
                load.run(args.output_len)
            gc.collect()
            row = load.measure(args.output_len)
            plain = plain or row
            both = row["ms_per_round"] and plain["ms_per_round"]
            row["overhead"] = row["ms_per_round"] / plain["ms_per_round"] - 1 if structured and both else None
            result.add({"concurrency": count, "constrained": float(structured is not None)} | row)
            tell(result, f"concurrency {count}, {'grammars' if structured else 'no grammars'}", row, args)
    for name, grammar in GRAMMARS.items():
        result.add(mask_row(engine.grammars, name, grammar, engine.model_config.vocab_size, args.rows))


class StructuredLoad(Load):
    """A load whose requests all follow a grammar, or none."""

    def __init__(
        self, engine: Engine, rng: np.random.Generator, count: int, length: int, structured: StructuredOutput | None
    ):
        super().__init__(engine, rng, count, length)
        self._structured = structured

    def measure(self, output_len: int) -> Row:
        before = dict(self._engine.counts.totals)
        with _timed() as spent:
            row = self.run(output_len)
        gained = {name: value - before.get(name, 0) for name, value in self._engine.counts.totals.items()}
        row["masks_ms"] = float(np.median(spent)) * 1e3 if spent else None
        row["forced"] = gained.get("forced_tokens", 0) / gained["generation_tokens"]
        return row

    def params(self, output_len: int) -> SamplingParams:
        return dataclasses.replace(super().params(output_len), structured=self._structured)


@contextmanager
def _timed() -> Iterator[list[float]]:
    """Within, how long the engine took for each round's masks, in seconds."""
    spent: list[float] = []

    def timed(*args: Any) -> Any:
        began = time.perf_counter()
        made = round_masks(*args)
        spent.append(time.perf_counter() - began)
        return made

    engines_module.round_masks = timed
    try:
        yield spent
    finally:
        engines_module.round_masks = round_masks


def mask_row(grammars: Grammars, name: str, wanted: StructuredOutput, vocab: int, rows: int) -> Row:
    """Times of single rows along texts drawn from a grammar, all its tokens alike but for long ones, which it prefers
    to end, as models do."""
    grammars.warm_up()
    began = time.perf_counter()
    compiled = grammars.compile(wanted)
    compile_ms = (time.perf_counter() - began) * 1e3
    rng, spent, drafts = np.random.default_rng(0), [], np.zeros((1, 2), np.int32)
    matcher = grammars.start(compiled, avoid_end=True)
    for _ in range(rows):
        bits, _ = round_masks([matcher], np.zeros((1, 2), np.int32), 2, vocab)
        allowed = np.flatnonzero(np.unpackbits(bits[0, 0].view(np.uint8), bitorder="little"))
        token = int(rng.choice(allowed))
        drafts[0] = 1, token
        began = time.process_time()  # the library's threads included
        round_masks([matcher], drafts, 2, vocab)
        spent.append((time.process_time() - began) / 2)  # the newest token's row and the draft's
        matcher.advance([token])
    median, p99 = np.percentile(spent, [50, 99]) * 1e6
    figures = {"median_us": float(median), "mean_us": float(np.mean(spent)) * 1e6, "p99_us": float(p99)}
    return {"grammar": name, "vocab": vocab, "compile_ms": compile_ms, **figures}


def plot(document: Document, figure: Any) -> None:
    """Round time against requests, with and without grammars."""
    axes = figure.subplots()
    rows = [row for row in document["rows"] if row.get("ms_per_round")]
    x = sorted({row["concurrency"] for row in rows})
    for share in (0.0, 1.0):
        mine = [row for row in rows if row["constrained"] == share]
        plots.curve(axes, mine, "concurrency", "ms_per_round", label=f"{share:.0%}")
    plots.against(axes, x, "requests", "ms per round")
