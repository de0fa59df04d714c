"""Values that `--draft` takes and refuses, and the n-gram drafter against its definition in plain Python."""

import dataclasses
import shutil
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec import ConfigError, EngineConfig, load_drafter, load_model
from jaxspec.checkpoint import ModelFolder
from jaxspec.drafters.base import DraftBatch, Drafter, Proposal
from jaxspec.drafters.loading import check_drafter
from jaxspec.drafters.ngram import Ngram
from jaxspec.drafters.registry import KNOWN, Known
from jaxspec.drafters.standalone import Standalone
from jaxspec.engine.llm import LLM
from jaxspec.rounds.packing import empty_slots
from tests.support.tiny import tiny_checkpoint


@dataclasses.dataclass(frozen=True)
class Mine(Drafter):
    """A user's drafter."""

    num_draft_tokens: int = 3


@dataclasses.dataclass(frozen=True)
class Lazy(Drafter):
    """Drafts no tokens at all, which is what `none` is for."""

    num_draft_tokens: int = 0

    @classmethod
    def load(cls, target, source, options):
        return cls(), {}


class NotADrafter:
    pass


class Plain(Drafter):
    """No dataclass, and no `load`."""


@dataclasses.dataclass(frozen=True)
class Alone(Mine):
    """Its `load` forgets the params."""

    @classmethod
    def load(cls, target, source, options):
        return cls()


@dataclasses.dataclass(frozen=True)
class Deep(Mine):
    """Reads a layer that no tiny model has."""

    feature_layers: tuple[int, ...] = (-1, 2, 99)


@pytest.fixture(scope="module")
def model():
    return load_model(str(tiny_checkpoint()), progress=False)


def named(model, name):
    return dataclasses.replace(model, name=name)


# -- load_drafter ------------------------------------------------------------------------------------------------------


def test_none_drafts_nothing(model):
    loaded = load_drafter("none", model)
    assert (loaded.name, loaded.drafter.num_draft_tokens, loaded.params) == ("none", 0, {})


@pytest.mark.parametrize("draft", ["ngram", "auto"])
def test_ngram_and_auto(model, draft):
    loaded = load_drafter(draft, model)
    assert loaded.name == "ngram" and loaded.drafter == Ngram(4, 2, 5)
    options = EngineConfig(draft=draft, num_draft_tokens=7)
    assert load_drafter(draft, model, options).drafter == Ngram(7, 2, 5)


@pytest.mark.parametrize("prefix", ["standalone:", ""])
def test_standalone_by_method_or_by_path_alone(model, prefix):
    folder = str(tiny_checkpoint("llama", seed=3))
    loaded = load_drafter(prefix + folder, model)
    assert isinstance(loaded.drafter, Standalone)
    assert loaded.drafter.config.model_type == "llama" and loaded.drafter.num_draft_tokens == 4
    expected = load_model(folder, progress=False).params["embed"]
    np.testing.assert_array_equal(loaded.params["embed"], expected)
    options = EngineConfig(draft=prefix + folder, num_draft_tokens=2, dtype="bfloat16")
    loaded = load_drafter(prefix + folder, model, options)
    assert loaded.drafter.num_draft_tokens == 2 and loaded.params["embed"].dtype == "bfloat16"


def test_without_weights_a_standalone_drafter_needs_its_config_alone(model, tmp_path):
    shutil.copy(tiny_checkpoint("llama", seed=3) / "config.json", tmp_path)
    draft = f"standalone:{tmp_path}"
    loaded = load_drafter(draft, model, EngineConfig(draft=draft, load_format="dummy"))
    assert loaded.params["embed"].shape == model.params["embed"].shape


def test_a_class_of_the_users(model):
    loaded = load_drafter(f"{__name__}:Mine", model, EngineConfig(draft=f"{__name__}:Mine", num_draft_tokens=5))
    assert loaded.drafter == Mine(5) and loaded.name == f"{__name__}:Mine"


def test_a_method_alone_takes_the_known_drafter(model, monkeypatch):
    monkeypatch.setitem(KNOWN["standalone"], "acme/big", Known(str(tiny_checkpoint(seed=4))))
    assert isinstance(load_drafter("standalone", named(model, "Acme/Big")).drafter, Standalone)
    with pytest.raises(ConfigError, match=r"no drafter is known for Acme/Other.*standalone:PATH_OR_ID.*acme/big"):
        load_drafter("standalone", named(model, "Acme/Other"))


@pytest.mark.parametrize("draft,words", [
    ("nosuch", ["nosuch is no method", "none, auto, ngram, suffix, standalone"]),
    ("", ["is no method"]),
    ("ngarm", ["ngarm is no method", "; did you mean ngram?"]),
    ("eagel3:/some/folder", ["; did you mean eagle3?"]),
    ("sufix:Class", ["can't import 'sufix'", "; did you mean suffix?"]),
    ("eagle3:/nope", ["--draft eagle3:/nope: the drafter '/nope' wasn't found: no such file or folder"]),
    ("dflash:/nope", ["--draft dflash:/nope: the drafter '/nope' wasn't found"]),
    ("standalone:/nope", ["--draft standalone:/nope: the drafter '/nope' wasn't found"]),
    ("ngram:some/model", ["ngram takes no model", "use --draft ngram"]),
    ("no_such_module:Class", ["can't import 'no_such_module'", "PYTHONPATH"]),
    (f"{__name__}:Mine:/a/path", ["Mine has no `load`, which would read /a/path. Drop the path"]),
    (f"{__name__}:Plain", ["Plain must be a frozen dataclass"]),
    (f"{__name__}:Alone", ["Alone.load must return a drafter and its params, got Alone("]),
    (f"{__name__}:Deep", ["feature_layers [99] don't exist", "layers 0 to 1"]),
    (f"{__name__}:NotADrafter", ["no class NotADrafter", "found: ", "Mine"]),
    (f"{__name__}:Absent", ["no class Absent", "Mine"]),
    (f"{__name__}:Lazy", ["num_draft_tokens must be at least 1, got 0"]),
])  # fmt: skip
def test_what_is_refused(model, draft, words):
    with pytest.raises(ConfigError) as error:
        load_drafter(draft, model, EngineConfig(draft="ngram"))
    for word in words:
        assert word in str(error.value)


def test_a_class_of_ones_own_reads_any_file():
    check_drafter(EngineConfig(draft=f"{__name__}:Deep:{__file__}"))


def test_a_module_that_fails_to_import_says_why(model, tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import absent_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="absent_dependency"):
        load_drafter("needs_more:Mine", model)
    assert "needs_more" not in sys.modules


@pytest.mark.parametrize("draft,target", [("ngram", "tiny"), (None, None)])
def test_arguments_that_are_swapped_or_not_loaded_are_refused(model, draft, target):
    with pytest.raises(ConfigError, match=r"load it first|must be a name or a path") as error:
        load_drafter(draft or model, target or model)
    assert len(str(error.value)) < 200


def test_another_vocabulary_is_refused(model):
    with pytest.raises(ConfigError, match=r"vocabulary has 80 tokens, the target's .* has 64"):
        load_drafter(f"standalone:{tiny_checkpoint(vocab=80)}", model)


@pytest.mark.parametrize("draft,words", [
    (lambda: f"standalone:{tiny_checkpoint(vocab=80)}", "vocabulary has 80 tokens, the target's .* has 64"),
    (lambda: f"ngram+standalone:{tiny_checkpoint(vocab=80)}", "vocabulary has 80 tokens, the target's .* has 64"),
    (lambda: f"standalone:{tiny_checkpoint('qwen3_next')}", "qwen3_next has linear attention"),
    (lambda: "mtp", "model_type qwen3.* brings no MTP module"),
])  # fmt: skip
def test_what_configs_alone_show_is_said_before_weights_are_read(monkeypatch, draft, words):
    monkeypatch.setattr(ModelFolder, "stored", lambda self, *_: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match=words):
        LLM(str(tiny_checkpoint()), draft=draft(), skip_warmup=True)


# -- n-gram ------------------------------------------------------------------------------------------------------------

CAPACITY = 24


def batch_of(histories, live=None):
    """A `DraftBatch` of the given token lists; behind each there is what an earlier request left in the slot."""
    slots = empty_slots(len(histories), CAPACITY).sampling
    rows = np.full((len(histories), CAPACITY), 1, np.int32)
    for row, history in zip(rows, histories, strict=True):
        row[: len(history)] = history
    return DraftBatch(
        slots=jnp.arange(len(histories)),
        length=jnp.array([len(h) for h in histories], jnp.int32),
        history=jnp.asarray(rows),
        table=jnp.zeros((len(histories), 1), jnp.int32),
        live=jnp.ones(len(histories), bool) if live is None else jnp.asarray(live),
        sampling=slots,
        greedy=True,
    )


def continuation(history, n, least, most):
    """The definition: the longest match of the last tokens, the later of equals; then what followed it, again and
    again if that is short."""
    for size in range(min(most, len(history) - 1), least - 1, -1):
        tail = history[-size:]
        for end in range(len(history) - 1, size - 1, -1):
            if history[end - size : end] == tail:
                followed = history[end:]
                return [followed[i % len(followed)] for i in range(n)]
    return None


histories = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=CAPACITY), min_size=3, max_size=3)


@given(histories, st.sampled_from([(1, 1, 1), (4, 2, 5), (3, 1, 3), (6, 3, 4)]))
@settings(max_examples=80, deadline=None)
def test_ngram_is_its_definition(histories, lengths):
    n, least, most = lengths
    proposal, _ = Ngram(n, least, most).propose({}, {}, batch_of(histories))
    assert proposal.probs is None and proposal.tokens.shape == (3, n)
    for history, tokens, count in zip(histories, proposal.tokens.tolist(), proposal.count.tolist(), strict=True):
        expected = continuation(history, n, least, most)
        assert count == (0 if expected is None else n), history
        assert expected is None or tokens == expected, history


def test_ngram_by_hand():
    propose = lambda h, *sizes: Ngram(*sizes).propose({}, {}, batch_of([h]))[0]  # noqa: E731
    assert propose([5, 6, 7, 8, 9, 5, 6], 3, 2, 5).tokens.tolist() == [[7, 8, 9]]
    assert propose([5, 6, 7, 5, 6, 8, 5, 6], 2, 2, 5).tokens.tolist() == [[8, 5]]  # the later of two
    assert propose([9, 5, 6, 7, 0, 5, 6, 8, 9, 5, 6], 1, 2, 5).tokens.tolist() == [[7]]  # the longer of two
    assert propose([4, 4, 4], 4, 2, 5).tokens.tolist() == [[4, 4, 4, 4]]  # a continuation of one, repeated
    assert propose([5, 6, 7, 8], 3, 2, 5).count.tolist() == [0]


def test_ngram_drafts_nothing_for_padding():
    proposal, _ = Ngram(2, 1, 3).propose({}, {}, batch_of([[4, 4, 4], [4, 4, 4]], live=[True, False]))
    assert proposal.count.tolist() == [2, 0]


# -- the protocol ------------------------------------------------------------------------------------------------------


def test_the_base_class_keeps_nothing_and_says_what_is_missing():
    drafter = Mine()
    assert drafter.init_state(None, 4) == {} and drafter.kv_bytes_per_token("float32") == 0
    assert drafter.commit({}, {"a": 1}, None, None) == {"a": 1} == drafter.prefill({}, {"a": 1}, None, ())
    with pytest.raises(NotImplementedError, match=r"Mine\.propose"):
        drafter.propose({}, {}, None)


def test_a_batch_hands_out_tokens_and_rows():
    batch = batch_of([[7, 8, 9], [5]], live=[True, False])
    assert batch.tokens(-2, 2).tolist() == [[8, 9], [5, 5]]  # before the first token, its copy
    rows = batch.rows(-2, 2)
    assert rows.positions(2).tolist() == [[1, 2], [-1, 0]] and rows.count.tolist() == [2, 0]


def test_choose_takes_the_argmax_or_draws_as_the_request_samples():
    batch = batch_of([[1, 2], [1, 2]])
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((2, 8)), jnp.float32)
    token, p = batch.choose(logits, 0)
    assert p is None and token.tolist() == jnp.argmax(logits, -1).tolist()
    sampling = dataclasses.replace(batch.sampling, temperature=jnp.array([0.0, 1.0, 0.0]), top_k=jnp.array([0, 3, 0]))
    sampling = dataclasses.replace(sampling, **{
        f.name: getattr(sampling, f.name)[:2] for f in dataclasses.fields(sampling)
    })  # fmt: skip
    token, p = batch.replace(greedy=False, sampling=sampling).choose(logits, 0)
    assert token[0] == jnp.argmax(logits[0]) and p[0, token[0]] == 1.0
    assert int((p[1] > 0).sum()) == 3 and p[1, token[1]] > 0


def test_a_proposal_needs_no_probabilities():
    proposal = Proposal(jnp.zeros((1, 2), jnp.int32), jnp.zeros(1, jnp.int32))
    assert proposal.probs is None and proposal.logits is None
