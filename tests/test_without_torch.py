"""Where PyTorch is spared, transformers doesn't find it, and nobody else notices."""

import importlib
import importlib.util

import pytest

from jaxspec import without_torch


@pytest.mark.parametrize("spared", [True, False])
def test_transformers_alone_finds_no_pytorch(spared, monkeypatch, tmp_path):
    monkeypatch.setattr(without_torch, "_spared", spared)
    (tmp_path / "torch.py").write_text("version = 'a file that stands for PyTorch'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(without_torch.sys.modules, "torch", raising=False)
    with without_torch.imported() as transformers:
        assert transformers.PreTrainedTokenizerFast
        assert (importlib.util.find_spec("torch") is None) == spared
    assert importlib.import_module("torch").version
    with without_torch.imported():  # which is there, so it can't be spared
        assert importlib.import_module("torch").version
    monkeypatch.delitem(without_torch.sys.modules, "torch")
