"""The matched table: each drafter gets the shared settings and its own, and the table says who is best by how much."""

import argparse
import json
from pathlib import Path

import pytest

from jaxspec.bench import matched
from jaxspec.bench.answers import compiling
from jaxspec.bench.results import BenchError
from jaxspec.train import __main__ as train
from jaxspec.train import flags
from tests.support.blocks import GOLDEN
from tests.support.tiny import tiny_checkpoint

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
    ("none", "'none' is no method"),
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
    part = {"category": "all", "prompts": 2, "tokens_per_round": length, "low": 2.0, "high": 3.0}
    parts = {"parts": [part]} if length else {}
    each = [(10, 1 / speed), (20, 2 / speed)]
    return {
        "draft": draft,
        "data": data,
        "concurrency": requests,
        "prompts": 2,
        "tokens_per_s": 100 * speed,
        "each": each,
        **parts,
    }


@pytest.fixture
def contenders(tmp_path):
    shape = dict(batch_size=4, row_length=64, init=None)
    names = "a", "b"
    made = [matched.Contender(n, argparse.Namespace(command=n, output=tmp_path / n, **shape)) for n in names]
    for each in made:
        (each.args.output / "drafter").mkdir(parents=True)
        each.weights.write_bytes(bytes(2_500_000))
        (each.args.output / "metrics.jsonl").write_text('{"step": 1}\n{"step": 30}\n')
        run = {"settings": {"texts": 90, "data_sha256": "0123456789abcdef"}}
        (each.args.output / "run.json").write_text(json.dumps(run))
    return made


def document(draft, speed, length=None):
    facts = {"commit": "c0", "devices": ["cuda:0 H200"], "cores": 16, "dtype": "bfloat16", "versions": {"jax": "0.9"}}
    rows = [row(draft, "X", 1, speed, length)]
    return {"benchmark": "accept", "rows": rows, "notes": [], "arguments": {}, "facts": facts}


def test_the_table_has_intervals_and_marks_the_best(contenders, tmp_path):
    a, b = (each.draft for each in contenders)
    budget = dict(budget=["--steps", "30"], num_draft_tokens=7, max_new_tokens=96)
    args = argparse.Namespace(output=tmp_path, seed=0, no_plots=True, model="m", **budget)
    documents = [document("none", 1.0), document(a, 1.5, 2.5), document(b, 1.2, 2.8)]
    documents[1]["notes"].append(f"{a}: 1 of 3 questions")
    for each in documents[:2]:
        each["rows"][0]["compiles"] = 2
        each["notes"].append(compiling(each["rows"]))
    text = matched.report(args, documents, contenders)
    together = "the speeds of 2 of 3 loads include that: none, X, 1 at a time; a, X, 1 at a time."
    assert text.endswith(f"\n\na: 1 of 3 questions.\n\nprograms were compiled meanwhile, and {together}")
    assert "| a | 2.5 | 30 |" in text and text + "\n" == (tmp_path / "compare.md").read_text()
    assert "| X | all | 2 | 2.50 (2.00 to 3.00) | **2.80** (2.00 to 3.00) |" in text
    assert "| X | 1 | 100 | 150, **1.50x** (1.50 to 1.50) | 120, 1.20x (1.20 to 1.20) |" in text
    assert [row["draft"] for row in json.loads((tmp_path / "compare.json").read_text())["rows"]] == ["none", "a", "b"]
    assert "Target: m, served in bfloat16 on cuda:0 H200 (16 CPU cores); jaxspec c0, jax 0.9." in text
    assert (
        "Training: 30 steps a drafter, in batches of 4 rows of 64 tokens, on 90 texts (sha256 0123456789ab); seed 0."
        in text
    )
    documents[2]["rows"][0]["compiles"] = 1
    assert matched.report(args, documents, contenders).endswith("meanwhile, and every speed includes that.")
    assert "7 drafts a round, greedy, at most 96 new tokens; questions: 2 of X." in text and "95% intervals" in text


def test_where_drafters_were_made_otherwise_the_table_says_so(contenders, tmp_path):
    """Processes may have shared the work, on other machines or at another commit. Where all are alike, none is best."""
    contenders[1].args.batch_size = 8
    budget = dict(budget=["--minutes", "8"], num_draft_tokens=7, max_new_tokens=96)
    args = argparse.Namespace(output=tmp_path, seed=0, no_plots=True, model="m", **budget)
    documents = [document("none", 1.0), *(document(each.draft, 1.5, 2.5) for each in contenders)]
    documents[1]["facts"] = documents[1]["facts"] | {"commit": "c1", "dtype": "float32"}
    text = matched.report(args, documents, contenders)
    assert "in bfloat16 / float32 on" in text and "jaxspec c0, jax 0.9 / jaxspec c1, jax 0.9." in text
    assert "Training: 8 minutes a drafter, in batches of 4 rows of 64 tokens / 8 rows" in text and "**" not in text


@pytest.fixture
def command(tmp_path, monkeypatch, contenders):
    """A command line whose training and serving are replaced, and lists of what it trained and served: other tests run
    these."""
    (tmp_path / "b.jsonl").write_text('{"question": "q", "answer": "#### 1"}\n')
    (tmp_path / "texts.jsonl").write_text('{"tokens": [1, 2], "answers": [[1, 2]]}\n')
    trained, benched = [], []

    def bench(argv):
        benched.append(argv)
        draft = argv[argv.index("--draft") + 1]
        made = document(draft, 1.0 if draft == "none" else 1.5, None if draft == "none" else 2.5)
        Path(argv[argv.index("--json") + 1]).write_text(json.dumps(made))

    monkeypatch.setattr(train, "_train", trained.append)
    monkeypatch.setattr(train, "_check", lambda *_: None)
    monkeypatch.setattr(train, "_check_shape", lambda args, config: None)
    monkeypatch.setattr(train, "resolve", lambda model: argparse.Namespace(config=None))
    monkeypatch.setattr(train, "bench", bench)
    made = {each.name: each for each in contenders} | {"none": matched.Contender.of_plain(contenders[0].args)}
    made["none"].args.output = tmp_path / "none"
    monkeypatch.setattr(matched, "contenders", lambda args, *_: [made[name] for name in args.drafters])
    given = ["--data", str(tmp_path / "texts.jsonl"), "--benchmark", f"X={tmp_path}/b.jsonl", "--output", str(tmp_path)]
    return ["compare", "--model", "m", "--budget", "2m", *given, "--no-plots", "--drafters"], trained, benched


def test_one_command_trains_measures_and_writes(command, tmp_path, capsys):
    argv, trained, benched = command
    assert train.main([*argv, "a,b"]) == 0
    assert [each.data for each in trained] == [str(tmp_path / "texts.jsonl")] * 2
    assert [each[each.index("--draft") + 1].partition(":")[0] for each in benched] == ["none", "a", "b"]
    assert ["--no-plain" in each for each in benched] == [False, True, True]
    assert benched[1][benched[1].index("--num-draft-tokens") + 1] == "7"
    assert benched[1][benched[1].index("--batch-sizes") + 1] == "1,8,32" and "--few-programs" not in benched[1]
    assert "150, 1.50x" in (tmp_path / "compare.md").read_text() and "150, 1.50x" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        train.main([*argv, "a", "--benchmark", "nowhere.jsonl"])
    assert "--benchmark nowhere.jsonl: No such file" in capsys.readouterr().err and len(trained) == 2
    with pytest.raises(SystemExit):
        train.main([*argv, "a", "--benchmark", f"X={tmp_path}/b.jsonl"])
    assert "two --benchmark files are called X" in capsys.readouterr().err and len(trained) == 2


def test_processes_share_the_drafters_of_a_table(command, contenders, tmp_path):
    """Each trains or serves its own; what is there isn't measured again, unless it is of other weights or loads."""
    argv, trained, benched = command
    assert train.main([*argv, "b", "--until", "trained"]) == 0 and len(trained) == 1 and not benched
    assert train.main([*argv, "none", "--until", "served"]) == 0 and len(trained) == 1 and len(benched) == 1
    assert train.main([*argv, "b", "--until", "served"]) == 0 and len(benched) == 2
    assert not (tmp_path / "compare.md").exists()
    assert train.main([*argv, "a,b"]) == 0 and len(benched) == 3
    assert "| X | 1 | 100 | 150, 1.50x (1.50 to 1.50) | 150" in (tmp_path / "compare.md").read_text()
    contenders[0].weights.write_bytes(bytes(3))
    assert train.main([*argv, "a,b"]) == 0 and len(benched) == 4
    assert train.main([*argv, "a,b", "--requests", "1,4"]) == 0 and len(benched) == 7


def test_all_drafters_are_checked_before_the_first_is_trained(tmp_path, capsys):
    (tmp_path / "b.jsonl").write_text('{"question": "q"}\n')
    argv = [*BASE, "--output", str(tmp_path), "--benchmark", str(tmp_path / "b.jsonl"), "--budget", "30", "--no-plots"]
    argv[argv.index("--model") + 1] = str(tiny_checkpoint())
    for drafter, words in (
        ("dflash?loss=nowhere:x", "compare: --loss nowhere:x must be module:function"),
        ("dflash?target-layers=99", "compare: --drafters dflash?target-layers=99: --target-layers 99 doesn't exist; "),
        ("dspark?block-size=6", "dspark?block-size=6: its blocks have 6 drafts, and --num-draft-tokens is 7 for all"),
        ("dflash2?block-size=6", "dflash2?block-size=6: its blocks have 5 drafts"),
    ):
        with pytest.raises(SystemExit):
            train.main([*argv, "--drafters", f"eagle3?num-layers=1,{drafter}"])
        assert words in capsys.readouterr().err
    assert not list(tmp_path.glob("eagle3*"))


def test_drafters_to_train_on_are_checked_before_the_first_is_trained(tmp_path, capsys):
    (tmp_path / "b.jsonl").write_text('{"question": "q"}\n')
    argv = [*BASE, "--output", str(tmp_path), "--benchmark", str(tmp_path / "b.jsonl"), "--budget", "30", "--no-plots"]
    argv[argv.index("--model") + 1] = str(GOLDEN / "dflash" / "target")
    block = GOLDEN / "dflash" / "full"
    for drafter, words in (
        (f"dflash?init={block}", f"dflash?init={block}: its blocks have 7 drafts, and --num-draft-tokens is 8 for all"),
        (f"dspark?init={block}", f"dspark?init={block}: its blocks have 7 drafts, and --num-draft-tokens is 8 for all"),
        (f"domino?init={block}", f"--init {block} is a drafter of the method dflash, and domino trains others"),
        (f"dflash?init={tmp_path}/no", f"compare: --drafters dflash?init={tmp_path}/no: no model '{tmp_path}/no'"),
    ):
        with pytest.raises(SystemExit):
            train.main([*argv, "--num-draft-tokens", "8", "--drafters", f"eagle3?num-layers=1,{drafter}"])
        assert words in capsys.readouterr().err
    assert not list(tmp_path.glob("eagle3*"))


def test_a_warm_up_beyond_the_run_is_said(tmp_path, capsys):
    from jaxspec.train import loop

    run = loop.Run(tmp_path, {})
    run.claim(50)
    loop._Clock(loop.Settings(steps=50, warm_up=100), run)
    assert "--warm-up 100 is not less than the run's 50 steps" in capsys.readouterr().err
    loop._Clock(loop.Settings(steps=50, warm_up=5), run)
    assert not capsys.readouterr().err
