"""Log-probabilities in OpenAI's two formats (chat and completions) and vLLM's format for prompts.

Invariant: what is written is valid JSON, so minus infinity (a token that couldn't be) becomes `FLOOR`, as at OpenAI.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from jaxspec.config.request import TokenLogprobs
from jaxspec.text.detokenizer import Detokenizer
from jaxspec.text.tokenizer import Tokenizer

FLOOR = -9999.0

Entry = tuple[int, TokenLogprobs | None]  # token id, and its log-probabilities; the first token of a prompt has none


class TokenNames:
    """Texts and bytes of single tokens, kept once made: 20 top log-probabilities a token ask for many."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool = False):
        """`as_ids` names every token "token_id:7", as vLLM's `return_tokens_as_token_ids` does."""
        self.tokenizer, self.as_ids = tokenizer, as_ids
        self.text = lru_cache(maxsize=2**17)(self._text)
        self.raw = lru_cache(maxsize=2**17)(self._raw)
        self.distinct = lru_cache(maxsize=2**17)(self._distinct)

    def _text(self, token: int) -> str:
        if self.as_ids or self.tokenizer is None:
            return f"token_id:{token}"
        return self.tokenizer.token_text(token)

    def _distinct(self, token: int) -> str:
        """The text, or of a token that has part of a character its bytes, as OpenAI's completions write them."""
        text = self.text(token)
        if "\ufffd" not in text or text.encode() == self.raw(token):
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.raw(token))

    def _raw(self, token: int) -> bytes:
        return self._text(token).encode() if self.tokenizer is None else self.tokenizer.token_bytes(token)


class Offsets:
    """Where each token of a text begins, in characters. A token that starts inside a character begins where it ends.

    The text is what `Detokenizer` makes of the tokens, from `start` on, without special ones if `skip`. With `echo`, it
    is that of a prompt. A token that isn't in that text, such as a begin-of-text token, takes no room, nor does the
    space that SentencePiece puts before a text. Without a tokenizer there is no text, and all is at `start`.

    `prompt_ids`: the tokens that the text goes on from.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        start: int = 0,
        prompt_ids: Sequence[int] = (),
        echo: str | None = None,
        skip: bool = True,
    ):
        self.place = start
        self._echo = echo
        self._detokenizer = None
        if tokenizer is not None:
            skip = skip and echo is None
            self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, prompt_ids=prompt_ids)

    def take(self, token: int) -> int:
        start, piece = self.place, self._detokenizer.push((token,))[0] if self._detokenizer else ""
        if self._echo is not None:
            piece = next(p for p in (piece, piece.removeprefix(" "), "") if self._echo.startswith(p, start))
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
    """`choices[].logprobs` of a completion or chunk. `top_logprobs` holds the chosen token too, as OpenAI's does, by
    its name, so that no two tokens may share one."""
    result: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, entry in entries:
        name = names.distinct(token)
        result["tokens"].append(name)
        result["text_offset"].append(offsets.take(token))
        if entry is None:
            result["token_logprobs"].append(None)
            result["top_logprobs"].append(None)
            continue
        chosen = max(entry.logprob, FLOOR)
        result["token_logprobs"].append(chosen)
        top: dict[str, float] = {}
        for other, logprob in entry.top:
            top.setdefault(names.distinct(other), max(logprob, FLOOR))
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
        ranks, told = {token: rank for rank, (token, _) in enumerate(entry.top, 1)}, {}
        for token, logprob in ({entry.token_id: entry.logprob} | dict(entry.top)).items():
            text, rank = names.text(token), ranks.get(token)
            told[str(token)] = {"logprob": max(logprob, FLOOR), "rank": rank, "decoded_token": text}
        shown.append(told)
    return shown
