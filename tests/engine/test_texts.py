"""Texts with an explicit cache equal whole ones, step by step, under jit, vmap and grad, over chains and trees."""

import dataclasses
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from examples import medusa
from jaxspec import LLM, RequestError, SamplingParams, load_drafter, load_model
from jaxspec.drafters.base import Drafter
from tests.support import heads
from tests.support.engines import assert_own
from tests.support.hybrids import checkpoint as hybrid_checkpoint
from tests.support.sample import rare
from tests.support.tiny import BYTE_VOCAB, tiny_checkpoint

TEXTS = np.random.default_rng(0).integers(0, 60, (2, 20)).astype(np.int32)
OPTIONS = dict(page_size=8, context_length=128, max_running_requests=2, skip_warmup=True, few_programs=True)
OPTIONS |= dict(chunked_prefill_size=64, prefill_sizes="64")  # one program


@pytest.fixture(scope="module")
def folder():
    return tiny_checkpoint(num_hidden_layers=1)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(str(folder), progress=False)


@pytest.fixture(scope="module")
def hybrid():
    return load_model(str(hybrid_checkpoint("qwen3_5", 64, 2)), progress=False)


@pytest.mark.parametrize("kind", [rare("model"), "hybrid"])  # a hybrid has both kinds of layers
def test_steps_equal_whole_texts(kind, request):
    """Rows that don't stand leave nothing behind, in pages or in states."""
    model = request.getfixturevalue(kind)
    whole = np.asarray(jaxspec.logits(model, TEXTS))
    last = (len(model.config.decoder.layers) - 1,)
    states = np.asarray(jaxspec.hidden_states(model, TEXTS, last))
    begun = jaxspec.prefill(model, TEXTS[:, :9], [9, 6], capacity=40, layers=last)
    np.testing.assert_allclose(begun.logits[0], whole[0, :9], atol=1e-5)
    np.testing.assert_allclose(begun.hidden[:, 1, :6], states[:, 1, :6], atol=1e-5)
    cache, standing = begun.cache, [9, 6]
    for kept in ([2, 0], [4, 3], [0, 1]):
        rows = np.stack([text[at : at + 4] for text, at in zip(TEXTS, standing, strict=True)])
        for row, n in enumerate(kept):
            rows[row, n:] = 61 - rows[row, n:]  # drafts that are rejected
        out = jaxspec.step(model, cache, rows)
        for row, n in enumerate(kept):
            np.testing.assert_allclose(out.logits[row, :n], whole[row, standing[row] :][:n], atol=1e-5)
        cache = jaxspec.keep(out.cache, kept)
        standing = [at + n for at, n in zip(standing, kept, strict=True)]
        assert cache.length.tolist() == standing


def test_a_tree_is_its_paths(model):
    """Each row sees its ancestors; the accepted path is a chain afterwards."""
    whole = np.asarray(jaxspec.logits(model, TEXTS[:1]))
    cache = jaxspec.prefill(model, TEXTS[:1, :9], capacity=40).cache
    tokens = np.array([[TEXTS[0, 9], 3, TEXTS[0, 10], 5, TEXTS[0, 11]]])
    parents = np.array([[0, 0, 1, 2]])
    out = jaxspec.step(model, cache, tokens, parents)
    np.testing.assert_allclose(out.logits[0, [0, 2, 4]], whole[0, 9:12], atol=1e-5)
    other = np.concatenate([TEXTS[0, :10], [3, 5], TEXTS[0, :8]])[None]  # as long, so that one program serves both
    np.testing.assert_allclose(out.logits[0, [1, 3]], jaxspec.logits(model, other)[0, 10:12], atol=1e-5)
    chosen = jnp.array([[TEXTS[0, 10], 0, TEXTS[0, 11], 0, TEXTS[0, 12]]])
    walk = lambda *of: jaxspec.verify.walk(*of, jaxspec.verify.Tree.of(jnp.asarray(parents), 2))  # noqa: E731
    path, count = jax.jit(walk)(chosen, jnp.asarray(tokens[:, 1:]), jnp.array([4]))
    assert path[0].tolist() == [0, 2, 4] and count.tolist() == [3]
    cache = jaxspec.keep(out.cache, count, path)
    out = jaxspec.step(model, cache, TEXTS[:1, 12:17], np.arange(4)[None])
    np.testing.assert_allclose(out.logits[0], whole[0, 12:17], atol=1e-5)


def test_the_functions_go_through_transformations(model):
    whole = jaxspec.logits(model, TEXTS)
    np.testing.assert_allclose(jax.jit(lambda t: jaxspec.logits(model, t))(TEXTS), whole, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(lambda t: jaxspec.logits(model, t[None])[0])(TEXTS), whole, atol=1e-5)

    @jax.jit
    def stepped(params, tokens):
        cache = jaxspec.prefill(model, tokens[:, :9], capacity=32, params=params).cache
        return jaxspec.step(model, cache, tokens[:, 9:15], params=params).logits

    np.testing.assert_allclose(stepped(model.params, TEXTS), whole[:, 9:15], atol=1e-5)
    slope = jax.grad(lambda p: jnp.square(jaxspec.logits(model, TEXTS, params=p)).mean())(model.params)
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(slope))


def test_the_embedding_is_layer_minus_one(model):
    embedded = jaxspec.hidden_states(model, TEXTS, (-1,))[0]
    np.testing.assert_array_equal(embedded, model.params["embed"][TEXTS])


@pytest.mark.parametrize(("call", "words"), [
    (lambda m, c: jaxspec.prefill(m, TEXTS, capacity=19), "capacity must be from the 20 tokens"),
    (lambda m, c: jaxspec.prefill(m, TEXTS, [3], capacity=40), r"lengths must be int\[2\]"),
    (lambda m, c: jaxspec.prefill(m, TEXTS, capacity=40, rows=0), "rows must be from 1 to 1024, got 0"),
    (lambda m, c: jaxspec.prefill(m, TEXTS, capacity=40.0), "capacity must be .* got 40.0"),
    (lambda m, c: jaxspec.prefill(m, TEXTS, [20, 21], capacity=40), r"lengths must be from 1 to 20, got \[20, 21\]"),
    (lambda m, c: jaxspec.prefill(m, TEXTS, [1.5, 2], capacity=40), r"lengths must be int\[2\], got float64"),
    (lambda m, c: jaxspec.prefill(m, TEXTS, capacity=40, params={"norm": 0}), "params must be .* lacks embed, head"),
    (lambda m, c: jaxspec.step(m, jaxspec.step(m, c, TEXTS[:, :3]), TEXTS[:, :3]), "cache must be .* got Step"),
    (lambda m, c: jaxspec.step(m, c, TEXTS[:, :3], [[0, 0], [0, 2]]), "parents must be from .* follows a row before"),
    (lambda m, c: jaxspec.keep(jaxspec.step(m, c, TEXTS[:, :3]).cache, [1, 1], [[3], [0]]), "path must be from 0 to 2"),
    (lambda m, c: jaxspec.keep(c.replace(length=c.length + 35, _pending=3), [2, 1]), r"capacity of 40 tokens: \[0\]"),
    (lambda m, c: jaxspec.step(m, c, TEXTS), r"tokens must be int\[2, q\] with q at most 16"),
    (lambda m, c: jaxspec.step(m, c, TEXTS[:1, :3]), r"tokens must be int\[2, q\]"),
    (lambda m, c: jaxspec.step(m, c, TEXTS[:, :3], [[0], [0]]), r"parents must be int\[2, 2\]"),
    (lambda m, c: jaxspec.step(m, c, TEXTS[:, :3], layers=(9,)), "don't exist"),
    (lambda m, c: jaxspec.keep(c, [1, 0]), "count must be from 0 to 0, .* the last step had 0 rows"),
    (lambda m, c: jaxspec.keep(jaxspec.step(m, c, TEXTS[:, :3]).cache, [4, 0]), "count .* the last step had 3 rows"),
    (lambda m, c: jaxspec.keep(c, [-1, 1]), "count must be from 0"),
    (lambda m, c: jax.grad(lambda p: jaxspec.prefill(m, TEXTS, capacity=40, params=p).logits.sum())(m.params),
     "no derivative.* Differentiate jaxspec.logits"),
    (lambda m, c: jaxspec.propose_along(m, load_drafter("ngram", m), [[1]], 2), "tokens must be two or more"),
])  # fmt: skip
def test_what_is_refused(model, call, words):
    with pytest.raises(RequestError, match=words):
        call(model, jaxspec.prefill(model, TEXTS[:, :4], capacity=40).cache)


def test_a_tree_is_refused_where_states_go_from_token_to_token(hybrid):
    cache = jaxspec.prefill(hybrid, TEXTS[:, :4], capacity=40).cache
    with pytest.raises(RequestError, match="recurrent layers"):
        jaxspec.step(hybrid, cache, TEXTS[:, :3], [[0, 0], [0, 1]])


# -- drafts along a text -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ngram", "eagle3", rare("standalone")])
def test_drafts_along_a_text_are_those_of_each_beginning(folder, model, method):
    """Where the text is the model's own, they are `propose`'s."""
    draft = {
        "ngram": "ngram",
        "eagle3": f"eagle3:{heads.random_eagle3(folder, tuple(range(64)), (0, 0))}",
        "standalone": f"standalone:{tiny_checkpoint('llama', seed=5, num_hidden_layers=1)}",
    }[method]
    drafter = load_drafter(draft, model)
    text = [7, 8, 9, 7, 8]
    for _ in range(8):
        text.append(int(jaxspec.logits(model, [text + [0] * (16 - len(text))])[0, len(text) - 1].argmax()))
    along = jaxspec.propose_along(model, drafter, [text], 3, start=4, distributions=True)
    assert along.tokens.shape == (1, 9, 3)
    for i in range(1, 9):
        one = jaxspec.propose(model, drafter, text[: 4 + i], 3)
        assert one.next_token == text[4 + i] and along.count[0, i] == one.count
        assert along.tokens[0, i, : one.count].tolist() == one.tokens[: one.count].tolist()
        if one.logits is not None:
            np.testing.assert_allclose(along.logits[0, i], one.logits, atol=1e-4)


def test_sampled_drafts_have_their_probabilities(model):
    drafter = load_drafter(f"standalone:{tiny_checkpoint('llama', seed=5, num_hidden_layers=1)}", model)
    cold, warm, same = (
        jaxspec.propose_along(model, drafter, TEXTS, 2, temperature=t, seed=3, distributions=True)
        for t in (0, 1.5, 1.5)
    )
    assert cold.probs is None and warm.probs.shape == (2, 19, 2, 64)
    np.testing.assert_array_equal(warm.tokens, same.tokens)
    assert (warm.tokens != cold.tokens).mean() > 0.5
    np.testing.assert_allclose(warm.probs, jax.nn.softmax(warm.logits / 1.5), atol=1e-5)


@pytest.mark.parametrize(("given", "words"), [
    (dict(start=0), "start must be"), (dict(start=20), "start must be"), (dict(temperature=-1), "temperature must be"),
    (dict(start=True), "start must be an integer"), (dict(temperature="x"), "temperature must be"),
    (dict(seed=1.5), "seed must be"),
])  # fmt: skip
def test_what_propose_along_refuses(model, given, words):
    with pytest.raises(RequestError, match=words):
        jaxspec.propose_along(model, load_drafter("ngram", model), TEXTS, 2, **given)


def test_the_expected_length_is_the_mean_of_block_verification():
    rng = np.random.default_rng(1)
    p, q = (jax.nn.softmax(2 * rng.standard_normal((1, n, 8))) for n in (4, 3))
    drafts, count, many = jnp.array([[1, 5, 2]]), jnp.array([3]), 4000
    assert {"block", "expected_length"} <= set(dir(jaxspec.verify))
    length = jax.jit(lambda q: jaxspec.verify.expected_length(p, drafts, count, q)[0])
    seeds = jnp.stack([jnp.zeros(many, jnp.uint32), jnp.arange(many, dtype=jnp.uint32)], axis=1)
    each = lambda x: jnp.broadcast_to(x, (many, *x.shape[1:]))  # noqa: E731
    _, lengths = jax.jit(jaxspec.verify.block)(*map(each, (p, drafts, count, q)), seeds, each(jnp.array([5])))
    np.testing.assert_allclose(lengths.mean(), length(q), atol=0.06)
    assert np.isfinite(jax.jit(jax.grad(length))(q)).all()


# -- what is loaded goes into an engine --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Loads(Drafter):
    """Its params depend on its path and on one of its options; another option is set afterwards."""

    num_draft_tokens: int = 2
    width: int = jaxspec.options.option(4, "columns of its table", "N")
    scale: float = jaxspec.options.option(1.0, "of its logits", "X")

    @classmethod
    def load(cls, target, source, options, width=4):
        return cls(width=width), {"table": np.zeros((3, width)), "path": source}


def test_a_class_takes_a_path_and_its_options(model):
    name = f"{__name__}:Loads"
    loaded = load_drafter(f"{name}:some/where: odd?width=7&scale=2", model)
    assert loaded.params["table"].shape == (3, 7) and loaded.params["path"] == "some/where: odd"
    assert (loaded.drafter.width, loaded.drafter.scale) == (7, 2.0)
    assert load_drafter(name, model).params["path"] is None


def test_an_engine_takes_what_is_loaded(model):
    drafter = load_drafter("ngram", model)
    llm = LLM(model, drafter, **OPTIONS)
    assert_own(model, llm.generate([[1, 2, 3, 1, 2]], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)))
    assert llm.engine.runner.model is model and llm.engine.runner.draft is drafter


def test_a_notebook_of_cells_runs(folder, monkeypatch, capsys):
    monkeypatch.setenv("MODEL", str(tiny_checkpoint("qwen3", BYTE_VOCAB, 5, tokenizer=True, num_hidden_layers=1)))
    runpy.run_path("examples/idea.py")
    assert capsys.readouterr().out.count("tokens") == 2


def test_a_papers_heads_are_trained_and_served():
    """The example, on a tiny model: its texts are plain decoding's, whatever its drafts are worth."""
    folder = tiny_checkpoint("qwen3", BYTE_VOCAB, 5, tokenizer=True, num_hidden_layers=1)
    assert medusa.main(str(folder), 5, **OPTIONS | {"context_length": 256}) >= 1
