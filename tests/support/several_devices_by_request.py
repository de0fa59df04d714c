"""Requests divided among virtual CPU devices (`--dp-attention`): as `several_devices.py`, of models with latents.

Each device has the pages of its own requests, so what is compared is texts, and single layers over the same pages.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxspec
from jaxspec import LLM
from jaxspec.cache.mixers import AttentionRows, Cache
from jaxspec.cache.paged import PageLayout, Rows
from jaxspec.checkpoint.params import dummy
from jaxspec.decoder.forward import forward
from jaxspec.models.families import MODELS
from jaxspec.models.local import by_request
from jaxspec.models.model_config import ModelConfig
from jaxspec.parallel import sharding
from tests.support import several_devices, widths
from tests.support.several_devices import BATCHES, PROMPTS, STRUCTURED, checkpoint, eagle3, said, takes_turns
from tests.support.tiny import tiny_config

PAGES, PAGE, T = 12, 4, 3  # pages of a device, their tokens, and rows of a request
BY_PAGE = PartitionSpec(None, sharding.AXIS)


@functools.cache
def one_layer(devices: int) -> Callable[[Rows], tuple[np.ndarray, np.ndarray]]:
    """A layer over random pages: of some rows, those that count, and all pages but the dummies after them."""
    config = ModelConfig.from_hf(tiny_config("deepseek_v3", num_hidden_layers=1, first_k_dense_replace=1))
    (pages,) = jax.eval_shape(lambda: PageLayout(2 * PAGES, PAGE, "float32").groups(config))
    pages = np.float32(np.random.default_rng(0).standard_normal(pages.shape))
    if devices > 1:
        config = dataclasses.replace(config, decoder=by_request(config.decoder, devices))
    mesh, own = sharding.mesh_of(devices), config.on_one_of(devices)
    params = dummy(MODELS["deepseek_v3"].tensors(config.decoder), "float32", 0, mesh)

    def run(params, pages, rows):
        tokens = jnp.arange(len(rows.count) * T).reshape(-1, T)
        given = rows.marked_positions(T), AttentionRows(rows), Cache((pages,))
        hidden = forward(own.decoder, params, tokens, *given)
        return hidden.last, hidden.cache.kv[0]

    if devices > 1:
        given = sharding.specs_of(params), BY_PAGE, sharding.EVERYWHERE
        run = sharding.spread(run, mesh, given, (sharding.EVERYWHERE, BY_PAGE))
    run = jax.jit(run)

    def outputs(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        out, after = run(params, pages, rows)
        valid = np.arange(T) < np.array(rows.count)[:, None]
        return np.asarray(out)[valid], np.delete(np.asarray(after), [0, PAGES], axis=1)

    return outputs


def test_a_device_computes_and_keeps_the_rows_of_its_requests():
    """Six requests on two devices, which take three at a time; one has four with rows, and one request has none."""
    first = np.array([1, 1, 0, 1, 1, 0]) * PAGES + 1 + np.array([0, 2, 0, 4, 6, 2])
    table, count = jnp.array([[page, page + 1, 0] for page in first]), jnp.array([3, 2, 0, 1, 3, 2])
    uneven = Rows(jnp.arange(6), count, table)
    for rows, more in ((uneven, True), (uneven.replace(count=count.at[0].set(0)), False)):
        expected = one_layer(1)(rows)
        for one, several in zip(expected, one_layer(2)(rows.replace(uneven=more)), strict=True):
            np.testing.assert_allclose(several, one, atol=2e-5)


def test_what_does_not_go_together_is_refused_by_name():
    latents, plain = (
        functools.partial(LLM, str(checkpoint(name)), skip_warmup=True) for name in ("deepseek_v3", "llama")
    )
    for make, more, words in (
        (latents, {}, "there is one. Add --tp-size N"),
        (plain, {"tp_size": 2}, "this model has none: its KV heads are divided by --tp-size alone"),
        (
            latents,
            {"tp_size": 2, "max_running_requests": 3},
            "--max-running-requests 3 must be a multiple of it. Give 4",
        ),
        (latents, {"tp_size": 2, "host_kv_gb": 1.0}, "doesn't go together with --host-kv-gb"),
        (latents, {"tp_size": 2, "enable_lora": True}, "doesn't go together with --lora-modules, --enable-lora"),
    ):
        with pytest.raises(jaxspec.ConfigError) as error:
            make("none", dp_attention=True, **more)
        assert words in str(error.value)


def engines(family: str, draft: str, size: int, **more) -> Iterator[LLM]:
    """One device's engine and that of several, each of which has two slots, and fewer pages than they may fill."""
    folder = checkpoint(family, **({"num_nextn_predict_layers": 1} if draft == "mtp" else {}))
    more |= {"load_format": "dummy"} if draft == "mtp" else {}
    draft = f"eagle3:{eagle3(folder)}" if draft == "eagle3" else draft
    more = {"max_running_requests": 2 * size, "max_total_tokens": 88 * size} | more
    yield several_devices.engine(folder, draft, 1, **more)
    yield widths.several(lambda: several_devices.engine(folder, draft, size, dp_attention=True, **more))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family,draft,size", [
    ("deepseek_v3", "none", 4), ("deepseek_v3", "ngram", 2), ("deepseek_v3", "mtp", 2), ("deepseek_v3", "mtp", 4),
    ("deepseek_v3", "eagle3", 2), ("deepseek_v2", "suffix", 2), ("kimi_k2", "none", 2), ("glm4_moe_lite", "mtp", 2),
    ("kimi_linear", "ngram", 2),
])  # fmt: skip
def test_texts_are_one_devices(family, draft, size):
    """Cold, then with cached prefixes; each has too few pages for all of its requests."""
    one, several = engines(family, draft, size)
    for name, batch in BATCHES.items():
        expected = said(one, batch)
        for _ in range(2):
            texts, logprobs = said(several, batch)
            assert texts == expected[0], name
            np.testing.assert_allclose(logprobs, expected[1], atol=2e-4)
    assert said(several, STRUCTURED, PROMPTS[:2])[0] == said(one, STRUCTURED, PROMPTS[:2])[0]
    stats = several.engine.stats()
    assert stats["cached_tokens_total"] and (size == 4 or stats["preemptions_total"])
    runner, plan = several.engine.runner, one.engine.runner.plan
    assert runner.plan.tokens == plan.tokens and runner.plan.by_request == size
    (pages,) = runner.state.cache.kv
    assert pages.addressable_shards[0].data.nbytes == pages.nbytes // size
    if draft == "none":
        assert runner.plan.kv_bytes == pages.nbytes // size
    damaged = [1, runner.plan.num_pages // size + 2]
    before = np.asarray(pages)
    runner.clear(damaged)
    (after,) = map(np.asarray, runner.state.cache.kv)
    assert not after[:, damaged].any()
    kept = np.delete(np.arange(len(before[0])), [*damaged, *range(0, len(before[0]), len(before[0]) // size)])
    np.testing.assert_array_equal(after[:, kept], before[:, kept])


@pytest.mark.exhaustive
@pytest.mark.parametrize("ragged", [False, True])
def test_rounds_of_fewer_drafts_and_rounds_that_share_their_rows_out(ragged, monkeypatch):
    folder = checkpoint("deepseek_v3", num_nextn_predict_layers=1)
    more = {"load_format": "dummy", "max_total_tokens": 176}
    texts = said(several_devices.engine(folder, "mtp", 1, **more), BATCHES["greedy"])[0]
    make = lambda: several_devices.engine(folder, "mtp", 2, dp_attention=True, **more)  # noqa: E731
    takes_turns(widths.several(make, ragged=ragged), texts, monkeypatch, several_devices.MODES[:2])


@pytest.mark.exhaustive
def test_nothing_compiles_after_warm_up():
    """Batches of every size, of which each device has its share; rounds are timed."""
    options = {"skip_warmup": False, "few_programs": False, "max_running_requests": 8, "max_total_tokens": 512}
    folder = checkpoint("deepseek_v3")
    llm = several_devices.engine(folder, "ngram", 2, dp_attention=True, **options)
    compiled, counts = llm.engine.runner.compiles["compiles"], (1, 2, 3, 5)
    run = lambda llm, count: said(llm, BATCHES["greedy"][:count], PROMPTS[:count])[0]  # noqa: E731
    texts = [run(llm, count) for count in counts]
    assert llm.engine.runner.compiles["compiles"] == compiled
    one = several_devices.engine(folder, "ngram", 1, max_running_requests=8, max_total_tokens=512)
    assert [run(one, count) for count in counts] == texts
