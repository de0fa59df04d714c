"""Llama 3's JSON: `{"name": ..., "parameters": {...}}`, bare or behind `<|python_tag|>`, several with `;` between.

A bare object has no marker that says it is a call, so it must name one of the request's tools and give its arguments:
other JSON is an answer, whatever it holds. One with a key that no call has is told at that key, so that JSON answers
still stream. A list of calls is read as well.
"""

from __future__ import annotations

import re

from server.parsers.scan import Steps, stops
from server.parsers.tools import ToolScanner

TAG = "<|python_tag|>"

_WORD = re.compile(r"[\w.+-]+")
_QUOTED = stops('"', "\\")


class Llama3Json(ToolScanner):
    MARKERS = (TAG,)

    def run(self) -> Steps:
        while stop := (yield from self.text(self.content, stops(TAG, "{", "["))):
            self.mark()
            marked = stop == TAG
            if marked:
                yield from self.literal(TAG)
                yield from self.space()
            listed = yield from self.literal("[")
            if listed:
                yield from self.space()
            if (yield from self.json_call(marked)):
                yield from self._further(marked, listed)
            elif self.at == len(self.buffer):  # cut off: what is inside of it is no call either
                self.back()
                yield from self.rest(self.content)
            elif marked:
                self.refuse(TAG)
            else:
                self.back()
                yield from self._answer()

    def _further(self, marked: bool, listed: str | None) -> Steps:
        """Read the calls of a list, its end, and what stands between calls."""
        while True:
            after = self.at
            yield from self.space()
            if listed and (yield from self.literal("]")):
                listed = None
                continue
            self.mark()
            sign = yield from self.literal(",", ";")
            yield from self.space()
            if not (yield from self.json_call(marked)):
                self.back()
                self.at = after if sign != ";" else self.at + 1
                return

    def _answer(self) -> Steps:
        """Pass on an object or a list that is no call, as far as it is JSON."""
        brackets, wants = "", "value"
        while True:
            before = self.at
            yield from self.space()
            if self.at > before:
                self.content(self.buffer[before : self.at])
            if not (yield from self.more()):
                return
            sign = self.buffer[self.at]
            if sign in "{[" and "value" in wants:
                brackets, wants = brackets + ("}" if sign == "{" else "]"), "key end" if sign == "{" else "value end"
            elif brackets.endswith(sign) and "end" in wants:
                brackets, wants = brackets[:-1], "comma end"
            elif sign == "," and "comma" in wants:
                wants = "key" if brackets[-1] == "}" else "value"
            elif sign == ":" and wants == "colon":
                wants = "value"
            elif sign == '"' and ("value" in wants or "key" in wants):
                wants = "colon" if "key" in wants else "comma end"
            elif _WORD.match(sign) and "value" in wants:
                wants = "comma end"
            else:
                return
            self.content(sign)
            self.at += 1
            if sign == '"':
                yield from self._rest_of_string()
            elif _WORD.match(sign):
                while (yield from self.more()) and _WORD.match(self.buffer, self.at):
                    end = _WORD.match(self.buffer, self.at).end()
                    self.content(self.buffer[self.at : end])
                    self.at = end
            elif not brackets:
                return

    def _rest_of_string(self) -> Steps:
        """Pass on a string from behind its opening quote."""
        while stop := (yield from self.text(self.content, _QUOTED)):
            size = 1 + (stop == "\\")
            while len(self.buffer) - self.at < size and not self.ended:
                yield
            self.content(self.buffer[self.at : self.at + size])
            self.at = min(self.at + size, len(self.buffer))
            if stop == '"':
                return
