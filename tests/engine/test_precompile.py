"""`jaxspec compile`: what it refuses, what it says, and its exit status. The programs are `test_executable_store`'."""

from types import SimpleNamespace

import pytest

from jaxspec.compiling.ladder import ladder_of
from jaxspec.engine import precompile
from jaxspec.rounds.packing import Shapes

SHAPES = Shapes(4, 64, 4, 16, (1, 2), 1, (1,), (4,), (4,))


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU on which a runner finds `found` programs in the cache."""
    told = SimpleNamespace(found=0, keeps=True, configs=[])

    def runner(config):
        (tmp_path / "out" / "executables").mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / "executables" / "a").write_bytes(bytes(3_000_000))
        told.configs.append(config)
        programs = SimpleNamespace(found=ladder_of(SHAPES)[: told.found])
        return SimpleNamespace(
            shapes=SHAPES, programs=programs, keeps_programs=told.keeps, draft=SimpleNamespace(name="mine")
        )

    monkeypatch.setattr(precompile, "Runner", runner)
    monkeypatch.setattr(precompile, "claim_device", lambda: None)
    monkeypatch.setattr(precompile.jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv("JAXSPEC_CACHE", raising=False)
    monkeypatch.setenv("JAXSPEC_CACHE", "elsewhere")  # so that it is put back
    return told


def test_it_fills_the_folder_with_the_servers_programs(gpu, tmp_path, capsys):
    assert precompile.main(["--model", "m", "--max-running-requests", "4", "--output", str(tmp_path / "out")]) == 0
    (config,) = gpu.configs
    assert (config.model, config.draft, config.max_running_requests) == ("m", "auto", 4)
    said = capsys.readouterr().out
    assert f"{len(ladder_of(SHAPES))} programs for cpu, 0 of them there before" in said
    assert f"holds 3 MB of programs. Serve with JAXSPEC_CACHE={tmp_path / 'out'} and" in said


@pytest.mark.parametrize(("missing", "status"), [(0, 0), (1, 1)])
def test_check_fails_if_something_was_missing(gpu, tmp_path, missing, status):
    gpu.found = len(ladder_of(SHAPES)) - missing
    assert precompile.main(["--check", "--output", str(tmp_path / "out")]) == status


@pytest.mark.parametrize(
    ("argv", "said"),
    [(["--skip-warmup"], "drop --skip-warmup"), (["--dp-size", "2"], "--dp-size"), (["--page-size", "0"], "page-size")],
)
def test_options_that_make_no_sense_are_refused(gpu, capsys, argv, said):
    with pytest.raises(SystemExit) as stop:
        precompile.main(argv)
    assert stop.value.code == 2 and said in capsys.readouterr().err


def test_what_cannot_be_kept_is_refused(gpu, tmp_path, capsys, monkeypatch):
    gpu.keeps = False
    with pytest.raises(SystemExit):
        precompile.main(["--output", str(tmp_path / "out")])
    assert "a drafter of your own" in capsys.readouterr().err
    monkeypatch.setattr(precompile.jax, "default_backend", lambda: "cpu")
    with pytest.raises(SystemExit):
        precompile.main([])
    assert "programs are kept for GPUs alone, and this is a cpu" in capsys.readouterr().err
