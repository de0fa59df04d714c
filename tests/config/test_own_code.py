"""Modules of the user's: an error in one is a line that says where."""

import itertools
import traceback

import jax
import pytest

from jaxspec.config.options import ConfigError
from jaxspec.config.own_code import blame, import_own

SOURCE = "class Own:\n    def inside(self, x):\n        return 1 / x\n    def odd(self): pass\n"
NAMES = map("own_code_{}".format, itertools.count())


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def make(source):
        name = next(NAMES)
        (tmp_path / f"{name}.py").write_text(source)
        return import_own(f"--draft {name}:Own?depth=2", name)

    return make


@pytest.mark.parametrize("source, said", [
    ("1 / 0", "ZeroDivisionError: division"),
    ("def f(", "SyntaxError: "),
    ("import jaxspec.nowhere", "ModuleNotFoundError: No module named 'jaxspec.nowhere'"),
    ("from json import nothing", "ImportError: cannot import name 'nothing'"),
])  # fmt: skip
def test_a_module_that_fails(module, source, said):
    with pytest.raises(ConfigError, match=rf"^--draft own_code_\d+:Own\?depth=2: importing own_code_\d+ fails: {said}"):
        module(source)


def test_a_module_that_is_not_there():
    for name in ("nowhere", "nowhere.mine", "json.mine"):
        with pytest.raises(ImportError):
            import_own(f"--loss {name}:x", name)


@pytest.mark.parametrize("level, lines", [("INFO", 0), ("DEBUG", 1)])
def test_a_callback_that_fails_is_blamed_and_its_traceback_is_for_debugging(module, caplog, level, lines):
    own = module("def inside(x): return 1 / 0\n")
    caplog.set_level(level, "jaxspec")
    with pytest.raises(Exception, match="inside") as caught:
        jax.block_until_ready(jax.jit(lambda x: jax.pure_callback(own.inside, x, x))(1.0))
    assert "fails: ZeroDivisionError: division by zero (" in blame(caught.value)
    assert [each.name for each in caplog.records if "_callback failed" in each.message] == ["jax._src.callback"] * lines
    with pytest.raises(Exception, match="elsewhere"):  # not the user's: jax reports it as ever
        jax.block_until_ready(jax.jit(lambda x: jax.pure_callback(elsewhere, x, x))(1.0))
    assert len([each for each in caplog.records if "_callback failed" in each.message]) == lines + 1


def elsewhere(x):
    return 1 / 0


def test_what_fails_within_is_blamed(module):
    own = module(SOURCE).Own()
    with pytest.raises(ZeroDivisionError) as caught:
        own.inside(0)
    said = blame(caught.value)
    assert ":Own?depth=2 fails: ZeroDivisionError: division by zero (" in said and said.endswith("line 3, in inside)")
    wrapped = RuntimeError("the engine stopped")
    wrapped.__cause__ = caught.value
    assert blame(wrapped) == said
    with pytest.raises(TypeError) as caught:
        own.odd(1)
    assert ":Own?depth=2 fails: TypeError: Own.odd() takes 1" in blame(caught.value)
    text = "".join(traceback.format_exception(caught.value.__cause__ or wrapped.__cause__))
    assert blame(RuntimeError(f"INTERNAL: CpuCallback error calling callback: {text}")) == said
    assert blame(ValueError("of ours")) is None and blame(TypeError("int() takes 1")) is None
