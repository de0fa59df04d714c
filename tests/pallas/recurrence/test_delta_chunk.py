"""The two kernels that take blocks of prompts through gated delta-rule attention, against the plain form, in Pallas's
GPU interpreter; and that they lower for CUDA. `tests/gpu/test_gated_delta.py` runs the same on the device.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.recurrence import delta_chunk as op
from jaxspec.pallas.recurrence import gated_delta
from tests.pallas.recurrence.test_delta_step import near
from tests.support.kernels import kernels
from tests.support.sample import rare

LAYERS, LAYER, SLOTS = 2, 1, 6


@dataclass(frozen=True)
class Case:
    """Blocks, each of which writes a slot, starts from one (-1: from zero) and leaves a copy in one (or in none)."""

    name: str
    slots: tuple[int, ...] = (0,)
    source: tuple[int, ...] = (-1,)
    keep: tuple[int, ...] = (-1,)
    key_heads: int = 1
    group: int = 1
    dtype: str = "float32"
    alike: bool = False  # one token repeated, which corrects itself the most

    def inputs(self, seed: int = 0):
        """The operands of `delta_chunk`: states, layer, slots, and random tokens of which little is forgotten."""
        rng = np.random.default_rng(seed)
        b, n = len(self.slots), self.key_heads * self.group
        normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
        unit = lambda x: (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(jnp.bfloat16)  # noqa: E731
        q, k = (unit(normal(b, op.BLOCK, self.key_heads, op.WIDTH)) for _ in range(2))
        v = normal(b, op.BLOCK, n, op.WIDTH).astype(jnp.bfloat16)
        decay = -0.1 * jnp.abs(normal(b, n, op.BLOCK))
        beta = jax.nn.sigmoid(normal(b, n, op.BLOCK))
        if self.alike:
            k, decay, beta = jnp.broadcast_to(k[:, :1], k.shape), 0 * decay, 0 * beta + 0.99
        states = normal(LAYERS, SLOTS, n, op.WIDTH, op.WIDTH).astype(self.dtype)
        places = (jnp.asarray(x, jnp.int32) for x in (self.slots, self.source, self.keep))
        return states, jnp.int32(LAYER), *places, q, k, v, jnp.cumsum(decay, -1), beta


def check(case: Case, interpret=False):
    operands = case.inputs()
    expected, wanted = jax.jit(gated_delta.reference_chunk)(*operands)
    out, states = op.delta_chunk(*operands, interpret=interpret)
    assert out.dtype == jnp.bfloat16
    before, wanted, states = (np.asarray(x) for x in (operands[0], wanted, states))
    near(out, expected, 0.01)
    for slot in range(SLOTS):
        near(states[LAYER, slot], wanted[LAYER, slot], 1e-4 if case.dtype == "float32" else 0.008)
    untouched = sorted(set(range(SLOTS)) - set(case.slots) - set(case.keep))
    np.testing.assert_array_equal(states[LAYER, untouched], before[LAYER, untouched])
    np.testing.assert_array_equal(states[0], before[0])


CASES = [
    Case("one prompt from nothing, with snapshots", (2, 2, 2), (-1, 2, 2), (4, SLOTS, 5)),
    Case("from stored states, several heads", (0, 1), (3, 0), (-1, -1), key_heads=2, group=2),
    rare(Case("from the snapshot of another", (0, 1, 0), (-1, 5, 5), (5, -1, SLOTS))),
    rare(Case("a repeated token", alike=True)),
    rare(Case("bfloat16", (0, 0), (1, 0), (-1, 3), dtype="bfloat16")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_plain_scan(case):
    check(case, interpret=plgpu.InterpretGPUParams())


@pytest.mark.parametrize("group,dtype", [(2, "float32"), rare(3, "float32"), rare(1, "bfloat16")])
def test_lowers_for_cuda(group, dtype):
    """Qwen3-Next and Qwen3.5 35B-A3B; 27B; 2B."""
    operands = jax.eval_shape(Case("", (0, 0), (-1, 0), (-1, 3), 16, group, dtype).inputs)
    assert kernels(jax.jit(op.delta_chunk, donate_argnums=0), *operands) == 2


def test_orders():
    """A state is written unless the next block writes it anew, and read unless the block before left it."""
    slots, source, keep = (jnp.array(x) for x in ([4, 4, 2, 4], [-1, 4, 3, 2], [-1, 5, SLOTS, 0]))
    expected = [[op.NONE, op.NONE, op.NONE], [4, op.CARRY, 5], [2, 3, op.NONE], [4, op.CARRY, 0]]
    np.testing.assert_array_equal(op._orders(slots, source, keep, SLOTS), expected)


BF16 = jnp.bfloat16


@pytest.mark.parametrize("q,v,dtypes,reason", [
    ((1, 64, 16, 128), (1, 64, 32, 128), (jnp.float32, BF16, BF16), None),
    ((1, 64, 16, 128), (1, 64, 32, 128), (BF16, BF16), None),
    ((1, 32, 16, 128), (1, 32, 32, 128), (BF16, BF16), "blocks of 32 tokens; supported: 64"),
    ((1, 64, 16, 128), (1, 64, 24, 128), (BF16, BF16), "24 value heads over 16 key heads"),
    ((1, 64, 16, 64), (1, 64, 32, 64), (BF16, BF16), "keys of width 64 and values of width 64"),
    ((1, 64, 16, 128), (1, 64, 32, 128), (jnp.float16, BF16), "states in float16"),
    ((1, 64, 16, 128), (1, 64, 32, 128), (BF16, BF16, jnp.float32), "queries, keys or values in float32"),
])  # fmt: skip
def test_supported_says_why_not(q, v, dtypes, reason):
    answer = op.supported(q, v, *dtypes)
    assert answer is None if reason is None else reason in answer


def test_an_unsupported_call_is_refused():
    states, layer, *places, q, k, v, logs, beta = Case("").inputs()
    with pytest.raises(ValueError, match="queries, keys or values in float32; supported: bfloat16"):
        op.delta_chunk(states, layer, *places, q.astype(jnp.float32), k, v, logs, beta)
