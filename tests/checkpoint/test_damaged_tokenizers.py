"""Tokenizers of folders that can't be read: what is said names the file at fault."""

import importlib.util
import shutil

import pytest

from jaxspec.checkpoint import CheckpointError
from jaxspec.checkpoint.shards import ModelFolder
from tests.support.tiny import BYTE_VOCAB, tiny_checkpoint


def break_tokenizer(name: str, text: str):
    return lambda folder: (folder / name).write_text(text)


def break_tokenizer_link(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("../../blobs/4d7a")


def break_sentencepiece(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>\x15\0\0\0\0\x18\x02")


@pytest.mark.parametrize("damage, message", [
    (break_tokenizer("tokenizer.json", '{"a": 1}'), "tokenizer.json is no tokenizer: model must be an object"),
    (break_tokenizer("tokenizer.json", '{"model": {}}'), "tokenizer.json is no tokenizer: added_tokens must be a"),
    (break_tokenizer("tokenizer.json", '{"a":'), "can't read .*/tokenizer.json: Expecting value"),
    (break_tokenizer("tokenizer.json", "version https://git-lfs.github.com/spec/v1\n"), "json is a Git LFS pointer"),
    (break_tokenizer("tokenizer_config.json", "[]"), "tokenizer_config.json must hold a JSON object, found list"),
    (break_tokenizer("tokenizer_config.json", '{"a":'), "can't read .*/tokenizer_config.json: Expecting value"),
    (break_tokenizer("special_tokens_map.json", "[]"), "special_tokens_map.json must hold a JSON object"),
    (break_tokenizer_link, "tokenizer.json is a link to .* gone"),
    (break_sentencepiece, "tokenizer.model and no tokenizer.json.* pip install sentencepiece protobuf"),
])  # fmt: skip
def test_each_kind_of_damage_to_a_tokenizer_has_its_own_message(monkeypatch, tmp_path, damage, message):
    shutil.copytree(tiny_checkpoint(vocab=BYTE_VOCAB, tokenizer=True), tmp_path / "a")
    damage(tmp_path / "a")
    find = importlib.util.find_spec
    without = lambda name, *more: None if name == "sentencepiece" else find(name, *more)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(CheckpointError, match=message):
        ModelFolder(tmp_path / "a", tmp_path / "a" / "config.json").tokenizer()
