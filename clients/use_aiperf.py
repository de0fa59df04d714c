"""NVIDIA's aiperf: chats and completions under load, streamed."""

import json
import tempfile
from pathlib import Path

from checks import check, command, main

REQUESTS = 6


def profile(kind, url, model, tokenizer):
    with tempfile.TemporaryDirectory() as scratch:
        command(
            "aiperf",
            *("profile", "--model", model, "--url", url, "--endpoint-type", kind, "--streaming"),
            *("--tokenizer", tokenizer, "--concurrency", "2", "--request-count", str(REQUESTS)),
            *("--synthetic-input-tokens-mean", "48", "--output-tokens-mean", "12", "--ui", "none"),
            *("--artifact-dir", scratch),
        )
        (report,) = Path(scratch).rglob("profile_export_aiperf.json")
        result = json.loads(report.read_text())
    assert result["request_count"]["avg"] == REQUESTS, result["request_count"]
    assert not result.get("error_summary"), result["error_summary"]
    latency, first = result["request_latency"]["avg"], result["time_to_first_token"]["avg"]
    return f"{REQUESTS} requests, {latency:.0f} ms each, {first:.0f} ms to the first token"


@check
def chat(url, model, tokenizer):
    return profile("chat", url, model, tokenizer)


@check
def completions(url, model, tokenizer):
    return profile("completions", url, model, tokenizer)


main()
