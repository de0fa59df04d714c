"""Check that what virtual CPU devices have of a model, and decide together, is what one device has and decides.

Without an engine. `tests/parallel/test_sharding.py` runs this file beside `tests/support/several_devices.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxspec
from jaxspec import EngineConfig
from jaxspec.bench import __main__ as bench
from jaxspec.cache.mixers import WholeTexts
from jaxspec.cache.paged import PageLayout
from jaxspec.checkpoint import ModelFolder, reserve
from jaxspec.checkpoint import params as loading
from jaxspec.checkpoint.stored import Readers
from jaxspec.decoder.forward import forward, unembed
from jaxspec.drafters.base import DraftBatch, Proposal
from jaxspec.models.description import Mamba2
from jaxspec.models.families import MODELS
from jaxspec.parallel import collectives, sharding
from jaxspec.rounds import programs as rounds
from jaxspec.rounds.packing import empty_slots
from jaxspec.sampling.acceptance import Tree
from tests.support.sample import rare
from tests.support.several_devices import GOLDEN, VOCAB, checkpoint, tree_of, with_drafter
from tests.support.tiny import tiny_checkpoint


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_each_device_reserves_memory_for_its_part(monkeypatch, quantization):
    """Every place is of the shape and dtype of what a device has of a weight, so that all are taken."""
    sizes = dict(head_dim=64, num_attention_heads=8, num_key_value_heads=8, intermediate_size=512)  # whole blocks
    folder, made = checkpoint("qwen3_next") if quantization is None else tiny_checkpoint("qwen3", VOCAB, 2, **sizes), []
    options = {"progress": False, "quantization": quantization, "tp_size": 2}
    expected = jaxspec.load_model(str(folder), **options).params

    def reserved(declared, dtype):
        made.append(reserve.Reserved(reserve.values_of(declared, dtype)))
        return made[-1]

    monkeypatch.setattr(reserve, "LEAST", 512)
    monkeypatch.setattr(loading, "reserved", reserved)
    got = jaxspec.load_model(str(folder), **options).params
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.float32(a), np.float32(b)), got, expected)
    assert len(made) == 2
    for rank, each in enumerate(made):
        assert each._places and not any(each._places.values()), rank


def test_padding_of_a_vocabulary_is_nobodys_token():
    """Its logits are zero, and these are all negative. Of equal ones, the first token is taken, as by one device."""
    logits = -np.array([[5, 1, 2, 3, 1], [2, 2, 2, 2, 2], [9, 8, 7, 6, 5]], np.float32)
    padded = np.pad(logits, ((0, 0), (0, 3)))

    def decide(part):
        return sharding.top_tokens(part, 5)[0], sharding.all_gather_requests(sharding.logits_of_my_requests(part, 5), 3)

    by_columns = PartitionSpec(None, sharding.AXIS)
    run = sharding.spread(decide, sharding.mesh_of(4), (by_columns,), sharding.EVERYWHERE)
    best, whole = jax.jit(run)(padded)
    assert best.tolist() == [1, 0, 4]
    np.testing.assert_array_equal(whole, logits)


@pytest.mark.parametrize("k", [3, 7])
def test_the_likeliest_tokens_of_all_devices_are_those_of_one(k):
    """Equal ones come in order, padding never, and more are wanted than a device has."""
    logits = np.float32(np.random.default_rng(k).integers(-9, 0, (2, 3, 15)))  # 15 on four devices: one lacks one
    by_columns = PartitionSpec(None, None, sharding.AXIS)
    find = functools.partial(sharding.top_logprobs, k=k, vocab=15)
    run = sharding.spread(find, sharding.mesh_of(4), (by_columns,), sharding.EVERYWHERE)
    values, ids, normaliser = jax.jit(run)(np.pad(logits, ((0, 0), (0, 0), (0, 1))))
    expected = sharding.top_logprobs(logits, k)
    np.testing.assert_array_equal(values, expected[0])
    np.testing.assert_array_equal(ids, expected[1])
    np.testing.assert_allclose(normaliser, expected[2], atol=1e-6)


@pytest.mark.parametrize("draft,mapped,greedy", [
    rare("dflash/full", False, True), rare("ngram+dspark/deepspec", True, False)
])  # fmt: skip
def test_drafts_of_several_devices_are_those_of_one(tmp_path, draft, mapped, greedy):
    """Compare each kind with more than layers: trees, Markov heads, token maps, two side by side.
    Engines say so with `make exhaustive`."""
    (tmp_path / "map.json").write_text(json.dumps(list(range(1, 40, 2))))
    more = {"draft_token_map": str(tmp_path / "map.json")} if mapped else tree_of(2, 4, 6)
    one, several = (proposed(draft, more, greedy, size) for size in (1, 2))
    np.testing.assert_array_equal(one.tokens, several.tokens)
    np.testing.assert_array_equal(one.count, several.count)
    if one.parents is not None:
        np.testing.assert_array_equal(one.parents, several.parents)
    assert greedy or np.abs(one.probs - several.probs).max() < 1e-5


def proposed(draft: str, more: dict, greedy: bool, size: int) -> Proposal:
    """The drafts behind two texts over random keys and values, on so many devices."""
    folder, draft = with_drafter(draft)
    model = jaxspec.load_model(str(folder), tp_size=size, progress=False)
    loaded = jaxspec.load_drafter(draft, model, EngineConfig(draft=draft, tp_size=size, **more))
    slots = empty_slots(2, 16)
    texts = jax.numpy.array([[3, 4, 5, 3, 4, 5, 3, 4] * 2, list(range(16))])
    settings = jax.tree.map(lambda x: x[:2], slots.sampling)
    table, layout = jax.numpy.arange(8).reshape(2, 4), PageLayout(8, 8, "float32")
    batch = DraftBatch(
        jax.numpy.arange(2), jax.numpy.array([11, 9]), texts, table, jax.numpy.ones(2, bool), settings, greedy
    )
    whole = jax.eval_shape(lambda: loaded.drafter.init_state(layout, 3))
    rng = np.random.default_rng(0)
    noise = lambda x: rng.standard_normal(x.shape, np.float32) if x.ndim == 6 else np.ones(x.shape, x.dtype)  # noqa: E731
    state, drafter = jax.tree.map(noise, whole), loaded.drafter
    run = lambda params, state: drafter.propose(params, state, batch)[0].replace(logits=None)  # noqa: E731
    if size > 1:
        mesh, drafter = sharding.mesh_of(size), drafter.on_one_of(size)
        params = sharding.everywhere(loaded.params, mesh)
        loaded = dataclasses.replace(loaded, params=params)
        parts = sharding.divided(whole, jax.eval_shape(lambda: drafter.init_state(layout, 3)))
        gives = Proposal(tokens=sharding.EVERYWHERE, count=sharding.EVERYWHERE, probs=sharding.BY_REQUEST,
                         parents=sharding.EVERYWHERE)  # fmt: skip
        run = sharding.spread(run, mesh, (sharding.specs_of(params), parts), gives)
    return jax.tree.map(np.asarray, jax.jit(run)(loaded.params, state))


def test_ordered_embeddings_are_scored_where_they_are():
    """Each of four devices has the logits of its own part of the tokens whose centroids are near."""
    model = jaxspec.load_model(str(GOLDEN / "checkpoints/gemma4-inputs"), progress=False)
    loaded = jaxspec.load_drafter(f"assistant:{GOLDEN / 'assistants/ordered'}", model)
    out = np.random.default_rng(0).standard_normal((3, loaded.drafter.config.hidden_size), np.float32)
    names = {"embed": PartitionSpec(sharding.AXIS), "centroids": sharding.EVERYWHERE, "ordering": sharding.EVERYWHERE}
    params, mesh = {name: loaded.params[name] for name in names}, sharding.mesh_of(4)
    score = lambda params: loaded.drafter._logits(params, out)[0]  # noqa: E731
    run = sharding.spread(score, mesh, (names,), PartitionSpec(None, sharding.AXIS))
    np.testing.assert_allclose(jax.jit(run)(params), score(params), atol=1e-6)


def test_a_sampled_tree_is_accepted_by_the_devices_that_decide():
    """Three requests on two devices, of which each has the logits of its own."""
    rng = np.random.default_rng(0)
    logits = np.float32(rng.standard_normal((3, 4, 6)))
    slots = jax.tree.map(lambda x: x[:3], empty_slots(3, 8))
    slots = slots.replace(length=slots.length + 2)
    drafts = jax.numpy.array(rng.integers(0, 6, (3, 3)), jax.numpy.int32)
    proposal = Proposal(drafts, jax.numpy.full(3, 3), parents=jax.numpy.array([[0, 0, 1]] * 3))
    tree = Tree.of(proposal.parents, 2)

    def decide(part):
        own = sharding.my_requests((slots, proposal, tree))
        scores = sharding.logits_of_my_requests(part, 6)
        return sharding.all_gather_requests(rounds._accept_path(scores, *own, rounds.SAMPLED, None), 3)

    by_columns = PartitionSpec(None, None, sharding.AXIS)
    run = sharding.spread(decide, sharding.mesh_of(2), (by_columns,), sharding.EVERYWHERE)
    for a, b in zip(jax.jit(run)(logits), jax.jit(decide)(logits), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.exhaustive  # sums of an engine's programs are in several_devices.py
def test_a_benchmark_times_sums(capsys):
    assert bench.main(["sums", "--tp-size", "2", "--kilobytes", "2,8"]) == 0
    out = capsys.readouterr().out
    assert "no sums through peers' memory: the device is a CPU" in out
    assert len(re.findall(r"psum( \+ norm)? .* True", out)) == 4


def test_words_gathered_by_a_sum_are_the_words():
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (4, 2, 3, 5)).astype(np.int32)

    def run(own):
        token = collectives.summing.set(lambda _: None)  # another way to sum, which sums nothing
        try:
            return collectives.all_gather(own[0])
        finally:
            collectives.summing.reset(token)

    spread = sharding.spread(run, sharding.mesh_of(4), PartitionSpec(sharding.AXIS), sharding.EVERYWHERE)
    np.testing.assert_array_equal(jax.jit(spread)(words), words)


@pytest.mark.parametrize("family,groups", [("granitemoehybrid", 1), rare("nemotron_h", 2)])
def test_devices_that_share_a_group_of_states_norm_it_together(family, groups):
    """Four devices: all of them a group, and two of them each."""
    folder, size = checkpoint(family, **({} if groups == 1 else {"n_groups": groups})), 4
    own = jaxspec.load_model(str(folder), progress=False).config.on_one_of(size).decoder
    (states,) = {layer.mixing for layer in own.layers if isinstance(layer.mixing, Mamba2)}
    assert (states.groups, states.group_devices) == (1, size // groups)
    expected, logits = (logits_of(folder, devices) for devices in (1, size))
    np.testing.assert_allclose(logits[..., :VOCAB], expected, atol=1e-4)


def logits_of(folder: Path, size: int) -> np.ndarray:
    """Logits of a text on so many devices."""
    model = jaxspec.load_model(str(folder), tp_size=size, progress=False)
    decoder, tokens = model.config.on_one_of(size).decoder, jax.numpy.arange(12)[None]

    def run(params):
        last = forward(decoder, params, tokens, tokens, WholeTexts(), None, ()).last
        return unembed(params, last, decoder)

    if size > 1:
        run = sharding.spread(run, sharding.mesh_of(size), (sharding.specs_of(model.params),), sharding.LOGITS)
    return np.asarray(jax.jit(run)(model.params))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_device_reads_the_rows_that_it_has(monkeypatch, family):
    """Nothing is read twice: tensors that all devices need, or columns of, are read once for all."""
    folder = checkpoint(family)
    files = ModelFolder(folder, folder / "config.json")
    stored, taken, begin = files.stored(), [], Readers._begin
    monkeypatch.setattr(Readers, "_begin", lambda self, out, each: taken.append(each) or begin(self, out, each))
    loading.assemble(MODELS[family].tensors(files.config.decoder), stored, "float32", sharding.mesh_of(2))
    padded = stored["model.embed_tokens.weight"][VOCAB // 2 + 1 :]  # rows that are read where they are padded
    assert sum(each.nbytes for each in (*taken, padded)) == sum(each.nbytes for each in stored.values())
    mlp = "model.layers.0.mlp." + ("experts.0." if family == "qwen3_moe" else "")
    gate, down = (stored[f"{mlp}{part}_proj.weight"] for part in ("gate", "down"))
    assert {gate[: len(gate) // 2], gate[len(gate) // 2 :], down} <= set(taken)
