"""Scripts that time a GPU run, as far as a CPU can tell, so that none is found broken there."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from jaxspec.bench import adaptive, engines, steady, traffic
from scripts.gpu import in_turn, pictures
from tests.support.picture_prompts import GOLDEN

PICTURES = [
    *("--model", str(GOLDEN / "qwen3_5"), "--side", "64", "--requests", "2", "--turns", "1", "--seconds", "1"),
    *(
        "--context-length",
        "2048",
        "--allow-longer-context",
        "--dtype",
        "float32",
        "--chunked-prefill-size",
        "32",
        "--page-size",
        "8",
    ),
]


class Made(Exception):
    pass


def test_pictures_engine_has_the_commands_options(monkeypatch):
    def engine(config, model, draft):
        raise Made(config.max_itl_ms, config.num_draft_tokens, draft.params["accept_rates"].tolist())

    monkeypatch.setattr(engines, "Engine", engine)
    monkeypatch.setattr(sys, "argv", ["pictures", *PICTURES])
    with pytest.raises(Made) as made:
        pictures.main()
    assert made.value.args == (50, 3, [[0.75, 0.5, 0.25]])


@pytest.mark.exhaustive
def test_pictures_are_timed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pictures", *PICTURES])
    pictures.main()
    said = capsys.readouterr().out
    for each in ("tower: ", "first token of a picture: ", "rounds: ", "--max-itl-ms None: ", "--max-itl-ms 50: "):
        assert each in said


def test_benchmarks_of_one_target_load_it_once(monkeypatch, tmp_path):
    loaded, ran = [], []
    monkeypatch.setattr(engines, "load_target", lambda config: loaded.append(config.model) or object())
    for owner, name in ((engines, "start"), (steady.Load, "run"), (adaptive, "time_rounds"), (traffic, "serve")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # restored afterwards

    def main(arguments):
        of = SimpleNamespace(model=arguments[1], quantization="fp8", tp_size=2)
        ran.append((arguments[0], engines.load_target(of)))
        return 0

    monkeypatch.setattr(in_turn, "main", main)
    assert in_turn.run(str(tmp_path / "lock"), [["load", "a"], ["decode", "a"], ["decode", "b"]]) == 0
    assert loaded == ["a", "b"] and [name for name, _ in ran] == ["load", "decode", "decode"]
    assert ran[0][1] is ran[1][1] is not ran[2][1]
