"""Kernels are lowered once, whichever programs call them, and are what `jax.jit` would have made of them."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import constraints, layout_inference
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.dense.few_rows import top_tokens
from jaxspec.pallas.hopper import jax_patches
from jaxspec.pallas.hopper.export import _in_place, lower_once


@pytest.fixture
def scaled():
    """A function with a kernel, and the shapes that it was traced with."""
    traced = []

    @lower_once("scaled", "factor")
    def scaled(x, more, *, factor: int, interpret=False):
        traced.append((x.shape, factor))

        def kernel(x_g, out_g, x_s):
            x_s[...] = x_g[...] * factor
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(x_s, out_g)
            plgpu.wait_smem_to_gmem(0)

        out = plgpu.kernel(
            kernel,
            out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
            scratch_types=[plgpu.SMEM(x.shape, x.dtype)],
            interpret=interpret,
        )(x)
        return {"out": out, "more": more["a"] + 1}

    return scaled, traced


def lower(function, *shapes):
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def test_programs_share_what_was_lowered(scaled):
    scaled, traced = scaled
    run = lambda x, y: scaled(scaled(x, {"a": y}, factor=2)["out"], {"a": y}, factor=2)  # noqa: E731
    assert lower(run, (128,), (3,)).count("custom_call @mosaic_gpu") == 1  # one function, called twice
    other = lambda x, y: scaled(x + 1, {"a": y}, factor=2)["more"] + y  # noqa: E731
    assert "custom_call @mosaic_gpu" in lower(other, (128,), (3,))
    assert traced == [((128,), 2)]


def test_whatever_differs_is_lowered_for_itself(scaled):
    scaled, traced = scaled
    for size, factor in ((128, 2), (256, 2), (128, 3)):
        lower(lambda x, factor=factor: scaled(x, {"a": x}, factor=factor)["out"], (size,))
    assert traced == [((128,), 2), ((256,), 2), ((128,), 3)]


def test_threads_wait_for_the_first(scaled):
    scaled, traced = scaled
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda i: lower(lambda x: scaled(x + i, {"a": x}, factor=2)["out"], (128,)), range(8)))
    assert all("custom_call @mosaic_gpu" in text for text in texts) and len(traced) == 1


def test_interpreted_it_is_a_jitted_function(scaled):
    scaled, _ = scaled
    x = jnp.arange(128, dtype=jnp.float32)
    params = plgpu.InterpretGPUParams()
    for _ in range(2):
        out = scaled(x, {"a": x[:3]}, factor=3, interpret=params)
    np.testing.assert_array_equal(out["out"], 3 * x)
    np.testing.assert_array_equal(out["more"], [1, 2, 3])


def test_a_cache_gives_its_place_to_what_becomes_of_it():
    rows, cache, place = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 4), (2, 9, 4), (8,)))
    assert _in_place([rows, cache, place], [rows, cache]) == [0, 1]
    assert _in_place([rows, rows, cache], [rows]) == [0]  # one result takes one place
    assert _in_place([cache, place], [rows, jax.ShapeDtypeStruct(cache.shape, jnp.float32)]) == []


def test_a_faster_search_finds_the_layouts_that_jax_does(monkeypatch):
    """Compare all arrays of a kernel, and the number of trials."""
    original, passes, found = jax_patches.install(), [], []
    assert original, f"jax is {jax.__version__}: read its search again, and name it in pallas/hopper/jax_patches.py"
    search = layout_inference.find_assignments_for

    def counted(system):
        passes.append(len(system.constraints))
        return original(system)

    def noted(unknowns, system, **options):
        solution, fuel = search(unknowns, system, **options)
        found[-1] = [str(solution[variable]) for variable in unknowns if variable in solution], fuel
        return solution, fuel

    monkeypatch.setattr(layout_inference, "find_assignments_for", noted)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((16, 576), (576,), (49152, 576))]
    for reduce_once in (constraints._reduce_system_once, counted):
        monkeypatch.setattr(constraints, "_reduce_system_once", reduce_once)
        found.append(None)
        kernel = jax.jit(lambda *args: top_tokens.__wrapped__(*args, eps=1e-6))
        kernel.trace(*shapes).lower(lowering_platforms=("cuda",))
    assert found[0] == found[1] and len(found[0][0]) > 20 and max(passes) > 100
