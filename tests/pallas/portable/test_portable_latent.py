"""The portable kernel of latent attention against a dense softmax in float64, in Pallas's interpreter; and that it
lowers for several generations of GPUs, and serves where it should.

`tests/gpu/test_portable_latent.py` runs the same cases and larger ones on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas import hopper, operation, portable
from jaxspec.pallas.attention.latent_attention import latent_attention, reference
from jaxspec.pallas.hopper import counting
from jaxspec.pallas.portable import latent as op
from tests.support.portable import KINDS, lowered
from tests.support.sample import one_in


@dataclass(frozen=True)
class Case:
    name: str
    t: int = 1
    n: int = 16
    latent: int = 64
    rest: int = 16
    lengths: tuple[int, ...] = (1, 70, 150)  # tokens of each request, the new ones included
    page: int = 32
    masked_slots: int = 0
    parts: int | None = 1
    dtype: str = "float32"
    pages: str | None = None  # the dtype of latents; None: `dtype`

    def inputs(self) -> tuple:
        """Operands of `latent_attention` behind the pages' layer: pages in any order, those of nobody finite."""
        rng, b, width = np.random.default_rng(0), len(self.lengths), self.latent + self.rest
        entries = -(-max(self.lengths) // self.page)
        table = 1 + rng.permutation(b * entries).reshape(b, entries).astype(np.int32)
        normal = lambda *s: jnp.asarray(rng.standard_normal(s, np.float32), self.dtype)  # noqa: E731
        kv, q = normal(2, 1 + b * entries, 1, 1, self.page, width), normal(b, self.t, self.n, width)
        kv = kv.astype(self.pages or self.dtype)
        start = np.array(self.lengths, np.int32) - (self.masked_slots or self.t)
        mask = None
        if self.masked_slots:
            mask = jnp.asarray(rng.random((b, self.t, self.masked_slots)) < 0.5)
        return q, kv, jnp.int32(1), jnp.asarray(table), jnp.asarray(start), self.latent, 0.2, mask


def dense(q, kv, layer, table, start, latent, scale, mask) -> np.ndarray:
    """Each row by itself, over the KV slots that it sees."""
    q, pages = np.float64(q), np.float64(kv)[int(layer), :, 0, 0]
    out = np.zeros((*q.shape[:3], latent))
    for b, t in np.ndindex(*q.shape[:2]):
        first = int(start[b])
        seen = list(range(first + t + 1)) if mask is None else list(range(first))
        if mask is not None:
            seen += [first + j for j in range(mask.shape[2]) if mask[b, t, j]]
        if not (seen := [slot for slot in seen if slot >= 0]):
            continue
        rows = pages[np.asarray(table)[b]].reshape(-1, pages.shape[-1])[seen]
        scores = q[b, t] @ rows.T * scale
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[b, t] = weights / weights.sum(-1, keepdims=True) @ rows[:, :latent]
    return out


CASES = [
    Case("decode, 20 heads, two parts", n=20, parts=2),
    Case("verify, 40 rows of two tiles", t=4, n=10, lengths=(4, 33, 150)),
    Case("decode, 128 heads", n=128, lengths=(65,)),
    Case("tree", t=6, n=3, masked_slots=6, lengths=(6, 40, 90), parts=2),
    Case("prompt", t=32, n=4, lengths=(32, 100, 20)),
    Case("FP8 pages, 20 heads, verify", n=20, t=3, pages="float8_e4m3fn", lengths=(3, 70, 150)),
    Case("FP8 pages, bfloat16", t=2, n=4, latent=128, rest=64, dtype="bfloat16", pages="float8_e4m3fn", lengths=(90,)),
    Case("bfloat16, 4 heads", t=2, n=4, latent=128, rest=64, dtype="bfloat16", lengths=(2, 90)),
]


def check(case: Case, attend) -> None:
    operands = case.inputs()
    out = np.float64(attend(*operands))
    expected = dense(*operands)
    np.testing.assert_allclose(out, expected, atol=2e-5 if case.dtype == "float32" else 0.02)
    # The reference rounds weights of the softmax as XLA does on the machine at hand.
    np.testing.assert_allclose(
        np.float64(reference(*operands)), expected, atol=2e-5 if case.dtype == "float32" else 0.06
    )


OFTEN = {"decode, 20 heads, two parts", "tree"}  # the others have less that differs


@pytest.mark.parametrize("case", [
    pytest.param(case, id=case.name, marks=() if case.name in OFTEN else pytest.mark.exhaustive) for case in CASES
])  # fmt: skip
def test_equals_dense_softmax(case):
    check(case, partial(op.latent_attention, parts=case.parts, interpret=True))


@pytest.mark.parametrize("capability,sizes", one_in(len(KINDS), KINDS, [
    dict(n=16, lengths=(4000,)),
    dict(n=64, t=4, lengths=(300,) * 4),
    dict(n=128, lengths=(4000,) * 2),
    dict(n=20, t=64, lengths=(300,)),
    dict(n=16, t=8, masked_slots=8, lengths=(300,)),
    dict(n=128, pages="float8_e4m3fn", lengths=(300,)),
]))  # fmt: skip
def test_lowers_for_each_generation(capability, sizes):
    case = Case("", latent=512, rest=64, page=64, dtype="bfloat16", **sizes)
    *arrays, latent, scale, mask = case.inputs()
    for parts in (1, 4):
        run = lambda *args, parts=parts: op.latent_attention(*args[:-1], latent, scale, args[-1], parts=parts)  # noqa: E731
        text = lowered(run, *arrays, mask, capability=capability)
        assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == min(parts, 2)


@pytest.mark.parametrize("change,reason", [
    ({}, None),
    ({"latent": 48}, "latents of 48 + 16 columns"),
    ({"rest": 8}, "latents of 64 + 8 columns"),
    ({"page": 8}, "pages of 8 tokens"),
])  # fmt: skip
def test_supported_says_why_not(change, reason):
    q, kv, _, _, _, latent, *_ = Case("", **change).inputs()
    answer = op.supported(q.shape, kv, q.dtype, latent)
    assert answer is None if reason is None else reason in answer
    half = jax.ShapeDtypeStruct(kv.shape, "float16")
    assert reason or "latents in float16" in op.supported(q.shape, half, q.dtype, latent)
    large = jax.ShapeDtypeStruct((2**17, 1, 1, 1, 2**8, 80), "float8_e4m3fn")
    assert reason or "of 2 to 4 GiB; give --max-total-tokens" in op.supported(q.shape, large, q.dtype, latent)


@pytest.mark.parametrize("device,capability", [(hopper, "9.0"), (portable, "8.0")])
def test_the_operation_takes_it_on_any_gpu(device, capability, monkeypatch, caplog):
    """And tells of shapes that it can't take."""
    for each in (hopper, portable):
        monkeypatch.setattr(each, "kernels_here", lambda each=each: None if each is device else "another serves")
    operation.warn.cache_clear()

    def run(*arrays, latent):
        return latent_attention(*arrays, latent, 0.2)

    with counting() as kernels:
        assert "gpu.triton" in lowered(partial(run, latent=64), *Case("").inputs()[:5], capability=capability)
        assert kernels == {"portable_latent": 1}
        odd = Case("", latent=48)
        assert "gpu.triton" not in lowered(partial(run, latent=48), *odd.inputs()[:5], capability=capability)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("latent attention runs in plain jax.numpy, which is slow") and "48 + 16 columns" in told
