"""The input of a custom tool's call, out of the JSON arguments that the model writes.

Invariant: what `push` returns, joined, is `text` at every moment, so that a stream says what the whole response says.
"""

from __future__ import annotations

from pydantic_core import from_json

from server.protocol.response_tools import INPUT


class CustomInput:
    """The string under `INPUT`. Arguments without one are the input as they are."""

    def __init__(self):
        self.text = ""
        self._arguments = ""

    def push(self, arguments: str) -> str:
        """Characters of the input that these further arguments complete."""
        self._arguments += arguments
        return self._more(self._found() or "")

    def finish(self) -> str:
        """Characters of the input that are left once all arguments are there."""
        return "" if self.text or self._found() is not None else self._more(self._arguments)

    def _more(self, text: str) -> str:
        more = text[len(self.text) :] if text.startswith(self.text) else ""
        self.text += more
        return more

    def _found(self) -> str | None:
        try:
            read = from_json(self._arguments, allow_partial="trailing-strings")
        except ValueError:
            return None
        found = read.get(INPUT) if isinstance(read, dict) else None
        return found if isinstance(found, str) else None
