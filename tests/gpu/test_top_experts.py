"""The router's kernel on the device."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxspec.pallas.top_experts import reference, select
from tests import test_top_experts

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("renormalised", [True, False])
@pytest.mark.parametrize("t,e,k", [*test_top_experts.CASES, (2048, 256, 8), (3000, 512, 10)])
def test_matches_the_reference(t, e, k, renormalised):
    test_top_experts.check(t, e, k, renormalised)


def test_every_token_chooses_by_itself():
    logits = jax.random.normal(jax.random.key(0), (5000, 128))
    for got, expected in zip(select(logits, k=8, renormalised=True), reference(logits, 8, True), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
