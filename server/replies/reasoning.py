"""How many of a choice's tokens are reasoning, for `usage`.

Invariant: the count depends on the tokens alone, not on the deltas that brought them: each token's text is parsed by
itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxspec.request import SamplingParams
from jaxspec.tokenizer import Detokenizer, Tokenizer
from server.chat.speech import Speech
from server.parsers import REASONING, Parser, Piece


class ReasoningTokens:
    """Counts the reasoning tokens of one choice.

    A token is reasoning if the next text that it leads to is. So an opening marker counts with the reasoning behind it,
    and a closing one doesn't, as it leads to the answer.
    """

    def __init__(self, speech: Speech, params: SamplingParams, tokenizer: Tokenizer):
        self.count = 0
        self._parser = Parser(speech.reasoning, tools=speech.tools, thinking=speech.thinking)
        self._text = Detokenizer(
            tokenizer, skip_special_tokens=params.skip_special_tokens, kept=params.kept_special_tokens
        )
        self._undecided = 0  # tokens that no piece has followed yet

    def push(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if self._parser.past_reasoning:
                return
            self._undecided += 1
            self._decide(self._parser.push(self._text.push((token,))[0]))

    def finish(self) -> None:
        """No more tokens come."""
        self._decide(self._parser.push(self._text.finish()) + self._parser.finish())

    def _decide(self, pieces: list[Piece]) -> None:
        if not pieces:
            return
        if any(piece.kind == REASONING for piece in pieces):
            self.count += self._undecided
        self._undecided = 0
