"""Features on disk: what a folder has, how it is resumed, and a training that reads them in place of its target."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxspec
from jaxspec.train.__main__ import main
from jaxspec.train.data import Text
from jaxspec.train.features import read_features
from jaxspec.train.packing import pack
from tests.support.tiny import tiny_checkpoint
from tests.train.test_loop import arguments, losses

LENGTHS = [20 + i % 7 for i in range(30)]


@pytest.fixture(scope="module")
def model():
    return str(tiny_checkpoint("llama", vocab=40, num_hidden_layers=5))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    each = [Text((np.arange(n) + i) % 30, ((4, 9), (12, n)), f"kind {i % 3}") for i, n in enumerate(LENGTHS)]
    path.write_text("".join(text.line() for text in each))
    return path


def write(model, texts, output, **more):
    flags = {"model": model, "data": texts, "output": output, "row_length": 24, "texts_per_file": 8} | more
    return main(["features", *(x for k, v in flags.items() for x in (f"--{k.replace('_', '-')}", str(v)))])


@pytest.fixture(scope="module")
def folder(model, texts, tmp_path_factory):
    output = tmp_path_factory.mktemp("features")
    assert write(model, texts, output) == 0
    return output


def test_a_folder_has_each_texts_rows(model, folder):
    record = json.loads((folder / "features.json").read_text())
    assert record["layers"] == [1, 1, 1] and record["texts"] == 30 and len(record["files"]) == 4
    held = load_file(folder / record["files"][1])
    target = jaxspec.load_model(model, dtype="float32", progress=False)
    for i, n in enumerate(LENGTHS[8:16]):
        own = {name: held[f"{i}.{name}"] for name in ("tokens", "loss_mask", "features", "hidden_states")}
        assert own["tokens"].tolist() == [(j + 8 + i) % 30 for j in range(min(n, 24))]
        assert np.flatnonzero(own["loss_mask"]).tolist() == [*range(4, 9), *range(12, min(n, 24))]
        wanted = jaxspec.hidden_states(target, own["tokens"][None], (1, 1, 1, 5))[:, 0]
        found = np.concatenate([own["features"], own["hidden_states"][None]])
        np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_texts_of_a_folder_have_their_categories(model, folder):
    target = jaxspec.load_model(model, dtype="float32", progress=False)
    assert [text.category for text in read_features(folder, target, 24)] == [f"kind {i % 3}" for i in range(30)]


def test_an_interrupted_folder_goes_on_with_the_files_that_lack(model, texts, folder, capsys):
    first, second = (folder / f"features-0000{i}.safetensors" for i in (0, 1))
    kept, lost = first.stat().st_mtime_ns, second.read_bytes()
    second.unlink()
    with pytest.raises(SystemExit):
        main(arguments("eagle3", model, folder, folder / "run"))
    assert "unfinished: features-00001.safetensors isn't there" in capsys.readouterr().err
    assert write(model, texts, folder) == 0
    assert first.stat().st_mtime_ns == kept and second.read_bytes() == lost
    with pytest.raises(SystemExit):
        write(model, texts, folder, target_layers="0,2")
    assert "other features" in capsys.readouterr().err


def test_a_batch_has_the_rows_of_its_texts(model, folder):
    target = jaxspec.load_model(model, dtype="float32", progress=False)
    packed = pack(read_features(folder, target, 24), 24, 4, 0)
    batch = dataclasses.replace(packed, feature_layers=(1,)).batch(0)
    wanted = jaxspec.hidden_states(target, batch.tokens, (1, 5))  # a text that fills a row is alone there
    alone = (batch.first[:, :20] == 0).all(axis=1)
    assert alone.any() and batch.answer.any()
    for found, rows in zip((batch.kept[1][0], batch.kept[0]), wanted, strict=True):
        np.testing.assert_allclose(found[alone, :20], rows[alone, :20], atol=2e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_a_training_from_disk_is_that_of_the_target(method, model, texts, folder, tmp_path):
    for name, data in (("disk", folder), ("live", texts)):
        more = {"target_layers": "1"} if method == "dflash" else {"loss": "soft", "unroll": 1}
        assert main(arguments(method, model, data, tmp_path / name, steps=4, **more)) == 0
    np.testing.assert_allclose(losses(tmp_path / "disk"), losses(tmp_path / "live"), rtol=1e-4)


@pytest.mark.parametrize("more, message", [
    ({"target_layers": "0,2,3"}, "its features are of layers [1, 1, 1], and the drafter reads [0, 2, 3]"),
    ({"row_length": 32}, "of rows of 24 tokens, and --row-length is 32"),
    ({"dtype": "bfloat16"}, "in float32, and --dtype is bfloat16"),
    ({"model": "other"}, "its features are of another model"),
])  # fmt: skip
def test_features_that_dont_fit_are_refused(more, message, model, folder, tmp_path, capsys):
    given = {"model": str(tiny_checkpoint("llama", vocab=44, num_hidden_layers=5)) if "model" in more else model}
    more = {name: value for name, value in more.items() if name != "model"}
    with pytest.raises(SystemExit):
        main(arguments("eagle3", given["model"], folder, tmp_path, **more))
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name, text, message", [
    ("features-00002.safetensors", "cut off", "features-00002.safetensors is damaged"),
    ("features.json", "[]", "features.json isn't one that `features` wrote"),
    ("features.json", '{"model": ', "/features: features.json isn't JSON"),
])  # fmt: skip
def test_files_that_are_damaged_are_named(name, text, message, model, folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path / "features")
    (tmp_path / "features" / name).write_text(text)
    with pytest.raises(SystemExit):
        main(arguments("eagle3", model, tmp_path / "features", tmp_path / "o", unroll=2))
    assert message in capsys.readouterr().err
