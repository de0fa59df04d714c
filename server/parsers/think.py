"""Reasoning between two markers, before the answer: Qwen3, DeepSeek R1, Magistral.

The text between is reasoning, the text after is content, and both keep their whitespace. Only what the reply begins
with counts as an opening marker: later ones are text, as a question about them would have it.
"""

from __future__ import annotations

from typing import ClassVar

from server.parsers.scan import Scanner, Steps, stops


class Think(Scanner):
    """`<think>` reasoning `</think>` answer.

    `thinking`: "prompt" where the prompt ended in the opening marker; "off" where it closed an empty block, so that all
    is content; None where the model opens a block itself, or doesn't. `past`: the reasoning, if any, is over, and what
    follows would be passed on unread.
    """

    OPENS: ClassVar[str] = "<think>"
    CLOSES: ClassVar[str] = "</think>"
    FORCED: ClassVar[bool] = False  # without an opening marker, too, the reply begins with reasoning
    CALL_ENDS: ClassVar[bool] = False  # unless the reply is constrained, a call ends reasoning left open

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
        ends = stops(self.CLOSES, "<tool_call>") if self.CALL_ENDS and not self.constrained else stops(self.CLOSES)
        while stop := (yield from self.text(self.reasoning, ends)):
            if stop == self.CLOSES:
                self.at += len(stop)
                return
            self.mark()
            self.at += len(stop)
            yield from self.space()
            begun = yield from self.literal("{", "<function=")
            self.back()
            if begun:  # otherwise it is a mention of the marker
                return
            self.reasoning(stop)
            self.at += len(stop)


class Qwen3(Think):
    """Parser like vLLM's of that name: a call that comes before `</think>` ends the reasoning."""

    CALL_ENDS = True


class DeepseekR1(Think):
    """Models that always reason first, and whose prompt or reply may lack the opening marker."""

    FORCED = True


class Magistral(Think):
    OPENS, CLOSES = "[THINK]", "[/THINK]"
