"""The kernel of a round of gated delta-rule attention against the plain one, in Pallas's GPU interpreter; and that it
lowers for CUDA.

The interpreter runs all blocks of a cluster at once, each in a thread of XLA's pool, which a small machine has two of.
So no more than two share a key head here. `tests/gpu/test_gated_delta.py` runs the same cases and larger ones on the
device, where alone the matmul in pieces is seen: the interpreter's takes no operand from registers.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.recurrence import delta_plan, delta_pool, gated_delta, gates_and_norm
from jaxspec.pallas.recurrence import delta_step as op
from jaxspec.pallas.recurrence.gates_and_norm import Around, AroundChannels
from tests.support import drawn
from tests.support.kernels import kernels
from tests.support.sample import one_in, rare

LAYERS, LAYER = 2, 1


@dataclass(frozen=True)
class Case:
    """Rounds of t rows for as many slots as `replay` has, which says how many of their `rows` records were accepted."""

    name: str
    t: int = 4
    rows: int = 4
    replay: tuple[int, ...] = (4, 0)
    key_heads: int = 1
    group: int = 1
    dtype: str = "float32"
    division: tuple | None = (2, 2)  # of which a `Division` is made
    padded_rows: int | None = None
    fixed: bool = False
    channel_decay: bool = False

    def inputs(self, seed: int = 0):
        """A pool full of random states and records, the slots, and the operands of `step` that come after them."""
        rng = np.random.default_rng(seed)
        b, n, width = len(self.replay), self.key_heads * self.group, op.WIDTH
        heads = dict(key_heads=self.key_heads, value_heads=n, key_width=width, value_width=width)
        heads["channel_decay"] = self.channel_decay
        pool = delta_pool.empty(LAYERS, b + 2, self.rows, **heads, dtype=self.dtype, key_dtype="bfloat16")

        random = lambda shape: rng.standard_normal(shape, np.float32)  # noqa: E731

        def normal(shape, dtype="float32", length=0.0):
            x = random(shape)
            return jnp.asarray(x * length / np.linalg.norm(x, axis=-1, keepdims=True) if length else x, dtype)

        gate = lambda shape: jnp.asarray(np.exp(-np.exp(random(shape) - 2)))  # noqa: E731
        share = lambda shape: jnp.asarray(1 / (1 + np.exp(-random(shape))))  # noqa: E731
        pool = pool.replace(
            state=normal(pool.state.shape, self.dtype),
            keys=normal(pool.keys.shape, "bfloat16", 1),
            updates=normal(pool.updates.shape),
            decay=gate(pool.decay.shape),
        )
        rows = (b, self.t)
        new = [normal((*rows, self.key_heads, width), "bfloat16", length) for length in (width**-0.5, 1)]
        decayed = (*rows, n, width) if self.channel_decay else (*rows, n)
        new += [normal((*rows, n, width), "bfloat16"), gate(decayed), share((*rows, n))]
        return pool, jnp.asarray(1 + rng.permutation(b), jnp.int32), (jnp.asarray(self.replay, jnp.int32), *new)


def check(case: Case, interpret=False):
    """Outputs, states and records are the plain step's to float32's rounding, and nothing else has changed."""
    pool, slots, rest = case.inputs()
    expected, wanted = jax.jit(gated_delta.reference_step)(pool, LAYER, slots, *rest)
    division = case.division and op.Division(*case.division)
    named = dict(division=division, padded_rows=case.padded_rows, fixed=case.fixed, interpret=interpret)
    out, after = op.delta_step(pool, jnp.int32(LAYER), slots, *rest, **named)
    assert out.dtype == jnp.bfloat16 and out.shape[1] == (case.padded_rows or case.t)
    decay = check_after(case, pool, slots, (expected, wanted), out[:, : case.t], after)
    np.testing.assert_array_equal(
        *(each[LAYER, slots] for each in decay)
        if case.channel_decay
        else (each[LAYER, slots, :, : case.t] for each in decay)
    )


def check_after(case: Case, pool, slots, plain, out, after):
    """Check that a step reads and leaves what the plain one does, and changes nothing else. Returns both decays."""
    expected, wanted = plain
    pool, wanted, after = (jax.tree.map(np.asarray, each) for each in (pool, wanted, after))
    near(out, expected, 0.008)
    near(after.state[LAYER], wanted.state[LAYER], 1e-6 if case.dtype == "float32" else 0.008)
    near(after.updates[LAYER], wanted.updates[LAYER], 1e-5)
    np.testing.assert_array_equal(after.keys[LAYER], wanted.keys[LAYER])
    others = [slot for slot in range(pool.state.shape[1]) if slot not in np.asarray(slots)]
    for was, now in zip(jax.tree.leaves(pool), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(was[0], now[0])
        np.testing.assert_array_equal(was[LAYER, others], now[LAYER, others])
    return after.decay, wanted.decay


def around_of(case: Case) -> Around | AroundChannels:
    b, n = len(case.replay), case.key_heads * case.group
    normal = lambda i, *shape: drawn.normal(jax.random.key(i), shape)  # noqa: E731
    rows = normal(3, b, case.padded_rows or case.t, (2 * case.key_heads + 2 * n) * op.WIDTH).astype("bfloat16")
    if case.channel_decay:
        steps, z = (normal(i, b, case.t, n * op.WIDTH).astype("bfloat16") for i in (0, 3))
        beside = normal(5, b, case.padded_rows or case.t, 32 + n).astype("bfloat16")
        scale = (1 + 0.1 * normal(4, op.WIDTH)).astype("bfloat16")
        steps, log = steps.at[0, 0, 0].set(100), normal(1, n).at[0].set(-6)  # a step whose power overflows
        return AroundChannels(steps, beside, log, normal(2, n * op.WIDTH), z, scale)
    gates = normal(0, b, case.padded_rows or case.t, 2 * n), normal(1, n), normal(2, n)
    return Around(*gates, rows, (1 + 0.1 * normal(4, op.WIDTH)).astype("bfloat16"))


def check_around(case: Case, interpret=False):
    """With gates made before it, and the norm after it: as the plain step with the plain form of these."""
    pool, slots, (replay, q, k, v, *_) = case.inputs()
    around, eps, n = around_of(case), 1e-6, v.shape[2]
    plain = gates_and_norm.plain_channels if case.channel_decay else gates_and_norm.plain
    decay, beta, z = plain(around, case.t)
    read, wanted = jax.jit(gated_delta.reference_step)(pool, LAYER, slots, replay, q, k, v, decay, beta)
    wide = np.asarray(read, np.float32)
    wide /= np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + eps)
    expected = wide * np.asarray(around.scale, np.float32) * np.asarray(z)[:, : case.t].reshape(*wide.shape[:2], n, -1)
    division = case.division and op.Division(*case.division)
    named = dict(around=around, eps=eps, division=division, padded_rows=case.padded_rows, interpret=interpret)
    out, after = op.delta_step(pool, jnp.int32(LAYER), slots, replay, q, k, v, **named)
    assert out.dtype == jnp.bfloat16 and out.shape[1] == (case.padded_rows or case.t)
    near(out[:, : case.t], expected, 0.015)
    near(after.state[LAYER], wanted.state[LAYER], 1e-6)
    near(after.updates[LAYER], wanted.updates[LAYER], 1e-5)
    near(after.decay[LAYER, slots, :, : case.t], wanted.decay[LAYER, slots, :, : case.t], 2e-6)  # 1.2e-6 on an H200


def near(actual, expected, tolerance):
    actual, expected = (np.asarray(x).astype(np.float32) for x in (actual, expected))
    assert np.isfinite(actual).all()
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    assert error < tolerance, error


CASES = [
    Case("one row", t=1, rows=1, replay=(1, 0)),
    Case("all and some accepted", replay=(4, 3)),
    Case("fewer rows than records, several key heads", t=2, rows=5, replay=(2,), key_heads=2),
    Case("two heads in a block", t=5, rows=5, replay=(5,), group=2),
    Case("a key head in one block, three values heads", t=2, rows=2, replay=(1,), group=3, division=(1, 1)),
    Case("tiles in a ring", replay=(2,), group=2, division=(1, 3)),
    Case("whole tiles at a time", replay=(2, 4), division=(2, 1, 128)),
    Case("more than eight rows", t=9, rows=9, replay=(2,)),
    Case("room for rows that fill up", t=3, replay=(1, 3), padded_rows=4),
    Case("bfloat16", replay=(3,), dtype="bfloat16"),
    Case("rows in order", replay=(4, 3), fixed=True),
    Case("rows in order, two heads in a block", t=2, rows=3, replay=(0, 2), group=2, division=(1, 2), fixed=True),
    Case("decays by channel", t=3, rows=5, replay=(3, 0), channel_decay=True),
    Case("decays by channel, one row", t=1, rows=1, replay=(1, 0), division=(1, 2), channel_decay=True),
    Case("decays by channel, two heads in a block, bfloat16", t=2, rows=2, replay=(2,), group=2, dtype="bfloat16",
         division=(1, 2), channel_decay=True),
]  # fmt: skip


# The first two and room stand below with gates and norm, too; rows in order again in rounds.
RARE = {"one row", "two heads in a block", "rows in order", "room for rows that fill up"}
RARE |= {"decays by channel, one row", "decays by channel, two heads in a block, bfloat16"}
RARE |= {"whole tiles at a time", "fewer rows than records, several key heads", "more than eight rows"}
RARE |= {"decays by channel"}
RARE |= {"rows in order, two heads in a block", "tiles in a ring", "a key head in one block, three values heads"}


@pytest.mark.parametrize("case", [
    pytest.param(case, id=case.name, marks=pytest.mark.exhaustive if case.name in RARE else ()) for case in CASES
])  # fmt: skip
def test_equals_the_plain_step(case):
    check(case, interpret=plgpu.InterpretGPUParams())


def rounds(case: Case, lengths: tuple[int, ...], interpret=False):
    """Run rows in rounds of these lengths, all accepted: their outputs, and the state behind them."""
    pool, slots, (replay, *rows) = case.inputs()
    outs, at = [], 0
    for length in (*lengths, 1):  # the last one replays the records of the one before it
        part = [x[:, at : at + length] for x in rows]
        division = case.division and op.Division(*case.division)
        named = dict(division=division, fixed=True, interpret=interpret)
        out, pool = op.delta_step(pool, jnp.int32(LAYER), slots, replay, *part, **named)
        outs.append(out)
        replay, at = jnp.full_like(replay, length), at + length
    return np.asarray(jnp.concatenate(outs, axis=1), np.float32), np.asarray(pool.state[LAYER, slots], np.float32)


ROUNDS = Case("", t=6, rows=4, replay=(3,))


@pytest.mark.parametrize("dtype", ["float32", rare("bfloat16")])
def test_rows_in_order_are_the_same_in_any_rounds(dtype):
    """But for what the interpreter's XLA contracts in one program and not in another: bits are the device's to show."""
    case = replace(ROUNDS, dtype=dtype)
    together, parted = (rounds(case, lengths, plgpu.InterpretGPUParams()) for lengths in ((4, 1), (1, 2, 1, 1)))
    for one, other in zip(together, parted, strict=True):
        near(one, other, 1e-6 if dtype == "float32" else 0.008)
    if dtype == "bfloat16":  # rounded after each token; 0.67 of it is the same if a round rounds it once
        assert (together[1] == parted[1]).mean() > 0.99


AROUND = [
    Case("one row, a head in a block", t=1, rows=1, replay=(1, 0), group=2),
    Case("two heads in a block, and room", t=3, replay=(1, 3), group=2, division=(1, 3), padded_rows=4),
    Case("a row in each warp", replay=(2,), group=2, division=(1, 3)),
    Case("decays by channel", t=3, rows=4, replay=(1, 3), key_heads=2, division=(1, 2), padded_rows=8,
         channel_decay=True),
]  # fmt: skip


@pytest.mark.parametrize("case", [rare(AROUND[0]), AROUND[1], rare(AROUND[2]), AROUND[3]], ids=lambda case: case.name)
def test_gates_and_norm_around_it_are_the_plain_ones(case):
    check_around(case, interpret=plgpu.InterpretGPUParams())


def test_what_has_gates_and_norm_of_its_own_is_named():
    pool, _, (_, q, _, v, *_) = Case("", 2, 2, (0, 0), 2, 2).inputs()
    reason = lambda q, v: gated_delta.unnormed(pool, q.shape, v.shape, q.dtype, v.dtype)  # noqa: E731
    assert reason(q, v) is None
    assert "10 requests" in reason(jnp.tile(q, (5, 1, 1, 1)), jnp.tile(v, (5, 1, 1, 1)))
    assert "4 rows over records of 2" in reason(jnp.tile(q, (1, 2, 1, 1)), jnp.tile(v, (1, 2, 1, 1)))
    assert "float32" in reason(q.astype("float32"), v)


@pytest.mark.parametrize("t,heads,group", [rare(1, 16, 2), rare(4, 16, 3), (1, 32, 1), rare(16, 32, 1)])
def test_lowers_with_gates_and_norm(t, heads, group):
    """Kimi Linear's 32 heads have no groups, and decays by channel."""
    case = Case("", t, t, (0,), heads, group, division=None, padded_rows=max(8, t), channel_decay=group == 1)
    pool, slots, (replay, q, k, v, *_) = case.inputs()
    run = lambda pool, slots, *rest: gated_delta.normed_step(pool, jnp.int32(1), slots, *rest, 1e-6)  # noqa: E731
    assert kernels(jax.jit(run, donate_argnums=0), pool, slots, replay, q, k, v, around_of(case)) == 1


@pytest.mark.parametrize("t,group,dtype,fixed", one_in(5, [
    (1, 2, "float32"),  # Qwen3-Next 80B-A3B, Qwen3.5 35B-A3B, 9B and 4B
    (2, 1, "float32"),  # Qwen3.5 2B
    (4, 3, "float32"),  # Qwen3.5 27B
    (4, 2, "bfloat16"),
    (8, 2, "float32"),
], [False, True]))  # fmt: skip
def test_lowers_for_cuda_once_for_all_layers(t, group, dtype, fixed):
    pool, slots, rest = Case("", t, t, (0,) * 3, 16, group, dtype, division=None).inputs()

    @partial(jax.jit, donate_argnums=0)
    def run(pool, slots, rest):
        outs = []
        for layer in range(LAYERS):
            out, pool = op.delta_step(pool, jnp.int32(layer), slots, *rest, fixed=fixed)
            outs.append(out)
        return outs, pool

    assert kernels(run, pool, slots, rest) == 1


@pytest.mark.parametrize("key_heads,group,t,division", [
    (16, 2, 4, op.Division(4, 2)),  # one request: a tile a block
    (128, 2, 4, op.Division(2, 4)),
    (512, 2, 4, op.Division(1, 4)),
    (512, 2, 8, op.Division(1, 3)),
    (512, 2, 16, op.Division(1, 3)),
    (16, 1, 4, op.Division(2, 2)),
    (512, 3, 4, op.Division(1, 4)),
])  # fmt: skip
def test_division(key_heads, group, t, division):
    assert delta_plan.division_of(key_heads, group, t, t, jnp.float32) == division


BF16 = jnp.bfloat16


@pytest.mark.parametrize("q,v,rows,dtypes,reason", [
    ((1, 4, 16, 128), (1, 4, 32, 128), 4, (jnp.float32, BF16), None),
    ((1, 4, 16, 128), (1, 4, 64, 128), 8, (BF16, BF16), None),
    ((1, 4, 16, 128), (1, 4, 32, 128), 4, (jnp.float16, BF16), "states in float16"),
    ((1, 4, 16, 128), (1, 4, 32, 128), 4, (jnp.float32, BF16, jnp.float32), "queries, keys or values in float32"),
    ((1, 4, 16, 64), (1, 4, 32, 128), 4, (jnp.float32, BF16), "keys of width 64 and values of width 128"),
    ((1, 4, 16, 128), (1, 4, 40, 128), 4, (jnp.float32, BF16), "40 value heads over 16 key heads"),
    ((1, 4, 4, 128), (1, 4, 32, 128), 4, (jnp.float32, BF16), "32 value heads over 4 key heads"),
    ((1, 4, 16, 128), (1, 4, 32, 128), 17, (jnp.float32, BF16), "17 rows"),
])  # fmt: skip
def test_supported_says_why_not(q, v, rows, dtypes, reason):
    answer = op.supported(q, v, rows, *dtypes)
    assert answer is None if reason is None else reason in answer


def test_an_unsupported_call_is_refused():
    pool, slots, rest = Case("", rows=17, replay=(0,)).inputs()
    with pytest.raises(ValueError, match="17 rows a request; supported: up to 16"):
        op.delta_step(pool, jnp.int32(0), slots, *rest)
