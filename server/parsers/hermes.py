"""Hermes' format, also Qwen2.5's and Qwen3's: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Read as well: several objects in one pair of markers, with commas and brackets as of a list; a repeated opening marker;
a brace too many, or too few, at the end; and an end of the reply in place of the closing marker.
"""

from __future__ import annotations

from server.parsers.scan import Steps, stops
from server.parsers.tools import ToolScanner

OPENS, CLOSES = "<tool_call>", "</tool_call>"


class Hermes(ToolScanner):
    MARKERS = (OPENS, CLOSES)

    def run(self) -> Steps:
        unclosed = False
        while stop := (yield from self.text(self.content, stops(OPENS, CLOSES) if unclosed else stops(OPENS))):
            if stop == OPENS:
                unclosed = yield from self._calls()
            else:  # text stood between the JSON and the marker
                self.at += len(stop)
                unclosed = False

    def _calls(self) -> Steps:
        """Read a marker and the calls behind it. Returns whether its closing marker is still to come."""
        self.mark()
        while (yield from self.literal(OPENS)):
            yield from self.space()
        markers = self.since_mark()
        if (yield from self.literal("[")):
            yield from self.space()
        if not (yield from self.json_call()):
            self.refuse(markers)
            return False
        return (yield from self._further())

    def _further(self) -> Steps:
        while True:
            yield from self.space()
            if (yield from self.closing(CLOSES)):
                return False
            if (yield from self.literal(",", "}", "]")):
                continue
            if not (yield from self.another_call()):
                return True
