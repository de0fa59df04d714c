"""Reasoning between two markers, before the answer: Qwen3, DeepSeek R1, GLM-4.5, Kimi K2, Magistral.

The text between is reasoning, the text after is content, and both keep their whitespace. Only what the reply begins
with counts as an opening marker: later ones are text, as a question about them would have it.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import ClassVar

from server.parsers.kimi_k2 import KimiK2
from server.parsers.scan import Scanner, Steps, stops
from server.parsers.tools import MAX_NAME

_NAME = re.compile(r"[\w.:/-]*")


class Think(Scanner):
    """`<think>` reasoning `</think>` answer.

    `thinking`: "prompt" where the prompt ended in the opening marker; "off" where it closed an empty block, so that all
    is content; None where the model opens a block itself, or doesn't. `past`: the reasoning, if any, is over, and what
    follows would be passed on unread.
    """

    OPENS: ClassVar[str] = "<think>"
    CLOSES: ClassVar[str] = "</think>"
    FORCED: ClassVar[bool] = False  # without an opening marker, too, the reply begins with reasoning
    CALLS: ClassVar[tuple[str, ...]] = ()  # unless the reply is constrained, a call behind one ends open reasoning

    def __init__(self, thinking: str | None = None):
        self.thinking, self.past = thinking, False
        super().__init__()

    def run(self) -> Steps:
        if self.thinking != "off":
            self.mark()
            yield from self.space()
            opened = yield from self.literal(self.OPENS)
            if opened:
                self.forget()
                self.openings += 1
            else:
                self.back()
            if opened or self.thinking == "prompt" or self.FORCED:
                yield from self._block()
        self.past = True
        yield from self.rest(self.content)

    def _block(self) -> Steps:
        ends = stops(self.CLOSES, *(() if self.constrained else self.CALLS))
        while stop := (yield from self.text(self.reasoning, ends)):
            if stop == self.CLOSES:
                self.at += len(stop)
                return
            self.mark()
            self.at += len(stop)
            yield from self.space()
            begun = yield from self.begins_call()
            self.back()
            if begun:  # otherwise it is a mention of the marker
                return
            self.reasoning(stop)
            self.at += len(stop)

    def begins_call(self) -> Generator[None, None, bool]:
        """Read on behind one of `CALLS`. Returns whether a call begins there."""
        return (yield from self.literal("{", "<function=")) is not None


class Qwen3(Think):
    """Parser like vLLM's of that name: a call that comes before `</think>` ends the reasoning."""

    CALLS = ("<tool_call>",)


class Glm45Thoughts(Think):
    """Parser like SGLang's `glm45`: a call that comes before `</think>` ends the reasoning."""

    CALLS = ("<tool_call>",)

    def begins_call(self) -> Generator[None, None, bool]:
        if not (yield from self.word(_NAME, MAX_NAME)):
            return False
        yield from self.space()
        return (yield from self.literal("<arg_key>", "</tool_call>")) is not None


class KimiK2Thoughts(Think):
    """Parser like vLLM's `kimi_k2`: a section of calls that comes before `</think>` ends the reasoning."""

    CALLS = KimiK2.SECTIONS

    def begins_call(self) -> Generator[None, None, bool]:
        return (yield from self.literal(KimiK2.CALL)) is not None


class DeepseekR1(Think):
    """Models that always reason first, and whose prompt or reply may lack the opening marker."""

    FORCED = True


class Magistral(Think):
    OPENS, CLOSES = "[THINK]", "[/THINK]"
