"""How many of a choice's tokens are reasoning, for `usage`.

Invariant: the count depends on the tokens alone, not on the deltas that brought them: each token's text is parsed by
itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxspec.config.request import Delta, SamplingParams
from jaxspec.text.detokenizer import Detokenizer
from jaxspec.text.tokenizer import Tokenizer
from server.chat.speech import Speech
from server.parsers import REASONING, Parser, Piece


class ReasoningTokens:
    """Counts the reasoning tokens of one choice.

    Markers around the reasoning don't count, as in vLLM. A token without a whole character, or whose text may begin a
    marker, counts if the text that it turns out to belong to is reasoning.
    """

    def __init__(self, speech: Speech, params: SamplingParams, tokenizer: Tokenizer):
        self.count = 0
        self._parser = Parser(speech.reasoning, None, speech.tools, speech.thinking, params.structured is not None)
        self._text = Detokenizer(
            tokenizer, skip_special_tokens=params.skip_special_tokens, kept=params.kept_special_tokens
        )
        self._undecided = 0  # tokens that no piece has followed yet

    def take(self, delta: Delta) -> None:
        """Count a delta's tokens."""
        self._push(delta.token_ids)
        if delta.finish_reason is not None:
            self._decide(self._parser.push(self._text.finish()) + self._parser.finish())

    def _push(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if self._parser.past_reasoning:
                return
            openings = self._parser.openings
            pieces = self._parser.push(self._text.push((token,))[0])
            if self._parser.openings > openings:
                self._undecided = 0  # those tokens were the marker's
                if not pieces:
                    continue
            self._undecided += 1
            self._decide(pieces)

    def _decide(self, pieces: list[Piece]) -> None:
        if not pieces:
            return
        if any(piece.kind == REASONING for piece in pieces):
            self.count += self._undecided
        self._undecided = 0
