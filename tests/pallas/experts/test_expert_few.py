"""A few tokens' experts by one kernel: each matmul in interpret mode, the whole by lowering it for CUDA."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.models.fp8 import E4M3
from jaxspec.models.weights import FourBits, Fp8, Int4, Nvfp4
from jaxspec.pallas import hopper
from jaxspec.pallas.dense import few_rows
from jaxspec.pallas.experts import experts_mlp
from jaxspec.pallas.experts.expert_few import mix, plan, supported
from jaxspec.pallas.experts.expert_few.fp8 import LOWER, pieces
from jaxspec.pallas.experts.expert_few.plan import COLUMNS, MOST, PARTS, ROWS, STEP, TILE, Plan, Work
from jaxspec.pallas.experts.experts_mlp import NOBODY
from jaxspec.pallas.hopper import KERNELS
from tests.decoder.test_moe import arrays, naive, random_case
from tests.pallas.experts import test_expert_four
from tests.pallas.experts.test_expert_four import four_case
from tests.pallas.experts.test_expert_fp8 import fp8_case
from tests.pallas.experts.test_expert_stream import MODELS, bfloat16, shapes
from tests.support import drawn
from tests.support.kernels import assert_close, lowered
from tests.support.sample import rare


def interpreted(x, stacks, *rest, **options):
    return mix(x, arrays(stacks), *rest, **options, fused=False, interpret=plgpu.InterpretGPUParams())


@pytest.fixture
def few_blocks(monkeypatch):
    """A block for each 16 outputs, but no need for a whole GPU of them; interpreting one takes a while."""
    monkeypatch.setattr(plan, "BLOCKS", range(1, 133))


@pytest.mark.parametrize("t,e,k,shared,d,f", [
    rare(1, 6, 3, 256, 256, 256),  # blocks with half a tile, blocks with two
    rare(1, 5, 4, 0, 256, 1024),  # a group of experts that is full; more steps than either ring has slots
    rare(3, 7, 2, 0, 512, 256),  # an odd number of tokens, several experts' parts in a tile; two steps of `up`
    rare(8, 4, 2, 256, 256, 256),  # experts of several tokens, and one of all
])  # fmt: skip
def test_matches_what_each_token_gets_by_itself(few_blocks, t, e, k, shared, d, f):
    case = bfloat16(random_case(t, e, k, 0.3, d=d, f=f, seed=t, shared=shared))
    assert_close(interpreted(*case), naive(*case))


def test_a_pair_of_e4m3_rows_is_a_bfloat16_row():
    """Exactly, but for numbers that the largest of the row exceeds 2^13 times."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(8, 128)) * 2.0 ** rng.integers(-13, 2, (8, 128)) * np.array([[1, 1e-6, 300, 1e9] * 2]).T
    rows[7] = 0
    rows = jnp.asarray(rows, jnp.bfloat16).astype(jnp.float32)
    factor, upper, lower = pieces(rows)
    assert upper.dtype == lower.dtype == E4M3
    made = (upper.astype(jnp.float32) + lower.astype(jnp.float32) * 2.0**-LOWER) * factor[:, None]
    largest = jnp.abs(rows).max(1, keepdims=True)
    large = jnp.abs(rows) > largest * 2.0**-13
    np.testing.assert_array_equal(made[large], rows[large])
    assert (jnp.abs(made - rows) <= largest * 2.0**-16).all()


def fp8_arrays(stacks):
    """The weights of `fp8_case` as the kernel takes them."""
    return [tuple(few_rows.Fp8Weight(weight.values, weight.scales) for weight in stack) for stack in stacks]


@pytest.mark.parametrize("t,e,k,shared,d,f,unit", [
    rare(1, 6, 3, 256, 512, 256, 128),  # blocks with half a tile, blocks with two
    rare(1, 5, 2, 0, 512, 1280, 128),  # an odd number of steps of `down`, more than the ring of hidden rows has slots
    (1, 3, 1, 0, 512, 256, 128),
    rare(3, 3, 2, 0, 512, 256, 128),  # an odd number of tokens
    rare(3, 7, 2, 256, 512, 256, 128),  # an odd number of tokens, several experts' parts in a tile
    rare(8, 4, 2, 256, 512, 256, 128),  # experts of several tokens, and one of all
    rare(1, 3, 1, 0, 512, 256, None),  # a scale for each output
    rare(3, 7, 2, 256, 512, 256, None),
])  # fmt: skip
def test_fp8_experts_match_numpy(few_blocks, t, e, k, shared, d, f, unit):
    (x, stacks, *rest), whole = fp8_case(t, e, k, d=d, f=f, shared=shared, unit=unit)
    got = mix(x, fp8_arrays(stacks), *rest, fused=False, interpret=plgpu.InterpretGPUParams())
    assert_close(got, naive(*whole))


@pytest.mark.parametrize("t,e,k,more", [
    rare(1, 2, 1, {"kind": Nvfp4(), "d": 512, "f": 256}),  # lowered below
    rare(1, 5, 2, {"kind": Int4(128), "d": 512, "f": 1280}),  # an odd number of steps of `down`
    rare(3, 7, 2, {"kind": Nvfp4(), "d": 512, "f": 256, "shared": 256}),  # several experts' parts in a tile
    rare(8, 4, 2, {"kind": Int4(32, zeros=True), "d": 1024, "f": 512}),
    rare(1, 6, 3, {"kind": Int4(None, zeros=True), "d": 512, "f": 256}),
    rare(8, 4, 2, {"kind": Int4(64), "d": 512, "f": 768, "shared": 768}),
])  # fmt: skip
def test_experts_in_four_bits_match_numpy(few_blocks, t, e, k, more):
    (x, stacks, ids, weights), whole = four_case(t, e, k, biased=False, **more)
    got = mix(x, stacks, ids, weights, fused=False, interpret=plgpu.InterpretGPUParams())
    assert_close(got, test_expert_four.naive(x, ids, weights, whole, None))


@pytest.mark.parametrize("t", [1, rare(3), rare(8)])
@pytest.mark.parametrize("f", [512, 768])
def test_rings_of_fp8_experts_are_shared_out(t, f):
    """Each slot is one warpgroup's, whichever tile comes: steps of `up` and slots are even."""
    sizes = Plan(t, 9, 2048, f, (256, 1), True)
    assert sizes.slots % 2 == sizes.hidden_slots % 2 == sizes.d // STEP % 2 == 0
    assert sizes.flight < sizes.slots


@pytest.mark.exhaustive  # the next tests but one add to it, rows that are no token's too
def test_is_added_to_the_residual_stream(few_blocks):
    """Rows that are no token's stay as they are, whatever they are."""
    case = bfloat16(random_case(1, 5, 2, d=256, f=256, seed=1))
    residual = drawn.normal(jax.random.key(0), (8, 256), jnp.bfloat16).at[1:].set(jnp.inf)
    got = interpreted(*case, residual)
    assert (got == residual + jnp.pad(interpreted(*case), ((0, 7), (0, 0)))).all()


def residual_and_scale(width: int):
    keys = jax.random.split(jax.random.key(width))
    residual, scale = (drawn.normal(key, shape) for key, shape in zip(keys, ((8, width), (width,)), strict=True))
    return residual.astype(jnp.bfloat16), (1 + 0.1 * scale).astype(jnp.bfloat16)


def assert_scaled(scaled, rows, scale, centred=False):
    """Compare with `few_rows.scale_rows` of the rows, its squares summed over fewer columns."""
    expected = few_rows.scale_rows(rows, scale, centred)
    wide = lambda x: np.asarray(x, np.float32)  # noqa: E731
    # Interpreted, XLA may leave out a rounding before it.
    np.testing.assert_allclose(wide(scaled.rows), wide(expected.rows), rtol=2**-7)
    np.testing.assert_allclose(scaled.squares.sum(0), expected.squares.sum(0), rtol=1e-3)


@pytest.mark.exhaustive  # tokens without experts, below, have scaled sums, too
@pytest.mark.parametrize("centred", [False, True])
def test_sums_come_scaled_for_the_norm_after_them(few_blocks, centred):
    case, (residual, scale) = bfloat16(random_case(3, 5, 2, d=256, f=256, seed=1)), residual_and_scale(256)
    got, scaled = interpreted(*case, residual, scale, centred=centred)
    np.testing.assert_array_equal(got, interpreted(*case, residual))
    assert_scaled(scaled, got, scale, centred)


@pytest.mark.parametrize("t,nobody,rows", [rare(1, 0, 1), rare(3, 0, 3), (3, 2, 8)])
def test_tokens_without_experts_get_nothing(few_blocks, t, nobody, rows):
    """Leave the residual stream of their rows, and of padding rows, as it is. Eight rows' sums come scaled, too. One
    expert is of all tokens."""
    x, stacks, ids, weights = bfloat16(random_case(t, 4, 2, d=256, f=256, seed=t, shared=256))
    ids = ids.at[nobody].set(NOBODY)
    residual, (_, scale) = drawn.normal(jax.random.key(t), (rows, 256), jnp.bfloat16), residual_and_scale(256)
    if rows == 8:
        got, scaled = interpreted(x, stacks, ids, weights, residual, scale, centred=True)
        assert_scaled(scaled, got, scale, True)
    else:
        got = interpreted(x, stacks, ids, weights, residual)
    alone = [nobody, *range(t, rows)]
    np.testing.assert_array_equal(got[jnp.array(alone)], residual[jnp.array(alone)])
    assert_close(got[:t], np.asarray(residual[:t], np.float64) + naive(x, stacks, ids, weights))


@pytest.mark.parametrize("f", [512, 768])
def test_blocks_share_all_parts(f):
    """Each part is one block's, no block has two more than another, and the first token's waves are of its experts."""
    sizes = Plan(8, 9, 2048, f, (256, 1))
    assert sizes.ahead == 1
    for count in (9, 10, 23, 24, 33, 64, 72):
        work = Work(sizes, jnp.arange(sizes.blocks), jnp.int32(count))
        tiles, taken = np.asarray(work.tiles), [[] for _ in range(sizes.blocks)]
        for tile in range(tiles.max()):
            first, high = (np.asarray(end) for end in work.parts(tile))
            assert (high - first <= PARTS).all()
            for block in np.flatnonzero(tile < tiles):
                taken[block] += range(first[block], high[block])
        assert sorted(part for parts in taken for part in parts) == list(range(count * sizes.parts))
        assert max(map(len, taken)) - min(map(len, taken)) <= 1
        assert max(max(parts[:PARTS]) for parts in taken) < 9 * sizes.parts


def mixtures():
    """One token and eight, of models with a shared expert and without; the others are lowered on a GPU too."""
    four = Int4(128), Nvfp4(), Int4(32, zeros=True)
    often = [("qwen3-30b-a3b", 1, None), ("qwen3.5-35b-a3b", 1, Nvfp4())]
    often.append(("qwen3-30b-a3b", 8, Fp8(None)))
    for case in itertools.product(MODELS, (1, 4, 8), (None, Fp8(128), Fp8(None), *four)):
        yield pytest.param(*case, marks=() if case in often else pytest.mark.exhaustive)


@pytest.mark.parametrize("model,tokens,kind", list(mixtures()))
def test_is_all_that_a_mixture_is_on_a_gpu(model, tokens, kind, monkeypatch):
    """Nothing stands before or after it, but for the counters' zeros."""
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    d, before = MODELS[model][0], KERNELS["expert_few"]
    four = isinstance(kind, FourBits)
    x, stacks, ids, weights = shapes(model, tokens, None if four else kind)
    if four:
        stacks = [test_expert_four.shapes(len(down.values), d, down.inputs, kind) for _, down in stacks]
    residual, scale = (jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in ((8, d), (d,)))
    run = lambda *given: experts_mlp.experts_mlp(*given[:-1], scale=given[-1])  # noqa: E731
    run = jax.jit(run, static_argnums=4)
    text = lowered(run, x, stacks, ids, weights, ids.shape[1], residual, scale)
    assert KERNELS["expert_few"] == before + 1
    assert text.count("custom_call @mosaic_gpu") == 1 and "gather" not in text and "stablehlo.pad" not in text


@pytest.mark.parametrize("f", [512, 768])
@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_rings_are_deep_enough(tokens, f):
    """A multiprocessor must have some 50 KiB on their way; at one token all of its weights of `down` should be."""
    sizes = Plan(tokens, 9, 2048, f, (256, 1))
    slot = 2 * TILE * STEP
    assert (sizes.slots - 1) * slot >= 64 * 1024
    if tokens == 1 and f == 512:
        assert sizes.slots * slot >= 9 * 2 * f * COLUMNS


def test_what_it_leaves_to_others_is_named(few_blocks):
    of = lambda f: arrays(random_case(2, 4, 2, d=256, f=f, shared=256)[1])  # noqa: E731
    assert supported(ROWS, MOST, jnp.bfloat16, of(256)) is None
    assert "9 tokens of 2 experts" in supported(9, 2, jnp.bfloat16, of(256))
    assert "1 tokens of 17 experts" in supported(1, 17, jnp.bfloat16, of(256))
    assert "float32" in supported(1, 2, jnp.float32, of(256))
    assert "widths 512 and 256" in supported(1, 2, jnp.bfloat16, of(512))
    assert "experts 128 wide" in supported(1, 2, jnp.bfloat16, of(128)[:1])
    wide = jax.eval_shape(lambda: (jnp.zeros((4, 512, 4096)), jnp.zeros((4, 4096, 256))))
    assert "4096 wide, which makes 256 blocks" in supported(1, 2, jnp.bfloat16, [wide])
    x, stacks, ids, weights = random_case(2, 4, 2)
    with pytest.raises(ValueError, match="float32, not bfloat16"):
        mix(x, arrays(stacks), ids, weights)
