"""Draw docs/rounds.png from the table "Beside vLLM" of docs/performance.md: `python -m scripts.rounds_chart`.

It needs matplotlib, which comes with the extra `bench`.
"""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
HEAD = "| GPU | mode | 1 | 8 | 32 | 128 |"  # of the table
Row = tuple[str, list[tuple[int, float, float]]]  # its name; requests, then ms of jaxspec and of vLLM


def rows(text: str) -> list[Row]:
    """The rows of the table, without cells that lack a figure."""
    counts = [int(cell) for cell in HEAD.split("|")[3:-1]]
    found = []
    for line in text[text.index(HEAD) :].splitlines()[2:]:
        if not line.startswith("|"):
            break
        gpu, mode, *cells = (cell.strip() for cell in line.split("|")[1:-1])
        pairs = [(n, *cell.split(" / ")) for n, cell in zip(counts, cells, strict=True)]
        points = [(n, float(ours), float(theirs)) for n, ours, theirs in pairs if "-" not in (ours, theirs)]
        found.append((f"{gpu}: {mode.partition(': jaxspec')[0]}", points))
    return found


def main() -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    told = [row for row in rows((DOCS / "performance.md").read_text()) if row[0].startswith("H200")]
    figure = Figure(figsize=(4 * len(told), 3.4), layout="constrained")
    for axes, (name, points) in zip(figure.subplots(1, len(told)), told, strict=True):
        requests = [n for n, *_ in points]
        axes.plot(requests, [ours for _, ours, _ in points], "o-", label="jaxspec")
        axes.plot(requests, [theirs for *_, theirs in points], "s--", label="vLLM 0.26")
        axes.set(title=name, xlabel="requests at a time", xscale="log", ylim=(0, None))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_xticks(requests, minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("ms a round (less is better)")
    figure.axes[0].legend()
    figure.savefig(DOCS / "rounds.png", dpi=100)


if __name__ == "__main__":
    main()
