"""Token maps: drafters of the target's whole vocabulary that draft from some of it, with a head of these tokens."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import ConfigError, EngineConfig, load_drafter
from jaxspec.drafters.loading import check_drafter
from jaxspec.drafters.vocabulary import read_token_map
from jaxspec.train.__main__ import main
from tests.checkpoint.test_bin_file import Named, save, storage, tensor
from tests.drafters.test_drafter_weights import PROMPT, drafting
from tests.support.blocks import GOLDEN
from tests.support.sample import rare
from tests.support.tiny import tiny_checkpoint


def write(path, ids):
    path.write_text(json.dumps(ids))
    return str(path)


@pytest.mark.parametrize("kind", [rare("eagle"), rare("dflash"), rare("dspark"), "mtp"])
def test_drafts_are_the_likeliest_of_the_tokens_that_the_map_has(kind, tmp_path):
    """By the drafter with all tokens: the first draft's logits are the same at these ids."""
    target, draft = drafting(kind)
    vocab = target.config.vocab_size
    ids = list(range(3, vocab, 7))[::-1]  # in any order
    options = EngineConfig(draft=draft, draft_token_map=write(tmp_path / "map.json", ids))
    whole, less = load_drafter(draft, target), load_drafter(draft, target, options)
    everything, found = (jaxspec.propose(target, each, PROMPT, 2) for each in (whole, less))
    assert set(found.tokens.tolist()) <= set(ids)
    kept = np.asarray(everything.logits)[0, sorted(ids)]
    np.testing.assert_allclose(np.asarray(found.logits)[0], kept, atol=1e-5)
    assert found.tokens[0] == sorted(ids)[int(kept.argmax())]
    before, after = (sum(leaf.nbytes for leaf in jax.tree.leaves(_head(each.params))) for each in (whole, less))
    assert after * vocab == before * len(ids)


def _head(params):
    """Weight that computes the logits."""
    head = params["head"] if isinstance(params.get("head"), dict) else params
    return head["head"] if "head" in head else head["embed"]


@pytest.mark.parametrize("kind", [rare("dspark"), rare("dflash2")])
def test_drafts_follow_one_another_by_the_targets_ids(kind, tmp_path):
    """With a map, drafts are those of the whole drafter whose other tokens' logits are minus infinity."""
    target, draft = drafting(kind)
    ids = np.arange(1, target.config.vocab_size, 3)
    options = EngineConfig(draft=draft, draft_token_map=write(tmp_path / "map.json", ids.tolist()))
    whole, less = load_drafter(draft, target), load_drafter(draft, target, options)
    whole = replace(whole, drafter=masked(whole.drafter, ids))
    for prompt in (PROMPT, PROMPT[:7], list(range(1, 20))):
        expected, found = (jaxspec.propose(target, each, prompt, 4) for each in (whole, less))
        assert found.tokens.tolist() == expected.tokens.tolist() and set(found.tokens.tolist()) <= set(ids.tolist())
        logits = np.asarray(found.logits) if kind == "dspark" else np.asarray(found.logits)[:, ids]
        np.testing.assert_allclose(logits, np.asarray(expected.logits)[:, ids], atol=1e-5)


def masked(drafter, ids):
    """The drafter, to which all other tokens are impossible."""

    class Masked(type(drafter)):
        def _logits(self, params, rows):
            logits = super()._logits(params, rows)
            return jnp.where(jnp.isin(jnp.arange(logits.shape[-1]), ids), logits, -jnp.inf)

    return Masked(**{field.name: getattr(drafter, field.name) for field in fields(drafter)})


@pytest.mark.exhaustive
def test_a_map_of_all_tokens_changes_no_draft(tmp_path):
    target, draft = drafting("dflash")
    path = tmp_path / "map.npy"
    np.save(path, np.arange(target.config.vocab_size, dtype=np.int32))
    options = EngineConfig(draft=draft, draft_token_map=str(path))
    whole, same = load_drafter(draft, target), load_drafter(draft, target, options)
    assert np.array_equal(*(jaxspec.propose(target, each, PROMPT, 2).tokens for each in (whole, same)))


@pytest.mark.parametrize(("text", "said"), [
    ("{}", "must hold a list of token ids and nothing else"),
    ("[1, 2.5]", "must hold a list of token ids and nothing else"),
    ("[true]", "must hold a list of token ids and nothing else"),
    ("[]", "must hold a list of token ids, got float64 of shape"),
    ("[1, 100]", "token 100 is none of the target's 100"),
    ("[-1]", "token -1 is none of the target's 100"),
    ("[7, 3, 7]", "token 7 is in it 2 times"),
    (f"[{2**70}]", "must hold a list of token ids|more than 64 bits"),
    ("[1", "It must be a JSON file with a list of token ids"),
    ("[" * 200_000, "It must be a JSON file with a list of token ids"),
])  # fmt: skip
def test_a_file_that_is_no_map_is_refused(text, said, tmp_path):
    path = tmp_path / "map.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"--draft-token-map {path}.*({said})"):
        read_token_map(str(path), 100)
    (tmp_path / "map.npy").write_bytes(b"\x93NUMPY broken")
    with pytest.raises(ConfigError, match=r"or a \.npy or \.pt file"):
        read_token_map(str(tmp_path / "map.npy"), 100)
    with pytest.raises(ConfigError, match="No such file"):
        read_token_map(str(tmp_path / "none.json"), 100)


def longs(ids):
    """Tensor of int64 as torch saves it: its description, and its storage's bytes."""
    stored = storage("torch.LongStorage", elements=len(ids))
    return tensor(0, (len(ids),), (1,), stored), np.asarray(ids, np.int64).tobytes()


def test_maps_that_numpy_and_torch_saved_are_read(tmp_path):
    """Arrays; lists and tensors, as FR-Spec publishes them."""
    np.save(tmp_path / "map.npy", np.array([7, 3, 5], np.int32))
    assert read_token_map(str(tmp_path / "map.npy"), 8).tolist() == [3, 5, 7]
    ids = [5, 70000, 3, 300]  # of each size that a pickle has an opcode for
    for held in ([ids], longs(ids)):
        path = save(tmp_path / "map.pt", *held)
        assert read_token_map(str(path), 70001).tolist() == sorted(ids)
    many = list(range(3000))  # a pickle appends a thousand at a time
    assert read_token_map(str(save(tmp_path / "map.pt", many)), 70001).tolist() == many


@pytest.mark.parametrize(("held", "said"), [
    ([{"ids": [1]}], r"holds a dict, not one tensor or one list of token ids.*json\.dump"),
    ([[1, "2"]], "holds a list with a str in it"),
    ([[1, True]], "holds a list with a bool in it"),
    ([[]], "must hold a list of token ids, got float64"),
    ([[1, 100]], "token 100 is none of the target's 100"),
    (longs([4, 9, 4]), "token 4 is in it 2 times"),
    ([tensor()], r"must hold a list of token ids, got float32 of shape \[2, 2\]"),
    ([longs([4, 5, 6])[0], b"short"], "storage '0' holds 5 bytes where its tensors need 24"),
    ([Named("os.system", "exit 0")], r"asks for 'os\.system'.*Nothing was run.*json\.dump"),
])  # fmt: skip
def test_a_pt_file_that_is_no_map_is_refused(held, said, tmp_path):
    with pytest.raises(ConfigError, match=f"--draft-token-map:? {tmp_path}/map.pt.*{said}"):
        read_token_map(str(save(tmp_path / "map.pt", *held)), 100)


def test_a_pt_file_that_torch_didnt_write_is_refused(tmp_path):
    path = tmp_path / "map.pt"
    path.write_text("[1, 2]")
    with pytest.raises(
        ConfigError, match=r"--draft-token-map: .*map\.pt .*is truncated or not what torch\.save writes"
    ):
        read_token_map(str(path), 100)
    with pytest.raises(ConfigError, match=r"before version 1\.6.*json\.dump"):
        path.write_bytes((GOLDEN / "bin" / "legacy.bin").read_bytes())
        read_token_map(str(path), 100)


def test_drafters_that_cant_take_a_map_say_so(tmp_path):
    path = write(tmp_path / "map.json", [1, 2, 3])
    with pytest.raises(ConfigError, match=f"--draft-token-map {path}: --draft ngram has no weights"):
        check_drafter(EngineConfig(draft="ngram", draft_token_map=path))
    with pytest.raises(ConfigError, match="needs the target's whole vocabulary"):
        check_drafter(EngineConfig(draft=f"standalone:{tiny_checkpoint('llama')}", draft_token_map=path))
    target, draft = drafting("dflash2")
    with pytest.raises(ConfigError, match="--draft-token-map has 3 tokens; this drafter chooses among"):
        load_drafter(draft, target, EngineConfig(draft=draft, draft_token_map=path))
    with pytest.raises(ConfigError, match="needs a drafter"):
        EngineConfig(draft_token_map=path)
    target, draft = drafting("eagle3")  # which has a vocabulary of its own
    with pytest.raises(ConfigError, match="this drafter was trained to draft"):
        load_drafter(draft, target, EngineConfig(draft=draft, draft_token_map=path))
    target, draft = drafting("eagle")
    with pytest.raises(ConfigError, match="--topk 4: --draft-token-map has 3 tokens"):
        load_drafter(draft, target, EngineConfig(draft=draft, topk=4, draft_token_map=path))


def test_where_auto_chooses_a_drafter_without_weights_a_warning_says_so(tmp_path, caplog):
    target, _ = drafting("eagle")
    options = EngineConfig(draft="auto", draft_token_map=write(tmp_path / "map.json", [1, 2, 3]))
    with caplog.at_level("WARNING", "jaxspec"):
        assert load_drafter("auto", target, options).name == "ngram"
    assert "--draft-token-map" in caplog.text and "has no effect" in caplog.text


def test_a_command_makes_a_map_of_texts(tmp_path, capsys):
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"tokens": [5, 9, 9, 7, 7, 7, 8], "answers": [[1, 7]]}\n')
    folder = tmp_path / "out"
    command = ["token-map", "--model", str(tiny_checkpoint("llama")), "--data", str(texts), "--output", str(folder)]
    assert main([*command, "--size", "2"]) == 0
    assert json.loads((folder / "token_map.json").read_text()) == [7, 9]
    assert "2 tokens, 83.33% of the answers' tokens" in capsys.readouterr().out
    assert read_token_map(str(folder / "token_map.json"), 100).tolist() == [7, 9]
    with pytest.raises(SystemExit):
        main([*command, "--size", "1000000"])
    assert "--size 1000000 is more than the target's" in capsys.readouterr().err
