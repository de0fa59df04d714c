"""Prompts: random ones that share what they should, and questions from files in the published formats."""

import argparse
import json

import numpy as np
import pytest

from jaxspec.bench import datasets
from jaxspec.bench.results import BenchError
from jaxspec.config.request import SamplingParams
from jaxspec.text.prompts import DataError
from tests.server.fake import byte_tokenizer


def arguments(*extra):
    parser = argparse.ArgumentParser()
    datasets.add_arguments(parser)
    parser.add_argument("--seed", type=int)
    return parser.parse_args(["--prompt-len", "10", "--prefix-len", "6", "--prefixes", "2", *extra])


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--data", str(path)]


def test_random_prompts_share_nothing_and_repeat_by_seed():
    take = datasets.source(arguments(), 1000)
    prompts = take(3) + take(3)
    assert len({prompt.tokens[:4] for prompt in prompts}) == 6
    assert all(len(prompt.tokens) == 10 and max(prompt.tokens) < 1000 for prompt in prompts)
    assert datasets.source(arguments(), 1000)(3) == prompts[:3]
    assert datasets.source(arguments("--seed", "1"), 1000)(3) != prompts[:3]
    path, body = prompts[0].request()
    assert path == "/v1/completions" and body == {"prompt": list(prompts[0].tokens)} and prompts[0].ids(None)


def test_shared_prefixes_are_shared():
    prompts = datasets.source(arguments("--dataset", "shared-prefix"), 1000)(5)
    assert len({prompt.tokens[:6] for prompt in prompts}) == 2
    assert len({prompt.tokens[6:] for prompt in prompts}) == 5
    assert {len(prompt.tokens) for prompt in prompts} == {16}


def test_a_conversation_s_next_prompt_begins_with_the_one_before():
    args = arguments("--dataset", "conversations", "--turns", "3")
    first, second, *later = [prompt.tokens for prompt in datasets.source(args, 1000)(8)]
    assert first[:6] == second[:6] and first[6:] != second[6:]
    assert list(map(len, (first, second, *later))) == [16, 16, 26, 26, 36, 36, 16, 16]
    assert later[0][:16] == first and later[1][:16] == second and later[2][:26] == later[0]
    assert later[4][:16] not in (first, second), "other conversations begin"


def test_spec_bench_takes_first_turns_from_all_categories(tmp_path):
    rows = [{"category": c, "turns": [f"{c}{i}", "second"]} for c, n in (("qa", 3), ("math", 1)) for i in range(n)]
    take = datasets.source(arguments("--dataset", "spec-bench", *lines(tmp_path / "q.jsonl", *rows)), 1000)
    assert [prompt.messages[0]["content"] for prompt in take(3)] == ["qa0", "math0", "qa1"]
    assert [prompt.messages[0]["content"] for prompt in take(2)] == ["qa2", "qa0"]  # and from the start again


def test_gsm8k_questions_go_through_the_template_on_both_ways(tmp_path):
    data = lines(tmp_path / "q.jsonl", {"question": "1+1?", "answer": "#### 2"})
    args = arguments("--dataset", "gsm8k", *data, "--chat-template-kwargs", '{"enable_thinking": false}')
    (prompt,) = datasets.source(args, 1000)(1)
    path, body = prompt.request()
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "1+1?"}]
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert byte_tokenizer().decode(prompt.ids(byte_tokenizer()), skip_special_tokens=True).startswith("user\n1+1?")
    with pytest.raises(BenchError, match="need a model with a tokenizer"):
        prompt.ids(None)


def test_functions_are_offered_with_each_question_if_asked_for(tmp_path):
    data = lines(tmp_path / "q.jsonl", {"question": "1+1?", "answer": "#### 2"})
    (with_two,) = datasets.source(arguments("--dataset", "gsm8k", *data, "--tools", "2"), 1000)(1)
    (without,) = datasets.source(arguments("--dataset", "gsm8k", *data), 1000)(1)
    assert [tool["function"]["name"] for tool in with_two.request()[1]["tools"]] == ["lookup_0", "lookup_1"]
    assert "tools" not in without.request()[1]


@pytest.mark.parametrize("row, said", [
    (None, "needs its file: --data FILE.jsonl"),
    (
        {"question": "a GSM8K line"},
        r"line 1 is not in the format spec-bench: it must have turns, and has question",
    ),
    ({"category": "qa", "turns": []}, "turns has no words"),
    ((), "has no prompts"),
])  # fmt: skip
def test_a_file_that_is_not_the_dataset(row, said, tmp_path):
    data = [] if row is None else lines(tmp_path / "q.jsonl", *([row] if row else []))
    args = arguments("--dataset", "spec-bench", *data)
    with pytest.raises((BenchError, DataError), match=said):
        datasets.source(args, 1000)
    with pytest.raises((BenchError, DataError), match=said):
        datasets.check(args)
    datasets.check(arguments())  # random prompts need no file


@pytest.mark.parametrize("dataset, argv, said", [
    ("random", ["--data", "q.jsonl"], "--dataset random has no use for --data: .* by --dataset, one of humaneval"),
    ("shared-prefix", ["--tools", "2"], "no use for --tools"),
    ("conversations", ["--chat-template-kwargs", '{"a": 1}'], "no use for --chat-template-kwargs"),
    ("agent", ["--category", "qa"], "no use for --category"),
])  # fmt: skip
def test_flags_that_a_dataset_does_not_read_are_refused(dataset, argv, said):
    with pytest.raises(BenchError, match=said):
        datasets.check(arguments("--dataset", dataset, *argv))
    datasets.check(arguments("--dataset", "agent", "--tools", "2"))  # it asks questions


def test_a_missing_file(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        datasets.source(arguments("--dataset", "gsm8k", "--data", str(tmp_path / "none.jsonl")), 1000)


def test_an_agents_questions_ask_about_a_file_twice_and_repeat_a_tools_output():
    asked = datasets.source(arguments("--dataset", "agent"), 1000)(40)
    first, again, tool, *_ = (prompt.messages[0]["content"] for prompt in asked)
    source = first.split("```")[1]
    assert source.count("\n") > 20 and source == again.split("```")[1]
    assert "Rename `" in first and first.splitlines()[-1] != again.splitlines()[-1]
    assert tool.count(": def ") > 2
    datasets.check(arguments("--dataset", "agent"))  # it needs no file


def test_lengths_are_a_number_or_drawn():
    rng = np.random.default_rng(0)
    assert [datasets.Lengths("7").draw(rng) for _ in range(3)] == [7] * 3
    assert {datasets.Lengths("3-5").draw(rng) for _ in range(60)} == {3, 4, 5}
    mixed = datasets.Lengths("10-12:9,8192:1")
    drawn = [mixed.draw(rng) for _ in range(500)]
    assert set(drawn) == {10, 11, 12, 8192} and 20 < drawn.count(8192) < 90 and mixed.most == 8192
    for text in ("0", "x", "5-3", "4:0", "4:", "", "1:1,2:nan", "1:inf"):
        with pytest.raises(ValueError):
            datasets.Lengths(text)


def test_prompts_and_outputs_have_drawn_lengths():
    prompts = datasets.source(arguments("--prompt-len", "5-9", "--output-len", "2,30"), 1000)(60)
    assert {len(prompt.tokens) for prompt in prompts} == {5, 6, 7, 8, 9}
    assert {prompt.output_len for prompt in prompts} == {2, 30}
    assert prompts[0].params(SamplingParams(max_tokens=99)).max_tokens == prompts[0].output_len
