"""Host time per round: the cost of the engine loop when the device's work costs nothing.

The real `Engine` serves N requests at once: it plans, packs, dispatches, reads, detokenises, ends requests and admits
new ones in their place. Only the programs' bodies are replaced. An empty program is compiled, called and donated to
like the real one and takes all its arguments (every weight, so dispatch costs the same). It returns a result of the
same shape, but only advances each request's count and makes up tokens. So all time that passes in the loop is the
host's. The empty program's own few microseconds are counted too: the figures are upper bounds.

`cpu` is the computing time of the loop's thread. On an idle machine it is almost the total. On a busy one the total
also holds waits for a core, and `cpu` is the figure to trust.

A request yields one token up to the verify width each round. HTTP isn't included; its threads work beside the loop.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from tqdm import tqdm

from jaxspec.bench import plots, traffic
from jaxspec.bench.results import Column, Document, Result, Table, counts, device_facts
from jaxspec.checkpoint import Model, load_model
from jaxspec.checkpoint.params import dummy
from jaxspec.compiling.programs import Programs
from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.flags import add_value, positive
from jaxspec.config.options import ConfigError
from jaxspec.config.request import SamplingParams
from jaxspec.engine.engine import Engine
from jaxspec.models.families import MODELS
from jaxspec.models.model_config import ModelConfig
from jaxspec.parallel import sharding
from jaxspec.parallel.sharding import EVERYWHERE, specs_of, spread
from jaxspec.rounds.programs import MODES, State
from jaxspec.text.tokenizer import Tokenizer, byte_alphabet

PHASES = ("intake", "plan", "dispatch", "read")
FIGURES = (*PHASES, "total", "cpu")
COLUMNS = (
    Column("requests", "requests"),
    *(Column(f"{name}_ms", f"{name} ms", ".3f") for name in FIGURES),
    Column("p99_ms", "99th percentile", ".3f"),
    Column("tokens_per_s", "tok/s", ".0f"),
)
TABLES = (
    Table(
        "host time per round: medians, and the total's 99th percentile",
        COLUMNS,
        lambda row: [
            row | {f"{name}_ms": row[name]["median_ms"] for name in FIGURES} | {"p99_ms": row["total"]["p99_ms"]}
        ],
    ),
)
PRINTABLE = 32, 127  # token ids that the empty program makes up: ASCII, where tokens are bytes
SETTLING_ROUNDS = 50  # after the last of the first N requests has started


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, value = parser.add_argument, partial(add_value, parser)
    value("--requests", counts("1,8,32"), "1,8,32,64,128,256", "N,N,...", "running at once")
    value("--rounds", positive, 1000, None, "measured for each N")
    add("--model", default="tiny", help="tiny (made up in memory), or anything that the server's --model takes")
    value("--layers", positive, 2, None, "of the tiny model: dispatch grows with the number of weights")
    value("--draft", str, "ngram", None, "as the server's --draft; decides the verify width")
    value("--num-draft-tokens", positive, None, None, "drafts per round (the drafter's default)")
    value("--context-length", positive, 4096, None, "sets the size of page tables and histories")
    value("--prompt-tokens", positive, 128, None, "of every request")
    value("--new-tokens", positive, 256, None, "of a request, half as many to half again")
    value("--tp-size", positive, 1, "N", "devices that a program is dispatched to")
    value("--num-continuous-decode-steps", positive, 1, "K", "rounds in a program; figures stay a round's")
    add("--sampled", action="store_true", help="sample at temperature 1")


def run(args: argparse.Namespace, result: Result) -> None:
    """Measure every number of requests.

    **Raises:** `ConfigError` or `CheckpointError` for options or a model that can't work.
    """
    engine = make_engine(args)
    result.fact(**device_facts(), width=engine.runner.width)
    load = Load(engine, args.prompt_tokens, args.new_tokens, args.sampled)
    for count in tqdm(args.requests, desc="host", unit="load", disable=None):
        result.add(load.measure(count, args.rounds))


def make_engine(args: argparse.Namespace) -> Engine:
    """An engine whose programs are empty, with slots and pages for the largest of `args.requests`."""
    most = max(args.requests)
    longest = args.prompt_tokens + args.new_tokens * 3 // 2
    if longest > args.context_length:
        raise ConfigError(
            f"--prompt-tokens {args.prompt_tokens} + 1.5 x --new-tokens {args.new_tokens} = {longest} tokens exceed "
            f"--context-length {args.context_length}"
        )
    options = EngineConfig(
        model=args.model,
        draft=args.draft,
        num_draft_tokens=args.num_draft_tokens,
        draft_policy="fixed",
        context_length=args.context_length,
        max_running_requests=most,
        max_total_tokens=2 * most * (longest + 64),  # as much again for the prefix tree to keep
        chunked_prefill_size=2048,
        num_continuous_decode_steps=args.num_continuous_decode_steps,
        seed=0,
        disable_structured_output=True,  # their programs have no empty ones
        skip_warmup=True,  # the real programs are never compiled
        tp_size=args.tp_size,
    )
    if args.model == "tiny":
        model = tiny_model(args.layers, args.context_length, args.tp_size)
    else:
        model = load_model(args.model, tp_size=args.tp_size)
    engine = Engine(options, model)
    engine.runner.programs = EmptyPrograms(engine)
    engine.runner.programs.warm_up(engine.runner.state)
    return engine


def tiny_model(layers: int, context: int, devices: int) -> Model:
    """A random model of width 32 whose tokens are bytes, made in memory, with a head for each device."""
    mesh = sharding.mesh_of(devices)
    config = ModelConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": 256,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": layers,
            "num_attention_heads": devices,
            "max_position_embeddings": context,
        }
    )
    backend = Backend(models.BPE(vocab={chr(char): byte for char, byte in byte_alphabet().items()}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    params = dummy(MODELS[config.model_type].tensors(config.decoder), "float32", 0, mesh)
    return Model(config, params, "float32", "tiny", None, Tokenizer.from_backend(backend), tp_size=devices)


class EmptyPrograms(Programs):
    """Programs that are compiled, called and donated to like an engine's own, and compute next to nothing."""

    def __init__(self, engine: Engine):
        runner = engine.runner
        params, division = (runner.model.params, runner.draft.params), runner.programs.division
        super().__init__(runner.model.config, runner.draft.drafter, runner.shapes, *params, division=division)

        # keep_unused: arguments that a program doesn't read would otherwise not be passed, which is cheaper
        def jit(f: Callable) -> Callable:
            if division is not None:
                beside = division.draft_params, specs_of(division.peers)
                given = division.params, beside, division.state, EVERYWHERE
                f = spread(f, division.mesh, given, (division.state, EVERYWHERE))
            return jax.jit(f, donate_argnums=2, keep_unused=True)

        admitting = _empty_admit
        if division is not None:
            admitting = spread(admitting, division.mesh, (division.state, EVERYWHERE), division.state)
        prefill = jit(lambda params, draft_params, state, packed: (state, packed[0, 0]))
        self._jits = {
            "admit": jax.jit(admitting, donate_argnums=0, keep_unused=True),
            "prefill": prefill,
            "score": prefill,  # of the ladder, so compiled; no request here wants its prompt scored
            **{f"first_{mode}": jit(partial(_empty_round, 1)) for mode in MODES},
            **{f"round_{mode}": jit(partial(_empty_round, runner.width)) for mode in MODES},
            **{f"rounds_{mode}": jit(partial(_empty_rounds, runner.width, runner.shapes.rounds)) for mode in MODES},
        }


def _empty_admit(state: State, packed: jax.Array) -> State:
    admitted = packing.admit(state.slots, packed)
    return state.replace(slots=state.slots.replace(length=admitted.length, limit=admitted.limit, done=admitted.done))


def _empty_round(
    width: int, params: Any, draft_params: Any, state: State, packed: jax.Array
) -> tuple[State, jax.Array]:
    """`programs.decode_round` with made-up tokens: 1 to `width` of them, by slot and position, up to the limit."""
    slots, ids = state.slots, packed[:, 0]
    length, limit = slots.length[ids], slots.limit[ids]
    noise = (ids * 40503 + length * 30011) >> 4
    accepted = 1 + noise % width
    emitted = jnp.minimum(accepted, limit - length)
    done = length + emitted >= limit
    low, high = PRINTABLE
    tokens = low + (noise[:, None] + 7 * jnp.arange(width)) % (high - low)
    counts = jnp.stack([emitted, accepted, jnp.full_like(ids, width - 1), done.astype(jnp.int32)], axis=1)
    slots = slots.replace(length=slots.length.at[ids].set(length + emitted), done=slots.done.at[ids].set(done))
    return state.replace(slots=slots), jnp.concatenate([counts, tokens], axis=1)


def _empty_rounds(
    width: int, rounds: int, params: Any, draft_params: Any, state: State, packed: jax.Array
) -> tuple[State, jax.Array]:
    """`programs.decode_rounds` with made-up tokens."""
    return jax.lax.scan(lambda state, _: _empty_round(width, None, None, state, packed), state, length=rounds)


class Load:
    """Keeps a number of requests running, a new one for each that ends, and times the loop.

    Phases: `intake` is `Engine.prepare` and `add` of new requests; `plan`, `Scheduler.plan`; `dispatch`, all of the
    runner, which packs and calls; `read`, the rest of a step: results to the host, text, deltas, ends.
    """

    def __init__(self, engine: Engine, prompt_tokens: int, new_tokens: int, sampled: bool):
        self.engine = engine
        self._prompt_tokens, self._new_tokens, self._sampled = prompt_tokens, new_tokens, sampled
        self._rng = np.random.default_rng(0)
        self._spent: Counter = Counter()
        self._time(engine.scheduler, "plan", "plan")
        for name in ("admit", "prefill", "first", "round"):
            self._time(engine.runner, name, "dispatch")

    def measure(self, count: int, rounds: int) -> dict[str, Any]:
        """Times of `rounds` rounds with `count` requests running: for each phase, median and 99th percentile in ms."""
        engine = self.engine
        self._step(count)
        while len(engine.scheduler.running) < count:
            self._step(count)
        for _ in range(SETTLING_ROUNDS):
            self._step(count)
        gc.collect()
        compiled = engine.stats()["compiles_total"]
        samples, tokens = [], engine.counts.totals["generation_tokens"]
        for _ in range(rounds):
            samples.append(self._step(count))
        tokens = engine.counts.totals["generation_tokens"] - tokens
        if compiled != engine.stats()["compiles_total"]:
            raise RuntimeError("a program was compiled while the loop was timed; the figures mean nothing")
        traffic.end(engine)
        figures = {name: _summary([sample[name] for sample in samples]) for name in FIGURES}
        seconds = sum(sample["total"] for sample in samples)
        return {"requests": count, "rounds": rounds, "tokens_per_s": tokens / seconds} | figures

    def _step(self, count: int) -> Counter:
        """One turn of the loop; seconds by phase, of each round that it read."""
        engine, spent, before = self.engine, self._spent, self.engine.counts.totals["rounds"]
        new = [self._request() for _ in range(count - len(engine.requests))]
        spent.clear()
        started, cpu = time.perf_counter(), time.thread_time()
        for prompt, params in new:
            engine.add(engine.prepare(prompt, params))
        spent["intake"] = time.perf_counter() - started
        engine.step()
        spent["cpu"] = time.thread_time() - cpu
        spent["total"] = time.perf_counter() - started
        spent["read"] = spent["total"] - sum(spent[name] for name in PHASES if name != "read")
        rounds = max(engine.counts.totals["rounds"] - before, 1)
        return Counter({name: seconds / rounds for name, seconds in spent.items()})

    def _request(self) -> tuple[list[int], SamplingParams]:
        new = int(self._rng.integers(self._new_tokens // 2, self._new_tokens * 3 // 2 + 1))
        prompt = self._rng.integers(*PRINTABLE, self._prompt_tokens).tolist()
        return prompt, SamplingParams(temperature=float(self._sampled), max_tokens=max(new, 1), ignore_eos=True)

    def _time(self, owner: Any, name: str, phase: str) -> None:
        method = getattr(owner, name)

        def timed(*args):
            started = time.perf_counter()
            result = method(*args)
            self._spent[phase] += time.perf_counter() - started
            return result

        setattr(owner, name, timed)


def _summary(seconds: list[float]) -> dict[str, float]:
    median, p99 = np.percentile(seconds, [50, 99]) * 1e3
    return {"median_ms": float(median), "mean_ms": float(np.mean(seconds) * 1e3), "p99_ms": float(p99)}


def plot(document: Document, figure: Any) -> None:
    """The phases of a round, one on the other, against the number of requests."""
    axes = figure.subplots()
    rows = document["rows"]
    x = [row["requests"] for row in rows]
    axes.stackplot(x, [[row[phase]["mean_ms"] for row in rows] for phase in PHASES], labels=PHASES)
    axes.plot(x, [row["total"]["p99_ms"] for row in rows], "k--", label="total, 99th percentile")
    plots.against(axes, x, "running requests", "ms per round on the host")
