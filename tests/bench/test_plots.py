"""A PNG for each benchmark, where matplotlib is installed; a plain word before measuring where it isn't."""

import builtins
import json
from pathlib import Path

import pytest

from jaxspec.bench import __main__ as bench
from jaxspec.bench import latency, plots, report, spent

FACTS = {"commit": None, "devices": ["cpu:0 cpu"], "width": 4}
LATENCIES = {f"{kind}_{figure}_ms": 3.0 for kind in latency.KINDS for figure in latency.FIGURES}
PART = {"rounds": 9, "tokens_per_round": 2.5, "low": 2.0, "high": None, "positions": [0.9, 0.6]}
BINS = {"seconds": [0, 1], "shares": {lane: [0.2, 0.2] for lane in spent.LANES}, "tokens_per_s": [5.0, 7.0]}
BINS |= {"running": [1, 2], "waiting": [3, 0]}
COURSE = [{"s": 0.0, "tokens_per_s": 5.0, "drafts": 1.0}, {"s": 0.1, "tokens_per_s": 7.0, "drafts": 0.0}]
ROWS = {
    "decode": [
        {"concurrency": 1, "overlap": "off", "ms_per_round": None, "tokens_per_s": None, "floor_ms": None},
        *(
            {"concurrency": n, "overlap": "on", "ms_per_round": 5.0, "tokens_per_s": 9.0, "floor_ms": 4.0}
            | {"accept_length": 2.0}
            for n in (1, 8)
        ),
    ],
    "prefill": [
        {"length": 64, "ttft_ms": 3.0, "floor_ms": 2.0},
        {"length": 32, "ttft_ms": 3.0, "floor_ms": 2.0, "batch": 2, "batch_tokens_per_s": 5.0}
        | {"batch_floor_tokens_per_s": 9.0},
    ],
    "serve": [{"via": via, "concurrency": 8, "output_tokens_per_s": 9.0} | LATENCIES for via in ("http", "offline")],
    "accept": [
        {"draft": "none", "data": data, "concurrency": n, "speedup": 1.0}
        for n in (1, 8)
        for data in ("GSM8K", "Alpaca")
    ]
    + [
        {"draft": draft, "data": data, "concurrency": n, "speedup": 1.5} | ({"parts": [PART]} if n == 1 else {})
        for draft in ("eagle3", "ngram")
        for n in (1, 8)
        for data in ("GSM8K", "Alpaca")
    ],
    "adaptive": [
        {"kind": kind, "rates": "0.5", "concurrency": n, "plain": 5.0, "course": {"plain": COURSE, "auto": COURSE}}
        | {"settings": {name: {"tokens_per_s": 6.0} for name in ("plain", "0", "3", "auto")}}
        for kind, n in (("steady", 1), ("steady", 8), ("rise and fall", 8))
    ],
    "kernels": [
        {"case": "one", "ratio": 1.5, "floor_us": 2.0},
        {"case": "two", "ratio": 1.2, "floor_us": 2.0, "plain_us": 8.0},
    ],
    "accuracy": [{"format": name, "draft": "ngram", "agree": 0.9} for name in ("unquantised", "weights")],
    "parity": [{"run": "ngram", "differ": 2, "margins": [0.1, 0.2]}],
    "load": [
        {"load": "closed loop of 8", "bins": BINS},
        {"load": "9.0/s", "bins": BINS},
        {"load": "nothing ran", "bins": {}},
    ],
    "sums": [{"way": way, "kilobytes": 2.0, "us": 5.0} for way in ("psum", "peer_sum")],
    "plan": [{"tp": tp, "concurrency": [1, 8], "ms": [5.0, 6.0]} for tp in (1, 2)],
    "host": [{"requests": n} | {name: {"mean_ms": 1.0, "p99_ms": 2.0} for name in bench.host.FIGURES} for n in (1, 8)],
    "schemas": [{"draft": "ngram", "temperature": t, "completed": 7} for t in (0.0, 1.0)],
    "structured": [
        *({"concurrency": n, "constrained": share, "ms_per_round": 5.0} for n in (1, 8) for share in (0.0, 1.0)),
        {"grammar": "any JSON", "median_us": 9.0},
    ],
}


def test_speed_ups_have_intervals_and_drafts_whole_numbers():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    rows = [row | {"speedup_low": 1.2, "speedup_high": 2.0} if row["speedup"] > 1 else row for row in ROWS["accept"]]
    bench.accept.plot({"rows": rows}, figure)
    lengths, positions, speeds = figure.axes
    assert len([each for each in speeds.containers if each.has_yerr]) == 2
    assert all(tick == int(tick) for tick in positions.get_xticks())
    (legend,) = figure.legends  # below: in the axes it would lie over bars and lines
    assert [text.get_text() for text in legend.get_texts()] == ["eagle3", "ngram"]
    assert not any(axes.get_legend() for axes in figure.axes)
    assert {label.get_rotation() for label in lengths.get_xticklabels()} == {30}
    (mean, _) = bench.accept._mean_speedups([row for row in rows if row["draft"] == "ngram"])
    assert mean["speedup"] == pytest.approx(1.5) and 1.2 < mean["speedup_low"] < 1.5 < mean["speedup_high"] < 2.0


def test_flat_curves_lie_within_their_axes_and_the_title_names_the_server_s_model(tmp_path):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    document = {"benchmark": "serve", "arguments": {"model": "m"}, "rows": ROWS["serve"], "facts": dict(FACTS)}
    document["facts"]["served_model"] = "theirs"
    bench.serve.plot(document, figure)
    for axes in figure.axes:
        highest = max(line.get_ydata()[0] for line in axes.lines)
        assert axes.get_ylim() == (0, pytest.approx(1.05 * highest))
    figures = []
    plots.draw(lambda _, figure: figures.append(figure), document, tmp_path / "x.png")
    assert figures[0].get_suptitle() == "serve: theirs, cpu:0 cpu"


def test_scores_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    row = {"draft": "none", "concurrency": 8, "speedup": 1.0, "tokens_per_s": 5.0}
    row |= {f"{name}{end}": 0.5 for name in ("strict", "flexible") for end in ("", "_low", "_high")}
    document = {"benchmark": "accuracy", "arguments": {"task": "gsm8k"}, "facts": FACTS, "rows": [row]}
    plots.draw(bench.accuracy.plot, document, tmp_path / "x.svg")
    assert b"<svg" in (tmp_path / "x.svg").read_bytes()


@pytest.mark.parametrize("name", bench.SUBCOMMANDS)
def test_every_benchmark_draws(name, tmp_path):
    pytest.importorskip("matplotlib")
    document = {"benchmark": name, "arguments": {"model": "m"}, "facts": FACTS, "rows": ROWS[name]}
    plots.draw(bench.SUBCOMMANDS[name].plot, document, tmp_path / "new" / "x.png")
    assert (tmp_path / "new" / "x.png").read_bytes().startswith(b"\x89PNG")


def test_the_document_names_every_benchmark():
    said = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    assert not [name for name in bench.SUBCOMMANDS if f"bench {name}" not in said and f"`{name}`" not in said]


def test_without_matplotlib_the_command_says_so_before_it_measures(monkeypatch, capsys):
    load = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return load(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setattr(bench.kernels, "run", lambda *_: pytest.fail("it measured"))
    with pytest.raises(SystemExit) as stop:
        bench.main(["kernels", "--small", "--plot", "x.png"])
    assert stop.value.code == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("options,says", [
    (["--plot", "x.txt"], "--plot x.txt: the name must end in one of "),
    (["--plot", "{file}/x.png"], "can't be written: "),
    (["--json", "{file}/x.json"], "can't be written: "),
    (["--json", "/proc/none/x.json"], "can't be written: "),
])  # fmt: skip
def test_a_file_that_cant_be_written_is_told_before_it_measures(monkeypatch, tmp_path, capsys, options, says):
    if options[0] == "--plot":
        pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    monkeypatch.setattr(bench.kernels, "run", lambda *_: pytest.fail("it measured"))
    with pytest.raises(SystemExit) as stop:
        bench.main(["kernels", "--small", *(each.replace("{file}", str(tmp_path / "file")) for each in options)])
    assert stop.value.code == 2 and says in capsys.readouterr().err


def test_decode_results_are_drawn_in_one_chart(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    facts = FACTS | {"cores": 1, "versions": {"python": "3.12", "jax": "0.11"}, "time": "now"}
    document = {"benchmark": "decode", "command": "run", "arguments": {"model": "m"}, "facts": facts, "notes": []}
    for name in ("none", "eagle3"):
        (tmp_path / f"{name}.json").write_text(json.dumps(document | {"rows": ROWS["decode"]}))
    assert bench.main(["report", str(tmp_path), "--plot", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    figure = pytest.importorskip("matplotlib.figure").Figure()
    report.compare({"none": document | {"rows": ROWS["decode"]}}, figure)
    assert [line.get_label() for axes in figure.axes for line in axes.lines] == ["none", "none"]


def test_a_chart_needs_something_to_draw(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    facts = FACTS | {"cores": 1, "versions": {"python": "3.12", "jax": "0.11"}, "time": "now"}
    (tmp_path / "a.json").write_text(
        json.dumps({"benchmark": "host", "command": "run", "facts": facts, "rows": [], "notes": []})
    )
    with pytest.raises(SystemExit):
        bench.main(["report", str(tmp_path), "--plot", str(tmp_path / "x.png")])
    assert "--plot draws decode results" in capsys.readouterr().err
