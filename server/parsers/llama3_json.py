"""Llama 3's JSON: `{"name": ..., "parameters": {...}}`, bare or behind `<|python_tag|>`, several with `;` between.

A bare object has no marker that says it is a call, so it must name one of the request's tools and give its arguments:
other JSON is an answer. One with a key that no call has is told at that key, so that JSON answers still stream.
"""

from __future__ import annotations

from server.parsers.scan import Steps, stops
from server.parsers.tools import ToolScanner

TAG = "<|python_tag|>"


class Llama3Json(ToolScanner):
    MARKERS = (TAG,)

    def run(self) -> Steps:
        while stop := (yield from self.text(self.content, stops(TAG, "{"))):
            self.mark()
            if stop == TAG:
                yield from self.literal(TAG)
                yield from self.space()
            if (yield from self.json_call(marked=stop == TAG)):
                yield from self._separator()
            elif self.at == len(self.buffer):  # cut off: what is inside of it is no call either
                self.back()
                yield from self.rest(self.content)
            else:
                self.refuse(stop)

    def _separator(self) -> Steps:
        after = self.at
        yield from self.space()
        if not (yield from self.literal(";")):
            self.at = after
