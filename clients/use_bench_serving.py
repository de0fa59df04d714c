"""`bench_serving` of the sglang-jax wheel, with each of its backends that talks to a server of this kind.

Its other three (trt, gserver, truss) speak Triton's, gserver's and Truss's own protocols.
"""

import json
import tempfile
from pathlib import Path

from checks import check, command, main

PROMPTS = 4


def bench(backend, url, model, tokenizer, *flags):
    with tempfile.TemporaryDirectory() as scratch:
        command(
            "python",
            *("-m", "sgl_jax.bench_serving", "--backend", backend, "--base-url", url, "--model", model),
            *("--tokenizer", tokenizer, "--dataset-name", "random-ids", "--num-prompts", str(PROMPTS)),
            *("--random-input-len", "32", "--random-output-len", "12", "--random-range-ratio", "1"),
            *("--max-concurrency", "2", "--disable-tqdm", "--output-file", f"{scratch}/out.jsonl", *flags),
        )
        result = json.loads(Path(scratch, "out.jsonl").read_text().splitlines()[-1])
    assert result["completed"] == PROMPTS, f"{result['completed']} of {PROMPTS} requests went well"
    assert result["total_output_tokens"] == 12 * PROMPTS, result["total_output_tokens"]
    accepted = result.get("accept_length")
    said = f"{PROMPTS} requests, {result['output_throughput']:.1f} tok/s"
    return said + (f", accept length {accepted:.2f}" if accepted else "")


def add(backend, *flags):
    def run(url, model, tokenizer):
        return bench(backend, url, model, tokenizer, *flags)

    run.__name__ = " ".join((backend, *flags))
    check(run)


for backend in ("sgl-jax", "sglang", "sglang-native", "sglang-oai", "vllm", "lmdeploy"):
    add(backend)
add("sgl-jax", "--disable-stream")
add("vllm", "--disable-stream")
main()
