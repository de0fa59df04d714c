"""guidellm: chats, completions and responses under load, streamed, with usage in every chunk."""

import json
import tempfile
from pathlib import Path

from checks import check, command, main

REQUESTS = 6


def benchmark(route, url, model, tokenizer):
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.json")
        command(
            "guidellm",
            *("run", "--backend", f"kind=openai_http,target={url},model={model},request_format={route}"),
            *("--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--data", "kind=synthetic_text,prompt_tokens=48,output_tokens=12"),
            *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
            *("--output", f"kind=json,path={report}", "--disable-console"),
        )
        (result,) = json.loads(report.read_text())["benchmarks"]
    totals = result["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0), totals
    return f"{REQUESTS} requests"


@check
def chat(url, model, tokenizer):
    return benchmark("/v1/chat/completions", url, model, tokenizer)


@check
def completions(url, model, tokenizer):
    return benchmark("/v1/completions", url, model, tokenizer)


@check
def responses(url, model, tokenizer):
    return benchmark("/v1/responses", url, model, tokenizer)


main()
