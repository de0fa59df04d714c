"""Memory of large weights, taken before they are made."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint import load_model, params, reserve
from jaxspec.checkpoint.reserve import Reserved
from jaxspec.models import fp8
from jaxspec.models.weights import Fp8, Weight
from tests.support.tiny import tiny_checkpoint


def test_weights_move_into_their_places():
    """Into the very memory, as on a GPU; an array without a place stays as it is."""
    places = Reserved([jax.ShapeDtypeStruct((256, 128), jnp.dtype(fp8.E4M3))])
    (place,) = places._places[(256, 128), jnp.dtype(fp8.E4M3)]
    memory = place.unsafe_buffer_pointer()
    del place
    made = Weight(jnp.ones((256, 128)).astype(fp8.E4M3), Fp8(128), scales=jnp.ones((2, 1)))
    first, second = places.moved(made), places.moved(made)
    assert first.values.unsafe_buffer_pointer() == memory
    assert second.values is made.values and first.scales is made.scales
    np.testing.assert_array_equal(first.values.astype(jnp.float32), 1)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("family,quantization", [("qwen3", None), ("qwen3", "fp8"), ("qwen3_moe", "fp8")])
def test_a_model_is_the_same_in_reserved_memory(monkeypatch, family, quantization, load_format):
    """Every place is of the shape and dtype of what a weight's values become, so that all are taken."""
    source, made = str(tiny_checkpoint(family)), []
    load = lambda: load_model(source, progress=False, quantization=quantization, load_format=load_format).params  # noqa: E731
    expected = load()

    def reserved(declared, dtype):
        made.append(Reserved(reserve.values_of(declared, dtype)))
        return made[-1]

    monkeypatch.setattr(reserve, "LEAST", 512)
    monkeypatch.setattr(params, "reserved", reserved)
    got = load()
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.float32(a), np.float32(b)), got, expected)
    assert made[0]._places and not any(made[0]._places.values())
