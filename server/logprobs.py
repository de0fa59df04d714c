"""Log-probabilities in OpenAI's two formats (chat and completions) and vLLM's format for prompts.

Invariant: what is written is valid JSON, so minus infinity (a token that couldn't be) becomes `FLOOR`, as at OpenAI.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from jaxspec.request import TokenLogprobs
from jaxspec.tokenizer import Tokenizer

FLOOR = -9999.0

Entry = tuple[int, TokenLogprobs | None]  # token id, and its log-probabilities; the first token of a prompt has none


class TokenNames:
    """Texts and bytes of single tokens, kept once made: 20 top log-probabilities a token ask for many."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self.text = lru_cache(maxsize=2**17)(self._text)
        self.raw = lru_cache(maxsize=2**17)(self._raw)

    def _text(self, token: int) -> str:
        return f"token_id:{token}" if self._tokenizer is None else self._tokenizer.token_text(token)

    def _raw(self, token: int) -> bytes:
        return self._text(token).encode() if self._tokenizer is None else self._tokenizer.token_bytes(token)


class Offsets:
    """Where each token of a text begins, in characters. A token that starts inside a character begins where it ends.

    With `text` (an echoed prompt), a token that isn't there, such as a begin-of-text token, takes no room.
    """

    def __init__(self, start: int = 0, text: str | None = None):
        self.place = start
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, raw: bytes) -> int:
        start, piece = self.place, self._decoder.decode(raw)
        if self._text is None or self._text.startswith(piece, start):
            self.place += len(piece)
        return start


def chat_logprobs(names: TokenNames, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat reply or chunk."""

    def item(token: int, logprob: float) -> dict[str, Any]:
        return {"token": names.text(token), "logprob": max(logprob, FLOOR), "bytes": list(names.raw(token))}

    return {
        "content": [
            item(entry.token_id, entry.logprob) | {"top_logprobs": [item(*top) for top in entry.top]}
            for entry in entries
        ],
        "refusal": None,
    }


def completion_logprobs(names: TokenNames, entries: Iterable[Entry], offsets: Offsets) -> dict[str, list]:
    """`choices[].logprobs` of a completion or chunk. `top_logprobs` holds the chosen token too, as OpenAI's does."""
    result: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, entry in entries:
        name = names.text(token)
        result["tokens"].append(name)
        result["text_offset"].append(offsets.take(names.raw(token)))
        if entry is None:
            result["token_logprobs"].append(None)
            result["top_logprobs"].append(None)
            continue
        chosen = max(entry.logprob, FLOOR)
        result["token_logprobs"].append(chosen)
        top: dict[str, float] = {}
        for other, logprob in entry.top:  # parts of characters share a name: the likeliest keeps it
            top.setdefault(names.text(other), max(logprob, FLOOR))
        top.setdefault(name, chosen)
        result["top_logprobs"].append(top)
    return result


def prompt_logprobs(names: TokenNames, entries: Iterable[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per token, token id -> logprob, rank and text; the first has none.

    The token that stands there comes first. Its rank is null when it isn't among the reported top.
    """
    shown: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            shown.append(None)
            continue
        ranks = {token: rank for rank, (token, _) in enumerate(entry.top, 1)}
        values = {entry.token_id: entry.logprob} | dict(entry.top)
        shown.append(
            {
                str(token): {
                    "logprob": max(logprob, FLOOR),
                    "rank": ranks.get(token),
                    "decoded_token": names.text(token),
                }
                for token, logprob in values.items()
            }
        )
    return shown
