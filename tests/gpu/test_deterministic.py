"""On the device: a row has the same bits whatever rows are beside it, in rounds and in prompts, after each layer."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.paged import PageLayout, Rows
from jaxspec.checkpoint.params import dummy
from jaxspec.decoder.forward import forward, unembed
from jaxspec.decoder.functions import rope
from jaxspec.models.families import MODELS
from jaxspec.models.model_config import ModelConfig
from jaxspec.models.weights import Weight
from jaxspec.pallas.hopper import KERNELS
from tests.support import lora
from tests.support.kernels import QWEN3_8B
from tests.support.tiny import tiny_config

pytestmark = pytest.mark.gpu

PAGE, PAGES = 64, 6  # of each request
SIZES = {
    "demo": ("llama", dict(hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3,
                           head_dim=64)),
    "8b": ("qwen3", QWEN3_8B),
}  # fmt: skip


class Model:
    """A decoder of two layers, its parameters with a head, and pages of 130 requests with anything in them."""

    def __init__(self, which: str):
        family, sizes = SIZES[which]
        config = ModelConfig.from_hf(tiny_config(family, vocab_size=1024, num_hidden_layers=2, **sizes))
        self.decoder = dataclasses.replace(config.decoder, deterministic=256)
        self.params = dummy(MODELS[family].tensors(config.decoder), "bfloat16", seed=3)
        self.params.setdefault("head", Weight(self.params["embed"].T))
        shape = PageLayout(1 + 130 * PAGES, PAGE, "bfloat16").kv(config).shape
        self.kv = jax.random.normal(jax.random.key(1), shape).astype("bfloat16")

    def adapted(self, requests: list[tuple[int, int]], t: int, adapters: list[int], first: int) -> np.ndarray:
        """Logits as of `logits`, with these adapters of four, -1 for none; `first`: the place of adapter 0."""
        places = jnp.array([each if each < 0 else (each + first) % 4 for each in adapters])
        params = self.params | {"adapters": lora.stacks(self.params["layers"], first)}
        return np.asarray(self.program(t)(params, self.kv, *self.rows(requests, t), places=places)[1])

    def logits(self, requests: list[tuple[int, int]], t: int, drafter: bool = False) -> np.ndarray:
        """Logits of t rows of each request (number, position of the first row); a request's tokens are its own.
        `drafter`: in a program that rotates heads of another layer as well."""
        hidden, logits, _ = self.program(t, drafter=drafter)(self.params, self.kv, *self.rows(requests, t))
        assert np.isfinite(hidden.last).all()
        return np.asarray(logits)

    def layers(self, requests: list[tuple[int, int]], t: int, capture: bool = True, wanted: int | None = None):
        """The residual stream after each layer, and the final hidden state, of the same rows; `capture`: layers' too.
        `wanted`: the only row of each request that goes through the last layer."""
        row = None if wanted is None else jnp.full(len(requests), wanted)
        hidden, *_ = self.program(t, capture)(self.params, self.kv, *self.rows(requests, t), row)
        return [np.asarray(x, np.float32) for x in (*hidden.features, hidden.last)]

    def rows(self, requests: list[tuple[int, int]], t: int) -> tuple[Rows, jax.Array]:
        number, start = (jnp.array(x) for x in zip(*requests, strict=True))
        table = 1 + PAGES * number[:, None] + jnp.arange(PAGES)
        return Rows(start, jnp.full(len(requests), t), table, fixed=256), number

    @functools.cache  # noqa: B019 (there are as few models as sizes)
    def program(self, t: int, capture: bool = False, drafter: bool = False):
        a, captured = self.decoder.attention, range(len(self.decoder.layers)) if capture else ()

        @jax.jit
        def run(params, kv, rows, number, wanted=None, places=None):
            positions = rows.positions(t)
            said = (positions * 7 + number[:, None] * 31) % 1000
            of = said, positions, rows, kv, tuple(captured), wanted
            hidden = forward(self.decoder, params, *of, adapters=places)
            heads = hidden.last[..., : a.head_dim][:, :, None] if drafter else ()
            other = [rope(heads, at, a) for at in (positions, positions + 1)] if drafter else None
            return hidden.replace(cache=None), unembed(params, hidden.last, self.decoder), other

        return run


@pytest.fixture(scope="module", params=list(SIZES))
def model(request):
    return Model(request.param)


def test_a_rows_bits_in_rounds_depend_on_no_other_row(model):
    before = KERNELS["decode_attention"]
    alone = {at: model.logits([(7, at)], 1)[0, 0] for at in (0, 200, 333)}
    assert KERNELS["decode_attention"] > before
    for count, t in ((33, 1), (128, 1), (40, 4), (2, 16)):  # up to 128 rows and more
        for at, expected in alone.items():
            others = [(i + 10, (i * 37) % 300) for i in range(count - 1)]
            where = count // 2
            got = model.logits([*others[:where], (7, at), *others[where:]], t)
            assert np.isfinite(got).all()
            assert (got[where, 0] == expected).all(), f"{count} requests of {t} rows, at {at}"


@pytest.mark.parametrize("t", [1, 64])  # a round's rows, and a prompt's
def test_a_rows_bits_depend_on_no_other_rows_adapter(model, t):
    """Nor on the place of its own, nor on whether others have any."""
    expected = {mine: model.adapted([(7, 64)], t, [mine], 0)[0] for mine in (2, -1)}
    for count in (2, 9, 40):
        for mine, alone in expected.items():
            others = [(i + 10, 64 * (i % 4)) for i in range(count - 1)]
            got = model.adapted([*others, (7, 64)], t, [*(i % 5 - 1 for i in range(count - 1)), mine], count % 4)
            assert (got[-1] == alone).all(), f"{count} requests, adapter {mine}"
    assert (expected[2] != expected[-1]).any()


def test_a_later_row_of_a_round_is_a_row_by_itself(model):
    """The second of two rows sees what the first one wrote, wherever a round begins."""
    two = model.logits([(7, 127)], 2)[0]
    five = model.logits([(9, 3), (7, 127), (11, 250)], 5)[1]
    assert (five[:2] == two).all()


def test_each_layer_of_a_round_has_the_bits_of_rounds_of_one_row(model, capsys):
    """Take tiles of attention of 8, 16 and 32 rows, and several; also without the capture of layers' outputs."""
    two = (7, 254), (8, 333)
    alone = [model.layers([one], 1) for one in two]
    expected = [np.concatenate(pair)[:, 0] for pair in zip(*alone, strict=True)]
    table = {}
    for count, t in ((0, 4), (38, 4), (14, 2), (6, 8), (1, 16)):
        requests = [*((i + 10, (i * 37) % 300) for i in range(count)), *two]
        got = [x[-2:, 0] for x in model.layers(requests, t)]
        table[f"{count + 2} x {t}"] = unequal(got, expected)
        if t == 4:
            last = model.layers(requests, t, capture=False)[0][-2:, 0]
            table[f"{count + 2} x {t}, no features"] = unequal([last], expected[-1:])
    report(capsys, table)


def test_each_layer_of_a_prompt_has_the_same_bits_with_features_and_without(model, capsys):
    """And where the last layer computes one row of each block, as in an engine whose drafter reads no late layer."""
    table = {}
    for requests in ([(7, 0)], [(7, 64), (9, 0), (11, 17)], [(i + 30, 5) for i in range(20)]):
        every = model.layers(requests, 64)
        for row in (0, 63):
            some = model.layers(requests, 64, wanted=row)
            expected = [*every[:-2], every[-2][:, [row]], every[-1][:, [row]]]
            table[f"{len(requests)} blocks, row {row}"] = unequal(some, expected)
            bare = model.layers(requests, 64, capture=False, wanted=row)
            table[f"{len(requests)} blocks, row {row}, no features"] = unequal(bare, expected[-1:])
    report(capsys, table)


def unequal(got: list[np.ndarray], expected: list[np.ndarray]) -> list[int]:
    """How many numbers differ after each layer, and in the final hidden state."""
    assert all(np.isfinite(x).all() for x in expected)
    return [int((a != b).sum()) for a, b in zip(got, expected, strict=True)]


def report(capsys, table: dict[str, list[int]]) -> None:
    wrong = {name: counts for name, counts in table.items() if any(counts)}
    with capsys.disabled():
        print(f"\n{len(wrong)} of {len(table)} comparisons differ, in so many numbers a layer and of the last state:")
        print("".join(f"  {name}: {counts}\n" for name, counts in wrong.items()))
    assert not wrong


@pytest.mark.parametrize("t", [1, 64])
def test_a_drafters_layer_in_the_program_changes_no_bit(model, t):
    requests = [(7, 0), (7, 64), (9, 0)]
    assert (model.logits(requests, t) == model.logits(requests, t, drafter=True)).all()


def test_a_prompts_rows_depend_on_no_other_block(model):
    alone = model.logits([(7, 128)], 64)[0]
    for others in ([(7, 64)], [(7, 64), (20, 0), (21, 17)], [(i + 30, 5) for i in range(20)]):
        got = model.logits([*others, (7, 128)], 64)
        if others[0][0] == 7:  # which wrote what this block sees
            alone_after = model.logits([(7, 64), (7, 128)], 64)[1]
            assert (got[-1] == alone_after).all()
        else:
            assert (got[-1] == alone).all()
    # Blocks that begin elsewhere: the same rows, over keys and values that blocks before them wrote.
    whole = model.logits([(7, 0), (7, 64), (7, 128)], 64)
    parted = model.logits([(7, 0), (7, 48), (7, 112)], 64)
    assert (np.concatenate(whole)[112:176] == parted[2]).all()
