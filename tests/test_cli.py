"""The command `jaxspec`: which module each subcommand runs, and with what arguments."""

import os
import shlex
import subprocess
import sys

import pytest

import jaxspec
from jaxspec import cli
from jaxspec.bench import __main__ as bench
from server.cli import collect_env, completion


@pytest.mark.parametrize("argv,module,passed", [
    (["serve", "a/b", "--port", "1"], "server.__main__", ["a/b", "--port", "1"]),
    (["bench", "decode"], "jaxspec.bench.__main__", ["decode"]),
    (["train"], "jaxspec.train.__main__", []),
    (["compile", "--model", "m"], "jaxspec.engine.precompile", ["--model", "m"]),
    (["chat", "http://a"], "server.cli.chat", ["http://a"]),
    (["send-one", "--json"], "server.cli.send_one", ["--json"]),
    (["collect-env"], "server.cli.collect_env", []),
    (["completion", "bash"], "server.cli.completion", ["bash"]),
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
    assert "jaxspec serve" in told.out + told.err
    assert ("no command 'sevre'; did you mean serve?" in told.err) == (status == 2)


def test_version(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jaxspec", "--version"])
    assert cli.main() == 0 and capsys.readouterr().out == f"jaxspec {jaxspec.__version__}\n"


@pytest.mark.parametrize("argv", [["--version"], ["--help"]])
def test_it_answers_at_once(argv):
    """Without jax, which takes seconds to import, and what else is large."""
    code = (
        "import sys; from jaxspec import cli; cli.main(); "
        "sys.exit(bool({'jax', 'numpy', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True)
    assert done.returncode == 0 and "jaxspec" in done.stdout


def test_a_closed_pipe_ends_it_without_a_traceback():
    command = f"{sys.executable} -m jaxspec collect-env --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == "" and done.returncode in (0, cli.PIPE_CLOSED)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run([sys.executable, "-m", "jaxspec", "--help"], stdout=closed, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (cli.PIPE_CLOSED, b"")


@pytest.mark.parametrize("argv,says", [
    (["decod"], "no command 'decod'; did you mean decode?"),
    (["decode", "--promt-len", "3"], "unknown argument --promt-len; did you mean --prompt-len?"),
    (["decode", "--xq", "3", "--yq"], "unknown arguments --xq, --yq; --help lists the flags"),
    (["decode", "--max-num-seqs", "3", "--x"], "--max-num-seqs; here it is --max-running-requests, --x; --help lists"),
    (["zzz"], "no command 'zzz'; there are decode, "),
    ([], "bench: give a command: decode, "),
    (["decode", "--concurrency", "x"], "bench decode: argument --concurrency: takes a list like 1,8,32 of"),
    (["sums", "--tp-size", "1"], "argument --tp-size: must be at least 2 devices, got '1'"),
    (["adaptive", "--accept-rates", "0.5", "--learn", "-1"], "--learn: must be a number of at least 0, got '-1'"),
])  # fmt: skip
def test_errors_of_benchmarks_name_the_nearest(capsys, argv, says):
    with pytest.raises(SystemExit) as error:
        bench.main(argv)
    told = capsys.readouterr().err
    assert error.value.code == 2 and says in told and told.count("\n") == 1, "one line, and not the usage"


@pytest.mark.parametrize("words,completed", [
    (["s"], ["serve", "send-one"]),
    (["serve", "a/b", "--draft-p"], ["--draft-policy"]),
    (["serve", "a/b", "--draft-policy", ""], ["auto", "ragged", "fixed"]),
    (["bench", "sums", "--js"], ["--json"]),
    (["bench", "struct"], ["structured"]),
    (["train", "eag"], ["eagle3"]),
    (["completion", ""], ["bash", "zsh"]),
    (["collect-env", ""], []),
])  # fmt: skip
def test_completion(completion_script, words, completed):
    typed = shlex.join(["jaxspec", *words])
    code = f"{completion_script}\nCOMP_WORDS=({typed}); COMP_CWORD={len(words)}; _jaxspec; echo ${{COMPREPLY[*]}}"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == completed and done.stderr == ""


@pytest.fixture(scope="module")
def completion_script():
    return completion.script().replace("complete -o", ": complete -o")


def test_the_environment_is_collected_without_secrets(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "a secret")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert collect_env.main([]) == 0
    told = capsys.readouterr().out
    assert f"jaxspec: {jaxspec.__version__} in " in told and "\njaxlib: " in told and "devices: cpu:0" in told
    assert "HF_TOKEN: (set)\n" in told and "JAX_PLATFORMS: cpu\n" in told and "a secret" not in told
