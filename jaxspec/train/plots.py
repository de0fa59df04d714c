"""`loss.png` and `acceptance.png` of a run. matplotlib comes with the extra `bench`, and is loaded only to draw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.bench.plots import whole
from jaxspec.train.data import TrainError
from jaxspec.train.evaluate import Figures

DOTS_PER_INCH = 120


def check() -> None:
    """**Raises:** `TrainError` if matplotlib isn't installed, before an hour of training ends without its charts."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise TrainError(
            f"charts need matplotlib ({error}): install it with pip install matplotlib, or add --no-plots"
        ) from error


def draw_loss(history: Sequence[dict[str, Any]], path: Path) -> None:
    """Loss, and the acceptance of each draft position, over steps."""
    figure = _figure(11, 4.5)
    loss, acceptance = figure.subplots(1, 2)
    steps = [record["step"] for record in history]
    look = {"linewidth": 0.8, "marker": "o" if len(steps) == 1 else ""}  # a line needs two
    loss.plot(steps, [record["loss"] for record in history], **look)
    loss.set(xlabel="step", ylabel="loss", title="mean loss of a draft")
    for i in range(len(history[0]["accepted"]) if history else 0):
        acceptance.plot(steps, [r["accepted"][i] for r in history], **look, label=f"draft {i + 1}")
    acceptance.set(
        xlabel="step", ylabel="share of rounds", ylim=(0, 1), title="training: all drafts up to this one right"
    )
    acceptance.legend(fontsize="small")
    for axes in (loss, acceptance):
        whole(axes.xaxis)
        axes.grid(alpha=0.3)
    figure.savefig(path)


def draw_acceptance(figures: Sequence[Figures], path: Path) -> None:
    """Tokens a round by category, and by category the share of rounds that each draft position stood in."""
    figure = _figure(12, 1.8 + 0.34 * len(figures))
    lengths, shares = figure.subplots(1, 2, sharey=True)
    names = [f.category for f in figures][::-1]
    bars = lengths.barh(names, [f.accept_length for f in figures][::-1])
    lengths.bar_label(bars, fmt="%.2f", padding=3, fontsize="small")
    lengths.set(xlabel="tokens a round, bonus included", xlim=(0, 1.15 * max(f.accept_length for f in figures)))
    image = shares.imshow([f.accepted for f in figures][::-1], aspect="auto", vmin=0, vmax=1, origin="lower")
    for y, each in enumerate(figures[::-1]):
        for x, share in enumerate(each.accepted):
            shares.text(x, y, f"{share:.2f}", ha="center", va="center", color="black" if share > 0.5 else "white")
    shares.set_xticks(range(len(figures[0].accepted)), range(1, len(figures[0].accepted) + 1))
    shares.set(xlabel="draft, accepted with all before it")
    figure.colorbar(image, ax=shares, label="share of rounds")
    figure.savefig(path)


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")
