"""Tokens to text as they arrive, cut at stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from jaxspec.text.stop_strings import StopStrings
from jaxspec.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns one completion's tokens into text as they arrive.

    The pushes' texts and `finish()`'s joined are `tokenizer.decode` of all the tokens, cut before the stop string that
    completes first (the longest, if several do at the same character), however the tokens were grouped into pushes.
    No push shows part of a character, and text waits only while it could be the beginning of a stop string.

    **Arguments:**

    - `stop`: strings that end the text. `keep_stop`: cut the text after the stop string, not before it.
    - `min_tokens`: a stop string counts only if a later token than this many completes it.
    - `prompt_ids`: tokens that the text goes on from. If they have any text, a leading space is kept that SentencePiece
      would drop.
    - `kept`: special tokens, by their text, that are shown where others are skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        prompt_ids: Sequence[int] = (),
        keep_stop: bool = False,
        kept: Sequence[str] = (),
    ):
        self._bytes = tokenizer.shown_bytes(skip_special_tokens, tuple(kept))
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._drop_space = tokenizer.drops_space and not any(map(self._bytes.get, prompt_ids))
        self._stops = StopStrings(stop, keep_stop) if stop else None
        self._min_tokens = min_tokens
        self._pushed = 0  # tokens
        self._shown: list[str] = []

    @property
    def text(self) -> str:
        """Everything shown so far."""
        return "".join(self._shown)

    def push(self, token_ids: Sequence[int]) -> tuple[str, str | None, int]:
        """Add tokens. Returns the text now safe to show, the stop string that ended it (or None), and how many of these
        tokens were used: all of them, or up to and including the one that completed the stop string."""
        if (stops := self._stops) is None:
            return self._show(self._characters(token_ids)), None, len(token_ids)
        if stops.hit is not None:
            return "", stops.hit, 0
        ready = ""
        for used, token in enumerate(token_ids, 1):
            self._pushed += 1
            if new := self._characters((token,)):
                ready += stops.push(new, self._pushed > self._min_tokens)
                if stops.hit is not None:
                    return self._show(ready), stops.hit, used
        return self._show(ready), None, len(token_ids)

    def finish(self) -> str:
        """No more tokens come: the text still held back. A character left incomplete shows as U+FFFD."""
        if self._stops is not None and self._stops.hit is not None:
            return ""
        held = "" if self._stops is None else self._stops.rest()
        return self._show(held + self._utf8(b"", True))

    def _characters(self, token_ids: Sequence[int]) -> str:
        """The characters that these tokens complete."""
        get = self._bytes.get
        text = self._utf8(b"".join([get(token, b"") for token in token_ids]))
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text
