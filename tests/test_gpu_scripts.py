"""Scripts that time a GPU run, as far as a CPU can tell, so that none is found broken there."""

from __future__ import annotations

import sys

import pytest

from jaxspec.bench import engines
from scripts.gpu import pictures
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
