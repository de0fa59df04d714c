"""The matched table: each drafter gets the shared settings and its own, and the table says who is best by how much."""

import argparse
import json

import pytest

from jaxspec.bench import matched
from jaxspec.bench.results import BenchError
from jaxspec.train import __main__ as train
from jaxspec.train import flags

BASE = ["compare", "--model", "m", "--data", "d", "--batch-size", "4", "--learning-rate", "0.01", "--seed", "3"]


def found(output, drafters, *more):
    parser = flags.parser()
    methods = [name for name in flags.commands(parser) if name not in flags.TOOLS]
    given = [*BASE, "--output", str(output), "--benchmark", "b", "--drafters", drafters, "--budget", "30", *more]
    return matched.contenders(parser.parse_args(given), parser.parse_args, methods)


def test_each_drafter_has_the_shared_settings_and_its_own(tmp_path):
    eagle, block, more = found(tmp_path, "eagle3,dspark?markov-rank=64&learning-rate=0.02,dspark")
    assert [each.args.command for each in (eagle, block, more)] == ["eagle3", "dspark", "dspark"]
    assert {each.args.batch_size for each in (eagle, block)} == {4} and {each.args.seed for each in (eagle, block)} == {
        3
    }
    assert (eagle.args.learning_rate, block.args.learning_rate, more.args.learning_rate) == (0.01, 0.02, 0.01)
    assert block.args.markov_rank == 64 and more.args.markov_rank is None and eagle.args.steps == 30
    assert len({each.args.output for each in (eagle, block, more)}) == 3 and eagle.args.no_evaluation
    assert eagle.draft == f"eagle3:{tmp_path}/eagle3/drafter"


def test_every_flag_of_a_method_can_be_given(tmp_path):
    """Lists of numbers and switches too."""
    shape = "?target-layers=0,2,3"
    given = f"lilicorr{shape}&candidates=4&lead=1,domino{shape}&gru-size=8&uncorrected=0,dspark?weigh-rounds"
    lilicorr, domino, dspark = found(tmp_path, given)
    assert lilicorr.draft.startswith("lilicorr:") and domino.draft.startswith("domino:")
    assert lilicorr.args.target_layers == domino.args.target_layers == (0, 2, 3) and dspark.args.weigh_rounds
    assert (lilicorr.args.candidates, lilicorr.args.lead) == (4, 1.0)
    assert (domino.args.gru_size, domino.args.uncorrected) == (8, 0)


@pytest.mark.parametrize("drafters, message", [
    ("eagle3,eagel", r"--drafters eagel: 'eagel' is no method of training; .*dspark, lilicorr, domino"),
    ("evaluate", "'evaluate' is no method"),
    ("eagle3,eagle3", "two of them have one name"),
    ("dspark,domino?steps=9", r"--drafters domino\?steps=9: --steps is the same for all drafters"),
])  # fmt: skip
def test_drafters_that_cannot_be_compared(tmp_path, drafters, message):
    with pytest.raises(BenchError, match=message):
        found(tmp_path, drafters)


@pytest.mark.parametrize("drafters, message", [
    ("lilicorr?gru-size=8", "arguments: --gru-size=8"),
    ("domino?gru-size", "--gru-size: expected one argument"),
    ("domino?base-weight=2", "must be a number from 0 to 1, got '2'"),
    ("dspark?weigh-rounds=yes", "ignored explicit argument 'yes'"),
])  # fmt: skip
def test_flags_that_a_method_does_not_take(tmp_path, drafters, message, capsys):
    with pytest.raises(SystemExit):
        found(tmp_path, drafters)
    assert message in capsys.readouterr().err


def test_budgets():
    assert matched.budget("8m") == ["--minutes", "8"] and matched.budget("4000") == ["--steps", "4000"]
    for text in ("0", "-3m", "x", "nanm", "infm", "1.5"):
        with pytest.raises(ValueError):
            matched.budget(text)


def row(draft, data, requests, speed, length=None):
    part = {"category": "all", "tokens_per_round": length, "low": 2.0, "high": 3.0}
    parts = {"parts": [part]} if length else {}
    return {"draft": draft, "data": data, "concurrency": requests, "tokens_per_s": 100 * speed, "speedup": speed,
            "speedup_low": speed - 0.1, "speedup_high": speed + 0.1, **parts}  # fmt: skip


@pytest.fixture
def contenders(tmp_path):
    made = [matched.Contender(name, argparse.Namespace(command=name, output=tmp_path / name)) for name in ("a", "b")]
    for each in made:
        (each.args.output / "drafter").mkdir(parents=True)
        (each.args.output / "drafter" / "model.safetensors").write_bytes(bytes(2_500_000))
        (each.args.output / "metrics.jsonl").write_text('{"step": 1}\n{"step": 30}\n')
    return made


def rows_of(contenders):
    a, b = (each.draft for each in contenders)
    return [row("none", "X", 1, 1.0), row(a, "X", 1, 1.5, 2.5), row(b, "X", 1, 1.2, 2.8)]


def test_the_table_has_intervals_and_marks_the_best(contenders):
    text = matched.table(rows_of(contenders), contenders)
    assert "| a | 2.5 | 30 |" in text
    assert "| X | all | 2.50 (2.00 to 3.00) | **2.80** (2.00 to 3.00) |" in text
    assert "| X | 1 | 100 | 150, **1.50x** (1.40 to 1.60) | 120, 1.20x (1.10 to 1.30) |" in text


def test_one_command_trains_measures_and_writes(tmp_path, monkeypatch, contenders, capsys):
    """Training and serving are replaced: other tests run them."""
    (tmp_path / "b.jsonl").write_text('{"question": "q", "answer": "#### 1"}\n')
    (tmp_path / "texts.jsonl").write_text('{"tokens": [1, 2], "answers": [[1, 2]]}\n')
    trained, benched = [], []
    monkeypatch.setattr(train, "_train", trained.append)

    def bench(argv):
        benched.extend(argv)
        (tmp_path / "compare.json").write_text(json.dumps({"rows": rows_of(contenders)}))

    monkeypatch.setattr("jaxspec.bench.__main__.main", bench)
    monkeypatch.setattr(matched, "contenders", lambda *_: contenders)
    given = ["--data", str(tmp_path / "texts.jsonl"), "--benchmark", f"X={tmp_path}/b.jsonl", "--output", str(tmp_path)]
    command = ["compare", "--model", "m", "--drafters", "a,b", "--budget", "2m", *given, "--no-plots"]
    assert train.main(command) == 0
    assert [each.data for each in trained] == [str(tmp_path / "texts.jsonl")] * 2
    assert benched[benched.index("--num-draft-tokens") + 1] == "7" and benched.count("--draft") == 2
    assert benched[benched.index("--batch-sizes") + 1] == "1,8,32" and "--few-programs" not in benched
    assert "**1.50x**" in (tmp_path / "compare.md").read_text() and "**1.50x**" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        train.main([*command, "--benchmark", "nowhere.jsonl"])
    assert "nowhere.jsonl: No such file" in capsys.readouterr().err and len(trained) == 2


def test_a_warm_up_beyond_the_run_is_said(tmp_path, capsys):
    from jaxspec.train import loop

    run = loop.Run(tmp_path, {})
    run.claim(50)
    loop._Clock(loop.Settings(steps=50, warm_up=100), run)
    assert "--warm-up 100 is not less than the run's 50 steps" in capsys.readouterr().err
    loop._Clock(loop.Settings(steps=50, warm_up=5), run)
    assert not capsys.readouterr().err
