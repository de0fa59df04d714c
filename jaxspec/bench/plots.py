"""PNG files from documents. matplotlib comes with the extra `bench` and is loaded only when a plot is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxspec.bench.results import BenchError, Document, Row, check_writable

DOTS_PER_INCH = 120
INCHES = 11, 4.5
LINE = 150  # small letters side by side


def check(path: Path) -> None:
    """**Raises:** `BenchError` if matplotlib isn't installed or can't write such a file, before anything was measured
    for a plot."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchError(f"--plot needs matplotlib ({error}); install it with: pip install matplotlib") from error
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:] not in known:
        raise BenchError(f"--plot {path}: the name must end in one of {', '.join(known)}")
    check_writable("--plot", path)


def curve(axes: Any, rows: Sequence[Row], x: str, y: str, look: str = "o-", **options: Any) -> Any:
    """A line through the rows, from one of their figures to another. `look` and `options` are matplotlib's."""
    (line,) = axes.plot([row[x] for row in rows], [row[y] for row in rows], look, **options)
    return line


def with_interval(axes: Any, rows: Sequence[Row], x: str, y: str, **options: Any) -> None:
    """A line through the rows, with bars from `y`_low to `y`_high where there are any. `options` are matplotlib's."""
    ends = [[row[y] if row.get(f"{y}_{end}") is None else row[f"{y}_{end}"] for row in rows] for end in ("low", "high")]
    around = [[abs(row[y] - end) for row, end in zip(rows, each, strict=True)] for each in ends]
    axes.errorbar([row[x] for row in rows], [row[y] for row in rows], around, fmt="o-", capsize=3, **options)


def against(axes: Any, x: Sequence[int], xlabel: str, ylabel: str) -> None:
    """Finish `axes` whose curves run over `x`, sizes that double or so: a tick at each, values from zero, a legend."""
    ticks = sorted(set(x))
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set(xlabel=xlabel, ylabel=ylabel)
    from_zero(axes)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def legend_below(figure: Any, axes: Any) -> None:
    """Put one legend, of what `axes` has, below all of `figure`, in as many columns as its longest label allows."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        columns = max(1, min(len(labels), LINE // (max(map(len, labels)) + 6)))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize="small")


def from_zero(axes: Any) -> None:
    """Values from zero, with room of the whole range above the highest: curves that are flat lie within it."""
    axes.update_datalim([(1, 0)], updatex=False)
    axes.autoscale_view(scalex=False)
    axes.set_ylim(0, None)


def whole(axis: Any) -> None:
    """Ticks of an axis at whole numbers only: drafts, requests, texts."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def rotated(axes: Any, names: Sequence[str]) -> None:
    """Names below the ticks of `axes`, turned so that none covers the next."""
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", rotation_mode="anchor", fontsize="small")


def draw(plot: Callable[[Document, Any], None], document: Document, path: Path) -> None:
    """Have `plot` fill a figure, and write it to `path`. No display is needed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    plot(document, figure)
    facts = document["facts"]
    model = facts.get("served_model") or document["arguments"].get("model")
    what = model, *facts.get("devices", [])[:1], facts["commit"]
    figure.suptitle(f"{document['benchmark']}: {', '.join(part for part in what if part)}", fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
