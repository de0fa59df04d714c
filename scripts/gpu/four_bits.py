"""Products of few rows with weights of four bits on one Hopper GPU: right or not, then us and TB/s beside FP8's.

A layer's four products of Qwen3-8B run one after the other, for several layers, so that no cache holds the weights.
Candidates change constants of `few_rows.share`. `python -m scripts.gpu.four_bits [--rows 8,32] [--candidates] [--many]`
"""

from __future__ import annotations

import argparse
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoder.matmul import project
from jaxspec.models.weights import Fp8, Int4, Nvfp4, Weight
from jaxspec.pallas.dense import few_rows, four_wide
from jaxspec.pallas.dense.few_rows import share
from jaxspec.pallas.hopper import jax_patches

LAYERS, TIMES, EPS = 4, 5, 1e-6
KERNELS = "few_rows", "fp8_rows", "fp8_wide", "four_wide"
SIZES = {"qkv": (4096, 6144), "out": (4096, 4096), "gate_up": (4096, 24576), "down": (12288, 4096)}
FORMATS = {"fp8": None, "int4": Int4(128), "nvfp4": Nvfp4()}
CHECKED = {
    "int4": Int4(128),
    "int4/32": Int4(32),
    "int4/zeros": Int4(128, True),
    "int4/all": Int4(None),
    "nvfp4": Nvfp4(),
}
CANDIDATES = [
    ("slots of 8 KB", {"FOUR_SLOT_BYTES": 8 << 10}),
    ("slots of 32 KB", {"FOUR_SLOT_BYTES": 32 << 10}),
    ("ring of 64 KB", {"RING_BYTES": 64 << 10}),
    ("ring of 192 KB", {"RING_BYTES": 192 << 10}),
]


def weight_of(kind: Int4 | Nvfp4, key: jax.Array, inputs: int, outputs: int) -> Weight:
    """A random weight that uses every number."""
    whole = jax.random.normal(key, (outputs, inputs), jnp.bfloat16) * inputs**-0.5
    zeros = isinstance(kind, Int4) and kind.zeros
    values, scales, *factors = (Int4(kind.group) if zeros else kind).quantise(whole)
    if zeros:
        points = jax.random.randint(key, scales.shape, 0, 17).astype(scales.dtype)
        scales = jnp.stack([scales, points], axis=1).reshape(-1, outputs)
    return Weight(values, kind, scales=scales, factors=factors[0] if factors else None)


def fp8_of(key: jax.Array, inputs: int, outputs: int) -> few_rows.Fp8Weight:
    values = jax.random.normal(key, (outputs, inputs), jnp.bfloat16).astype(jnp.float8_e4m3fn)
    return few_rows.Fp8Weight(values, jnp.full((outputs // 32, inputs // 128), inputs**-0.5, jnp.float32))


def check() -> None:
    """Print the error of products by kernel, of float64's largest result."""
    for name, kind in CHECKED.items():
        for rows, inputs, outputs in ((8, 4096, 512), (32, 1024, 4096)):
            weight = jax.jit(weight_of, static_argnums=(0, 2, 3))(kind, jax.random.key(rows), inputs, outputs)
            x = jax.random.normal(jax.random.key(1), (rows, inputs), jnp.bfloat16)
            expected = np.asarray(x, np.float64) @ np.asarray(weight.dequantised(jnp.float32), np.float64)
            got = np.asarray(few_rows.product([x], weight), np.float64)
            error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
            print(
                f"{'right' if error < 4e-3 else 'WRONG'} {name} {rows} x {inputs} x {outputs}: {error:.1e}", flush=True
            )
            if not error < 4e-3:
                where(kind, weight, x[:8])


def check_many() -> None:
    """Check the kernel of many rows, too."""
    for name, kind in CHECKED.items():
        for rows, inputs, outputs in ((40, 4096, 512), (128, 1024, 6144), (512, 512, 24576)):
            weight = jax.jit(weight_of, static_argnums=(0, 2, 3))(kind, jax.random.key(rows), inputs, outputs)
            x = jax.random.normal(jax.random.key(1), (rows, inputs), jnp.bfloat16)
            expected = np.asarray(x, np.float32) @ np.asarray(weight.dequantised(jnp.float32))
            got = np.asarray(four_wide.matmul(x, weight, jnp.array([rows])), np.float32)
            error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
            told = "right" if error < 4e-3 else "WRONG"
            print(f"{told} four_wide {name} {rows} x {inputs} x {outputs}: {error:.1e}", flush=True)


def where(kind: Int4 | Nvfp4, weight: Weight, x: jax.Array) -> None:
    """Print which inputs come out wrong: rows of one input each pick a column of the weight."""
    whole, found = np.asarray(weight.dequantised(jnp.float32)), []
    for first in range(0, 256, 8):
        rows = jnp.roll(jnp.eye(8, weight.inputs, dtype=jnp.bfloat16), first, axis=1)
        got = np.asarray(few_rows.product([rows], weight), np.float32)
        close = np.isclose(got, whole[first : first + 8], rtol=1e-2, atol=1e-4)
        found += [f"{first + i}: {row.mean():.2f}" for i, row in enumerate(close) if row.mean() < 1]
    print("  share of outputs right by input (others all):", ", ".join(found[:64]), flush=True)
    if found:
        rows = jnp.eye(8, weight.inputs, dtype=jnp.bfloat16)
        got = np.asarray(few_rows.product([rows], weight), np.float32)
        print("  got", got[0, :24].tolist(), "\n  for", whole[0, :24].tolist(), flush=True)


def layers(x: jax.Array, scale: jax.Array, weights: list[dict]) -> jax.Array:
    given = few_rows.scale_rows(x, scale)
    for each in weights:
        qkv = few_rows.normed.jitted(*given, [each["qkv"]], eps=EPS, dtypes=("bfloat16",))[0]
        x, given = few_rows.add_product.jitted(x, qkv[:, :4096], each["out"], scale)
        hidden = few_rows.gated.jitted(*given, each["gate_up"], eps=EPS)
        x, given = few_rows.add_product.jitted(x, hidden, each["down"], scale)
    return x


def projected(x: jax.Array, scale: jax.Array, weights: list[dict]) -> list[jax.Array]:
    """Each product by itself, by the kernel that serves; those of four bits by that of many rows."""
    valid, made = jnp.array([len(x)], jnp.int32), []
    for each in weights:
        for part in SIZES:
            weight, gated = each[part], part == "gate_up"
            if isinstance(weight, few_rows.Fp8Weight):
                weight = Weight(weight.values, Fp8(128), scales=weight.scales)
            rows = jnp.tile(x, (1, weight.inputs // x.shape[1]))
            if isinstance(weight.format, Fp8):
                made.append(project(rows, weight, valid))
            else:
                made.append(four_wide.matmul.jitted(rows, weight, valid, gated=gated))
    return made


def lowered(rows: int, weights: list[dict], changes: dict, function=layers):
    """The layers' program, with changed constants."""
    before = {name: getattr(share, name) for name in changes}
    for name, value in changes.items():
        setattr(share, name, value)
    try:
        jax.clear_caches()
        x, scale = jnp.ones((rows, 4096), jnp.bfloat16), jnp.ones((4096,), jnp.bfloat16)
        return jax.jit(function).lower(x, scale, weights), x, scale
    finally:
        for name, value in before.items():
            setattr(share, name, value)


def times(program, *given) -> list[float]:
    """Microseconds of each of a layer's four kernels, in their order, by the profiler."""
    jax.block_until_ready(program(*given))
    options = jax.profiler.ProfileOptions()
    options.enable_hlo_proto, options.python_tracer_level = False, 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(TIMES):
                jax.block_until_ready(program(*given))
        (trace,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(trace))
        events = sorted(
            (event.start_ns, event.duration_ns / 1e3)
            for plane in data.planes if "GPU" in plane.name
            for line in plane.lines if "Stream" in line.name
            for event in line.events if any(each in event.name for each in KERNELS)
        )  # fmt: skip
    found = np.array([us for _, us in events]).reshape(TIMES * LAYERS, len(SIZES))
    return np.median(found, axis=0).tolist()


def measure(made: dict, runs: list[tuple], begin: float) -> None:
    """Compile all, then time each by itself."""
    with ThreadPoolExecutor(12) as pool:
        work = []
        for label, name, r, changes in runs:
            try:
                program, *given = lowered(r, made[name], changes, projected if "by itself" in label else layers)
            except Exception as error:  # a candidate may not fit
                print(f"{label}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            work.append((label, name, pool.submit(program.compile), given))
        print(f"{time.perf_counter() - begin:.0f} s: lowered", flush=True)
        print("us (TB/s) of " + ", ".join(SIZES) + "; all")
        for label, name, program, given in work:
            try:
                us = times(program.result(), *given, made[name])
            except Exception as error:
                print(f"{label}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            parts = [sum(a.nbytes for a in jax.tree.leaves(made[name][0][part])) for part in SIZES]
            told = ", ".join(f"{t:.1f} ({b / t / 1e6:.2f})" for t, b in zip(us, parts, strict=True))
            print(f"{label}: {told}; {sum(us):.1f} ({sum(parts) / sum(us) / 1e6:.2f})", flush=True)
    print(f"{time.perf_counter() - begin:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="8,16,32")
    parser.add_argument("--many", action="store_true", help="the kernel of many rows in place of that of few")
    parser.add_argument("--candidates", action="store_true", help="also constants of few_rows.share")
    args = parser.parse_args()
    jax_patches.install()
    begin = time.perf_counter()
    (check_many if args.many else check)()
    print(f"{time.perf_counter() - begin:.0f} s", flush=True)
    made, keys = {}, iter(jax.random.split(jax.random.key(0), 64))
    for name, kind in FORMATS.items():
        make = jax.jit(fp8_of, static_argnums=(1, 2)) if kind is None else None
        four = jax.jit(weight_of, static_argnums=(0, 2, 3))
        made[name] = [
            {part: make(next(keys), *size) if make else four(kind, next(keys), *size) for part, size in SIZES.items()}
            for _ in range(LAYERS)
        ]
    rows = [int(each) for each in args.rows.split(",")]
    each = [("int4", 8, CANDIDATES), ("nvfp4", 8, CANDIDATES[::2]), ("int4", 32, CANDIDATES[1:])]
    if not args.many:
        measure(made, [(f"{name}, {r} rows", name, r, {}) for r in rows for name in FORMATS], begin)
    many = [(f"{name}, {r} rows, each by itself", name, r, {}) for r in (32, 64, 128, 512) for name in FORMATS]
    measure(made, many if args.many else [], begin)
    for name, r, some in each if args.candidates else ():
        measure(made, [(f"{name}, {r} rows, {label}", name, r, changes) for label, changes in some], begin)


if __name__ == "__main__":
    main()
