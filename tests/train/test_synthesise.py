"""Texts that the target writes: what it would say to these prompts, marked as its own; and what serving measures."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.engine.llm import LLM
from jaxspec.text.prompts import DataError, Prompt
from jaxspec.train import synthesise
from jaxspec.train.data import TrainError, read_texts
from jaxspec.train.evaluate import chat_prompts, evaluate, held_out_prompts, table
from jaxspec.train.interrupted import Interrupted
from jaxspec.train.synthesise import Recipe
from tests.support.tiny import BYTE_VOCAB, tiny_checkpoint

END = 258  # <|im_end|>
GREEDY = Recipe((0.0,), max_answer=6, max_prompt=8, longest=96)


@pytest.fixture(scope="module")
def llm():
    model = tiny_checkpoint("llama", vocab=BYTE_VOCAB, tokenizer=True, eos=END, num_hidden_layers=1)
    options = {"max_running_requests": 4, "context_length": 96, "chunked_prefill_size": 96, "skip_warmup": True}
    options |= {"few_programs": True, "decode_log_interval": 0, "disable_prefix_cache": True}
    return LLM(str(model), "ngram", **options)


def test_answers_are_the_targets_own(llm, tmp_path, capsys):
    prompts = tmp_path / "p.jsonl"
    records = [{"turns": ["Hi", "So?"], "category": "two"}, {"prompt": "A"}, {"prompt": "x" * 200}]
    prompts.write_text("".join(json.dumps(r) + "\n" for r in records))
    path = tmp_path / "out" / "data.jsonl"
    synthesise.synthesise(llm, str(prompts), path, None, GREEDY)
    texts = read_texts(path, BYTE_VOCAB)
    assert "1 of 3 prompts are longer than --row-length 96 leaves for them: left out" in capsys.readouterr().err
    assert [t.category for t in texts] == ["two", "p"] and not list(path.parent.glob("*.part"))
    assert all(len(t.tokens) <= 96 for t in texts)
    model = llm.engine.runner.model
    for text in texts:
        favourites = np.asarray(jnp.argmax(jaxspec.logits(model, text.tokens[None])[0], axis=-1))
        assert text.answers
        for begin, end in text.answers:
            assert text.tokens[begin:end].tolist() == favourites[begin - 1 : end - 1].tolist()
    chat = [{"role": "user", "content": "A"}]
    begin = texts[1].answers[0][0]
    assert texts[1].tokens[:begin].tolist() == model.tokenizer.apply_chat_template(chat)
    assert begin + 6 >= len(texts[1].tokens) > begin


def test_its_own_prompts_are_between_the_templates_ends(llm, tmp_path):
    path = tmp_path / "data.jsonl"
    synthesise.synthesise(llm, "self", path, 5, GREEDY)
    whole = path.read_text()
    texts = read_texts(path, BYTE_VOCAB)
    before, after = synthesise.template_ends(llm.engine.tokenizer)
    assert len(texts) == 5 and len({t.tokens.tobytes() for t in texts}) > 1
    for text in texts:
        prompt = text.tokens[: text.answers[0][0]].tolist()
        assert prompt[: len(before)] == before and prompt[-len(after) :] == after
        assert text.category in synthesise.OPENINGS
    # Killed while the last was being written: that one is written again, and nothing else.
    lines = whole.splitlines(keepends=True)
    path.unlink()
    path.with_name("data.jsonl.part").write_text("".join(lines)[:-7])
    synthesise.synthesise(llm, "self", path, 5, GREEDY)
    assert path.read_text() == whole


@pytest.mark.parametrize("source", ["self", "file"])
def test_an_interrupt_keeps_the_waves_before(source, llm, tmp_path, monkeypatch):
    monkeypatch.setattr(synthesise, "TIMES", 1)
    (tmp_path / "file").write_text("".join(f"{i}\n" for i in range(10)))
    source, path, calls = source if source == "self" else str(tmp_path / "file"), tmp_path / "data.jsonl", []
    recipe = dataclasses.replace(GREEDY, max_answer=2, max_prompt=2)
    synthesise.synthesise(llm, source, path, 10, recipe)
    whole = path.read_text()
    path.unlink()
    generate = llm.generate

    def interrupted(*given):
        calls.append(given)
        if len(calls) == (5 if source == "self" else 3):  # in the third wave
            raise KeyboardInterrupt
        return generate(*given)

    with monkeypatch.context() as patch:
        patch.setattr(llm, "generate", interrupted)
        with pytest.raises(Interrupted, match="interrupted after 8 of 10 texts; the same command resumes"):
            synthesise.synthesise(llm, source, path, 10, recipe)
    assert path.with_name("data.jsonl.part").read_text() == "".join(whole.splitlines(keepends=True)[:8])
    monkeypatch.setattr(synthesise, "TIMES", 3)
    synthesise.synthesise(llm, source, path, 10, recipe)
    assert path.read_text() == whole, "texts don't depend on how many are written at once"


def test_a_prompt_of_its_own_that_reads_longer_is_shortened(llm):
    tokenizer, prompt = llm.engine.tokenizer, Prompt(("\ufffd" * 50,), category="x")
    short = synthesise._shortened(tokenizer, prompt, 60)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": short.turns[0]}])
    assert short.turns[0] and len(ids) <= 60 and short.category == "x"
    assert synthesise._shortened(tokenizer, prompt, 1000) == prompt


def test_its_own_prompts_leave_short_texts_half_of_their_room():
    assert Recipe(longest=128).asking(0, 28, (END,)).max_tokens == 50
    assert Recipe(longest=1024).asking(0, 28, (END,)).max_tokens == 384


def test_what_cant_be_written_is_refused(llm, tmp_path, monkeypatch):
    with pytest.raises(TrainError, match="--data self needs --num-samples"):
        synthesise.synthesise(llm, "self", tmp_path / "d", None, GREEDY)
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(DataError, match="has no prompts"):
        synthesise.synthesise(llm, str(tmp_path / "empty.txt"), tmp_path / "d", None, GREEDY)
    (tmp_path / "long.txt").write_text("x" * 90)
    with pytest.raises(TrainError, match="no prompt leaves room for an answer in --row-length 96"):
        synthesise.synthesise(llm, str(tmp_path / "long.txt"), tmp_path / "d", None, GREEDY)
    short = dataclasses.replace(GREEDY, longest=20)
    with pytest.raises(TrainError, match="--row-length 20 has no room for a prompt and an answer"):
        synthesise.synthesise(llm, "self", tmp_path / "d", 1, short)
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", None)
    with pytest.raises(TrainError, match="has no chat template"):
        synthesise.synthesise(llm, "self", tmp_path / "d", 1, GREEDY)


def test_figures_are_by_category_and_add_up(llm, capsys):
    asked = [Prompt(("a b a b a b",), category="one"), Prompt(("Q" * 300,), category="long"), Prompt(("d",))]
    prompts = chat_prompts(llm, asked)
    figures = evaluate(llm, prompts, 12)
    assert [f.category for f in figures] == ["one", "all", "all"]  # none of "long" leaves room for an answer
    assert figures[-1].rounds == sum(f.rounds for f in figures[:-1]) and figures[-1].prompts == 2
    for f in figures:
        assert f.accept_length == pytest.approx(1 + sum(f.accepted))
    assert "| one | 1 |" in table(figures)
    assert "long: 1 prompts left out, longer than 84 tokens" in capsys.readouterr().err
    with pytest.raises(TrainError, match="no prompt has at most"):
        evaluate(llm, {"long": prompts["long"]}, 12)
    assert held_out_prompts(read(llm)) == {"x": [[1, 2]]}


def read(llm):
    from jaxspec.train.data import Text

    return [Text(np.array([1, 2, 3]), ((2, 3),), "x"), Text(np.array([1]), (), "y")]
