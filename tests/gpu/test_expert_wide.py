"""The FP8 experts' kernel of prompts on the device, against plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.experts import expert_wide, experts_mlp
from tests.decoder.test_moe import random_case
from tests.gpu.test_expert_fp8 import draw, stack
from tests.gpu.test_expert_stream import SKEWS, check
from tests.pallas.experts.test_expert_stream import bfloat16
from tests.support.kernels import assert_close

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("model,tokens,block", [
    ("qwen3-30b-a3b", 1100, 128), ("qwen3.5-35b-a3b", 2048, 128), ("qwen3.5-35b-a3b", 2048, None),
    ("glm-4.5-air", 1100, None), ("glm-4.5-air", 4096, None),
])  # fmt: skip
def test_kernel_matches_the_reference(model, tokens, block, skew):
    check(draw(model, tokens, skew, SKEWS.index(skew), block), ["expert_wide"], tolerance=1e-2)


@pytest.mark.parametrize("block", [128, None])
@pytest.mark.parametrize("tokens", [600, 3000])
def test_items_keep_to_their_rows_and_repeat_their_bits(tokens, block):
    """A narrow model, where items of one expert's rows end next to another's, over and over."""
    for seed in range(5):
        x, _, ids, _ = bfloat16(random_case(tokens, 16, 4, 0.5, d=256, f=1, seed=seed))
        stacks = [stack(16, 256, 128, seed, block)]
        rows, items, place = jax.jit(experts_mlp.plan, static_argnums=(2, 3, 4))(x, ids, 16, 4, expert_wide.MAX_ROWS)
        assert items.rows == expert_wide.MAX_ROWS
        mix = jax.jit(expert_wide.mix)
        got, again = mix(rows, stacks, items)[place], mix(rows, stacks, items)[place]
        np.testing.assert_array_equal(*(jnp.asarray(each, jnp.float32) for each in (got, again)))
        assert_close(got, experts_mlp.reference(rows, stacks, items)[place], 1e-2)
