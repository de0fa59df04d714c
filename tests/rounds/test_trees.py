"""Trees: what is verified, accepted and kept of them, whatever their shape (EAGLE's own are in test_eagle_trees)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxspec
from jaxspec import SamplingParams, load_model
from jaxspec.cache.paged import Rows
from jaxspec.drafters.base import NoDrafter
from jaxspec.pallas.attention.paged_attention import reference
from jaxspec.rounds.programs import GREEDY, LOGPROBS
from jaxspec.sampling import acceptance, sampling
from jaxspec.sampling.acceptance import Tree
from tests.pallas.attention.test_paged_attention import LAYER, H, dense, paged
from tests.rounds.test_distribution import SETTINGS
from tests.support.exact import adjusted, slots_for
from tests.support.sample import rare
from tests.support.tiny import tiny_checkpoint
from tests.support.trees import Session, Wild, assert_noted, padded

# -- the tree itself ---------------------------------------------------------------------------------------------------


def branch(parents, row):
    """The rows from the root's child down to `row`."""
    rows = []
    while row:
        rows, row = [row, *rows], parents[row - 1]
    return rows


@st.composite
def trees(draw, drafts=8):
    return [draw(st.integers(0, i)) for i in range(drafts)]


grow = jax.jit(Tree.of, static_argnums=1)
walk = jax.jit(acceptance.walk)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(trees(), st.integers(1, 4))
def test_depths_and_ancestors(parents, height):
    tree = grow(jnp.array([parents]), height)
    for row in range(len(parents) + 1):
        above = branch(parents, row)
        assert tree.depth[0, row] == min(len(above), height + 1)
        if len(above) <= height:
            assert np.flatnonzero(tree.follows[0, row]).tolist() == [0, *above]
    firsts = [parents.index(parent) == i for i, parent in enumerate(parents)]
    assert tree.first_children()[0].tolist() == firsts


def test_a_circle_is_as_good_as_no_draft():
    """Whatever a drafter says its parents are: nobody gets to what doesn't hang from the root."""
    tree = Tree.of(jnp.array([[2, 1, 0]]), 3)
    path, n = acceptance.walk(jnp.array([[5, 5, 5, 5]]), jnp.array([[5, 5, 5]]), jnp.array([3]), tree)
    assert n.tolist() == [2] and path[0, :2].tolist() == [0, 3]


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.data())
def test_walk_goes_where_the_targets_tokens_lead(data):
    parents = data.draw(trees(), "parents")
    drafts = data.draw(st.lists(st.integers(0, 2), min_size=8, max_size=8), "drafts")
    chosen = data.draw(st.lists(st.integers(0, 2), min_size=9, max_size=9), "chosen")
    count, height = data.draw(st.integers(0, 8), "count"), data.draw(st.integers(1, 4), "height")
    stands = [  # rows whose every ancestor is what was chosen before it
        row
        for row in range(count + 1)
        if (above := branch(parents, row)) is not None
        and len(above) <= height
        and all(drafts[r - 1] == chosen[parents[r - 1]] for r in above)
    ]
    path, n = walk(*(jnp.array([x]) for x in (chosen, drafts, count)), grow(jnp.array([parents]), height))
    best = max(len(branch(parents, row)) for row in stands)
    end = next(row for row in stands if len(branch(parents, row)) == best)
    assert n.tolist() == [best + 1] and path.shape == (1, height + 1)
    assert path[0, : best + 1].tolist() == [0, *branch(parents, end)]


def test_a_chain_is_a_tree_too():
    rng = np.random.default_rng(0)
    drafts, chosen = rng.integers(0, 2, (64, 4)), rng.integers(0, 2, (64, 5))
    count = rng.integers(0, 5, 64)
    tree = Tree.of(jnp.broadcast_to(jnp.arange(4), (64, 4)), 4)
    path, n = walk(*map(jnp.asarray, (chosen, drafts, count)), tree)
    _, expected = acceptance.match(*map(jnp.asarray, (chosen, drafts, count)))
    np.testing.assert_array_equal(n, expected)
    for row, k in zip(path, n, strict=True):
        assert row[:k].tolist() == list(range(k))


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.data())
def test_each_row_is_adjusted_for_its_own_branch(data):
    b, d, vocab = 3, 5, 8
    token = st.integers(0, vocab - 1)
    parents = [data.draw(trees(d)) for _ in range(b)]
    drafts = [data.draw(st.lists(token, min_size=d, max_size=d)) for _ in range(b)]
    number = st.floats(0, 2).map(lambda x: round(x, 3))
    params = [
        SamplingParams(
            presence_penalty=data.draw(number), frequency_penalty=data.draw(number),
            repetition_penalty=data.draw(number) + 0.25, logit_bias={data.draw(token): 1.5},
            min_tokens=data.draw(st.integers(0, 6)),
        )
        for _ in range(b)
    ]  # fmt: skip
    prompts = [data.draw(st.lists(token, min_size=1, max_size=4)) for _ in range(b)]
    outputs = [data.draw(st.lists(token, max_size=4)) for _ in range(b)]
    logits = np.random.default_rng(data.draw(st.integers(0, 99))).standard_normal((b, d + 1, vocab), np.float32)
    slots = jax.tree.map(lambda x: x[:b], slots_for(params, prompts, outputs, capacity=16, stop_ids=[[3]] * b))
    follows = grow(jnp.array(parents), d).drafts
    got = _adjust(logits, slots.sampling, slots.history, slots.prompt, slots.length, jnp.array(drafts), follows)
    for i, j in np.ndindex(b, d + 1):
        said = outputs[i] + [drafts[i][row - 1] for row in branch(parents[i], j)]
        want = adjusted(logits[i, j], prompts[i], said, params[i], [3])
        np.testing.assert_allclose(got[i, j], want, rtol=1e-5, atol=1e-4)


_adjust = jax.jit(sampling.adjust)

# -- in the cache ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_tokens", [8, 1024])
@pytest.mark.parametrize("t,w", [(5, 5), (3, 12), (2, 40)])
def test_rows_see_what_is_before_the_mask_and_what_it_names(t, w, block_tokens):
    rng = np.random.default_rng(t)
    lengths = (w, w + 1, 41, 70)
    kv, table, sequences = paged(rng, lengths, kv_heads=2, page_size=8, entries=9)
    q = rng.standard_normal((len(lengths), t, 4, H), np.float32)
    mask = rng.random((len(lengths), t, w)) < 0.4
    start = np.array(lengths, np.int32) - w
    start[0] -= 3  # partly before the text
    out = reference(q, jnp.asarray(kv), jnp.int32(LAYER), table, start, jnp.asarray(mask), block_tokens=block_tokens)
    for b, (k, v) in enumerate(sequences):
        for i in range(t):
            listed = start[b] + np.flatnonzero(mask[b, i])
            seen = np.concatenate([np.arange(start[b]), listed[listed >= 0]])
            expected = dense(q[b, i], k[seen], v[seen]) if len(seen) else 0
            np.testing.assert_allclose(out[b, i], expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_an_accepted_path_becomes_a_chain(dtype):
    """Compact all layers, over page edges; nothing else moves."""
    rng = np.random.default_rng(0)
    layers, page, table = 3, 4, np.array([[3, 1, 5], [2, 6, 4]], np.int32)
    before = rng.standard_normal((layers, 7, 2, 2, page, H)).astype(np.float32)
    before = np.asarray(jnp.asarray(before).astype(dtype).astype(jnp.float32))
    start, path, count = [2, 7], [[0, 3, 4, 7], [0, 1, 3, 0]], [4, 3]
    rows = Rows(jnp.array(start), jnp.array(count), jnp.asarray(table))
    kv = jnp.asarray(before).astype(dtype)
    after = np.asarray(rows.compact(kv, jnp.array(path), rows.count).astype(jnp.float32))
    expected = before.copy()
    for b in range(2):
        place = lambda i: (table[b, (start[b] + i) // page], (start[b] + i) % page)  # noqa: B023, E731
        for i in range(count[b]):
            (to, at), (source, offset) = place(i), place(path[b][i])
            expected[:, to, :, :, at] = before[:, source, :, :, offset]
    np.testing.assert_array_equal(after[:, 1:], expected[:, 1:])


def test_rows_of_a_step_stand_behind_those_of_the_steps_before():
    """Their places follow one another; their positions are the branches', from the newest token's on."""
    mask = jnp.ones((1, 2, 6), bool)
    rows = Rows(jnp.array([14]), jnp.array([2]), jnp.array([[1]]), depth=jnp.array([[2, 2]]), mask=mask)
    assert rows.positions(2).tolist() == [[12, 12]]  # the mask begins at place 10
    assert Rows(rows.start, rows.count, rows.table).positions(2).tolist() == [[14, 15]]


# -- through the programs ----------------------------------------------------------------------------------------------

PROMPTS = [np.random.default_rng(n).integers(0, 64, n).tolist() for n in range(1, 34)]
NEW = 20


@functools.cache
def model():
    return load_model(str(tiny_checkpoint("llama", 64, 2)), dtype="float32", progress=False)


@functools.cache
def plain(mode):
    params = list(SETTINGS.values()) if mode == LOGPROBS else [SamplingParams(temperature=0.0)]
    return Session(model(), NoDrafter(), {}, PROMPTS, params, NEW, mode), params


@pytest.mark.parametrize("mode", [rare(GREEDY), LOGPROBS])
def test_trees_of_any_shape_change_nothing(mode):
    """Text, keys and values are plain decoding's, greedy, and sampled under the same seeds with all that changes what
    is said and its log-probabilities; and the drafter sees every token once with the features before it."""
    expected, params = plain(mode)
    session = Session(model(), Wild(), {"texts": padded(expected.texts)}, PROMPTS, params, NEW, mode)
    assert session.texts == expected.texts
    lengths = np.bincount(np.concatenate(session.accepted), minlength=6)
    assert (lengths[1:6] > 5).all() and lengths.sum() == lengths[1:6].sum()  # of every length, 4 deep and the bonus
    states = jaxspec.hidden_states(model(), padded(session.texts, 0), Wild.feature_layers)
    for i, text in enumerate(session.texts):
        np.testing.assert_allclose(session.kv(i), expected.kv(i), atol=1e-4)
        np.testing.assert_allclose(session.logprobs[i], expected.logprobs[i], atol=1e-4)
        assert_noted(session.state.draft, i, text, states[:, i, : len(text) - 1])
        assert max(session.drafted[i]) <= Wild.deep and all(
            a <= d + 1 for a, d in zip(session.accepted[i], session.drafted[i], strict=True)
        )
