"""Mistral's format: `[TOOL_CALLS]`, then a JSON list of calls, or (tokenizers from v11 on) `name[ARGS]{...}`.

Where the list lacks a bracket at the end, or the name its `[ARGS]`, the calls count all the same. Ids have nine letters
or digits, because Mistral's templates refuse others.
"""

from __future__ import annotations

import re
import secrets
import string

from server.parsers.scan import Steps, stops
from server.parsers.tools import MAX_NAME, ToolScanner

MARKER, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
ALPHABET = string.ascii_letters + string.digits

_NAME = re.compile(r"[\w.:/-]*")


class Mistral(ToolScanner):
    MARKERS = (MARKER, ARGS, CALL_ID)

    def new_id(self) -> str:
        return "".join(secrets.choice(ALPHABET) for _ in range(9))

    def run(self) -> Steps:
        while (yield from self.text(self.content, stops(MARKER))):
            self.mark()
            yield from self.literal(MARKER)
            yield from self.space()
            read = self._list if (yield from self.literal("[")) else self._compact
            if not (yield from read()):
                self.refuse(MARKER)

    def _list(self) -> Steps:
        """Read a list of calls, behind its bracket. Returns whether it has any."""
        yield from self.space()
        if not (yield from self.json_call()):
            return False
        while True:
            yield from self.space()
            sign = yield from self.literal("]", ",", "}")
            if sign == "]":
                return True
            if sign:
                continue
            if not (yield from self.another_call()):
                return True

    def _compact(self) -> Steps:
        """Read a name and its arguments. Returns whether they are a call."""
        name = yield from self.word(_NAME, MAX_NAME)
        if not name:
            return False
        if (yield from self.literal(CALL_ID)):
            yield from self.word(_NAME, MAX_NAME)
        yield from self.literal(ARGS)
        yield from self.space()
        if not (yield from self.more()) or self.buffer[self.at] != "{":
            return False
        return (yield from self.value(name, self.arguments))
