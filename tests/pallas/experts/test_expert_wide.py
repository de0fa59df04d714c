"""The FP8 experts' kernel of prompts: in interpret mode against numpy, by lowering for CUDA, and where it is chosen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.weights import Fp8
from jaxspec.pallas import hopper
from jaxspec.pallas.dense import tiles
from jaxspec.pallas.experts import expert_wide, experts_mlp
from jaxspec.pallas.experts.expert_stream import COUNT
from jaxspec.pallas.hopper import counting
from tests.decoder.test_moe import naive
from tests.pallas.experts.test_expert_fp8 import fp8_case, interpret
from tests.pallas.experts.test_expert_stream import backwards, shapes
from tests.support.kernels import assert_close, kernels
from tests.support.sample import rare


@pytest.fixture
def interpreted(monkeypatch):
    interpret(monkeypatch, expert_wide)
    monkeypatch.setattr(tiles, "BLOCKS", 2)
    monkeypatch.setattr(expert_wide, "SLOTS", 3)


@pytest.mark.parametrize("t,e,k,more", [
    (150, 2, 1, {"skew": 1}),  # items of two heights; a ring that goes round
    rare(140, 3, 2, {"shared": 128, "unit": 64}),  # an expert of another stack; a scale for each group of outputs
    rare(140, 3, 2, {"shared": 128, "unit": None}),  # a scale for each output
])  # fmt: skip
def test_a_mixture_matches_numpy(interpreted, t, e, k, more):
    """Planning and adding up around the kernel. The last token is padding."""
    case, whole = fp8_case(t, e, k, **more)
    case, whole = ((*c[:2], c[2].at[-1].set(experts_mlp.NOBODY), c[3]) for c in (case, whole))
    with counting() as chosen:
        got = jax.jit(experts_mlp.experts_mlp)(*case)
    assert chosen == {"expert_wide": 1}
    assert_close(got, naive(*whole))


@pytest.mark.exhaustive  # on a GPU test_expert_wide.py checks it, too
def test_items_write_their_own_rows_alone(interpreted):
    """Back to front, so that an item that writes too far spoils another's rows."""
    (x, stacks, ids, _), _ = fp8_case(150, 2, 1, skew=0.4)
    rows, items, place = jax.jit(experts_mlp.plan, static_argnums=(2, 3, 4))(x, ids, 2, 1, expert_wide.MAX_ROWS)
    blocks = np.asarray(items.table[: items.table[0, COUNT], 3])
    assert items.rows == 128 and set((blocks % 8).tolist()) - {0}  # some fill no height
    items = backwards(items)
    got = expert_wide.mix(rows, stacks, items)
    assert_close(got[place], jax.jit(experts_mlp.reference)(rows, stacks, items)[place])


@pytest.mark.parametrize("model,scales", [("qwen3.5-35b-a3b", Fp8(128)), rare("glm-4.5-air", Fp8(None))])
def test_prompts_take_it_by_their_rows_for_an_expert(model, scales, monkeypatch):
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    with counting() as chosen:
        assert kernels(experts_mlp.experts_mlp, *shapes(model, 2048, scales)) == 4
    assert chosen["expert_wide"]


def test_what_should_not_run_is_named():
    given = shapes("qwen3.5-35b-a3b", 2048, Fp8(128))
    assert "5400 rows for 257 experts" in expert_wide.supported(600, 9, given[1])
    (_, stacks, *_), _ = fp8_case(2, 2, 2, d=384)
    assert "rows of 384" in expert_wide.supported(4096, 2, stacks)
    (x, stacks, ids, _), _ = fp8_case(2, 2, 2)
    finer = [tuple(weight.replace(scales=jnp.repeat(weight.scales, 2, axis=1)) for weight in stacks[0])]
    rows, items, _ = experts_mlp.plan(x, ids, 4)
    with pytest.raises(ValueError, match="scales for 64 outputs and for 128 in one mixture"):
        expert_wide.mix(rows, stacks + finer, items)
