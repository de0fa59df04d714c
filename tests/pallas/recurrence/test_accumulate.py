"""A recurrence of given updates against a loop over tokens in numpy: prompts in blocks, rounds with rejected rows."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas import portable
from jaxspec.pallas.hopper import counting
from jaxspec.pallas.portable import delta as kernels
from jaxspec.pallas.recurrence import accumulate, delta_pool, delta_step, gates_and_norm
from jaxspec.pallas.recurrence.delta_plan import Division
from jaxspec.pallas.recurrence.gates_and_norm import Steps
from tests.pallas.recurrence import test_delta_step
from tests.support.kernels import kernels as calls
from tests.support.portable import KINDS, lowered
from tests.support.sample import rare

LAYER = jnp.int32(1)


def drawn(t, m, n, k, v, seed=0):
    """Queries and keys [t m k], updates [t n v], and decays [t n], some of which forget nearly all."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    return normal(t, m, k), normal(t, m, k), normal(t, n, v), rng.uniform(1e-6, 1, (t, n)).astype(np.float32) ** 0.1


def looped(q, k, u, decay):
    """Read and update the state one token after the other: each one's result, and the last state."""
    group = u.shape[1] // q.shape[1]
    q, k = (np.repeat(x.astype(np.float64), group, axis=1) for x in (q, k))
    state, out = np.zeros((*u.shape[1:], q.shape[2])), []
    for t in range(len(u)):
        state = decay[t, :, None, None] * state + u[t, :, :, None] * k[t, :, None]
        out.append(np.einsum("nvk,nk->nv", state, q[t]))
    return np.array(out), state


def empty(rows, m, n, k, v):
    named = {"key_heads": m, "value_heads": n, "key_width": k, "value_width": v}
    return delta_pool.empty(2, 5, rows, **named, dtype=jnp.float32, key_dtype=jnp.float32)


@pytest.mark.parametrize("m,n,k,v", [(1, 1, 1, 8), (2, 4, 16, 8), (2, 6, 32, 32)])
def test_prompts_and_rounds_are_the_loop(m, n, k, v):
    """Two blocks of a prompt, the second not full, a snapshot behind the first; then rounds whose last rows fail."""
    given = drawn(30, m, n, k, v)
    expected, _ = looped(*given)
    pool, i32 = empty(4, m, n, k, v), lambda *x: jnp.array(x, jnp.int32)
    blocks = [np.stack([x[:8], np.pad(x[8:13], ((0, 3), *[(0, 0)] * (x.ndim - 1)))]) for x in given]
    out, pool = accumulate.chunk(pool, LAYER, i32(2, 2), i32(-1, 2), i32(4, -1), i32(8, 5), *map(jnp.asarray, blocks))
    np.testing.assert_allclose(np.concatenate([out[0], out[1, :5]]), expected[:13], atol=1e-4)
    np.testing.assert_allclose(pool.state[1, 4], looped(*(x[:8] for x in given))[1], atol=1e-4)
    at, replay = 13, 0
    for accepted in (4, 1, 3, 0, 2):
        rows = [jnp.asarray(x[None, at : at + 4]).at[0, accepted:].multiply(1 + (x.ndim > 2)) for x in given]
        out, pool = accumulate.step(pool, LAYER, i32(2), i32(replay), *rows)
        np.testing.assert_allclose(out[0, :accepted], expected[at : at + accepted], atol=1e-4)
        at, replay = at + accepted, accepted
    np.testing.assert_allclose(
        pool.replayed(LAYER, i32(2), i32(replay))[0], looped(*(x[:at] for x in given))[1], atol=1e-4
    )
    assert not pool.state[0].any(), "another layer's"


def step_inputs(dtype, t=3, m=2, n=4, k=32, v=64):
    pool = empty(4, m, n, k, v)
    pool = jax.tree.map(lambda x: jnp.asarray(np.random.default_rng(x.ndim).uniform(0.1, 1, x.shape), x.dtype), pool)
    pool = pool.replace(state=pool.state.astype(dtype))
    rows = [jnp.asarray(np.stack(x)) for x in zip(drawn(t, m, n, k, v), drawn(t, m, n, k, v, 1), strict=True)]
    return pool, LAYER, jnp.array([3, 1], jnp.int32), jnp.array([2, 0], jnp.int32), *rows


def check_step(dtype: str, interpret: bool = False) -> None:
    pool, *rest = step_inputs(dtype)
    expected, wanted = accumulate.reference_step(pool, *rest)
    run = jax.jit(kernels.step, static_argnames="interpret")
    out, after = run(pool, *rest, None, interpret=interpret)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4 if dtype == "float32" else 0.3)
    for got, each in zip(jax.tree.leaves(after), jax.tree.leaves(wanted), strict=True):
        got, each = (np.asarray(x, np.float32) for x in (got, each))
        np.testing.assert_allclose(got, each, rtol=1e-5 if dtype == "float32" else 0.02, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernel_equals_the_plain_step(dtype):
    check_step(dtype, interpret=True)


def check_scan(interpret: bool = False) -> None:
    rng = np.random.default_rng(3)
    slots, source, keep = (jnp.array(each, jnp.int32) for each in ([1, 1, 2, 2], [-1, 1, 4, 2], [4, -1, 9, 3]))
    states, carry, write = (
        jnp.asarray(rng.uniform(0, 1, s), jnp.float32) for s in ((2, 6, 2, 64, 32), (4, 2), (4, 2, 64, 32))
    )
    given = states, LAYER, slots, source, keep, carry, write
    got = jax.jit(kernels.scan, static_argnames="interpret")(*given, interpret=interpret)
    for each, wanted in zip(got, delta_pool.scan_blocks(*given), strict=True):
        np.testing.assert_allclose(each, wanted, rtol=1e-6)


def test_the_kernel_of_a_prompts_states_equals_the_plain_one():
    check_scan(interpret=True)


@pytest.mark.parametrize("capability", KINDS)
def test_kernels_serve_mamba_2s_sizes_where_they_lower(capability, monkeypatch):
    """Nemotron 3 Nano's: 64 heads of 64, 8 groups, states of 128."""
    monkeypatch.setattr(portable, "kernels_here", lambda: None)
    pool, *rest = step_inputs("float32", m=8, n=64, k=128, v=64)
    with counting() as counted:
        text = lowered(accumulate.step, pool, *rest, capability=capability)
        slots = rest[1]
        run = lambda pool, *rows: accumulate.chunk(pool, LAYER, slots, slots, -slots, slots * 0 + 3, *rows)  # noqa: E731
        text += lowered(run, pool, *rest[3:], capability=capability)
    assert counted == {"portable_delta_step": 1, "portable_delta_scan": 1}
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 2


@dataclass(frozen=True)
class Space:
    """Rounds of a state space, as `test_delta_step.Case`: `group` heads `width` wide share keys and queries."""

    name: str
    t: int = 4
    rows: int = 4
    replay: tuple[int, ...] = (4, 0)
    key_heads: int = 1
    group: int = 2
    width: int = 64
    dtype: str = "float32"
    division: tuple | None = (2, 2)
    limits: tuple[float, float] = (0.0, float("inf"))

    def inputs(self):
        """A pool full of random states and records, the slots, and the operands of `accumulate.stepped` after them."""
        b, n = len(self.replay), self.key_heads * self.group
        named = {"key_heads": self.key_heads, "value_heads": n, "key_width": 128, "value_width": self.width}
        pool = delta_pool.empty(2, b + 2, self.rows, **named, dtype=self.dtype, key_dtype="bfloat16")
        rng = np.random.default_rng(0)
        normal = lambda shape, dtype="bfloat16": jnp.asarray(rng.standard_normal(shape, np.float32), dtype)  # noqa: E731
        pool = jax.tree.map(lambda x: normal(x.shape, x.dtype), pool)
        pool = pool.replace(decay=jnp.exp(-jnp.abs(pool.decay)))
        q, k = (normal((b, self.t, self.key_heads, 128)) / 8 for _ in range(2))
        heads = (normal((n,), "float32") for _ in range(3))
        steps = Steps(normal((b, self.t, 256 + n)), *heads)
        slots = jnp.asarray(1 + rng.permutation(b), jnp.int32)
        x = normal((b, self.t, n, self.width))
        return pool, slots, (jnp.asarray(self.replay, jnp.int32), q, k, x, steps, self.limits)


def check_space(case: Space, interpret=False):
    """Results, states and records are those of the plain steps before the plain recurrence, in every head."""
    pool, slots, (replay, q, k, x, steps, limits) = case.inputs()
    updates, decay, skipped = accumulate.by_steps(x, steps, limits)
    read, wanted = jax.jit(accumulate.reference_step)(pool, LAYER, slots, replay, q, k, updates, decay)
    named = {"division": case.division and Division(*case.division), "interpret": interpret}
    out, after = delta_step.space_step(pool, LAYER, slots, replay, q, k, x, steps, limits, **named)
    assert out.dtype == jnp.bfloat16 and out.shape == x.shape
    decays = test_delta_step.check_after(case, pool, slots, (read + skipped, wanted), out, after)
    np.testing.assert_allclose(*(each[1, slots, :, : case.t] for each in decays), rtol=1e-5, atol=1e-6)


SPACES = [
    Space("one row", t=1, rows=1, replay=(1, 0)),
    Space("all and some accepted", replay=(4, 3)),
    Space("a key head in one block, whose tiles are in a ring", t=2, rows=5, replay=(2,), key_heads=2, division=(1, 3)),
    Space("two heads in a block", t=5, rows=5, replay=(5,), group=4, division=(2, 2)),
    Space("wide heads, and steps with limits", t=2, rows=2, replay=(1,), width=128, limits=(0.5, 1.0)),
    Space("bfloat16", replay=(3,), dtype="bfloat16"),
    Space("a key head in pieces", t=3, replay=(2, 4), group=16, division=(1, 2)),
]


@pytest.mark.parametrize("case", [
    pytest.param(each, id=each.name, marks=pytest.mark.exhaustive if i in (0, 3, 5) else ())
    for i, each in enumerate(SPACES)
])  # fmt: skip
def test_hoppers_kernel_equals_the_plain_steps_and_recurrence(case):
    check_space(case, interpret=plgpu.InterpretGPUParams())


SERVED = [
    Space("Nemotron 3 Nano", 1, 1, (0,), 8, 8, division=None),
    Space("Nemotron 3 Nano, drafts", 4, 4, (3, 0, 1), 8, 8, division=None),
    Space("Nemotron 3 Nano, many", 4, 4, tuple(i % 5 for i in range(64)), 8, 8, division=None),
    Space("Nemotron-H 8B, eight rows", 8, 8, (8, 2), 8, 16, division=None),
    Space("Granite 4, 48 heads", 1, 4, (3,) * 9, 1, 48, division=None),
]


@pytest.mark.parametrize("case", [SERVED[0], rare(SERVED[1]), rare(SERVED[2]), rare(SERVED[3]), SERVED[4]])
def test_hoppers_kernel_lowers_for_cuda(case):
    pool, slots, (*rest, limits) = case.inputs()
    run = jax.jit(partial(accumulate.stepped, limits=limits), donate_argnums=0)
    assert calls(run, pool, LAYER, slots, *rest) == 1


def test_what_hoppers_kernel_refuses_is_named():
    pool, _, (_, q, _, x, *_) = Space("").inputs()
    reason = lambda q, x: accumulate.unstepped(pool, q, x, "bfloat16", "bfloat16")  # noqa: E731
    assert reason(q.shape, x.shape) is None
    assert "values of width 80; supported: 128 and 64" in reason(q.shape, (*x.shape[:3], 80))
    assert "17 rows" in reason((1, 17, *q.shape[2:]), x.shape)
    assert "float32" in accumulate.unstepped(pool, q.shape, x.shape, "float32", "bfloat16")


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.5, 2.0)])
def test_hoppers_steps_are_exact_however_small(limits):
    """A step of 1e-6 is of log(1 + 1e-6), of which float32's sum loses the last digits."""
    dt = np.array([-30, -14, -8, -3.5, -3.4, 0, 3, 90], np.float32)
    zeros = jnp.zeros(len(dt), jnp.float32)
    made = [gates_and_norm.steps(jnp.asarray(dt)[None], zeros, zeros, 0, i, limits) for i in range(len(dt))]
    exact = np.clip(np.log1p(np.exp(-np.abs(dt, dtype=np.float64))) + np.maximum(dt, 0), *limits)
    np.testing.assert_allclose([step for _, step in made], exact, rtol=1e-5)
    np.testing.assert_allclose([decay for decay, _ in made], np.exp(-exact), rtol=1e-5, atol=1e-30)
