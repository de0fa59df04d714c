"""Trees on the device, in bfloat16, through the decode kernel's mask: they go where plain decoding goes.

Text is compared up to where it parts from plain decoding's, since in bfloat16 near-ties fall as they like.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import load_model
from jaxspec.drafters.base import NoDrafter
from jaxspec.pallas.hopper import KERNELS
from tests.rounds.test_trees import NEW, PROMPTS
from tests.support.tiny import tiny_checkpoint
from tests.support.trees import Session, Wild, padded

pytestmark = pytest.mark.gpu


def test_trees_go_where_plain_decoding_goes(figures):
    model = load_model(str(tiny_checkpoint("llama", 64, 2, head_dim=64)), dtype="bfloat16", progress=False)
    plain = Session(model, NoDrafter(), {}, PROMPTS, new_tokens=NEW)
    before = KERNELS["decode_attention"]
    trees = Session(model, Wild(), {"texts": padded(plain.texts)}, PROMPTS, new_tokens=NEW)
    assert KERNELS["decode_attention"] > before
    same = []
    for i, (text, expected) in enumerate(zip(trees.texts, plain.texts, strict=True)):
        agree = next((n for n, (a, b) in enumerate(zip(text, expected, strict=True)) if a != b), len(text))
        same.append((agree - len(PROMPTS[i])) / NEW)
        known = agree - 1
        np.testing.assert_allclose(trees.kv(i)[:, :, :known], plain.kv(i)[:, :, :known], atol=0.1)
    figures["trees in bfloat16"] = {"text in common": float(np.mean(same))}
    assert np.mean(same) > 0.75
    accepted = jnp.concatenate([jnp.array(each) for each in trees.accepted])
    assert accepted.max() == Wild.deep + 1 and accepted.mean() > 1.3
