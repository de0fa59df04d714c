"""Accuracy: an exact format agrees with itself, FP8 is scored by what the model says of the same text."""

import json
import math

import numpy as np
import pytest

import jaxspec
from jaxspec.bench import accuracy
from jaxspec.bench.__main__ import main
from tests.support.sample import rare

SIZES = ["--dataset", "random", "--prompt-len", "24", "--output-len", "12", "--num-prompts", "5", "--concurrency", "4"]


@pytest.mark.parametrize("formats", [rare(["weights"]), rare(["weights", "int4", "nvfp4", "kv"])], ids=",".join)
def test_formats_are_compared_with_the_unquantised_model(tiny, tmp_path, capsys, formats):
    out = tmp_path / "accuracy.json"
    chosen = ["--formats", ",".join(formats), "--draft", f"standalone:{tiny[1]}"]
    assert main(["accuracy", *tiny, *SIZES, *chosen, "--json", str(out)]) == 0
    exact, *others = json.loads(out.read_text())["rows"]
    assert [row["format"] for row in (exact, *others)] == ["unquantised", *formats]
    assert exact["agree"] == exact["same"] == 1.0 and exact["tokens_per_round"] > 3
    assert exact["low"] <= exact["tokens_per_round"] <= exact["high"]
    weights = others[0]
    assert 0.5 < weights["agree"] < 1 and weights["tokens_per_round"] < exact["tokens_per_round"]
    assert len({row["perplexity"] for row in (exact, *others)}) == 1 + len(others)
    for row in others:
        assert row["answer_perplexity"] == pytest.approx(exact["answer_perplexity"], rel=0.2)
    printed = capsys.readouterr().out
    assert "100.00%" in printed and "of the answer" in printed


def test_scores_are_the_models_own(tiny):
    """Compare with one forward over each whole text."""

    llm = jaxspec.LLM(tiny[1], dtype="float32", skip_warmup=True, few_programs=True, context_length=64)
    prompts, texts = [[5, 6, 7], [9, 8, 7, 6, 5]], [[1, 2, 3, 4], [4, 3]]
    row = accuracy._scores(llm.engine, prompts, texts, 2)
    sums, agreed = np.zeros(2), 0
    for prompt, text in zip(prompts, texts, strict=True):
        logits = np.asarray(jaxspec.logits(llm.engine.runner.model, [prompt + text])[0], np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for place, token in enumerate((prompt + text)[1:]):
            sums[int(place + 1 >= len(prompt))] -= logprobs[place, token]
            agreed += place + 1 >= len(prompt) and logits[place].argmax() == token
    assert row["tokens"] == [6, 6] and row["agree"] == agreed / 6
    assert row["perplexity"] == pytest.approx(math.exp(sums[0] / 6), rel=1e-4)
    assert row["answer_perplexity"] == pytest.approx(math.exp(sums[1] / 6), rel=1e-4)


@pytest.mark.parametrize(("options", "message"), [
    (["--formats", "weights,int8"], "'int8' is none of weights, activations, int4, nvfp4, kv"),
    (["--temperature", "1"], "--temperature is 1.0"),
])  # fmt: skip
def test_what_accuracy_cannot_compare(tiny, capsys, options, message):
    with pytest.raises(SystemExit):
        main(["accuracy", *tiny, "--dataset", "random", *options])
    assert message in capsys.readouterr().err
