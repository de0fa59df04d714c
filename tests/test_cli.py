"""The command `jaxspec`: which module each subcommand runs, and with what arguments."""

import subprocess
import sys

import pytest

import jaxspec
from jaxspec import cli


@pytest.mark.parametrize("argv,module,passed", [
    (["serve", "a/b", "--port", "1"], "server.__main__", ["a/b", "--port", "1"]),
    (["bench", "decode"], "jaxspec.bench.__main__", ["decode"]),
    (["train"], "jaxspec.train.__main__", []),
    (["compile", "--model", "m"], "jaxspec.engine.precompile", ["--model", "m"]),
    (["vllm", "serve", "a/b"], "server.__main__", ["vllm", "serve", "a/b"]),
])  # fmt: skip
def test_commands(monkeypatch, argv, module, passed):
    ran = []

    class Module:
        def run(self):
            ran.append(sys.argv[1:])
            return 7

        main = run

    monkeypatch.setattr(cli, "import_module", lambda name: ran.append(name) or Module())
    monkeypatch.setattr(sys, "argv", ["jaxspec", *argv])
    monkeypatch.setattr(sys, "path", ["/elsewhere"])
    assert cli.main() == 7 and ran == [module, passed]
    assert "" in sys.path, "--draft module:Class finds a module of the folder that one is in"


@pytest.mark.parametrize(("argv", "status"), [([], 0), (["--help"], 0), (["sevre"], 2)])
def test_what_else_is_typed(monkeypatch, capsys, argv, status):
    monkeypatch.setattr(sys, "argv", ["jaxspec", *argv])
    assert cli.main() == status
    told = capsys.readouterr()
    assert "jaxspec serve" in told.out + told.err and ("no command 'sevre'" in told.err) == (status == 2)


def test_version(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jaxspec", "--version"])
    assert cli.main() == 0 and capsys.readouterr().out == f"jaxspec {jaxspec.__version__}\n"


def test_the_library_does_not_import_the_server():
    code = "import sys, jaxspec, jaxspec.cli; sys.exit(any(name.split('.')[0] == 'server' for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
