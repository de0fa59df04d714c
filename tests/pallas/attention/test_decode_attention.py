"""The decode kernel against a dense softmax in float64, in Pallas's GPU interpreter; and that it lowers for CUDA.

The interpreter has no counters between blocks: parts are combined by a second call of the kernel there.
`tests/gpu/test_decode_attention.py` runs the same cases and larger ones on the device.
"""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu.fragmented_array import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.models.positions import Chunks, Window
from jaxspec.pallas.attention import decode_attention as op
from tests.support.kernels import kernels, lowered
from tests.support.sample import one_in, rare

LAYERS, LAYER = 2, 1
STRANGER = 300.0  # what keys and values that nobody should see are filled with


@dataclass(frozen=True)
class Case:
    """Rows of requests that have `lengths` tokens, the t new ones included; below t, the first rows are padding."""

    name: str
    lengths: tuple[int, ...] = (70, 200)
    t: int = 1
    group: int = 4
    kv_heads: int = 2
    h: int = 128
    page: int = 64
    entries: int = 4
    fp8: bool = False
    scaled: bool = False
    whole: bool = False  # the mask hides nothing
    masked_slots: int = 0  # KV slots that a mask covers, t of them the new rows' own; 0: rows are causal
    window: Window | None = None  # positions that a row sees
    sinks: bool = False
    chain: bool = False  # rows of a mask have their KV slots as positions
    division: tuple[int, int] = (1, 1)  # blocks, warpgroups of a block
    segment: int = 0  # steps that are summed by themselves

    def inputs(self, seed: int = 0) -> tuple[dict, dict]:
        """Arguments of `decode_attention`: the positional ones and the named."""
        rng = np.random.default_rng(seed)
        b, n = len(self.lengths), self.group * self.kv_heads
        pages = 1 + b * self.entries
        table = rng.permutation(np.arange(1, pages)).reshape(b, self.entries).astype(np.int32)
        kv = np.full((LAYERS, pages, 2, self.kv_heads, self.page, self.h), STRANGER, np.float32)
        for row, length in zip(table, self.lengths, strict=True):
            used = -(-max(length, 0) // self.page)
            for i, page in enumerate(row[:used]):
                real = min(self.page, length - i * self.page)
                kv[LAYER, page, :, :, :real] = rng.standard_normal((2, self.kv_heads, real, self.h), np.float32)
            if self.window is not None:  # steps that the window doesn't reach aren't read
                step = op.step_tokens(self.h)
                unread = begin(length - (self.masked_slots or self.t), self.window) // step * step // self.page
                kv[LAYER, row[:unread]] = np.nan
            row[used:] = 0  # the scheduler's tables end in the dummy page
        args = dict(
            q=jnp.asarray(2 * rng.standard_normal((b, self.t, n, self.h), np.float32), jnp.bfloat16),
            kv=jnp.asarray(kv).astype(op.FP8 if self.fp8 else jnp.bfloat16),
            layer=jnp.int32(LAYER),
            table=jnp.asarray(table),
            start=jnp.asarray(self.lengths, jnp.int32) - (self.masked_slots or self.t),
        )
        scales = jnp.asarray(rng.uniform(0.5, 2, (LAYERS, 2, self.kv_heads)), jnp.float32) if self.scaled else None
        named = dict(scales=scales, mask=None)
        if self.sinks:  # some far above all scores, some far below
            named["sinks"] = jnp.asarray(rng.choice([-300.0, -1.0, 2.0, 4.0, 300.0], n), jnp.float32)
        if not self.masked_slots:
            return args, named | self.sight()
        mask, depth = self.tree(rng)
        return args, named | dict(mask=mask) | self.sight(depth)

    def sight(self, depth=None) -> dict:
        if self.window is None:
            return {}
        return dict(window=self.window) | ({} if depth is None or self.chain else dict(depth=depth))

    def tree(self, rng) -> tuple[jax.Array, jax.Array]:
        """A random tree over the masked slots of each request, the new rows its last: a row's ancestors and itself, and
        how many ancestors it has."""
        follows = np.full((len(self.lengths), self.masked_slots, self.masked_slots), self.whole)
        depth = np.zeros((len(self.lengths), self.masked_slots), np.int32)
        for request, depths in zip(follows, depth, strict=True):
            for i in range(self.masked_slots):
                if (parent := rng.integers(-1, i) if i else -1) >= 0:
                    request[i] = request[parent]
                    depths[i] = depths[parent] + 1
                request[i, i] = True
        new = slice(self.masked_slots - self.t, None)
        return jnp.asarray(follows[:, new]), jnp.asarray(depth[:, new])


def begin(position: int, window: Window) -> int:
    """The first position that a row sees."""
    return max(position // window.size * window.size if isinstance(window, Chunks) else position - window + 1, 0)


def dense(q, kv, layer, table, start, scales, mask, window=None, depth=None, sinks=None):
    """Reference of `decode_attention`: each row by itself, f64[b, t, n, h]."""
    q, kv = np.asarray(q, np.float64), np.asarray(kv[layer].astype(jnp.float32), np.float64)
    b, t, n, h = q.shape
    m, out = kv.shape[2], np.zeros(q.shape)
    for r in range(b):
        k, v = np.moveaxis(kv[table[r]], 2, 3).swapaxes(0, 1).reshape(2, -1, m, h)
        if scales is not None:
            k, v = k * np.asarray(scales)[layer, 0, :, None], v * np.asarray(scales)[layer, 1, :, None]
        for i in range(t):
            first = int(start[r])
            position = first + (i if depth is None else int(depth[r, i]))
            before = 0 if window is None else begin(position, window)
            seen = np.arange(before, position + 1)  # empty where that is negative
            if mask is not None:
                listed = first + np.flatnonzero(mask[r, i])
                seen = np.concatenate([np.arange(before, first), listed[listed >= 0]])
            if len(seen):
                kr, vr = (np.repeat(x[seen], n // m, axis=1) for x in (k, v))
                scores = np.einsum("nh,snh->ns", q[r, i], kr) * h**-0.5
                top = scores.max(1, keepdims=True)
                total = np.exp(scores - top).sum(1, keepdims=True)
                if sinks is not None:
                    total += np.exp(np.asarray(sinks, np.float64)[:, None] - top)
                out[r, i] = np.einsum("ns,snh->nh", np.exp(scores - top) / total, vr)
    return out


def segments(case: Case) -> dict:
    return {"segment": case.segment, "tallest": op.NARROW_ROWS} if case.segment else {}


def check(case: Case, interpret=False):
    check_kernel(case, partial(op._attend, parts=case.division, interpret=interpret, **segments(case)))


def check_kernel(case: Case, kernel):
    """The kernel's result is bfloat16's rounding away from the dense one, and rows without a position are zero."""
    args, named = case.inputs()
    out = kernel(**args, **named)
    assert out.dtype == jnp.bfloat16
    out, expected = np.asarray(out, np.float64), dense(**args, **named)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(out[(expected == 0).all(-1)], 0)
    error = np.abs(out - expected).max(axis=(1, 2, 3))
    scale = np.maximum(np.abs(expected).max(axis=(1, 2, 3)), 1e-3)
    assert (error / scale < 0.01).all(), (error / scale).max()


BLOCKS, PAIR = (3, 1), (1, 2)  # of a request's tokens
CASES = [
    Case("decode", lengths=(1, 63, 64, 65, -3)),
    Case("verify, blocks", t=4, lengths=(4, 3, 200), division=BLOCKS),
    Case("verify, pair", t=4, lengths=(4, 3, 200), division=PAIR),
    Case("odd group, pages of 16, pair", t=3, group=3, kv_heads=1, h=64, page=16, entries=18, lengths=(280, 2),
         division=PAIR),
    Case("width 256, pages of 32", t=2, group=7, kv_heads=1, h=256, page=32, lengths=(100,)),
    Case("two tiles, blocks", t=9, group=8, kv_heads=1, page=128, entries=2, lengths=(131,), division=BLOCKS),
    Case("all rows", t=32, group=5, kv_heads=1, h=64, lengths=(100,)),
    Case("tree", t=8, masked_slots=8, lengths=(8, 72)),
    Case("tree of all bits, two tiles, pair", t=32, masked_slots=32, kv_heads=1, lengths=(90, 20), division=PAIR),
    Case("a step of a tree, blocks", t=4, masked_slots=12, kv_heads=1, page=16, entries=9, lengths=(7, 12, 77, 130),
         division=BLOCKS),
    Case("a step of a tree, all bits", t=3, masked_slots=32, group=7, kv_heads=1, h=64, lengths=(32, 90)),
    Case("block that sees ahead", t=16, masked_slots=16, whole=True, group=2, lengths=(16, 80)),
    Case("fp8", t=2, fp8=True, scaled=True, lengths=(130, 5)),
    Case("fp8, many rows", t=10, fp8=True, scaled=True, kv_heads=1, lengths=(130, 9)),
    Case("fp8, pair", t=4, group=1, fp8=True, scaled=True, h=64, page=32, entries=6, lengths=(150,), division=PAIR),
    Case("fp8, width 256, no scales", fp8=True, kv_heads=1, h=256, lengths=(70,)),
    Case("window", lengths=(1, 20, 21, 200, -3), window=20),
    Case("window of whole pages, blocks", t=4, lengths=(4, 131, 256), window=64, division=BLOCKS),
    Case("window longer than some texts, pair", t=4, lengths=(90, 100, 250), window=99, division=PAIR),
    Case("window of one, pages of 128", t=3, page=128, kv_heads=1, lengths=(131, 128), window=1),
    Case("window, two tiles, pages of 16, blocks", t=9, group=8, kv_heads=1, page=16, entries=9, lengths=(131, 12, 40),
         window=5, division=BLOCKS),
    Case("window, width 64, pair", t=3, group=3, kv_heads=1, h=64, page=16, entries=30, lengths=(470, 140), window=150,
         division=PAIR),
    Case("window, fp8, many rows", t=10, fp8=True, scaled=True, kv_heads=1, lengths=(230, 9), window=70),
    Case("window, tree", t=8, masked_slots=8, lengths=(8, 72, 200), window=40),
    Case("window, tree of two tiles, pair", t=32, masked_slots=32, kv_heads=1, lengths=(190, 40), window=100,
         division=PAIR),
    Case("window, a step of a tree, blocks", t=4, masked_slots=12, kv_heads=1, page=16, entries=9, lengths=(7, 77, 130),
         window=33, division=BLOCKS),
    Case("chunks, rows of two, blocks", t=4, lengths=(4, 66, 128, 194), window=Chunks(64), division=BLOCKS),
    Case("chunks, two tiles, pages of 16", t=9, group=8, kv_heads=1, page=16, entries=9, lengths=(131, 12, 40),
         window=Chunks(16)),
    Case("chunks, tree, fp8, pair", t=8, masked_slots=8, fp8=True, scaled=True, lengths=(8, 72, 133, 200),
         window=Chunks(64), division=PAIR),
    Case("sinks", lengths=(1, 20, -3, 200), h=64, group=8, kv_heads=2, sinks=True),
    Case("sinks, window, blocks", t=4, lengths=(4, 131, 256), h=64, group=8, kv_heads=1, window=20, sinks=True,
         division=BLOCKS),
    Case("sinks, two tiles, pair", t=9, group=8, kv_heads=1, h=64, lengths=(131, 5), sinks=True, division=PAIR),
    Case("sinks, tree, fp8", t=8, masked_slots=8, fp8=True, scaled=True, h=64, kv_heads=1, lengths=(8, 72), sinks=True),
    Case("segments", lengths=(1, 128, 129, 250, -3), segment=2),
    Case("segments, three tiles, blocks", t=9, group=8, kv_heads=1, entries=6, lengths=(331, 9), segment=1,
         division=BLOCKS),
    Case("more segments than are added together", t=2, group=3, kv_heads=1, h=64, page=128, entries=10,
         lengths=(1270, 300), segment=1, division=PAIR),
    Case("window, block that sees ahead", t=16, masked_slots=16, whole=True, chain=True, group=2, lengths=(16, 180),
         window=90),
]  # fmt: skip


# Each adds no branch of the kernel to those before it; on a GPU they all run.
RARE = {
    *("window of whole pages, blocks", "window longer than some texts, pair", "window, width 64, pair"),
    *("window, fp8, many rows", "window, tree of two tiles, pair", "sinks, two tiles, pair", "sinks, tree, fp8"),
    *("window, a step of a tree, blocks", "two tiles, blocks", "verify, pair", "window, tree"),
    *("a step of a tree, all bits", "window of one, pages of 128", "fp8, many rows", "sinks, window, blocks"),
    *("verify, blocks", "tree of all bits, two tiles, pair", "segments", "window", "fp8"),
    *("window, two tiles, pages of 16, blocks", "block that sees ahead", "odd group, pages of 16, pair", "tree"),
    *("chunks, two tiles, pages of 16", "width 256, pages of 32", "fp8, width 256, no scales", "decode"),
    *("segments, three tiles, blocks", "all rows"),
}


@pytest.mark.parametrize("case", [
    pytest.param(case, id=case.name, marks=pytest.mark.exhaustive if case.name in RARE else ()) for case in CASES
])  # fmt: skip
def test_equals_dense_softmax(case):
    check(case, interpret=plgpu.InterpretGPUParams())


def test_a_segments_sum_is_the_same_whoever_makes_it():
    """Whatever number of blocks and warpgroups, and of rows."""
    case = Case("", t=3, lengths=(3, 140), kv_heads=1, segment=1)
    args, named = case.inputs()
    run = partial(op._attend, interpret=plgpu.InterpretGPUParams(), **segments(case))
    outs = [np.asarray(run(**args, **named, parts=parts), np.float32) for parts in ((3, 1), (1, 2))]
    one = args | {"q": args["q"][:, 1:2], "start": args["start"] + 1}
    outs.append(np.asarray(run(**one, **named, parts=(1, 1)), np.float32))
    np.testing.assert_array_equal(outs[1], outs[0])
    np.testing.assert_array_equal(outs[2][:, 0], outs[0][:, 1])


@pytest.mark.parametrize("h,page,group,t,parts", one_in(
    4, [(64, 64, 3, 1), (128, 64, 4, 4), (128, 128, 8, 32), (256, 16, 2, 5)], [((1, 1),), ((8, 2),)]
))  # fmt: skip
def test_segments_lower_for_cuda(h, page, group, t, parts):
    parts = (parts[0], 1) if h == 256 else parts  # as `division` has it
    case = Case("", entries=20, lengths=(90,), t=t, group=group, h=h, page=page, segment=4)
    args, named = case.inputs()
    assert kernels(partial(op._attend, parts=parts, interpret=False, **segments(case)), **args, **named) == 1


@pytest.mark.parametrize("h", [64, rare(128), rare(256)])  # steps of 128 tokens, of 64, and of 64
def test_a_thread_adds_a_rows_tokens_in_the_same_order_in_tiles_of_8_16_and_32_rows(h, monkeypatch):
    """Seen in what the kernel is lowered to: the interpreter sums another way."""
    reduce, addf, made, orders = FragmentedArray.reduce, fragmented_array.addf, {}, {}

    def add(a, b):
        total = addf(a, b)
        if a in made and b in made:
            made[total] = f"({made[a]}+{made[b]})"
        return total

    def recorded(array, kind, axis, *rest, **named):
        made.clear()
        tokens = array.registers[:, 0].reshape(-1)  # of a thread, for one row
        made.update((register, str(i)) for i, register in enumerate(tokens))
        out = reduce(array, kind, axis, *rest, **named)
        if kind == "add":
            orders[array.shape[1]] = [each for each in made.values() if each.count("+") == len(tokens) - 1]
        return out

    monkeypatch.setattr(fragmented_array, "addf", add)
    monkeypatch.setattr(FragmentedArray, "reduce", recorded)
    for t in (1, 4, 8):
        case = Case("", entries=21, lengths=(90,), t=t, group=3, h=h, segment=4)
        args, named = case.inputs()
        lowered(partial(op._attend, parts=(1, 1), interpret=False, **segments(case)), **args, **named)
    expected = ["(((0+1)+2)+3)" if op.step_tokens(h) == 128 else "(0+1)"]
    assert orders == {8: expected, 16: expected, 32: expected}


@pytest.mark.parametrize("h,page,group,t,fp8,masked_slots,few,window", one_in(3 * len(op.HEAD_WIDTHS), op.HEAD_WIDTHS, [
    (64, 4, 1, False, 0, False, None),
    (16, 7, 4, False, 16, True, None),
    (32, 16, 4, False, 0, True, None),
    (64, 4, 16, False, 16, False, None),
    (128, 1, 32, True, 32, True, None),
    (64, 4, 4, False, 0, True, 1024),
    (16, 8, 16, True, 16, False, 128),
    (64, 5, 4, False, 0, True, Chunks(8192)),
]))  # fmt: skip
def test_lowers_for_cuda(h, page, group, t, fp8, masked_slots, few, window):
    lower(few, t=t, group=group, h=h, page=page, fp8=fp8, scaled=fp8, masked_slots=masked_slots, window=window)


@pytest.mark.parametrize("t,few,masked_slots,window", [rare(1, True, 0, 128), rare(16, False, 16, None)])
def test_lowers_for_cuda_with_sinks(t, few, masked_slots, window):
    lower(few, t=t, group=8, h=64, masked_slots=masked_slots, window=window, sinks=True)


def lower(few: bool, **sizes):
    case = Case("", entries=2, lengths=(90,), **sizes)
    args, named = case.inputs()
    division = op.division(1, case.h) if few else (1, 1)
    named = {name: value for name, value in named.items() if name != "window"}
    run = partial(op._attend, parts=division, window=case.window, interpret=False)
    assert kernels(run, **args, **named) == 1


def test_all_layers_share_one_lowering():
    args, _ = Case("").inputs()
    q, rest = args.pop("q"), {k: v for k, v in args.items() if k != "layer"}

    def layers(q):
        for layer in range(3):
            q = op.decode_attention(q, layer=jnp.int32(layer), **rest)
        return q

    assert kernels(layers, q) == 1


@pytest.mark.parametrize("q,kv,dtype,reason", [
    ((1, 1, 8, 128), (2, 3, 2, 2, 64, 128), jnp.bfloat16, None),
    ((1, 32, 9, 64), (2, 3, 2, 3, 16, 64), jnp.float8_e4m3fn, None),
    ((1, 1, 8, 128), (2, 3, 2, 2, 64, 128), jnp.float32, "a cache in float32"),
    ((1, 1, 8, 80), (2, 3, 2, 2, 64, 80), jnp.bfloat16, "width 80"),
    ((1, 1, 8, 128), (2, 3, 2, 2, 8, 128), jnp.bfloat16, "pages of 8 tokens"),
    ((1, 1, 8, 128), (2, 3, 2, 3, 64, 128), jnp.bfloat16, "8 query heads over 3"),
    ((1, 1, 32, 128), (2, 3, 2, 1, 64, 128), jnp.bfloat16, "32 query heads over 1"),
    ((1, 33, 8, 128), (2, 3, 2, 2, 64, 128), jnp.bfloat16, "33 rows"),
])  # fmt: skip
def test_supported_says_why_not(q, kv, dtype, reason):
    answer = op.supported(q, kv, dtype)
    assert answer is None if reason is None else reason in answer


def test_an_unsupported_call_is_refused():
    args, _ = Case("", page=8).inputs()
    with pytest.raises(ValueError, match="pages of 8 tokens"):
        op.decode_attention(**args)
    args, named = Case("", masked_slots=33).inputs()
    with pytest.raises(ValueError, match="a mask over 33 KV slots; up to 32 are"):
        op.decode_attention(**args, **named)


def test_a_window_is_divided_into_no_more_parts_than_it_has_steps():
    spans = {127: (4, 1), 128: (4, 1), 1024: (16, 2), None: (16, 2)}
    assert {span: op.division(1, 128, span) for span in spans} == spans


@pytest.mark.parametrize("tiles,h,processors,division", [
    (1, 128, 132, (16, 2)),
    (8, 128, 132, (16, 1)),
    (8, 256, 132, (16, 1)),
    (8, 128, 114, (8, 1)),
    (16, 128, 132, (8, 1)),
    (64, 128, 132, (2, 1)),
    (256, 128, 132, (1, 1)),
])  # fmt: skip
def test_division_fills_the_processors(tiles, h, processors, division, monkeypatch):
    monkeypatch.setattr(op.jax, "devices", lambda: [SimpleNamespace(core_count=processors)])
    assert op.division(tiles, h) == division
