"""The input of a custom tool's call, out of the JSON arguments that the model writes.

Invariant: the parts of an input, joined, are the input, so that a stream says what the whole response says.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from pydantic_core import from_json

from server.parsers import ARGUMENTS, CALL, Piece
from server.protocol.tools import INPUT

CUSTOM_CALL, CUSTOM_INPUT = "custom_call", "custom_input"  # pieces in place of `CALL` and `ARGUMENTS`


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


class CustomCalls:
    """Pieces of one choice, those of calls of the custom tools `names` as the clients of these tools read them."""

    def __init__(self, names: Set[str]):
        self._names = names
        self._open: tuple[int, CustomInput] | None = None  # a custom call's index and input

    def read(self, pieces: Sequence[Piece], ended: bool) -> list[Piece]:
        """These pieces, read. `ended`: no more come."""
        read: list[Piece] = []
        for piece in pieces:
            if piece.kind == CALL:
                read += self._close()
                if piece.text in self._names:
                    self._open = piece.index, CustomInput()
                    piece = piece._replace(kind=CUSTOM_CALL)
            elif piece.kind == ARGUMENTS and self._open:
                piece = Piece(CUSTOM_INPUT, self._open[1].push(piece.text), piece.index)
            read.append(piece)
        return read + self._close() if ended else read

    def _close(self) -> list[Piece]:
        if self._open is None:
            return []
        (index, custom), self._open = self._open, None
        return [Piece(CUSTOM_INPUT, custom.finish(), index)]
