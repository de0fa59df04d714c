"""Which GPUs a model needs and the least time of a round on them, from its config.json alone. Nothing is loaded.

A row is a tensor-parallel size: `replicas` of that many GPUs each. Sizes are those of one GPU. They come from the
engine's own memory plan, made for one GPU's share of the model, so options mean what they mean to the server.

`c=N` is the time of a round, in ms, with N requests in a replica: bytes over bandwidth or operations over arithmetic,
plus what kernels take besides, plus the sums over the GPUs of a replica, and the passes of a drafter with weights. It
is an estimate: `MEASURED` in tests/bench/test_plan.py has rounds that it is compared with. A dash says that the KV
cache doesn't hold N requests of `--context` tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.bench import engines, floors, plots
from jaxspec.bench.floors import Ceilings, ModelCost
from jaxspec.bench.results import BenchError, Column, Document, Result, Row, Table
from jaxspec.cache.memory_plan import MemoryPlan
from jaxspec.checkpoint import Model, ModelFolder, locate, outlined
from jaxspec.compiling.abstract_model import drafter_of
from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.flags import engine_options, positive
from jaxspec.config.options import ConfigError
from jaxspec.decoder.forward import COPY_ROWS
from jaxspec.decoder.matmul import quantises_rows
from jaxspec.drafters import combined
from jaxspec.drafters.chain import Chain
from jaxspec.drafters.loading import LoadedDrafter, parse_draft
from jaxspec.drafters.registry import DRAFTERS
from jaxspec.drafters.vocabulary import read_token_map
from jaxspec.engine.adapters import Outline
from jaxspec.engine.defaults import GPU, Defaults, resolve, shapes_of, small_model
from jaxspec.engine.runner import Runner
from jaxspec.models.description import Absent, Decoder, Mixture, Mlp
from jaxspec.models.families import MODELS
from jaxspec.models.memory import Recurrence
from jaxspec.pallas.experts.experts_mlp import expected_experts

MIB = 2**20
POOL = 0.95  # XLA's share of a GPU's memory, as `claim_device` sets it


@dataclass(frozen=True)
class Gpu:
    """A GPU: its memory in bytes, and what decode reaches of its bandwidth and its bfloat16 arithmetic, a second."""

    memory: int
    bandwidth: float
    flops: float


# An H200 reaches 4.05 of 4.8 TB/s in rounds and 600 of 989 TFLOP/s in products, measured. Of the others those shares
# of their data sheets are assumed.
GPUS = {
    "h200": Gpu(143771 * MIB, 4.05e12, 600e12),
    "h100": Gpu(81559 * MIB, 3.35e12 * 4.05 / 4.8, 600e12),
    "h20": Gpu(97871 * MIB, 4.0e12 * 4.05 / 4.8, 148e12 * 600 / 989),
}

# Seconds that a round's parts take beside their bytes: medians of an H200's kernels by the profiler, of models on one
# GPU and on two (docs/lab/measurements-several-gpus.md).
ATTENTION, LINEAR = 7e-6, 11e-6  # a layer's full attention; linear attention with its convolution and norms
PRODUCT, FP8_PRODUCT = 2.5e-6, 4e-6  # a layer's product with its norm or gate, of one row
ROW, FP8_ROW, ROWS = 0.04e-6, 0.07e-6, 128  # of a product for each row, up to so many: later ones are operations
MIXTURE, FP8_EXPERT, SHARED = 12e-6, 0.15e-6, 2e-6  # router, plan and sum; each expert read in FP8; shared experts
PLANNED = 0.22e-6  # of a mixture for each row beyond `ROWS`, which XLA plans, gathers and adds up
HEAD, PASS = 20e-6, 40e-6  # embedding, head and choice of tokens; small operations of a drafter's pass
ROUTED = "experts_gate_up", "experts_up", "experts_down"  # weights of which a round reads some
LINK = 330e9  # bytes a second that NVLink carries in a sum of more than a megabyte
# A sum over so many GPUs. NCCL's, in seconds: at 2 measured, the others assumed. Our kernel's by KB in microseconds: in
# rounds over two and four H200s, and as published for eight H100s (sglang #2904).
NCCL = {2: 15e-6, 4: 21e-6, 8: 25.5e-6}
ONE_SHOT = {
    2: [(8, 5.0), (64, 5.1), (256, 7.5), (1024, 11.0)],
    4: [(8, 7.5), (64, 8.6), (256, 11.0), (512, 15.0), (1024, 26.9)],
    8: [(0.5, 5.8), (32, 7.8), (256, 16.7), (512, 22.1), (1024, 33.8)],
}

CONCURRENCY = (1, 8, 32, 128)
GIB_COLUMNS = ("weights", "draft", "kv", "states", "slots", "workspace", "left")
COLUMNS = (
    Column("tp", "TP"),
    Column("replicas", "replicas"),
    *(Column(f"{name}_gib", f"{name} GiB", ".2f") for name in GIB_COLUMNS),
    Column("tokens", "KV tokens", "d"),
    Column("host_tokens", "on the host", "d"),
)
ROUND_COLUMNS = (Column("tp", "TP"), Column("replicas", "replicas"), Column("rows", "rows"))
ROUND_COLUMNS += tuple(Column(f"c{n}", f"c={n}", ".2f") for n in CONCURRENCY)


def _rounds(row: Row) -> list[Row]:
    return [row | {f"c{n}": ms for n, ms in zip(row["concurrency"], row["ms"], strict=True)}] if "ms" in row else []


TABLES = (Table("a GPU's memory", COLUMNS), Table("time of a round, ms", ROUND_COLUMNS, _rounds))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the machine")
    group.add_argument("--gpus", type=positive, default=8, help="of one host (%(default)s)")
    group.add_argument("--gpu", choices=GPUS, default="h200", help="their kind (%(default)s)")
    help_text = "how GPUs sum: one-shot (our kernel, where GPUs address each other), or psum (NCCL) (%(default)s)"
    group.add_argument("--sums", choices=("one-shot", "psum"), default="one-shot", help=help_text)
    group = parser.add_argument_group("the load")
    group.add_argument("--context", type=positive, default=1024, help="mean tokens of a request (%(default)s)")
    engines.add_arguments(parser, without=("load_format", "tp_size", "ep_size", "dp_size"))
    for action in parser._actions:
        if "--context-length" in action.option_strings:  # vLLM's name of it
            action.option_strings.append("--max-model-len")
            parser._option_string_actions["--max-model-len"] = action


def run(args: argparse.Namespace, result: Result) -> None:
    """Plan every tensor-parallel size up to the number of GPUs.

    **Raises:** `ConfigError`, `CheckpointError`, `BenchError` if the model fits at none.
    """
    args.load_format, args.tp_size, args.ep_size, args.dp_size = "dummy", 1, 1, 1
    options = EngineConfig(**engine_options(args))
    gpu, rows, refused = GPUS[args.gpu], [], []
    result.fact(gpu=dataclasses.asdict(gpu))
    for tp in (1, 2, 4, 8):
        if args.gpus % tp:
            continue
        try:
            made = planned(options, tp, GPU, (gpu.memory, int(POOL * gpu.memory)))
        except ConfigError as error:
            refused.append(f"TP {tp} doesn't do: {error}")
            continue
        if args.context > made.config.context_length:
            raise BenchError(
                f"--context {args.context}: a request has at most {made.config.context_length} tokens "
                "(--context-length, or the model's positions)"
            )
        row = _row(made, gpu, tp, args.gpus // tp, args.context, args.sums)
        rows.append(row)
        result.add(row)
    for sentence in refused:
        result.note(sentence)
    if not rows:
        raise BenchError(f"{args.model} doesn't fit on {args.gpus} GPUs of kind {args.gpu}; the reasons are above")
    result.note(_advice(rows))


def _row(made: Planner, gpu: Gpu, tp: int, replicas: int, context: int, sums: str) -> Row:
    plan = made.plan
    sizes = plan.weight_bytes, plan.draft_weight_bytes, plan.kv_bytes, plan.states.total, plan.slot_bytes
    sizes = *sizes, plan.workspace_bytes, gpu.memory - plan.total
    row = {"tp": tp, "replicas": replicas, "tokens": plan.tokens, "rows": made.width, "plan": dataclasses.asdict(plan)}
    per_token = plan.kv_bytes * tp / (plan.tokens + plan.page_size * plan.by_request)
    row["host_tokens"] = int(made.config.host_kv_gb * 2**30 / per_token) if made.config.host_kv_gb else None
    row |= {f"{name}_gib": size / 2**30 for name, size in zip(GIB_COLUMNS, sizes, strict=True)}
    ms = [made.round_seconds(n, context, gpu, tp, sums) * 1e3 for n in CONCURRENCY]
    fits = [n <= made.shapes.num_slots and n * context <= plan.tokens for n in CONCURRENCY]
    return row | {"concurrency": CONCURRENCY, "ms": [t if fit else None for t, fit in zip(ms, fits, strict=True)]}


def _advice(rows: list[Row]) -> str:
    """Which size answers one request soonest, and which makes most rounds of requests on all GPUs together."""
    alone = [row for row in rows if row["ms"][0] is not None]
    if not alone:
        return "No size holds one request of --context tokens; lower --context"
    quickest = min(alone, key=lambda row: row["ms"][0])
    rates = [
        (row["replicas"] * n / ms, n, row) for row in alone for n, ms in zip(CONCURRENCY, row["ms"], strict=True) if ms
    ]
    _, requests, most = max(rates, key=lambda rate: rate[0])
    return (
        f"Best for latency: TP {quickest['tp']}, {quickest['ms'][0]:.2f} ms a round of one request. Best for "
        f"throughput: TP {most['tp']} x {most['replicas']} replicas, {requests} requests in each. Times are estimates"
    )


class Planner(Runner):
    """A runner that plans memory and stops there. Its model and drafter are shapes without arrays.

    `defaults` and `memory` are those of the machine that is planned for; `memory` None: this one's.
    """

    def __init__(
        self,
        options: EngineConfig,
        model: Model,
        draft: LoadedDrafter,
        defaults: Defaults,
        memory: tuple[int, int] | None,
    ):
        self.model, self.draft, self._memory = model, draft, memory
        self.hosts, self._other_bytes = None, 0
        self.adapters = Outline(options, model) if options.has_adapters else None
        self._local, self._drafter = model.config, draft.drafter  # a device's share is a model here
        self.config = resolve(options, model, draft, defaults)
        self.width = draft.drafter.num_draft_tokens + 1
        tower = None if self.no_pictures else model.config.tower
        more = {"alone": not small_model(model), "defaults": defaults, "tower": tower}
        self.shapes = shapes_of(self.config, draft.drafter, **more)
        self.plan: MemoryPlan
        self.plan, self._layout = self._plan()

    def round_seconds(self, requests: int, context: int, gpu: Gpu, tp: int, sums: str) -> float:
        """The time of a round of so many requests on one of `tp` GPUs that have a share of the model each."""
        model, decoder, rows = self.model, self.model.config.decoder, requests * self.width
        cost = ModelCost.of(model, self._layout.dtype, self.config.state_dtype)
        size, flops = cost.round(requests, self.width, context)
        weights, rate = cost.weights_read(rows), gpu.flops
        if any(map(quantises_rows, floors.weights_of(model.params["layers"]))):
            rate *= 2  # of FP8 tensor cores
        seconds = Ceilings(gpu.bandwidth, rate).seconds(weights, flops) + (size - weights) / gpu.bandwidth
        seconds += beside(decoder, model.params["layers"], rows) + HEAD
        seconds += (2 * len(decoder.layers) + 1) * sum_seconds(rows * decoder.width * 2, tp, sums)
        return seconds + self._draft_seconds(requests, gpu, tp, sums)

    def _draft_seconds(self, requests: int, gpu: Gpu, tp: int, sums: str) -> float:
        """The time of a drafter's passes: a chain's, one for each draft, and one of all others that have weights."""
        drafter, params = self.draft.drafter, self.draft.params
        config = getattr(drafter, "config", None)
        if config is None or not isinstance(params, Mapping):
            return 0.0
        head = params.get("head", {"embed": params.get("embed")})
        head = head if isinstance(head, Mapping) else {"head": head}
        copied = "head_copy" if requests <= COPY_ROWS and "head_copy" in head else "head" if "head" in head else "embed"
        own = {name: each for name, each in params.items() if name not in ("embed", "head")}
        layers, decoder = own.get("layers", [own.get("layer", {})]), config.decoder
        size = floors.bytes_of(own) + floors.bytes_of(head[copied])
        if mixture := decoder.mixture:
            read = expected_experts(requests, mixture.per_token, mixture.experts) / mixture.experts
            size -= (1 - read) * floors.bytes_of([layer.get(name, ()) for layer in layers for name in ROUTED])
        seconds = size / gpu.bandwidth + beside(decoder, layers, requests) + HEAD + PASS
        seconds += 2 * len(decoder.layers) * sum_seconds(requests * decoder.width * 2, tp, sums)
        return seconds * (drafter.longest if isinstance(drafter, Chain) else 1)


def beside(decoder: Decoder, layers: Any, rows: int) -> float:
    """Seconds that the kernels of these layers take beside their bytes, for so many rows."""
    fp8 = any(weight.quantised for weight in floors.weights_of(layers))
    product = FP8_PRODUCT + FP8_ROW * min(rows, ROWS) if fp8 else PRODUCT + ROW * min(rows, ROWS)
    seconds = 0.0
    for layer in decoder.layers:
        mixture = layer.feed if isinstance(layer.feed, Mixture) else None
        seconds += LINEAR if isinstance(layer.mixing.memory, Recurrence) else ATTENTION
        seconds += product * (2 if mixture else 4)
        if mixture:
            experts = expected_experts(rows, mixture.per_token, mixture.experts)
            seconds += MIXTURE + FP8_EXPERT * experts * fp8 + SHARED * bool(mixture.shared)
            seconds += PLANNED * max(0, rows - ROWS)
    return seconds


def sum_seconds(size: int, tp: int, sums: str) -> float:
    """Time to sum `size` bytes of each of `tp` GPUs."""
    if tp == 1:
        return 0.0
    if sums == "psum":
        return NCCL[tp] + max(0, size - 256 * 1024) / LINK
    kilobytes, microseconds = zip(*ONE_SHOT[tp], strict=True)
    two_shots = 10e-6 + 2 * (tp - 1) / tp * size / LINK
    return two_shots if size > 2**20 else min(np.interp(size / 1024, kilobytes, microseconds) * 1e-6, two_shots)


def planned(options: EngineConfig, tp: int, defaults: Defaults, memory: tuple[int, int] | None) -> Planner:
    """The plan of one of `tp` devices. **Raises:** `ConfigError` if the model doesn't fit or can't be divided."""
    with tempfile.TemporaryDirectory() as where:
        dtype = options.dtype or locate(options.model, options.revision, load_format="dummy").config.dtype
        model = _target(dataclasses.replace(options, dtype=dtype, load_format="dummy"), tp)
        if tp > 1:
            options = _with_draft_shares(options, tp, Path(where))
        return Planner(options, model, _with_whole_tables(drafter_of(options, model), tp), defaults, memory)


# --- one device's share ---

KV_HEADS = ("num_key_value_heads", "num_global_key_value_heads")
VOCABULARIES = ("vocab_size", "draft_vocab_size")
WIDTHS = ("intermediate_size", "moe_intermediate_size")
WHOLE = ("markov_before", "before", "after")  # params of DSpark and DFlash 2 that are whole on each device


def _target(options: EngineConfig, n: int) -> Model:
    """Outline what one of n devices has of the target. Experts are divided among the fewest groups of devices that
    allow it.

    **Raises:** `ConfigError` naming what can't be divided.
    """
    refused = None
    for groups in (groups for groups in (1, 2, 4, 8) if groups <= n):
        try:
            model = outlined(dataclasses.replace(options, tp_size=n, ep_size=groups))
        except ConfigError as error:
            refused = refused or error
            continue
        config = model.config.on_one_of(n)
        layers = tuple(dataclasses.replace(layer, feed=_feed_share(layer.feed)) for layer in config.decoder.layers)
        own = dataclasses.replace(config.decoder, layers=layers, vocab_size=-(-config.vocab_size // n))
        return dataclasses.replace(model, config=dataclasses.replace(config, decoder=own))
    raise refused


def _feed_share(feed: Mlp | Mixture | Absent) -> Mlp | Mixture | Absent:
    """A mixture of the experts that one group of devices has, as if choices were spread evenly."""
    if not isinstance(feed, Mixture):
        return feed
    experts, chosen = feed.experts // feed.groups, -(-feed.per_token // feed.groups)
    return dataclasses.replace(feed, experts=experts, per_token=chosen, groups=1)


def share(hf: Mapping[str, Any], n: int) -> dict[str, Any]:
    """The config.json of what one of n devices computes of a drafter: its heads, columns of MLPs and experts, rows of
    the vocabulary. KV heads that are fewer than devices are repeated.

    **Raises:** `ConfigError` naming what can't be divided.
    """
    if isinstance(text := hf.get("text_config"), Mapping):
        return {**hf, "text_config": share(text, n)}
    kind = str(hf.get("model_type")).removesuffix("_text")
    hf = {**getattr(MODELS.get(kind), "DEFAULTS", {}), **hf}
    heads = hf.get("num_attention_heads")
    if not isinstance(heads, int):
        return dict(hf)  # loading it says what is missing
    mine = {"head_dim": hf.get("head_dim") or hf["hidden_size"] // heads}
    mine |= _kv_share({"num_key_value_heads": heads} | {key: hf[key] for key in KV_HEADS if hf.get(key)}, n)
    if isinstance(by_layer := hf.get("per_layer_config"), Mapping):
        mine["per_layer_config"] = {i: {**own, **_kv_share(own, n)} for i, own in by_layer.items()}
    mine |= {name: _divided(hf, name, n) for name in ("num_attention_heads", *WIDTHS) if hf.get(name)}
    mine |= {name: -(-hf[name] // n) for name in VOCABULARIES if hf.get(name)}
    for name in (name for name in ("mask_token_id", "bos_token_id") if isinstance(hf.get(name), int)):
        mine[name] = min(hf[name], mine["vocab_size"] - 1)
    return {**hf, **mine}


def _kv_share(sizes: Mapping[str, Any], n: int) -> dict[str, int]:
    """One device's KV heads, of the keys that count some."""
    heads = {key: sizes[key] for key in KV_HEADS if key in sizes}
    for key, count in heads.items():
        if count % n and n % count:
            raise ConfigError(f"{key} {count} can't be divided among {n} devices, nor repeated on them")
    return {key: max(1, count // n) for key, count in heads.items()}


def _divided(hf: Mapping[str, Any], name: str, n: int) -> int:
    if hf[name] % n:
        raise ConfigError(f"{name} {hf[name]} isn't a multiple of {n}")
    return hf[name] // n


def _with_draft_shares(options: EngineConfig, n: int, where: Path) -> EngineConfig:
    """The options with shares for drafters, whose configs are written to folders in `where`."""
    sides = combined.parts(options.draft) or (options.draft,)
    drafts = [_draft_share(side, options, n, where / str(i)) for i, side in enumerate(sides)]
    return dataclasses.replace(options, draft="+".join(drafts), draft_token_map=_map_share(options, n, where))


def _with_whole_tables(draft: LoadedDrafter, n: int) -> LoadedDrafter:
    """The drafter's share with its tables of rows by token whole, as each of n devices has them."""
    whole = lambda x: jax.ShapeDtypeStruct((n * x.shape[0], *x.shape[1:]), x.dtype)  # noqa: E731
    tables = {name: whole(draft.params[name]) for name in WHOLE if n > 1 and name in draft.params}
    return dataclasses.replace(draft, params={**draft.params, **tables}) if tables else draft


def _map_share(options: EngineConfig, n: int, where: Path) -> str | None:
    """A token map with as many tokens as one of n devices has of the options' map."""
    if options.draft_token_map is None:
        return None
    files = locate(options.model, options.revision, load_format="dummy")
    known = len(read_token_map(options.draft_token_map, files.config.vocab_size))
    (where / "map.json").write_text(json.dumps(list(range(-(-known // n)))))
    return str(where / "map.json")


def _draft_share(draft: str, options: EngineConfig, n: int, folder: Path) -> str:
    if draft in ("none", "auto"):
        return draft
    cls, source, _ = parse_draft(draft, options.model, "dummy")
    if source is None or cls not in DRAFTERS.values():
        return draft
    files = locate(source, load_format="dummy")
    if not isinstance(files, ModelFolder):
        raise ConfigError(f"{source} is a GGUF file, which is planned for one GPU alone")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(share(files.hf, n)))
    method, query = next(method for method, each in DRAFTERS.items() if each is cls), re.search(r"\?.*", draft)
    return f"{method}:{folder}{query[0] if query else ''}"


def plot(document: Document, figure: Any) -> None:
    """Time of a round against requests, a line for each tensor-parallel size."""
    axes = figure.subplots()
    for row in document["rows"]:
        axes.plot(row["concurrency"], row["ms"], "o-", label=f"TP {row['tp']}")
    plots.against(axes, list(CONCURRENCY), "requests in a replica", "least ms per round")
