"""Kimi K2's format: calls in a section of their own, each with an id that counts a chat's calls.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
    <|tool_calls_section_end|>

The id is the call's, since the chat template shows it to the model beside the call's result.
"""

from __future__ import annotations

import re
from collections.abc import Generator

from server.parsers.deepseek import DeepseekV31
from server.parsers.tools import MAX_NAME

_ID = re.compile(r"[\w.:/-]*")
_NUMBER = re.compile(r":\d+$")


class KimiK2(DeepseekV31):
    SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    CALL, SEPARATOR, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    MARKERS = (SECTION, SECTION_END, CALL, SEPARATOR, CALL_END)
    SECTIONS = SECTION, "<|tool_call_section_begin|>"  # some write the singular
    SECTION_ENDS = SECTION_END, "<|tool_call_section_end|>"
    HEAD, TAIL = (CALL, "functions.{name}:", "{number}", SEPARATOR), (CALL_END,)

    _id = ""

    def new_id(self) -> str:
        return self._id if _NUMBER.search(self._id) else super().new_id()

    def name(self) -> Generator[None, None, str | None]:
        self._id = (yield from self.word(_ID, MAX_NAME)) or ""
        yield from self.space()
        if not (yield from self.literal(self.SEPARATOR)):
            return None
        return _NUMBER.sub("", self._id).removeprefix("functions.")
