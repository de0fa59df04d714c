"""Tokens a round of n-grams and suffix decoding on a coding agent's answers, and what trees of n-grams would add.

    python -m scripts.lookup_drafts --model M [--texts FILE]

Nothing is computed by a model: the answers are those that `jaxspec.bench.agent` asks for, one request after the other,
and M gives its tokenizer. `--texts` has other requests: JSON lines with `prompt` and `answer`. Drafts are those of the
drafters' references, so as an engine makes them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxspec import load_model
from jaxspec.bench import agent
from jaxspec.drafters.suffix_reference import Reference

LONGEST, SHORTEST = 5, 2  # matches of n-grams, as `Ngram` has them
Paths = list[list[int]]  # of a round's drafts: one of a chain, several of a tree


def occurrences(text: list[int]) -> Iterator[int]:
    """Where the text's last tokens stood before: the position after them, long matches first, then late ones."""
    seen = set()
    for length in range(LONGEST, SHORTEST - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if end not in seen and text[end - length : end] == text[-length:]:
                seen.add(end)
                yield end


def following(text: list[int], start: int, count: int) -> list[int]:
    """The tokens from there on; past the end they repeat with the match's period."""
    return [text[start + i % (len(text) - start)] for i in range(count)]


def ngrams(sizes: tuple[int, ...]) -> Callable[[list[int]], Paths]:
    """Branches of so many drafts, each after an occurrence whose next token no branch before it has."""

    def propose(text: list[int]) -> Paths:
        paths: Paths = []
        for start in occurrences(text):
            if len(paths) == len(sizes):
                break
            if text[start] not in {path[0] for path in paths}:
                paths.append(following(text, start, sizes[len(paths)]))
        return paths

    return propose


def agreed(path: list[int], rest: list[int]) -> int:
    """How many drafts stand."""
    return next((i for i, (a, b) in enumerate(zip(path, rest, strict=False)) if a != b), min(len(path), len(rest)))


def count(requests: list[tuple[list[int], list[int]]], propose: Callable[[list[int]], Paths]) -> float:
    """Tokens a round, the target's own included."""
    rounds = tokens = 0
    for prompt, answer in requests:
        done = 1  # the first token is no round's
        while done < len(answer):
            paths, rest = propose(prompt + answer[:done]), answer[done:]
            right = max((agreed(path, rest) for path in paths), default=0)
            gained = min(right + 1, len(rest))
            rounds, tokens, done = rounds + 1, tokens + gained, done + gained
    return tokens / rounds


def count_suffix(requests: list[tuple[list[int], list[int]]], drafts: int, recent: int) -> float:
    """Tokens a round of suffix decoding, which has the responses of the `recent` requests before."""
    tree, rounds, tokens = Reference(24, recent), 0, 0
    for number, (prompt, answer) in enumerate(requests):
        tree.start_request(number, prompt)
        tree.add_active_response(number, answer[:1])
        done = 1
        while done < len(answer):
            path, rest = tree.speculate(number, prompt + answer[:done], drafts).token_ids, answer[done:]
            gained = min(agreed(path, rest) + 1, len(rest))
            tree.add_active_response(number, rest[:gained])
            rounds, tokens, done = rounds + 1, tokens + gained, done + gained
        tree.stop_request(number)
    return tokens / rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", type=Path)
    args = parser.parse_args()
    pairs = list(agent.answered())
    if args.texts:
        records = map(json.loads, args.texts.read_text(encoding="utf-8").rstrip("\n").split("\n"))
        pairs = [(record["prompt"], record["answer"]) for record in records]
    tokenizer = load_model(args.model, load_format="dummy", progress=False).tokenizer
    chat = lambda text: tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)  # noqa: E731
    requests = [(chat(ask), tokenizer.encode(answer, add_special_tokens=False)) for ask, answer in pairs]
    print(f"{len(requests)} requests, {sum(len(answer) for _, answer in requests)} tokens of answers")
    for sizes in ((4,), (8,), (16,), (5, 3), (4, 2, 2), (12, 4), (8, 4, 4)):
        print(f"n-grams, {' + '.join(map(str, sizes))} drafts: {count(requests, ngrams(sizes)):.2f}", flush=True)
    for drafts in (4, 8, 16):
        for recent in (0, 64):
            value = count_suffix(requests, drafts, recent)
            print(f"suffix, {drafts} drafts, {recent} recent requests: {value:.2f}", flush=True)


if __name__ == "__main__":
    main()
