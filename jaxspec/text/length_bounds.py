"""Bounds on a text's token ids before it is encoded: how many there are at least, and where it may be cut.

Encoding a megabyte takes seconds and can't be interrupted. So a text that can't fit a context is refused by the bytes
that a token spells at most, and any other is encoded piece by piece.

Invariants: no text has fewer tokens than `least_tokens`; the ids of a text's `pieces`, joined, are those of the text.
A tokenizer that might break either is recognised when it is loaded: its least is 0, and its texts have one piece.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cached_property, lru_cache
from typing import Any

PIECE = 16 * 2**10  # characters
UNCUT = 2**20  # characters that are encoded at once where a text can't be cut; up to 7 s, in a thread of its own
COMPOSED = 3  # bytes that NFC makes one of, at most: three letters of Hangul, of 3 bytes each, are a syllable of 3

# Where a word begins after printable ASCII, behind a space or a newline.
_CUT = re.compile(r"(?<=[!-~])(?= [A-Za-z])|(?<=[!-~]\n)(?=[A-Za-z])")


class Measure:
    """**Arguments:** `backend`, a `tokenizers.Tokenizer`; `spelt`, the bytes of each of its tokens."""

    def __init__(self, backend: Any, spelt: Iterable[bytes]):
        self._spelt = spelt
        self._added = list(backend.get_added_tokens_decoder().values())
        self._normalizers = _steps(backend.normalizer, "normalizers")
        self._composes = any(step["type"] == "NFC" for step in self._normalizers)
        self._strips = any(token.lstrip or token.rstrip for token in self._added)
        self._spells_all = self._loses_nothing(backend)
        self._may_cut = self._splits_before_words(backend)

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self._spelt), default=0)

    def least_tokens(self, text: str) -> int:
        """A number of tokens that `text` surely has."""
        if not self._spells_all:
            return 0
        least = 0
        for start in range(0, len(text), PIECE):
            piece = text[start : start + PIECE]
            raw = ("".join(piece.split()) if self._strips else piece).encode(errors="replace")
            size = len(raw) // (COMPOSED if self._composes and not raw.isascii() else 1)
            inside = size - 2 * self.longest  # a token at either end may be longer than any of these bytes alone
            if inside > 0:
                whole = _mask(raw) if raw.isascii() else ~0  # NFC spells other bytes than were there
                least += -(-inside // self._longest_of(whole))
        return least

    def pieces(self, text: str) -> list[str]:
        """`text` in parts of about `PIECE` characters that can be encoded one by one, without special tokens."""
        starts = [0]
        while self._may_cut and (start := _next_cut(text, starts[-1] + PIECE)):
            starts.append(start)
        return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]

    def _loses_nothing(self, backend: Any) -> bool:
        """Whether each byte of a normalised text is spelt by a token: none is unknown or dropped."""
        plain = all(
            step["type"] in ("NFC", "Prepend")
            or (step["type"] == "Replace" and step["pattern"] == {"String": " "} and step["content"] == "▁")
            for step in self._normalizers
        )
        splits = _steps(backend.pre_tokenizer, "pretokenizers")
        drops = any(step.get("behavior") == "Removed" or "Whitespace" in step["type"] for step in splits)
        complete = any(step["type"] == "ByteLevel" for step in splits) or getattr(backend.model, "byte_fallback", False)
        return plain and complete and not drops

    def _splits_before_words(self, backend: Any) -> bool:
        """Whether the pre-tokenizer always splits where `_CUT` matches, so that no token reaches across.

        The pattern that splits is the tokenizer's own, so each character that may stand there is tried, alone and
        after others of its kind. No added token may reach across either, or take the space after it along.
        """
        splits = _steps(backend.pre_tokenizer, "pretokenizers")
        if not splits or any(step["type"] not in ("Split", "ByteLevel", "Digits") for step in splits):
            return False
        if any(step.get("add_prefix_space") for step in splits) or getattr(backend.model, "dropout", None):
            return False
        if any(step["type"] != "NFC" for step in self._normalizers):
            return False
        if any(token.rstrip or token.single_word or _CUT.search(f"!{token.content}a") for token in self._added):
            return False
        for before in map(chr, range(ord("!"), ord("~") + 1)):
            for text in (f"a{before}", f"1{before}", f".{before}", f" {before}", before * 3, f"a {before * 5}"):
                for gap, word in (("", " b"), ("\n", "b")):
                    found = backend.pre_tokenizer.pre_tokenize_str(text + gap + word + "c d")
                    if len(text + gap) not in (start for _, (start, _) in found):
                        return False
        return True

    def _longest_of(self, allowed: int) -> int:
        """Bytes of the longest token that has none but the `allowed` bytes; 1 if there is none."""
        return self._find_longest(allowed)

    @cached_property
    def _find_longest(self) -> Any:
        by_mask: dict[int, int] = {}
        for raw in self._spelt:
            mask = _mask(raw)
            by_mask[mask] = max(by_mask.get(mask, 1), len(raw))
        ordered = sorted(by_mask.items(), key=lambda item: -item[1])

        @lru_cache(maxsize=1024)
        def find(allowed: int) -> int:
            return next((size for mask, size in ordered if not mask & ~allowed), 1)

        return find


def _mask(raw: bytes) -> int:
    """The set of bytes in `raw`, a bit each."""
    mask = 0
    for byte in set(raw):
        mask |= 1 << byte
    return mask


def _next_cut(text: str, start: int) -> int | None:
    """The first place from `start` on where text may be cut, looked for a bounded stretch at a time."""
    while start < len(text):
        if found := _CUT.search(text, start, start + PIECE + 2):
            return found.start()
        start += PIECE
    return None


def _steps(component: Any, name: str) -> list[dict[str, Any]]:
    """The parts of a normalizer or pre-tokenizer, as tokenizer.json has them."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    return state[name] if state["type"] == "Sequence" else [state]
