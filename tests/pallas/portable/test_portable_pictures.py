"""The portable kernel of vision towers' attention against a dense softmax in float64, in Pallas's interpreter; and that
it lowers for several generations of GPUs, and serves where it should.

`tests/gpu/test_portable_pictures.py` runs the same cases and larger ones on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas import hopper, operation, portable
from jaxspec.pallas.attention.picture_attention import picture_attention, reference
from jaxspec.pallas.hopper import counting
from jaxspec.pallas.portable import pictures as op
from tests.support.portable import KINDS, lowered


@dataclass(frozen=True)
class Case:
    name: str
    patches: int = 256
    pictures: tuple[int, ...] = (100, 4, 80)  # patches of each, one behind the other
    n: int = 2
    h: int = 72
    dtype: str = "float32"

    def inputs(self) -> tuple:
        """Operands of `picture_attention`. No key of padding counts, whatever it is."""
        normal = np.random.default_rng(0).standard_normal((3, self.patches, self.n, self.h), np.float32)
        begin, end, at = np.full(self.patches, self.patches, np.int32), np.zeros(self.patches, np.int32), 0
        for each in self.pictures:
            own, at = slice(at, at + each), at + each
            begin[own], end[own] = own.start, own.stop
        normal[1:, at:] = 1e4
        return (*jnp.asarray(normal, self.dtype), jnp.asarray(begin), jnp.asarray(end))


def dense(q, k, v, begin, end) -> np.ndarray:
    """Each patch by itself, over those of its picture."""
    q, k, v = np.float64(q), np.float64(k), np.float64(v)
    out = np.zeros_like(q)
    for p, (first, last) in enumerate(zip(np.asarray(begin), np.asarray(end), strict=True)):
        if first < last:
            scores = np.einsum("nh,pnh->np", q[p], k[first:last]) * q.shape[-1] ** -0.5
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[p] = np.einsum("np,pnh->nh", weights / weights.sum(-1, keepdims=True), v[first:last])
    return out


CASES = [
    Case("heads of 72, three pictures and padding"),
    Case("heads of 24, one tile", patches=64, pictures=(64,), h=24),
    Case("bfloat16, heads of 128", h=128, n=1, pictures=(200,), dtype="bfloat16"),
    Case("only padding", patches=16, pictures=(), n=1, h=16),
]


def check(case: Case, attend) -> None:
    operands = case.inputs()
    expected, bound = dense(*operands), 2e-5 if case.dtype == "float32" else 0.02
    for each in (attend, reference):
        np.testing.assert_allclose(np.float64(each(*operands)), expected, atol=bound)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_dense_softmax(case):
    check(case, partial(op.picture_attention, interpret=True))


@pytest.mark.parametrize("capability", KINDS)
def test_lowers_for_each_generation(capability):
    case = Case("", patches=1024, pictures=(1000,), n=16, dtype="bfloat16")
    text = lowered(op.picture_attention, *case.inputs(), capability=capability)
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 1


@pytest.mark.parametrize("change,reason", [
    ({}, None),
    ({"h": 160}, "heads of width 160; up to 128"),
    ({"patches": 192}, "192 patches; powers of two from 16 on"),
    ({"dtype": "int8"}, "queries in int8"),
])  # fmt: skip
def test_supported_says_why_not(change, reason):
    q, *_ = Case("", **change).inputs()
    answer = op.supported(q.shape, q.dtype)
    assert answer is None if reason is None else reason in answer


@pytest.mark.parametrize("device,capability", [(hopper, "9.0"), (portable, "8.0")])
def test_the_operation_takes_it_on_any_gpu(device, capability, monkeypatch, caplog):
    """And tells of shapes that it can't take."""
    for each in (hopper, portable):
        monkeypatch.setattr(each, "kernels_here", lambda each=each: None if each is device else "another serves")
    operation.warn.cache_clear()
    with counting() as kernels:
        assert "gpu.triton" in lowered(picture_attention, *Case("").inputs(), capability=capability)
        assert kernels == {"portable_pictures": 1}
        assert "gpu.triton" not in lowered(picture_attention, *Case("", h=160).inputs(), capability=capability)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("pictures' attention runs in plain jax.numpy, which is slow") and "width 160" in told
