"""`bench_serving` of SGLang itself, with what the sglang-jax wheel's lacks: backends that chat, and two data sets."""

import json
import tempfile
from pathlib import Path

from checks import check, command, main

PROMPTS = 4
QUESTIONS = ("What is the capital of France?", "Name three fruits.", "Is the sea blue?", "How many legs has a cat?")
GROUPS = ("--gsp-num-groups", "2", "--gsp-prompts-per-group", "2", "--gsp-output-len", "12")
LENGTHS = ("--gsp-system-prompt-len", "64", "--gsp-question-len", "16")


def bench(backend, data, url, model, tokenizer):
    with tempfile.TemporaryDirectory() as scratch:
        out, questions = Path(scratch, "out.jsonl"), Path(scratch, "sharegpt.json")
        turns = lambda text: [{"from": "human", "value": text}, {"from": "gpt", "value": "I think so. " * 4}]  # noqa: E731
        questions.write_text(json.dumps([{"conversations": turns(text)} for text in QUESTIONS]))
        flags = {
            "random-ids": ("--random-input-len", "32", "--random-output-len", "12", "--random-range-ratio", "1"),
            "generated-shared-prefix": (*GROUPS, *LENGTHS),
            "sharegpt": ("--dataset-path", str(questions), "--sharegpt-output-len", "12"),
        }[data]
        command(
            "python",
            *("-m", "sglang.bench_serving", "--backend", backend, "--base-url", url, "--model", model),
            *("--tokenizer", tokenizer, "--dataset-name", data, "--num-prompts", str(PROMPTS), *flags),
            *("--max-concurrency", "2", "--disable-tqdm", "--output-file", str(out)),
            HOME=scratch,  # it keeps the prompts that it makes in ~/.cache
            HF_HUB_OFFLINE="1",  # it looks for the model by its name, for a minute where there is no hub
        )
        result = json.loads(out.read_text().splitlines()[-1])
    assert result["completed"] == PROMPTS, f"{result['completed']} of {PROMPTS} requests went well"
    assert result["total_output_tokens"] == 12 * PROMPTS, result["total_output_tokens"]
    return f"{PROMPTS} requests, {result['output_throughput']:.1f} tok/s"


def add(backend, data):
    def run(url, model, tokenizer):
        return bench(backend, data, url, model, tokenizer)

    run.__name__ = f"{backend} {data}"
    check(run)


for backend, data in (
    ("sglang-oai-chat", "random-ids"),
    ("vllm-chat", "random-ids"),
    ("sglang", "generated-shared-prefix"),
    ("sglang-oai-chat", "generated-shared-prefix"),
    ("sglang", "sharegpt"),
    ("sglang-oai-chat", "sharegpt"),
):
    add(backend, data)
main()
