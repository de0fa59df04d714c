"""Errors of texts and tokenizers."""

from __future__ import annotations


class TokenizerError(ValueError):
    """A tokenizer that can't be read, text it can't encode, or a chat template that refuses the messages."""


class TooLong(TokenizerError):
    """A text with more tokens than are allowed. `least`: a number of tokens that it surely has."""

    def __init__(self, least: int, limit: int):
        super().__init__(f"the text has at least {least} tokens, at most {limit} are allowed")
        self.least = least
