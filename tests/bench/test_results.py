"""Tables, documents and the report made of them."""

import argparse
import json
import sys

import pytest

from jaxspec.bench import __main__ as bench
from jaxspec.bench.results import BenchError, Column, Result, Table, counts, numbers

TABLE = Table("title", (Column("size", "size"), Column("ms", "ms", ".2f"), Column("extra", "extra")))


def result(path=None):
    return Result("decode", ["decode", "--model", "a b"], argparse.Namespace(rate=float("inf"), path=path), TABLE, path)


def test_a_row_is_printed_and_saved_at_once(tmp_path, capsys):
    run = result(tmp_path / "new" / "x.json")
    run.add({"size": 8, "ms": 1.239})
    saved = json.loads((tmp_path / "new" / "x.json").read_text())
    assert saved["rows"] == [{"size": 8, "ms": 1.239}]
    assert saved["command"] == "python -m jaxspec.bench decode --model 'a b'"
    assert saved["arguments"]["rate"] == "inf"
    run.add({"size": 16, "ms": None})
    run.note("mind this")
    title, head, first, second, note = capsys.readouterr().out.splitlines()
    assert title == "title" and head.split() == ["size", "ms"]  # nobody asked for `extra`
    assert first.split() == ["8", "1.24"] and second.split() == ["16", "-"] and note == "mind this"
    assert json.loads((tmp_path / "new" / "x.json").read_text())["notes"] == ["mind this"]


@pytest.mark.parametrize("error, status, said", [
    (BenchError("the next one fails"), 2, "decode: the next one fails\n"), (KeyboardInterrupt(), 130, "interrupted\n"),
])  # fmt: skip
def test_an_error_or_an_interrupt_loses_no_row(tmp_path, monkeypatch, capsys, error, status, said):
    def run(args, result):
        result.add({"draft": "none"})
        raise error

    monkeypatch.setattr(bench.SUBCOMMANDS["decode"], "run", run)
    with pytest.raises(SystemExit) as ended:
        sys.exit(bench.main(["decode", "--csv", str(tmp_path / "x.csv")]))
    assert ended.value.code == status
    assert (tmp_path / "x.csv").read_text().split() == ["draft", "none"]
    assert capsys.readouterr().err.endswith(said)


def test_an_error_before_any_row_leaves_earlier_files(tmp_path, monkeypatch):
    def run(args, result):
        raise BenchError("the model isn't there")

    monkeypatch.setattr(bench.SUBCOMMANDS["decode"], "run", run)
    files = tmp_path / "x.csv", tmp_path / "x.json"
    for file in files:
        file.write_text("an earlier run's")
    with pytest.raises(SystemExit):
        bench.main(["decode", "--csv", str(files[0]), "--json", str(files[1])])
    assert {file.read_text() for file in files} == {"an earlier run's"}


def test_facts_tell_code_and_machine_without_touching_the_device(monkeypatch):
    def touched(*_):
        raise AssertionError("a server may be about to take the device's memory")

    monkeypatch.setattr("jax.devices", touched)
    monkeypatch.setattr("jax.local_devices", touched)
    facts = result().document["facts"]
    assert set(facts["versions"]) >= {"jaxspec", "python", "jax"} and facts["cores"] >= 1
    assert facts["commit"] is None or len(facts["commit"].removesuffix("+changes")) == 12


def test_markdown():
    assert TABLE.markdown([{"size": 8, "ms": 2}, {"size": 9, "ms": None}]).splitlines() == [
        "| size | ms |",
        "| --- | --- |",
        "| 8 | 2.00 |",
        "| 9 | - |",
    ]


@pytest.mark.parametrize("text", ["", "1,", "0,2", "a", "1.5"])
def test_lists_of_counts_refuse(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"takes a list like 1,8,32 of integers from 1 on, got"):
        counts("1,8,32")(text)
    assert counts("1,8,32")("4,2") == [4, 2]


def test_lists_of_numbers_refuse_what_is_out_of_range():
    rates = numbers(float, 0.0, 1.0, "0.75,0.5")
    assert rates("1,0.25,0") == [1.0, 0.25, 0.0]
    with pytest.raises(argparse.ArgumentTypeError, match=r"of numbers from 0 to 1, got '0.5,1.5'"):
        rates("0.5,1.5")


@pytest.fixture
def folder(tmp_path):
    for name, rows in (("b-plain", [{"concurrency": 8, "ms_per_round": 5.0}]), ("a-first", [{"concurrency": 1}])):
        run = result(tmp_path / f"{name}.json")
        run.document["rows"] = rows
        run.fact(devices=["cuda:0 H200"], ready_s=12.34)
        run.note(f"note of {name}")
    (tmp_path / "b-plain.png").write_bytes(b"")
    return tmp_path


def test_the_report_has_every_document_with_what_made_it(folder, capsys):
    capsys.readouterr()
    assert bench.main(["report", str(folder)]) == 0
    said = capsys.readouterr().out
    first, second = said.split("### b-plain")
    assert "### a-first" in first and "- note of a-first" in first and "![" not in first
    assert "    python -m jaxspec.bench decode --model 'a b'" in second
    assert "cuda:0 H200" in second and "ready in 12.3 s" in second
    assert "\n\ndecode: time per round, ms:\n\n| requests | ms/round |\n" in second, "units are in the title"
    assert "| 8 | 5.000 |" in second and "![b-plain](b-plain.png)" in second


def test_the_report_leaves_out_what_holds_no_result(folder, tmp_path_factory, capsys):
    (folder / "c.json").write_text('{"rows": []}')  # a training run's recipe has no benchmark either
    (folder / "d.json").mkdir()
    assert bench.main(["report", str(folder)]) == 0
    said = capsys.readouterr()
    assert "### b-plain" in said.out and "left out: " in said.err
    assert "c.json is not a benchmark's result (KeyError" in said.err and "d.json is not" in said.err
    (bad := tmp_path_factory.mktemp("bad")).joinpath("c.json").write_text("[1]")
    empty = tmp_path_factory.mktemp("empty")
    for path, said in ((bad, "c.json is not a benchmark's result"), (empty, "has no .json files")):
        with pytest.raises(SystemExit) as stop:
            bench.main(["report", str(path)])
        assert stop.value.code == 2
        assert said in capsys.readouterr().err
