"""PNGs of a run, where matplotlib is installed; a plain word before training where it isn't."""

import builtins

import pytest

from jaxspec.train import plots
from jaxspec.train.data import TrainError
from jaxspec.train.evaluate import Figures

FIGURES = [Figures(name, 3, 10, 1.75, (0.5, 0.25)) for name in ("writing", "all")]


def test_charts_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    plots.draw_loss([{"step": i, "loss": 5.0 / i, "accepted": [0.5, 0.2]} for i in (1, 2)], tmp_path / "loss.png")
    plots.draw_acceptance(FIGURES, tmp_path / "acceptance.png")
    for path in (tmp_path / "loss.png", tmp_path / "acceptance.png"):
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_a_single_record_is_drawn_as_a_point(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    monkeypatch.setattr(plots, "_figure", lambda *_: figure)
    plots.draw_loss([{"step": 4, "loss": 5.0, "accepted": [0.5]}], tmp_path / "loss.png")
    assert {line.get_marker() for axes in figure.axes for line in axes.lines} == {"o"}
    assert {tick % 1 for tick in figure.axes[0].get_xticks()} == {0}


def test_missing_matplotlib_is_told_before_training(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError("no matplotlib")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(TrainError, match="--no-plots"):
        plots.check()
