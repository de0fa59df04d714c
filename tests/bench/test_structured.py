"""The benchmarks of structured output: schemas of files, and the cost of rounds and masks."""

import json
from types import SimpleNamespace

import pytest

from jaxspec.bench import schemas, structured
from jaxspec.bench.__main__ import main
from tests.support.sample import rare
from tests.support.tiny import BYTE_VOCAB, tiny_checkpoint

WHOLE = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TESTS = [{"data": {"a": 1}, "valid": True}, {"data": {"a": "x"}, "valid": False}, {"data": {"a": 1}, "valid": False}]


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    (folder / "deep").mkdir(parents=True)
    (folder / "one.json").write_text(json.dumps({"schema": WHOLE, "tests": TESTS}))
    refused = {"schema": {"not": {}}, "tests": []}
    (folder / "deep" / "more.json").write_text(json.dumps([{"schema": {"enum": ["b", 3]}, "tests": []}, refused, 7]))
    (folder / "deep" / "none.json").write_text("{")
    return folder


def folder():
    return str(tiny_checkpoint(vocab=BYTE_VOCAB, tokenizer=True, num_hidden_layers=1))


@pytest.mark.parametrize("drafts", [["ngram"], rare(["none", "ngram"])], ids=",".join)
def test_schemas_are_compiled_walked_and_generated_from(data, tmp_path, capsys, drafts):
    out = tmp_path / "out.json"
    options = ["--drafts", ",".join(drafts), "--new-tokens", "40", "--requests", "2", "--json", str(out)]
    assert main(["schemas", "--model", folder(), "--data", str(data), *options]) == 0
    document = json.loads(out.read_text())
    facts, rows = document["facts"], document["rows"]
    assert (facts["schemas"], facts["compiled"]) == (3, 2) and "the schema" in str(facts["refused"])
    assert (facts["valid_accepted"], facts["invalid_rejected"], facts["invalid_accepted"]) == (1, 1, 1)
    assert [(row["draft"], row["temperature"], row["texts"]) for row in rows] == [
        (draft, temperature, 2) for draft in drafts for temperature in (0.0, 1.0)
    ]
    assert all(row["invalid"] == row["failed"] == 0 and row["as_first"] == 2 for row in rows)
    assert sum(row["valid"] for row in rows) > 0
    assert "texts generated" in capsys.readouterr().out


@pytest.mark.parametrize(("draft", "says"), [("ngram@2", "--topk"), ("eagle@x", "'x' isn't a --topk")])
def test_a_drafter_of_trees_is_named_with_its_topk(data, capsys, draft, says):
    with pytest.raises(SystemExit, match="2"):
        main(["schemas", "--model", folder(), "--data", str(data), "--drafts", draft])
    assert says in capsys.readouterr().err


def test_an_invalid_text_would_show(capsys):
    import jsonschema

    case, judge = schemas.Case("x", WHOLE, []), lambda text, why="stop": schemas.judge(
        case, SimpleNamespace(text=text, finish_reason=why), jsonschema
    )  # fmt: skip
    assert [judge('{"a": 1}'), judge('{"a": "b"}'), judge("{"), judge("{", "length")] == [
        *("valid", "invalid", "invalid", "unfinished"),
    ]


def test_rounds_too_few_to_time_are_noted(monkeypatch, capsys):
    engine = SimpleNamespace(
        grammars=True, config=SimpleNamespace(skip_warmup=False), model_config=SimpleNamespace(vocab_size=9)
    )
    untimed = {"ms_per_round": None, "preemptions": 0, "compiles": 0}
    monkeypatch.setattr(structured.engines, "start", lambda *_, **__: engine)
    monkeypatch.setattr(structured, "mask_row", lambda *_: {})
    monkeypatch.setattr(structured.StructuredLoad, "measure", lambda *_: dict(untimed))
    assert main(["structured", "--model", "m", "--concurrency", "3", "--output-len", "6"]) == 0
    told = capsys.readouterr().out
    for kind in ("no grammars", "grammars"):
        assert f"concurrency 3, {kind}: all requests decoded together too briefly or never; raise" in told


@pytest.mark.exhaustive  # schemas run the same engine
def test_rounds_and_masks_are_timed(tmp_path):
    out = tmp_path / "out.json"
    sizes = ["--concurrency", "2", "--prompt-len", "8", "--output-len", "40", "--rows", "5", "--context-length", "64"]
    options = ["--load-format", "auto", "--skip-warmup", "--draft", "ngram", "--num-continuous-decode-steps", "1"]
    assert main(["structured", "--model", folder(), *options, *sizes, "--json", str(out)]) == 0
    plain, constrained, *masks = json.loads(out.read_text())["rows"]
    assert plain["constrained"] == 0 and constrained["constrained"] == 1
    assert plain["forced"] == 0 < constrained["forced"] < 1 and plain["masks_ms"] is None
    assert 0 < constrained["masks_ms"] < constrained["ms_per_round"]
    assert constrained["overhead"] == pytest.approx(constrained["ms_per_round"] / plain["ms_per_round"] - 1)
    assert len(masks) == 4 and all(0 < row["median_us"] <= row["p99_us"] for row in masks)
