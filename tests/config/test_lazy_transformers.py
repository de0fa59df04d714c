"""Where PyTorch is spared, transformers doesn't find it, and nobody else notices."""

import importlib
import importlib.util

import pytest

from jaxspec.config import lazy_transformers


@pytest.mark.parametrize("spared", [True, False])
def test_transformers_alone_finds_no_pytorch(spared, monkeypatch, tmp_path):
    monkeypatch.setattr(lazy_transformers, "_spared", spared)
    (tmp_path / "torch.py").write_text("version = 'a file that stands for PyTorch'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(lazy_transformers.sys.modules, "torch", raising=False)
    with lazy_transformers.imported() as transformers:
        assert transformers.PreTrainedTokenizerFast
        assert (importlib.util.find_spec("torch") is None) == spared
    assert importlib.import_module("torch").version
    with lazy_transformers.imported():  # which is there, so it can't be spared
        assert importlib.import_module("torch").version
    monkeypatch.delitem(lazy_transformers.sys.modules, "torch")
