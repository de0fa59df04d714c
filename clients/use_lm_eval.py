"""lm_eval over the API: log-likelihoods of completions, generation by completions and by chats.

`tokenizer_backend=remote` has the server tokenise (/tokenizer_info, /tokenize, /detokenize), so that no tokenizer is
needed here.
"""

import json
import tempfile
from pathlib import Path

from checks import check, command, main

TASKS = Path(__file__).parent / "tasks"


def evaluate(task, model, url, *, chat=False, **arguments):
    """The one figure of a task of ours."""
    with tempfile.TemporaryDirectory() as scratch:
        for file in TASKS.glob("*.yaml"):
            (Path(scratch) / file.name).write_text(file.read_text().replace("DATA", str(TASKS / "capitals.jsonl")))
        route = "chat/completions" if chat else "completions"
        given = {"model": model, "base_url": f"{url}/v1/{route}", "num_concurrent": 2, "max_retries": 1} | arguments
        command(
            "lm_eval",
            *("--model", "local-chat-completions" if chat else "local-completions"),
            *("--model_args", ",".join(f"{name}={value}" for name, value in given.items())),
            *("--tasks", task, "--include_path", scratch, "--output_path", f"{scratch}/out"),
            *(("--apply_chat_template",) if chat else ()),
            OPENAI_API_KEY="unused",
            HF_DATASETS_CACHE=f"{scratch}/datasets",
        )
        (results,) = Path(scratch, "out").rglob("results_*.json")
        figures = json.loads(results.read_text())["results"][task]
    ((name, value),) = [item for item in figures.items() if item[0].startswith(("acc,", "exact_match,"))]
    return name.partition(",")[0], value


@check
def completions_scored(url, model, tokenizer):
    name, value = evaluate("capitals_choice", model, url, tokenizer_backend="huggingface", tokenizer=tokenizer)
    assert value >= 0.75, value
    return f"{name} {value:.2f} of 4"


@check
def completions_scored_with_the_servers_tokenizer(url, model, tokenizer):
    name, value = evaluate("capitals_choice", model, url, tokenizer_backend="remote")
    assert value >= 0.75, value
    return f"{name} {value:.2f} of 4"


@check
def completions_generated(url, model, tokenizer):
    name, value = evaluate("capitals_text", model, url, tokenizer_backend="huggingface", tokenizer=tokenizer)
    assert value >= 0.75, value
    return f"{name} {value:.2f} of 4"


@check
def chats_generated(url, model, tokenizer):
    name, value = evaluate("capitals_chat", model, url, chat=True)
    assert value >= 0.75, value
    return f"{name} {value:.2f} of 4"


main()
