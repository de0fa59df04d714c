"""Hash what every program of the ladder asks of a Hopper GPU, lowered on a CPU: `python scripts/lowered.py OUT.json`.

Run it before and after a change that should touch no arithmetic, then `python scripts/lowered.py --compare A B`: equal
programs are equal speed. Weights and state are shapes without arrays, so models of any size need no memory. Decoder
layers share one trace, so models are cut to `--layers`; of modes other than greedy only the largest batch is lowered
unless `--all` is given. `--tp-size 2` lowers what each of two GPUs runs.

A program has two hashes. `text` is its StableHLO without names and locations: functions are numbered as they come.
`graph` is what each result is computed from, and doesn't see what XLA undoes first: the order of operations, functions,
dead code, values computed twice, and chains of reshapes. In a program a kernel is its name, its static arguments and
its operands; with `--kernels` each is lowered by itself as well and hashed apart (`kernel NAME ...`).
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}

import jax
import jax.extend.core
import numpy as np
from configs import (
    DFLASH2_8B,
    DFLASH_8B,
    DFLASH_SMALL,
    DOMINO_8B,
    DSPARK_8B,
    EAGLE3_8B,
    EAGLE3_SMALL,
    EAGLE_SMALL,
    GPT_OSS_20B,
    LILICORR_8B,
    QWEN3_0_6B,
    QWEN3_8B,
    QWEN3_30B,
    QWEN35_35B,
    SMOLLM2,
)
from jax._src.interpreters import mlir
from jax._src.pallas.mosaic_gpu import lowering as mosaic
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.checkpoint import Model, load, params
from jaxspec.compiling.ladder import ladder_of
from jaxspec.config.engine_config import EngineConfig
from jaxspec.drafters import own_weights
from jaxspec.drafters.loading import LoadedDrafter, load_drafter
from jaxspec.engine import defaults, runner
from jaxspec.models.weights import Weight
from jaxspec.pallas import hopper
from jaxspec.pallas.hopper import export
from jaxspec.parallel import peers, sharding
from jaxspec.parallel.collectives import AXIS
from jaxspec.rounds.programs import GREEDY, MODES

TREE = dict(topk=4, num_steps=5, num_draft_tokens=8)
FP8 = {"quantization": "fp8"}
# Of each model: its config, and of each draft its config (None: it has none), and options.
CASES = {
    "qwen3-8b": (QWEN3_8B, {
        "none": (None, {}),
        "ngram": (None, {"num_draft_tokens": 4}),
        "ngram-deterministic": (None, {"num_draft_tokens": 4, "deterministic": True}),
        "standalone": (QWEN3_0_6B, {}),
        "eagle3": (EAGLE3_8B, {}),
        "eagle3-tree": (EAGLE3_8B, TREE),
        "dflash": (DFLASH_8B, {}),
        "dflash2": (DFLASH2_8B, {}),
        "dspark": (DSPARK_8B, {}),
        "domino": (DOMINO_8B, {}),
        "lilicorr": (LILICORR_8B, {}),
    }),
    "qwen3-30b-a3b": (QWEN3_30B, {"none": (None, {}), "ngram": (None, {"num_draft_tokens": 4})}),
    "qwen3.5-35b-a3b": (QWEN35_35B, {"none": (None, {}), "ngram": (None, {}), "mtp": (None, {})}),
    "qwen3-8b-fp8": (QWEN3_8B, {"none": (None, FP8), "eagle3": (EAGLE3_8B, FP8 | {"draft_quantization": "fp8"})}),
    "qwen3.5-35b-a3b-fp8": (QWEN35_35B, {"none": (None, FP8), "mtp": (None, FP8 | {"draft_quantization": "fp8"})}),
    "qwen3-8b-int4": (QWEN3_8B, {"none": (None, {"quantization": "int4"})}),
    "gpt-oss-20b": (GPT_OSS_20B, {"none": (None, {}), "ngram": (None, {})}),
    "smollm2": (SMOLLM2, {
        "none": (None, {}),
        "ngram": (None, {}),
        "ngram-deterministic": (None, {"deterministic": True}),
        "eagle": (EAGLE_SMALL, {}),
        "eagle3": (EAGLE3_SMALL, {}),
        "eagle3-tree": (EAGLE3_SMALL, TREE),
        "dflash": (DFLASH_SMALL, {}),
    }),
}  # fmt: skip


class Kernels:
    """In place of `export._Lowered`: a kernel is one custom call, and is lowered by itself, once, for its hash."""

    def __init__(self, hashes: dict[str, str], alone: bool):
        self.hashes, self.alone, self.calls = hashes, alone, {}

    def function(self, call: export.Call):
        name = f"{call.function.__module__.removeprefix('jaxspec.pallas.')}.{call.function.__name__}"
        told = without_addresses(call.static)
        shapes, tree = call.shapes, call.tree
        operands = ", ".join(f"{s.dtype}{list(s.shape)}" for s in shapes)
        key = f"kernel {name} {told} {tree} ({operands})"
        if key not in self.calls:
            out = jax.eval_shape(call.run, *shapes)
            leaves, structure = jax.tree.flatten(out)

            def opaque(*operands):
                what = jax.ffi.ffi_call(name, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves])
                return jax.tree.unflatten(structure, what(*operands, static=f"{told} {tree}"))

            self.calls[key] = jax.jit(opaque)
            if self.alone:
                self.hashes[key] = hashed(call.lower()[0].mlir_module())
        return self.calls[key]


def hashed(text: str) -> str:
    """Hash of a module without locations, names of arguments and functions."""
    text = re.sub(r"^#loc.*$", "", text, flags=re.M)
    text = re.sub(r' ?loc\((?:#\w+|unknown|"[^"]*")\)', "", text)
    text = re.sub(r'(jax\.result_info|jax\.arg_info) = "[^"]*"', "", text)
    text = re.sub(r'kernel_hash = "(?:[^"\\]|\\.)*"', "", text)
    numbers: dict[str, str] = {}
    calls = re.findall(r"custom_call @(\w+)", text)
    number = lambda m: m[0] if m[1] in calls else numbers.setdefault(m[1], f"@f{len(numbers)}")  # noqa: E731
    text = re.sub(r"@([\w.]+)", number, text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Graph:
    """Hashes of all values of a program, each made of the operation and the hashes of its operands."""

    INLINED = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")

    def __init__(self):
        self.shapes: dict[str, tuple[str, tuple[int, ...]]] = {}  # of what is a reshape: of which value
        self.narrow: dict[str, str] = {}  # of what was made wider: the value before

    def program(self, closed) -> str:
        given = [digest("input", i, str(v.aval)) for i, v in enumerate(closed.jaxpr.invars)]
        return digest(*self.outputs(closed.jaxpr, closed.consts, given))

    def outputs(self, jaxpr, consts, given) -> list[str]:
        known = dict(zip(jaxpr.invars, given, strict=True))
        known |= {v: digest("constant", np.asarray(c).tobytes()) for v, c in zip(jaxpr.constvars, consts, strict=True)}
        of = lambda v: known[v] if not hasattr(v, "val") else digest("literal", repr(v.val), str(v.aval))  # noqa: E731
        for eqn in jaxpr.eqns:
            operands = [of(v) for v in eqn.invars]
            known.update(zip(eqn.outvars, self.results(eqn, operands), strict=True))
        return [of(v) for v in jaxpr.outvars]

    def results(self, eqn, operands) -> list[str]:
        name, inner = eqn.primitive.name, eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if name in self.INLINED:
            return self.outputs(inner.jaxpr, inner.consts, operands)
        if name in ("scan", "cond", "while"):
            return self.control(name, eqn.params, operands, len(eqn.outvars))
        if name == "pad" and eqn.invars[0].aval.size == eqn.outvars[0].aval.size:
            return operands[:1]
        if len(operands) == len(eqn.outvars) == 1:
            one, given, made = operands[0], eqn.invars[0].aval, eqn.outvars[0].aval
            if name in ("reshape", "squeeze", "broadcast_in_dim", "reduce_sum", "slice") and given.size == made.size:
                return [self.reshape(one, given.shape, made.shape)]
            if name == "convert_element_type":
                if given.dtype == made.dtype:
                    return [one]
                if self.narrow.get(one, ("", None))[1] == made.dtype:
                    return [self.narrow[one][0]]
                out = digest(name, one, str(made.dtype))
                if (given.dtype, made.dtype) == ("bfloat16", "float32"):
                    self.narrow[out] = one, given.dtype
                return [out]
        params = [(key, self.parameter(value)) for key, value in sorted(eqn.params.items())]
        return [digest(name, params, operands, k) for k in range(len(eqn.outvars))]

    def control(self, name: str, params: dict, operands: list[str], results: int) -> list[str]:
        """Hash a loop's or a branch's results. Values that its bodies close over are like all others, in any order."""
        own = lambda closed, given: self.outputs(closed.jaxpr, closed.consts, given)  # noqa: E731
        if name == "cond":
            bodies, start = [own(branch, operands[1:]) for branch in params["branches"]], operands[:1]
        else:
            if name == "scan":
                counts = [len(list(params["ft_in"].unpack()[0]))]
            else:
                counts = [params["cond_nconsts"], params["body_nconsts"]]
            start = operands[sum(counts) :]
            carried = [digest("carried", k) for k in range(len(start))]
            parts = ["jaxpr"] if name == "scan" else ["cond_jaxpr", "body_jaxpr"]
            bodies = []
            for part, count in zip(parts, counts, strict=True):
                bodies.append(own(params[part], [*operands[:count], *carried]))
                operands = operands[count:]
        told = [(key, params[key]) for key in ("length", "reverse") if key in params]
        return [digest(name, told, bodies, start, k) for k in range(results)]

    def reshape(self, value: str, before: tuple[int, ...], after: tuple[int, ...]) -> str:
        root, shape = self.shapes.get(value, (value, before))
        out = root if shape == after else digest("reshape", root, after)
        self.shapes.setdefault(out, (root, shape))
        if value in self.narrow:
            self.narrow[out] = self.reshape(self.narrow[value][0], before, after), self.narrow[value][1]
        return out

    def parameter(self, value) -> str:
        if isinstance(value, tuple | list):
            return str([self.parameter(each) for each in value])
        if hasattr(value, "eqns"):
            value = jax.extend.core.ClosedJaxpr(value, ())
        return Graph().program(value) if hasattr(value, "jaxpr") else without_addresses(value)


def without_addresses(value) -> str:
    """Describe a value by `str`, without the addresses of functions in this process's memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def digest(*what) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


class Abstract(runner.Runner):
    """A runner whose state is shapes alone."""

    def _empty_state(self):
        if self._division is not None:
            place = lambda x, spec: shaped(x, NamedSharding(self.mesh, spec))  # noqa: E731
            layout = dataclasses.replace(self._layout, whole=True)
            whole = self._state_shapes(layout, self.model.config, self.draft.drafter)
            return jax.tree.map(place, whole, self._division.state)
        empty = super()._empty_state
        return jax.eval_shape(lambda: empty())


def shaped(x, where) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def divide_shapes() -> None:
    """Make weights of several devices as shapes, divided as arrays are, and sums through peers' memory."""
    dummy = params.dummy

    def divided(declared, dtype, seed, mesh=None):
        if mesh is None:
            return dummy(declared, dtype, seed)

        def made(param):
            part = jax.eval_shape(lambda: dummy([sharding.local_param(param, mesh.size)], dtype, seed)[0])
            return sharding.joined(param, [part] * mesh.size, mesh)

        return jax.tree.map(made, declared)

    def joined(axis, parts, mesh):
        spec = [AXIS if i == axis else None for i in range(len(parts[0].shape))]
        shape = [n * mesh.size if i == axis else n for i, n in enumerate(parts[0].shape)]
        return jax.ShapeDtypeStruct(shape, parts[0].dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    def copied(head, axis):
        if not isinstance(head, jax.ShapeDtypeStruct):
            return copy(head, axis)
        made = jax.eval_shape(lambda head: copy(head, axis), jax.ShapeDtypeStruct(head.shape, head.dtype))
        mesh, part = head.sharding.mesh, head.sharding.spec[axis] if axis < len(head.sharding.spec) else None
        return jax.tree.map(lambda x: shaped(x, NamedSharding(mesh, PartitionSpec(part))), made)

    def opened(mesh):
        table = jax.ShapeDtypeStruct((mesh.size, 2), "int32", sharding=NamedSharding(mesh, PartitionSpec()))
        rank = jax.ShapeDtypeStruct((mesh.size,), "int32", sharding=NamedSharding(mesh, PartitionSpec(AXIS)))
        return peers.Workspaces(None, peers.Peers(table, rank)), "through peers' memory"

    copy = own_weights._fp8_copy
    load.dummy = own_weights.dummy = divided
    sharding._global, own_weights._fp8_copy, peers.opened = joined, copied, opened


def abstract_model(hf: dict, folder: Path, layers: int, options: dict) -> Model:
    hf = hf | {"num_hidden_layers": min(layers, hf["num_hidden_layers"])}
    (folder / "config.json").write_text(json.dumps(hf))
    kept = []

    def loaded():
        named = {name: options[name] for name in ("quantization", "tp_size", "dp_attention") if name in options}
        kept.append(load.load_model(str(folder), "bfloat16", load_format="dummy", **named))
        return kept[0].params

    if "tp_size" in options:
        loaded()
        return kept[0]

    params = jax.eval_shape(loaded)
    return dataclasses.replace(kept[0], params=params)


def abstract_drafter(draft: str, model: Model, options: EngineConfig) -> LoadedDrafter:
    kept = []
    if options.tp_size > 1:
        return load_drafter(draft, model, options)

    def loaded(params):
        kept.append(load_drafter(draft, dataclasses.replace(model, params=params), options))
        return kept[0].params

    params = jax.eval_shape(loaded, model.params)
    return dataclasses.replace(kept[0], params=params)


def programs(name: str, args: argparse.Namespace):
    """Each program's name with what lowers it."""
    hf, drafts = CASES[name]
    for draft, (draft_hf, sizes) in drafts.items():
        if args.draft and draft != args.draft:
            continue
        with tempfile.TemporaryDirectory() as where:
            folders = [Path(where, each) for each in ("target", "draft")]
            for folder in folders:
                folder.mkdir()
            if args.tp_size > 1:
                sizes = sizes | {"tp_size": args.tp_size}
            model = abstract_model(hf, folders[0], args.layers, sizes)
            spelt = draft.removesuffix("-tree").removesuffix("-deterministic")
            if draft_hf is not None:
                own = draft_hf | {"num_hidden_layers": min(args.layers, draft_hf["num_hidden_layers"])}
                folders[1].joinpath("config.json").write_text(json.dumps(own))
                spelt = f"{spelt}:{folders[1]}"
            options = EngineConfig(
                model=str(folders[0]), draft=spelt, load_format="dummy", dtype="bfloat16", skip_warmup=True,
                max_total_tokens=65536, context_length=4096, **sizes,
            )  # fmt: skip
            if options.deterministic and "head" not in model.params:  # which the runner would make of arrays
                head = jax.eval_shape(lambda embed: Weight(embed.T), model.params["embed"])
                model = dataclasses.replace(model, params=model.params | {"head": head})
            made = Abstract(options, model, abstract_drafter(spelt, model, options))
        ladder = ladder_of(made.shapes)
        for kind, size in ladder:
            mode = kind.partition("_")[2].partition("_")[0]  # of rounds with fewer drafts, a number follows
            largest = max(n for k, n in ladder if k == kind)
            if mode not in ("", *args.modes.split(",")) or (
                not args.all and mode not in ("", GREEDY) and size != largest
            ):
                continue
            made_of = kind, size, made.state
            arguments = *made.programs._arguments(*made_of), *made.programs._handed(*made_of)
            yield f"{name} {draft} {kind} {size}", made.programs._jits[kind], arguments


def run(args: argparse.Namespace) -> None:
    """Lower and write hashes, by program, to `args.out`."""
    defaults.here = lambda: defaults.GPU
    on_hopper = hopper.kernels_here  # not `portable`'s of the same name: there those kernels don't run
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("jaxspec") and vars(module).get("kernels_here") is on_hopper:
            module.kernels_here = lambda: None
    # A kernel's module is bytecode, with locations in it, so none are made.
    mlir.source_info_to_location = lambda *_: mlir.ir.Location.unknown()
    mosaic.source_info_util = SimpleNamespace(**vars(mosaic.source_info_util) | {"user_frame": lambda *_: None})
    if args.tp_size > 1:
        divide_shapes()
    hashes: dict[str, str] = {}
    kernels = Kernels(hashes, args.kernels)
    export._Lowered.function = lambda self, name, call: kernels.function(call)
    started = time.monotonic()
    for name in args.models.split(","):
        for program, jitted, arguments in programs(name, args):
            traced = jitted.trace(*arguments)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
            hashes[f"text {program}"], hashes[f"graph {program}"] = hashed(text), Graph().program(traced.jaxpr)
            args.out[0].write_text(json.dumps({"layers": args.layers, "hashes": hashes}, indent=1, sort_keys=True))
        print(f"{name}: {time.monotonic() - started:.0f} s, {len(hashes)} hashes", flush=True)


def compare(before: Path, after: Path) -> int:
    """Print how many are equal, and which aren't. Returns how many graphs and kernels differ."""
    one, other = (json.loads(path.read_text())["hashes"] for path in (before, after))
    different = 0
    for kind in ("text", "graph", "kernel"):
        mine, theirs = ({k: v for k, v in each.items() if k.startswith(kind)} for each in (one, other))
        both = mine.keys() & theirs.keys()
        differ = sorted(key for key in both if mine[key] != theirs[key])
        print(f"{kind}: {len(both) - len(differ)} of {len(both)} equal")
        missing = sorted(mine.keys() - both), sorted(theirs.keys() - both)
        for heading, keys in zip(("differs", "only before", "only after"), (differ, *missing), strict=True):
            for key in keys:
                print(f"  {heading}: {key[:200]}")
        different += 0 if kind == "text" else len(differ)
    return int(different > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, nargs="+", help="the file to write, or with --compare two files to compare")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--models", default=",".join(CASES), help="of " + ", ".join(CASES))
    parser.add_argument("--draft", help="this draft alone")
    parser.add_argument("--layers", type=int, default=4, help="decoder layers that models are cut to")
    parser.add_argument("--modes", default=",".join(MODES), help="of rounds (default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="every batch size in every mode")
    parser.add_argument("--kernels", action="store_true", help="lower each kernel by itself too")
    parser.add_argument("--tp-size", type=int, default=1, help="devices, up to 2")
    args = parser.parse_args()
    if args.compare:
        return compare(*args.out)
    run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
