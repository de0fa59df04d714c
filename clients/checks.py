"""Checks that the clients' scripts share. Each script runs in its client's own environment, so they use only the
standard library.

A check is a function of (url, model, tokenizer): the server's address, the model's name, a folder with its tokenizer.
It returns a few words on what it saw, or raises. A script prints a JSON line for each: check, seconds, ok, said.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TIME_TOOL = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The local time in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
_checks: list[Callable[[str, str, str], str]] = []


def check(function: Callable[[str, str, str], str]) -> Callable[[str, str, str], str]:
    _checks.append(function)
    return function


def weather_arguments(arguments: dict) -> str:
    """The arguments of a call of get_weather, if they follow its schema."""
    assert arguments.keys() == {"city", "unit"}, arguments
    assert isinstance(arguments["city"], str) and arguments["unit"] in ("celsius", "fahrenheit"), arguments
    return json.dumps(arguments)


def command(name: str, *args: str, timeout: float = 900, **env: str) -> str:
    """Run a program of this environment and return its output. **Raises:** `AssertionError` with the end of that, if it
    fails."""
    path = Path(sys.executable).parent / name
    known = os.environ | {"TOKENIZERS_PARALLELISM": "false", "NO_COLOR": "1"} | env
    done = subprocess.run(
        [str(path), *args], env=known, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"exit status {done.returncode}: ...{done.stdout.strip()[-600:]}"
    return done.stdout


def main() -> None:
    url, model, tokenizer = sys.argv[1:]
    for function in _checks:
        began = time.monotonic()
        try:
            ok, said = True, function(url, model, tokenizer)
        except Exception as error:
            ok, said = False, f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - began
        line = {
            "check": function.__name__.replace("_", " "),
            "seconds": seconds,
            "ok": ok,
            "said": " ".join(said.split()),
        }
        print("\n" + json.dumps(line), flush=True)
