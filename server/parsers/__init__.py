"""Chat as models speak it: a reply's text in, pieces out: reasoning, content, tool calls.

One hook between detokeniser and reply. A `Parser` takes the text of one choice in whatever pieces it comes, and gives
each piece's kind; what it gives, joined, is the same however the text was cut (`scan.py` says why). A new format is a
file with a scanner, and a line in one of the tables.

Where no flag says which formats a model speaks, its chat template does, which shows the model's own markers: the first
line of a table that fits counts. Fine-tunes keep their base's model type but not always its format, so the model type
only decides where the template can't.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxspec.text.chat_template import code_of
from server.parsers.deepseek import DeepseekV3, DeepseekV31
from server.parsers.gemma4 import Gemma4, Gemma4Thoughts
from server.parsers.glm45 import Glm45, MinimaxM2
from server.parsers.harmony import Harmony
from server.parsers.hermes import Hermes
from server.parsers.kimi_k2 import KimiK2
from server.parsers.llama3_json import Llama3Json
from server.parsers.mistral import Mistral
from server.parsers.qwen3_coder import Qwen3Coder
from server.parsers.scan import ARGUMENTS, CALL, CONTENT, REASONING, Piece, Scanner, join
from server.parsers.think import DeepseekR1, Glm45Thoughts, KimiK2Thoughts, Magistral, Qwen3, Think
from server.parsers.tools import ToolScanner

__all__ = ["ARGUMENTS", "CALL", "CONTENT", "PARSERS", "REASONING", "REASONING_PARSERS", "Parser", "Piece", "parse"]

REASONING_PARSERS: dict[str, type[Think] | type[Harmony]] = {
    "qwen3": Qwen3,
    "deepseek_r1": DeepseekR1,
    "glm45": Glm45Thoughts,
    "kimi_k2": KimiK2Thoughts,
    **dict.fromkeys(("think", "minimax_m2"), Think),
    "mistral": Magistral,
    "gemma4": Gemma4Thoughts,
    **dict.fromkeys(("harmony", "gpt_oss", "openai_gptoss"), Harmony),
}
PARSERS: dict[str, type[ToolScanner]] = {
    **dict.fromkeys(("hermes", "qwen25", "qwen"), Hermes),
    "qwen3_coder": Qwen3Coder,
    **dict.fromkeys(("llama3_json", "llama3"), Llama3Json),
    "mistral": Mistral,
    **dict.fromkeys(("deepseek_v3", "deepseekv3"), DeepseekV3),
    **dict.fromkeys(("deepseek_v31", "deepseekv31"), DeepseekV31),
    "kimi_k2": KimiK2,
    **dict.fromkeys(("glm45", "glm47"), Glm45),
    "minimax_m2": MinimaxM2,
    "gemma4": Gemma4,
    **dict.fromkeys(("harmony", "gpt_oss", "openai"), Harmony),
}

# (marker that the template has, model types or None for any, format)
REASONING_DEFAULTS: tuple[tuple[str, str | None, str], ...] = (
    ("<|channel|>", None, "harmony"),
    ("[THINK]", None, "mistral"),
    ("<|channel>", None, "gemma4"),
    ("<think>", "qwen3", "qwen3"),
    ("</think>", "qwen3", "qwen3"),
    ("<｜Assistant｜>", None, "deepseek_r1"),
    ("<think>", None, "think"),
)
TOOL_DEFAULTS: tuple[tuple[str, str | None, str], ...] = (
    ("<|channel|>", None, "harmony"),
    ("<|tool_call>", None, "gemma4"),
    ("<function=", None, "qwen3_coder"),
    ("<arg_key>", None, "glm45"),
    ("<minimax:tool_call>", None, "minimax_m2"),
    ("<tool_call>", None, "hermes"),
    ("[TOOL_CALLS]", None, "mistral"),
    ("<|tool_calls_section_begin|>", None, "kimi_k2"),
    ("```json", "deepseek", "deepseek_v3"),
    ("<｜tool▁calls▁begin｜>", None, "deepseek_v31"),
    ("<|python_tag|>", None, "llama3_json"),
    ('"parameters": dictionary of argument name', None, "llama3_json"),
)


class Parser:
    """The parser of one choice.

    **Arguments:** `reasoning` and `tools_format` are names of `REASONING_PARSERS` and `PARSERS`, or None for text that
    is to pass as it is. `tools`: the request's, as OpenAI writes them; None if they aren't known. `thinking`: "prompt"
    where the prompt ended in the opening marker of reasoning, "off" where it closed an empty block, else None.
    `constrained`: the reply follows a grammar, so that texts end where that says; with `free_calls`, calls don't.

    `cut`, set before `finish`: the reply ended before the model ended it. Otherwise arguments that the model left open
    are closed, so that they are JSON.
    """

    cut = True

    def __init__(
        self,
        reasoning: str | None = None,
        tools_format: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: str | None = None,
        constrained: bool = False,
        free_calls: bool = False,
    ):
        first = REASONING_PARSERS[reasoning] if reasoning else None
        second = PARSERS[tools_format] if tools_format else None
        if Harmony in (first, second):  # which reads both
            first, second = None, Harmony
        self._think = first(thinking) if first else None
        self._tools: Scanner | None = second(tools) if second else None
        if self._think:
            self._think.constrained = constrained
        if self._tools:
            self._tools.constrained = constrained and not free_calls

    @property
    def past_reasoning(self) -> bool:
        """Whether no reasoning can follow."""
        return self._think is not None and self._think.past

    @property
    def openings(self) -> int:
        """How many markers were read that begin reasoning; in harmony, any message."""
        scanner = self._think or self._tools
        return scanner.openings if scanner else 0

    def push(self, text: str) -> list[Piece]:
        """Add text; returns the pieces that it completes."""
        if not text:
            return []
        if self._think is None or self._think.past:
            return self._tools.push(text) if self._tools else [Piece(CONTENT, text)]
        return self._through(self._think.push(text))

    def finish(self) -> list[Piece]:
        """No more text comes; returns what was held back."""
        pieces = self._through(self._think.finish()) if self._think else []
        return pieces + self._tools.finish(self.cut) if self._tools else pieces

    def _through(self, pieces: list[Piece]) -> list[Piece]:
        """Let the content among these be searched for calls."""
        if self._tools is None:
            return pieces
        return [each for p in pieces for each in (self._tools.push(p.text) if p.kind == CONTENT else [p])]


def parse(
    format: str | Sequence[str],
    pieces: Iterable[str],
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: str | None = None,
    cut: bool = True,
    constrained: bool = False,
) -> dict[str, Any]:
    """A whole reply from its pieces, cut anywhere: `reasoning_content` and `content` (None where there is none), and
    `tool_calls`, each with `name` and `arguments`.

    `format`: a tool format, a reasoning format, or both, as "qwen3+hermes" or ("qwen3", "hermes"). `cut` and
    the other arguments are `Parser`'s.

    **Raises:** `ValueError` for a format that isn't in the tables, with those that are.
    """
    names = format.split("+") if isinstance(format, str) else list(format)
    if len(names) == 1:
        names = [None, names[0]] if names[0] in PARSERS else [names[0], None]
    if len(names) != 2 or names[0] not in (None, *REASONING_PARSERS) or names[1] not in (None, *PARSERS):
        raise ValueError(
            f"no parser {format!r}; reasoning formats: {', '.join(REASONING_PARSERS)}; "
            f"tool formats: {', '.join(PARSERS)}; both are joined as qwen3+hermes"
        )
    parser = Parser(*names, tools, thinking, constrained)
    found, parser.cut = [piece for text in pieces for piece in parser.push(text)], cut
    return join(found + parser.finish())


def reasoning_default(model_type: str, template: str | None) -> str | None:
    """The reasoning format of a model with this chat template, or None where it has none that is known. With "think",
    calls say which models end their reasoning by one."""
    name, calls = _first(REASONING_DEFAULTS, model_type, template), tool_default(model_type, template)
    return calls if name == "think" and calls in ("glm45", "kimi_k2") else name


def tool_default(model_type: str, template: str | None) -> str | None:
    """The tool format of a model. A template that mentions no tools is a model's that was taught no format: with
    Hermes', the commonest, tools are described in a system message."""
    if template is not None and not mentions_tools(template):
        return "hermes"
    return _first(TOOL_DEFAULTS, model_type, template)


def mentions_tools(template: str) -> bool:
    """Whether a chat template looks at its variable `tools`."""
    return re.search(r"\btools\b", code_of(template)) is not None


def _first(table: tuple[tuple[str, str | None, str], ...], model_type: str, template: str | None) -> str | None:
    fits = (name for marker, kind, name in table if marker in (template or "") and model_type.startswith(kind or ""))
    return next(fits, None)
