"""Compile the portable kernels for GPUs that aren't here: `python -m scripts.compile_portable [8.0 8.9 ...]`.

It needs jax with its CUDA plugin (`pip install 'jax[cuda13]'`), and no GPU: XLA compiles for a description of one,
Triton and ptxas included. So instructions and shared memory fit; what the kernels compute there is not seen.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"--xla_dump_to={tempfile.mkdtemp(prefix='jaxspec-compiled-')}"

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from jaxspec.decoder.matmul import gating
from jaxspec.models.description import ClampedSwiglu
from jaxspec.models.weights import Fp8, Int4, Mxfp4, Nvfp4, Weight
from jaxspec.pallas import portable
from jaxspec.pallas.experts import experts_mlp, top_experts
from jaxspec.pallas.portable import attention, delta, four_bits, fp8, latent, pictures
from jaxspec.pallas.recurrence import delta_pool, gated_delta

DUMPED = Path(os.environ["XLA_FLAGS"].partition("=")[2])  # where XLA says what it launches

# By compute capability: name, as jax knows it, multiprocessors, a block's and a multiprocessor's shared memory.
GPUS = {
    "8.0": ("NVIDIA A100-SXM4-80GB", "NVIDIA A100", 108, 166912, 167936),
    "8.6": ("NVIDIA A10", "NVIDIA A10", 72, 101376, 102400),
    "8.9": ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090", 128, 101376, 102400),
    "9.0": ("NVIDIA H200", "NVIDIA H200", 132, 232448, 233472),
    "10.0": ("NVIDIA B200", "NVIDIA B200", 148, 232448, 233472),
    "12.0": ("NVIDIA GeForce RTX 5090", "NVIDIA RTX PRO 6000", 170, 101376, 102400),
}
TARGET = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: {per_core}
  threads_per_core_limit: {threads} core_count: {cores} fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 1000000000000 l2_cache_size: 41943040
  clock_rate_ghz: 1.5 device_memory_size: 25769803776 shared_memory_per_block_optin: {block}
  cuda_compute_capability {{ major: {major} minor: {minor} }} registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}} platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }} device_description_str: "{name}" """

shape = jax.ShapeDtypeStruct


def compiled(capability: str, f: Callable, *args: Any) -> jax.stages.Compiled:
    """A function's program for a GPU of this capability. **Raises:** XLA's error if something doesn't fit."""
    name, known, cores, block, per_core = GPUS[capability]
    major, minor = capability.split(".")
    threads = 2048 if minor == "0" and major != "12" else 1536
    target = TARGET.format(
        name=name, cores=cores, block=block, per_core=per_core, major=major, minor=minor, threads=threads
    )
    (device,) = topologies.get_topology_desc("", platform="cuda", target_config=target, topology="1x1x1").devices
    here = SingleDeviceSharding(device)
    args = jax.tree.map(lambda x: shape(x.shape, x.dtype, sharding=here), args)
    portable.capability, portable.multiprocessors = lambda: float(capability), lambda: cores
    kind = AbstractDevice(device_kind=known, num_cores=None, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
        return jax.jit(f).lower(*args).compile()


def shared_memory() -> int:
    """Bytes that the largest kernel of the programs compiled since the last call has; they are forgotten."""
    largest = 0
    for path in DUMPED.iterdir():
        if path.name.endswith("thunk_sequence.txt"):
            largest = max([largest, *map(int, re.findall(r"shared_memory: (\d+)", path.read_text()))])
        path.unlink()
    return largest


def attends(b=1, t=1, n=32, m=8, h=128, page=64, kv="bfloat16", window=None, masked_slots=0, sinks=False) -> tuple:
    entries = 1024 // page
    args = shape((b, t, n, h), jnp.bfloat16), shape((2, b * entries + 1, 2, m, page, h), kv), shape((), jnp.int32)
    named = {"mask": shape((b, t, masked_slots), bool)} if masked_slots else {}
    named |= {"sinks": shape((n,), jnp.float32)} if sinks else {}
    named |= {"scales": shape((2, 2, m), jnp.float32)} if kv != "bfloat16" else {}
    run = lambda q, kv, layer, table, start, named: attention.attention(  # noqa: E731
        q, kv, layer, table, start, window=window, **named
    )
    return run, *args, shape((b, entries), jnp.int32), shape((b,), jnp.int32), named


def attends_latents(b=1, t=1, n=128, page=64, kv="bfloat16") -> tuple:
    entries = 4096 // page
    args = shape((b, t, n, 576), jnp.bfloat16), shape((2, b * entries + 1, 1, 1, page, 576), kv)
    run = lambda *args: latent.latent_attention(*args, 512, 0.1)  # noqa: E731
    return run, *args, shape((), jnp.int32), shape((b, entries), jnp.int32), shape((b,), jnp.int32)


def attends_pictures(p=4096, n=16, h=72) -> tuple:
    heads, places = [shape((p, n, h), jnp.bfloat16)] * 3, [shape((p,), jnp.int32)] * 2
    return pictures.picture_attention, *heads, *places


def mixes(
    tokens: int, d: int = 2048, f: int = 512, e: int = 256, k: int = 8, shared: int = 1, activation: str | None = None
) -> tuple:
    stack = lambda e: tuple(Weight(shape((e, *s), jnp.bfloat16)) for s in ((2 * f, d), (d, f)))  # noqa: E731
    stacks = [stack(e), stack(shared)] if shared else [stack(e)]
    routing = shape((tokens, k + shared), jnp.int32), shape((tokens, k + shared), jnp.float32)
    run = partial(experts_mlp.experts_mlp, gating=gating(activation)) if activation else experts_mlp.experts_mlp
    return run, shape((tokens, d), jnp.bfloat16), stacks, *routing


def packed(tokens: int, width: int = 2880, e: int = 32, k: int = 4) -> tuple:
    def weight(n: int) -> Weight:
        return Weight(shape((e, n, width // 2), jnp.uint8), Mxfp4(), scales=shape((e, width // 32, n), jnp.uint8))

    biases = shape((e, 2 * width), jnp.bfloat16), shape((e, width), jnp.bfloat16)
    routing = shape((tokens, k), jnp.int32), shape((tokens, k), jnp.float32)
    run = partial(experts_mlp.experts_mlp, gating=gating(ClampedSwiglu(1.702, 7.0)))
    return run, shape((tokens, width), jnp.bfloat16), [(weight(2 * width), weight(width), *biases)], *routing


def mixes_fp8(block: int | None, tokens: int, d: int = 2048, f: int = 512, e: int = 256, k: int = 8) -> tuple:
    def weight(e: int, n: int, k: int) -> Weight:
        scales = shape((e, n // block, k // block) if block else (e, n, 1), jnp.float32)
        return Weight(shape((e, n, k), FP8), Fp8(block), scales=scales)

    stacks = [(weight(n, 2 * f, d), weight(n, d, f)) for n in (e, 1)]
    routing = shape((tokens, k + 1), jnp.int32), shape((tokens, k + 1), jnp.float32)
    return experts_mlp.experts_mlp, shape((tokens, d), jnp.bfloat16), stacks, *routing


def stored(kind: Int4 | Nvfp4, outputs: int, inputs: int, *experts: int) -> Weight:
    """A weight of four bits, or a stack of experts'."""
    values, scales, *factors = jax.eval_shape(kind.quantise, shape((*experts, outputs, inputs), jnp.bfloat16))
    return Weight(values, kind, scales=scales, factors=factors[0] if factors else None)


def mixes_packed(kind: Int4 | Nvfp4, tokens: int, d: int = 2048, f: int = 512, e: int = 256, k: int = 8) -> tuple:
    stacks = [(stored(kind, 2 * f, d, n), stored(kind, d, f, n)) for n in (e, 1)]
    routing = shape((tokens, k + 1), jnp.int32), shape((tokens, k + 1), jnp.float32)
    return experts_mlp.experts_mlp, shape((tokens, d), jnp.bfloat16), stacks, *routing


def steps(b: int, t: int, m: int = 16, n: int = 32, width: int = 128) -> tuple:
    heads = dict(key_heads=m, value_heads=n, key_width=width, value_width=width)
    pool = jax.eval_shape(lambda: delta_pool.empty(2, b + 1, t, **heads, dtype="float32", key_dtype="bfloat16"))
    rows = lambda *s: shape((b, t, *s), jnp.bfloat16)  # noqa: E731
    slots, gates = shape((b,), jnp.int32), shape((b, t, n), jnp.float32)
    operands = rows(m, width), rows(m, width), rows(n, width), gates, gates
    return gated_delta.step, pool, shape((), jnp.int32), slots, slots, *operands


def scans(b: int, n: int = 32, width: int = 128) -> tuple:
    index, square = shape((b,), jnp.int32), shape((b, n, width, width), jnp.float32)
    return delta.scan, shape((2, 9, n, width, width), jnp.float32), shape((), jnp.int32), *[index] * 3, square, square


FP8 = "float8_e4m3fn"


def cases() -> Iterator[tuple[str, tuple]]:
    """Names, functions and their arguments."""
    yield "attention, a request", attends()
    yield "attention, 128 requests", attends(b=128)
    yield "attention, 8 requests of 4 rows", attends(b=8, t=4)
    yield "attention, a tree", attends(t=8, masked_slots=8, window=100)
    yield "attention, a prompt", attends(b=32, t=64)
    yield "attention, heads 256 wide", attends(b=8, n=16, m=2, h=256)
    yield "attention, a prompt, heads 256 wide", attends(b=32, t=64, n=16, m=2, h=256)
    yield "attention, heads 512 wide", attends(b=8, n=32, m=4, h=512)
    yield "attention, 4 rows, heads 512 wide", attends(b=8, t=4, n=32, m=4, h=512)
    yield "attention, a prompt, heads 512 wide", attends(b=32, t=64, n=32, m=4, h=512)
    yield "attention, a prompt, heads 512 wide, FP8 pages", attends(b=32, t=64, n=16, m=2, h=512, kv=FP8)
    yield "attention, window and sinks", attends(b=32, t=64, n=64, h=64, window=128, sinks=True)
    yield "attention, pages of 16", attends(b=8, page=16)
    yield "latent attention, 128 heads", attends_latents(b=8)
    yield "latent attention, 16 heads", attends_latents(n=16)
    yield "latent attention, 128 heads, FP8 pages", attends_latents(b=8, kv=FP8)
    yield "pictures' attention, heads of 72", attends_pictures()
    yield "latent attention, 20 heads, a prompt", attends_latents(b=8, t=64, n=20)
    yield "attention, FP8 pages", attends(b=128, kv=FP8)
    yield "attention, a prompt, FP8 pages", attends(b=32, t=64, kv=FP8)
    for tokens in (1, 8, 32, 128, 2048):
        yield f"experts, {tokens} tokens", mixes(tokens)
    for tokens in (1, 32, 2048):
        yield f"experts gated by GELU, {tokens} tokens", mixes(tokens, 2816, 704, 128, shared=0, activation="gelu_tanh")
    yield "experts 768 wide, 2048 tokens", mixes(2048, f=768, e=128, shared=0)
    for rows in (1, 32, 128):
        widths = shape((rows, 4096), jnp.bfloat16), shape((6144, 4096), FP8), shape((48, 32), jnp.float32)
        yield f"FP8 weight, {rows} rows", (fp8.product, *widths)
    for tokens in (1, 64, 2048):
        yield f"experts in FP8, scales in blocks, {tokens} tokens", mixes_fp8(128, tokens)
        yield f"experts in FP8, scales of outputs, {tokens} tokens", mixes_fp8(None, tokens, 4096, 1408, 128)
    for tokens in (1, 2048):
        yield f"experts in MXFP4, {tokens} tokens", packed(tokens)
    for kind in (Int4(128), Nvfp4()):
        for tokens in (1, 2048):
            yield f"experts in {kind}, {tokens} tokens", mixes_packed(kind, tokens)
        for rows in (1, 32, 128):
            weight = stored(kind, 6144, 4096)
            yield f"{kind} weight, {rows} rows", (four_bits.product, shape((rows, 4096), jnp.bfloat16), weight)
    rows, gate = shape((32, 2048), jnp.bfloat16), shape((2048, 1), jnp.bfloat16)
    choose = lambda *args: top_experts.top_experts(*args, 8, True)  # noqa: E731
    yield "router", (choose, shape((32, 256), jnp.float32), shape((32,), jnp.int32), (rows, gate))
    yield "delta step, 32 requests of 4 rows", steps(32, 4)
    yield "delta scan, 32 blocks", scans(32)


def main(capabilities: list[str]) -> int:
    """Compile every case for each; the number of those that don't."""
    warnings.simplefilter("ignore", DeprecationWarning)
    portable.kernels_here = lambda: None
    failed = 0
    for capability in capabilities or GPUS:
        for name, (f, *args) in cases():
            started = time.monotonic()
            try:
                compiled(capability, f, *args)
                shared, most = shared_memory(), GPUS[capability][3]
                result = f"{time.monotonic() - started:.1f} s, {shared} of {most} bytes of shared memory"
                if not 0 < shared <= most:
                    raise ValueError(result)
            except Exception as error:
                failed, result = failed + 1, f"failed: {error}"
            print(f"{capability} ({GPUS[capability][0]}), {name}: {result}", flush=True)
    DUMPED.rmdir()
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
