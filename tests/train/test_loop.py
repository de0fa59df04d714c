"""Training: it learns, it can be killed and goes on as if it hadn't been, on one device and on several."""

import errno
import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec.checkpoint import load_model
from jaxspec.drafters.loading import load_drafter
from jaxspec.models.weights import HALF
from jaxspec.train import __main__ as command
from jaxspec.train import loop
from jaxspec.train.__main__ import main
from jaxspec.train.data import Text, TrainError
from jaxspec.train.folder import held
from jaxspec.train.interrupted import Stop
from jaxspec.train.loop import Settings, learning_rate
from tests.support.sample import rare
from tests.support.tiny import tiny_checkpoint

ROOT = Path(__file__).resolve().parent.parent.parent
SIZES = {"mlp_size": "16", "num_heads": "2", "num_kv_heads": "1"}


@pytest.fixture(scope="module")
def model():
    return str(tiny_checkpoint("llama", vocab=40, num_hidden_layers=5))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Texts that count upwards: something that can be learnt in a few steps."""
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("".join(Text((np.arange(20) + i) % 30, ((4, 20),)).line() for i in range(30)))
    return path


def arguments(method, model, texts, output, steps=12, **more):
    flags = {
        "model": model, "data": texts, "output": output, "steps": steps, "row_length": 24, "batch_size": 4,
        "warm_up": 2, "log_every": 1, "learning_rate": 0.01, "loss": "hard", **SIZES, **more,
    }  # fmt: skip
    return [method, *(x for k, v in flags.items() for x in (f"--{k.replace('_', '-')}", str(v))), "--no-evaluation",
            "--no-plots"]  # fmt: skip


def losses(output):
    return [json.loads(line)["loss"] for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(model, texts, tmp_path_factory):
    """A run that nobody disturbed."""
    output = tmp_path_factory.mktemp("whole")
    assert main(arguments("eagle3", model, texts, output, unroll=2, draft_vocab_size=32)) == 0
    return output


def test_rows_that_no_answer_begins_in(model, texts, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(arguments("eagle3", model, texts, tmp_path, row_length=4))
    assert "every answer begins beyond the first 4 tokens" in capsys.readouterr().err


def test_a_run_that_is_done_is_left_as_it_is(whole, model, texts, capsys):
    weights = whole / "drafter" / "model.safetensors"
    made = weights.stat().st_mtime_ns
    assert main(arguments("eagle3", model, texts, whole, unroll=2, draft_vocab_size=32)) == 0
    assert "is trained already" in capsys.readouterr().out and weights.stat().st_mtime_ns == made


def test_loss_falls(whole):
    curve = losses(whole)
    assert len(curve) == 12 and min(curve[-3:]) < 0.8 * curve[0]


@pytest.mark.exhaustive  # an interrupted one, below, resumes too
@pytest.mark.timeout(300)
def test_a_killed_run_resumes_to_the_same_losses(whole, model, texts, tmp_path):
    command = arguments("eagle3", model, texts, tmp_path, unroll=2, draft_vocab_size=32, save_every=0.001)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    environment |= {"JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir}
    with subprocess.Popen(
        [sys.executable, "-m", "jaxspec.train", *command], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL
    ) as process:
        metrics = tmp_path / "metrics.jsonl"
        while process.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") < 6):
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    saved = [int(path.name) for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()]
    assert saved and max(saved) < 12, "it must have been killed in the middle"
    assert main(command) == 0
    assert losses(tmp_path) == losses(whole)
    assert (tmp_path / "drafter" / "model.safetensors").read_bytes() == (
        whole / "drafter" / "model.safetensors"
    ).read_bytes()


@pytest.fixture
def interruptible():
    """Python's own handler of Ctrl-C, which it lacks where it was started with the signal ignored, as in background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [rare(signal.SIGINT), signal.SIGTERM])
def test_an_interrupted_run_keeps_its_steps(interruptible, number, whole, model, texts, tmp_path, monkeypatch, capsys):
    show = loop.Meter.show

    def interrupted_show(self, step, report, rate):
        show(self, step, report, rate)
        if step == 5:
            signal.raise_signal(number)

    command = arguments("eagle3", model, texts, tmp_path, unroll=2, draft_vocab_size=32, save_every=1000)
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(loop.Meter, "show", interrupted_show)
        assert main(command) == 130
    assert signal.getsignal(number) == before
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted at step 5; the same command resumes"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["5"]
    assert main(command) == 0
    assert losses(tmp_path) == losses(whole)


def test_a_second_interrupt_isnt_delayed(interruptible):
    with pytest.raises(KeyboardInterrupt), Stop() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.asked
        signal.raise_signal(signal.SIGINT)


def refusal(arguments, capsys):
    """The one line, without the command's name."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    *progress, line = capsys.readouterr().err.rstrip("\n").split("\n")
    assert all("loading" in each for each in progress)
    return line.split(": ", 1)[1]


def test_other_texts_of_the_same_name_are_refused(whole, model, texts, capsys):
    as_they_were = texts.read_text()
    texts.write_text(as_they_were.replace("[4,20]", "[5,20]"))
    line = refusal(arguments("eagle3", model, texts, whole, unroll=2, draft_vocab_size=32), capsys)
    texts.write_text(as_they_were)
    assert "holds another run: it has data_sha256 '" in line


def test_another_runs_folder_is_refused_before_texts_are_written(whole, model, texts, monkeypatch, capsys):
    again = {"unroll": 2, "draft_vocab_size": 32}
    monkeypatch.setattr(command, "_texts_file", lambda _: pytest.fail("texts were written"))
    before = sorted(whole.rglob("*"))
    assert "holds another run: it has unroll 2, not 3" in refusal(
        arguments("eagle3", model, texts, whole, **again | {"unroll": 3}), capsys
    )
    assert "holds another run: it has data " in refusal(arguments("eagle3", model, "self", whole, **again), capsys)
    assert sorted(whole.rglob("*")) == before


def test_texts_that_were_made_otherwise_are_refused(model, tmp_path, monkeypatch, capsys):
    prompts = tmp_path / "p.txt"
    prompts.write_text("one\ntwo\n")
    output = tmp_path / "o"

    def engine(*_, **__):
        (output / "data.jsonl.part").write_text("a text\n")
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_engine", engine)
    given = ["data", "--model", model, "--data", str(prompts), "--output", str(output)]
    assert main(given) == 130 and main([*given, "--concurrency", "3"]) == 130
    assert capsys.readouterr().err == "interrupted\n" * 2
    for more in (["--temperature", "0.5"], ["--seed", "1"], ["--num-samples", "1"], ["--data", "self"]):
        flag = more[0].removeprefix("--").replace("-", "_")
        line = refusal([*given, *more], capsys)
        assert line.startswith(f"--output {output} holds other texts: it has ") and f"{flag} " in line
    (output / "data.jsonl.part").rename(output / "data.jsonl")
    assert main(given) == 0
    prompts.write_text("one\nthree\n")
    assert "holds other texts: it has data_sha256 " in refusal(given, capsys)
    (output / "recipe.json").unlink()  # as versions before left it
    capsys.readouterr()
    assert main(given) == 0
    assert "are kept, and nothing says how they were made" in capsys.readouterr().out


def test_a_folder_in_use_is_refused(model, texts, tmp_path, capsys):
    with held(tmp_path):
        line = refusal(arguments("eagle3", model, texts, tmp_path), capsys)
    assert line == f"--output {tmp_path}: another process is training in this folder, or writing texts"


def test_a_folder_without_locks_is_used_and_told(monkeypatch, tmp_path, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with held(tmp_path):
        pass
    assert "can't be locked (No locks available): let no other process work there" in capsys.readouterr().err


@pytest.mark.parametrize("under", ["", "x"])
def test_an_output_that_is_a_file_is_refused(under, model, texts, tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    told = f"--output {file / under} must be a folder, and {file / under} is a file"
    assert refusal(arguments("eagle3", model, texts, file / under), capsys) == told
    more = ["--model", model, "--data", str(texts), "--output", str(file / under)]
    assert refusal(["data", *more], capsys) == told
    assert refusal(["evaluate", *more, "--no-plots"], capsys) == told


def test_an_output_with_broken_files_is_refused(model, texts, tmp_path, capsys):
    run = tmp_path / "run.json"
    for text, told in (('{"settings": {', "run.json isn't JSON"), ("[]", "holds settings that aren't ours: []")):
        run.write_text(text)
        line = refusal(arguments("eagle3", model, texts, tmp_path), capsys)
        assert line.startswith(f"--output {tmp_path}") and told in line
    run.unlink()
    (tmp_path / "drafter").touch()
    line = refusal(arguments("eagle3", model, texts, tmp_path), capsys)
    assert line == f"--output {tmp_path}: drafter: File exists"


@pytest.mark.parametrize(
    "method",
    ["eagle3", "dflash2", "dspark", "lilicorr", *(pytest.param(each, marks=pytest.mark.exhaustive)
                                                  for each in ("dflash", "domino"))],
)  # fmt: skip
def test_what_was_trained_is_what_is_served(method, model, texts, tmp_path):
    from jaxspec.train import export

    target = load_model(model, "float32", progress=False)
    mlp_size = 3 * HALF  # so that gate and up alternate in several runs
    shape = export.Shape(1 if method == "eagle3" else 2, mlp_size, 2, 1, (0, 3, 4))
    settings = {
        "dflash": {}, "dspark": export.dspark_settings(2, 1, 6, "rnn"), "domino": export.domino_settings(6, 4, 1),
        "lilicorr": export.lilicorr_settings(4, 12, 1, 3, 5), "dflash2": export.dflash2_settings(6, 4, 2, 8),
    }  # fmt: skip
    if method == "eagle3":
        fresh = export.fresh_eagle3(tmp_path, target, shape, np.array([1, 5, 9, 30]), 0)
    else:
        fresh = export.fresh_block(tmp_path, target, shape, export.Block(4, 39, method, settings[method]), 0)
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(fresh.trained))
    rounded = jax.tree.map(lambda x: x.astype("bfloat16").astype("float32"), fresh.trained)
    fresh.save(fresh.trained)
    loaded = load_drafter(f"{method}:{tmp_path}", target)
    assert loaded.drafter == fresh.drafter and loaded.drafter.feature_layers == (0, 3, 4)
    served = {name: loaded.params[name] for name in fresh.trained}
    jax.tree.map(np.testing.assert_array_equal, served, rounded)
    if method == "eagle3":
        assert loaded.params["target_ids"].tolist() == [1, 5, 9, 30]
        np.testing.assert_array_equal(
            fresh.trained["head"]["head"].values, target.params["head"].values[:, [1, 5, 9, 30]]
        )


def test_without_a_vocabulary_the_head_is_the_targets(model, tmp_path):
    from jaxspec.train import export

    target = load_model(model, "float32", progress=False)
    fresh = export.fresh_eagle3(tmp_path, target, export.Shape(mlp_size=16), None, 0)
    assert "head" not in fresh.trained and fresh.frozen["head"]["head"] is target.params["head"]
    with pytest.raises(TrainError, match="--num-layers 2: an EAGLE-3 drafter has one layer"):
        export.fresh_eagle3(tmp_path, target, export.Shape(2), None, 0)


@pytest.mark.parametrize("method, more, tp_size", [
    ("eagle3", {"unroll": 2, "draft_vocab_size": 32}, 2),
    pytest.param("eagle3", {"unroll": 2}, 1, marks=pytest.mark.exhaustive),
    pytest.param("dflash", {"block_size": 4}, 2, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_four_devices_make_the_steps_of_one(method, more, tp_size, model, texts, tmp_path, request):
    """Rows differ in how many drafts they have, so a mean of the devices' means would be another. Two devices may have
    the target's layers between them."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    four = arguments(method, model, texts, tmp_path / "four", tp_size=tp_size, **more)
    done = subprocess.run(
        [sys.executable, "-m", "jaxspec.train", *four], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    one = request.getfixturevalue("whole") if "draft_vocab_size" in more else tmp_path / "one"
    assert main(arguments(method, model, texts, one, **more)) == 0  # a run that is done is left as it is
    np.testing.assert_allclose(losses(tmp_path / "four"), losses(one), rtol=1e-3)


@pytest.mark.exhaustive  # its objective is test_objectives.py's
def test_dflash_learns(model, texts, tmp_path):
    shape = {"block_size": 4, "num_layers": 1, "target_layers": "1,3"}
    assert main(arguments("dflash", model, texts, tmp_path, learning_rate=0.03, **shape)) == 0
    curve = losses(tmp_path)
    assert min(curve[-3:]) < 0.8 * curve[0]
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert config["dflash_config"] == {"mask_token_id": 39, "target_layer_ids": [1, 3]} and config["block_size"] == 4


@pytest.mark.exhaustive  # its loss by itself is in test_losses.py, a run of its heads in test_continued.py
def test_dspark_learns(model, texts, tmp_path):
    """Texts that count: what comes next follows from the token before, which its Markov head is told."""
    shape = {"block_size": 4, "num_layers": 1, "target_layers": "1,3", "markov_rank": 8}
    assert main(arguments("dspark", model, texts, tmp_path, learning_rate=0.03, **shape)) == 0
    curve = losses(tmp_path)
    assert min(curve[-3:]) < 0.8 * curve[0]
    drafter = load_drafter(f"dspark:{tmp_path / 'drafter'}", load_model(model, "float32", progress=False)).drafter
    assert (drafter.rank, drafter.head, drafter.num_draft_tokens, drafter.guesses_by_draft) == (8, "vanilla", 4, True)
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert len(record["accepted"]) == 4


@pytest.mark.exhaustive
@pytest.mark.parametrize("method,more,expected", [
    ("lilicorr", {"candidates": 4, "network_size": 12, "network_heads": 3, "factor_size": 6}, (3, 4, 12)),
    ("domino", {"gru_size": 12, "correction_rank": 8, "base_share": 0.3}, (4, 12, 8)),
])  # fmt: skip
def test_lilicorr_and_domino_learn(method, more, expected, model, texts, tmp_path):
    shape = {"block_size": 4, "num_layers": 1, "target_layers": "1,3"}
    assert main(arguments(method, model, texts, tmp_path, learning_rate=0.03, **shape, **more)) == 0
    curve = losses(tmp_path)
    assert min(curve[-3:]) < 0.8 * curve[0]
    drafter = load_drafter(f"{method}:{tmp_path / 'drafter'}", load_model(model, "float32", progress=False)).drafter
    sizes = (drafter.lattice.top, drafter.lattice.width) if method == "lilicorr" else (drafter.width, drafter.rank)
    assert (drafter.num_draft_tokens, *sizes) == expected
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert len(record["accepted"]) == expected[0]


def test_a_budget_in_minutes_becomes_steps_once(tmp_path, monkeypatch):
    run, clock = loop.Run(tmp_path, {"a": 1}), [0.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: clock[0])
    watch = loop._Clock(Settings(minutes=1, save_every=5), run)
    for step in range(1, 40):
        clock[0] += 20 if step <= 3 else 0.5  # compiling isn't counted
        watch.tick(step, None)
        assert (run.steps is not None) == (step >= loop.TIMED_STEPS)
        assert run.steps is not None or not watch.save_due()
    assert run.steps == 120 and watch.save_due() and not watch.save_due()
    assert loop.Run(tmp_path, {"a": 1}).steps == 120
    shutil.rmtree(tmp_path)


def test_learning_rate_rises_then_falls():
    settings = Settings(steps=100, learning_rate=2.0, warm_up=10)
    rates = [learning_rate(settings, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.2) and max(rates) == rates[9] == rates[10] == 2.0
    assert all(a > b for a, b in itertools.pairwise(rates[10:])) and rates[-1] < 0.03
    assert [learning_rate(settings, step, None) for step in range(11)] == rates[:11]


@pytest.mark.parametrize("given", [{}, {"steps": 1, "minutes": 1.0}, {"steps": 3, "clip": 0.0}, {"minutes": -1.0},
                                   {"steps": 3, "learning_rate": float("inf")}, {"steps": 3, "warm_up": -3},
                                   {"steps": 3, "weight_decay": float("nan")}])  # fmt: skip
def test_senseless_settings_are_refused(given):
    with pytest.raises(TrainError, match="--"):
        Settings(**given)


@pytest.mark.parametrize(("flag", "values", "told"), [
    ("minutes", "0 nan inf", "must be a number above 0"),
    ("learning-rate", "-1 0 inf nan x", "must be a number above 0"),
    ("clip", "0 nan", "must be a number above 0"),
    ("gamma", "0 -1 nan", "must be a number above 0"),
    ("warm-up", "-3 1.5", "must be an integer of at least 0"),
    ("weight-decay", "nan -0.1 inf", "must be a number of at least 0"),
    ("save-every", "-1 nan", "must be a number of at least 0"),
    ("seed", "-1", "must be an integer of at least 0"),
])  # fmt: skip
def test_senseless_numbers_are_refused(flag, values, told, tmp_path, capsys):
    for value in values.split():
        budget = [] if flag == "minutes" else ["--steps", "1"]
        with pytest.raises(SystemExit):
            main(["dflash", "--model", "m", "--data", "d", "--output", str(tmp_path), *budget, f"--{flag}={value}"])
        assert f"argument --{flag}: {told}, got '{value}'" in capsys.readouterr().err


def test_a_loss_that_is_no_number_says_to_start_anew(tmp_path):
    meter = loop.Meter.__new__(loop.Meter)
    with pytest.raises(TrainError, match="loss is nan at step 3: start anew in another --output with a lower"):
        meter.show(3, SimpleNamespace(loss=np.float32("nan")), 1.0)


@pytest.mark.parametrize(("method", "given", "told"), [
    ("eagle3", {"num_layers": 2}, "--num-layers 2: an EAGLE-3 drafter has one layer"),
    ("eagle3", {"target_layers": "1,2,9"}, "--target-layers 9 doesn't exist"),
    ("eagle3", {"draft_vocab_size": 41}, "--draft-vocab-size 41 is more than the target's 40 tokens"),
    ("eagle3", {"batch_size": 3}, "--batch-size 3 must be a multiple of the 2 devices present"),
    ("eagle3", {"init": "nowhere"}, "no model 'nowhere'"),
    ("dflash", {"block_size": 1}, "block_size"),
    ("dflash", {"mask_token_id": 40}, "mask_token_id"),
    ("dspark", {"target_layers": "9"}, "has layers 0 to 4"),
])  # fmt: skip
def test_what_cant_be_trained_is_told_before_texts_are_written(
    method, given, told, model, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(command, "_texts_file", lambda _: pytest.fail("texts were written"))
    monkeypatch.setattr(loop.jax, "devices", lambda: [None, None])
    if "init" in given:
        for name in tuple(SIZES):
            monkeypatch.delitem(SIZES, name)
    assert told in refusal(arguments(method, model, "self", tmp_path, **given), capsys)


@pytest.mark.parametrize(("method", "family"), [
    # whose features are compared with serving in test_objectives.py
    pytest.param("eagle3", "qwen3_5_moe", marks=pytest.mark.exhaustive),
    pytest.param("dflash", "qwen3_next", marks=pytest.mark.exhaustive),
    pytest.param("dflash", "qwen3_moe", marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_drafters_of_hybrids_and_mixtures_are_trained_and_serve_them(method, family, texts, tmp_path):
    model = str(tiny_checkpoint(family, vocab=40))
    own = {"unroll": 2, "target_layers": "0,1"} if method == "eagle3" else {"block_size": 4, "num_layers": 1}
    assert main(arguments(method, model, texts, tmp_path, batch_size=12, **own)) == 0
    curve = losses(tmp_path)
    assert min(curve[-3:]) < 0.95 * curve[0]
    target = load_model(model, "float32", progress=False)
    drafter = load_drafter(f"{method}:{tmp_path / 'drafter'}", target)
    assert len(jaxspec.propose(target, drafter, [5, 6, 7, 8], 2).tokens) == 2


def test_metrics_behind_the_checkpoint_are_forgotten(tmp_path):
    run = loop.Run(tmp_path, {})
    for step in (1, 2, 3):
        run.log({"step": step})
    with run.metrics.open("a") as file:
        file.write('{"step": 4')  # a kill in mid-write
    run.cut(2)
    assert [record["step"] for record in run.history()] == [1, 2]
