"""`bench serve` beside SGLang's `bench_serving`, against one server with a script: a table, and whether rows agree.

    pip download --no-deps sglang==0.5.6 && unzip sglang-*.whl
    python scripts/bench_beside.py sglang/bench_serving.py --python VENV/bin/python

VENV has aiohttp, numpy, pillow, pybase64, requests, tqdm and transformers. Prompts go to a server in this
process, 8 at a time. It waits before each token as long as a schedule says: about a second before the first, 0.1 s
before others, 0.5 s before two of them. Exits with 1 if a figure differs by more than 1%.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

PROMPTS, PROMPT, OUTPUT, AT_ONCE, STALLS = 64, 64, 24, 8, (8, 16)
WARM_UP = 4  # as `bench serve` has it
# Runs the file with what it imports and doesn't need here left out, and a tokenizer of one word a token.
RUN = """
import importlib.util, sys, types
sys.modules["datasets"] = types.SimpleNamespace(load_dataset=None)
spec = importlib.util.spec_from_file_location("bench_serving", sys.argv[1])
bench = importlib.util.module_from_spec(spec)
sys.modules["bench_serving"] = bench
spec.loader.exec_module(bench)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(1000)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
bench.get_tokenizer = lambda *_, **__: PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
sys.argv = sys.argv[1:]
source = open(sys.argv[0]).read()
main = source[source.index('if __name__ == "__main__":') :]
bench.__name__ = "__main__"
exec(compile(main, sys.argv[0], "exec"), vars(bench))
"""
# A row of the table: its name, our key, theirs.
ROWS = (
    ("requests/s", "requests_per_s", "request_throughput"),
    ("input tokens/s", "prompt_tokens_per_s", "input_throughput"),
    ("output tokens/s", "output_tokens_per_s", "output_throughput"),
    ("total tokens/s", "total_tokens_per_s", "total_throughput"),
    ("peak output tokens/s", "peak_output_tokens_per_s", "max_output_tokens_per_s"),
    ("mean concurrency", "mean_concurrency", "concurrency"),
    *((f"E2E {ours}, ms", f"e2e_{ours}_ms", f"{theirs}_e2e_latency_ms")
      for ours, theirs in (("mean", "mean"), ("p50", "median"), ("p99", "p99"))),
    *((f"{kind} {ours}, ms", f"{kind.lower()}_{ours}_ms", f"{theirs}_{kind.lower()}_ms")
      for kind in ("TTFT", "TPOT", "ITL") for ours, theirs in (("mean", "mean"), ("p50", "median"), ("p99", "p99"))),
    ("ITL p95, ms", "itl_p95_ms", "p95_itl_ms"),
    ("ITL max, ms", "itl_max_ms", "max_itl_ms"),
)  # fmt: skip


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: list[int]) -> None:
    """Requests of one connection: the model's name, or a stream of tokens in time with the schedule."""
    try:
        while head := (await reader.readuntil(b"\r\n\r\n")).decode().lower():
            length = head.partition("content-length:")[2].split()
            body = json.loads(await reader.readexactly(int(length[0]) if length else 0) or "{}")
            if not head.startswith("post /v1/completions"):
                found = b'{"data":[{"id":"mock"}]}' if "/v1/models" in head else b"{}"
                status = "200 OK" if "/v1/models" in head else "404 Not Found"
                writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(found)}\r\n\r\n".encode() + found)
                continue
            number, clock = count[0], asyncio.get_running_loop()
            count[0] += 1
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            at = clock.time()
            for i in range(body["max_tokens"]):
                at += 0.5 if i in STALLS else 0.1 if i else 1.02 + 0.05 * (number // AT_ONCE % 4)
                await asyncio.sleep(at - clock.time())
                send(writer, {"choices": [{"index": 0, "text": f"w{i} "}]})
            if body.get("stream_options", {}).get("include_usage"):
                prompt = body["prompt"]
                used = len(prompt.split() if isinstance(prompt, str) else prompt)
                usage = {"prompt_tokens": used, "completion_tokens": body["max_tokens"]}
                send(writer, {"choices": [], "usage": usage})
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    except asyncio.IncompleteReadError:
        writer.close()


def send(writer: asyncio.StreamWriter, event: dict) -> None:
    text = b"data: " + json.dumps(event).encode() + b"\n\n"
    writer.write(b"%x\r\n%s\r\n" % (len(text), text))


def serve(count: list[int]) -> str:
    """Serve in a thread, counting requests; the server's address."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(lambda *pair: answer(*pair, count), "127.0.0.1", 0))
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench_serving", help="SGLang's file")
    parser.add_argument("--python", default=sys.executable, help="runs it (default: this one)")
    args = parser.parse_args()
    count, folder = [WARM_UP], Path(tempfile.mkdtemp())
    shared = ["--base-url", serve(count), "--num-prompts", str(PROMPTS)]
    said = subprocess.run(
        [args.python, "-c", RUN, args.bench_serving, "--backend", "vllm", "--model", "mock", *shared,
         "--dataset-name", "random-ids", "--random-input-len", str(PROMPT), "--random-output-len", str(OUTPUT),
         "--random-range-ratio", "1", "--max-concurrency", str(AT_ONCE), "--warmup-requests", str(WARM_UP),
         "--output-file", str(folder / "theirs"), "--disable-tqdm"],
        check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ).stdout  # fmt: skip
    count[0] = WARM_UP
    subprocess.run(
        [sys.executable, "-m", "jaxspec.bench", "serve", *shared, "--vocab-size", "1000", "--prompt-len", str(PROMPT),
         "--output-len", str(OUTPUT), "--concurrency", str(AT_ONCE), "--json", str(folder / "ours")],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    theirs = json.loads((folder / "theirs").read_text())
    theirs["max_itl_ms"] = float(re.search(r"Max ITL \(ms\): +([\d.]+)", said)[1])
    ours = json.loads((folder / "ours").read_text())["rows"][0]
    assert theirs["completed"] == ours["completed"] == PROMPTS
    worst = 0.0
    print("| | `bench serve` | `bench_serving` | difference |\n|---|---|---|---|")
    for name, here, there in ROWS:
        difference = ours[here] / theirs[there] - 1
        worst = max(worst, abs(difference))
        print(f"| {name} | {ours[here]:.2f} | {theirs[there]:.2f} | {difference:+.2%} |")
    return int(worst > 0.01)


if __name__ == "__main__":
    sys.exit(main())
