"""Harmony, gpt-oss' format: messages with a channel and maybe a recipient, each between special tokens.

A message in channel `analysis` is reasoning, one in `final` content, and so is one in `commentary` without a recipient.
One `to=functions.NAME` is a call of NAME with its body as arguments. Other recipients are the model's built-in tools,
which a server has none of: what they are sent is reasoning. A message ends at an end token, or where another begins.
The prompt ends in `<|start|>assistant`, so a reply begins inside of a header.
"""

from __future__ import annotations

import re

from server.parsers.scan import Emit, Steps, stops
from server.parsers.tools import ToolScanner

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
MAX_HEADER = 1024  # characters; a longer one is text

_MESSAGE_ENDS = stops(*ENDS, START, CHANNEL)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CUT_OFF = re.compile(r"(?:<\|\w+\|>|assistant|analysis|commentary|final|json|\s)*(?:to=\S*|\w*|<[|\w]*)")


class Harmony(ToolScanner):
    MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)

    def run(self) -> Steps:
        self._said: set[str] = set()  # kinds of text that a message has had: a newline stands before the next
        while (yield from self.more()):
            if (yield from self.literal(*ENDS)):
                continue
            self.mark()
            marker = yield from self.literal(START, CHANNEL, MESSAGE, " to=")
            self.back()
            if not marker:
                yield from self._body("content", self.content)
                continue
            self.mark()
            header = yield from self.upto(MESSAGE, MAX_HEADER)
            if header is not None:
                self.forget()
                self.openings += 1
                yield from self._message(header)
            elif self.ended and _CUT_OFF.fullmatch(self.buffer, self.at):
                return
            else:
                self.refuse(marker)

    def _message(self, header: str) -> Steps:
        channel = (found := _CHANNEL.search(header)) and found.group(1)
        recipient = (found := _RECIPIENT.search(header)) and found.group(1)
        if recipient and (recipient.startswith("functions.") or recipient in self.schemas):
            yield from self._call(recipient.removeprefix("functions."))
        elif channel == "analysis" or recipient:
            yield from self._body("reasoning", self.reasoning)
        else:
            yield from self._body("content", self.content)

    def _call(self, name: str) -> Steps:
        self.call(name)
        yield from self.space()
        if (yield from self.more()) and self.buffer[self.at] == "{":
            yield from self.json(self.arguments)
            yield from self.text(self.content, _MESSAGE_ENDS)
            return
        empty = True

        def say(text: str) -> None:
            nonlocal empty
            empty = False
            self.arguments(text)

        yield from self.text(say, _MESSAGE_ENDS)
        if empty:
            self.arguments("{}")

    def _body(self, kind: str, emit: Emit) -> Steps:
        apart = kind in self._said

        def say(text: str) -> None:
            nonlocal apart
            emit("\n" + text if apart else text)
            apart = False
            self._said.add(kind)

        yield from self.text(say, _MESSAGE_ENDS)
