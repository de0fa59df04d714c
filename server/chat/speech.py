"""How the served model speaks in a chat: which formats it has, how tools reach its prompt, how its replies are read.

Invariant: a request with tools is served so that the model sees them and its calls are found, or it is refused with the
reason. What `tool_choice` demands is demanded of the model, never hoped for.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxspec.config.request import Delta, RequestError, SamplingParams, StructuredOutput
from jaxspec.text.tokenizer import Tokenizer, TokenizerError
from server import parsers
from server.chat.effort import effort_variables
from server.chat.harmony import as_template_takes
from server.chat.tool_grammar import tool_call_grammar
from server.http.json_reader import parse
from server.parsers import ARGUMENTS, CALL, PARSERS, REASONING_PARSERS, Parser, Piece
from server.parsers.harmony import Harmony
from server.parsers.think import Think
from server.protocol.chat import ChatRequest
from server.protocol.tools import Named

log = logging.getLogger("jaxspec.server")

TAIL = 32  # tokens at the end of a prompt in which markers of reasoning are looked for
# The format is Hermes', which the parser of that name reads back.
INTRODUCTION = """\
# Tools

You may call one or more functions to help with the request. Here they are, one JSON object a line:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as a JSON object, between these tags:
<tool_call>
{{"name": "function name", "arguments": {{"argument name": "value"}}}}
</tool_call>"""


@dataclass(frozen=True)
class Speech:
    """How one chat's replies are read.

    `parallel`: all calls count, not the first alone. `named`: the request named the function to call, which OpenAI's
    finish_reason doesn't count as the model's wish to call. `grammar`: of the calls that the request demands.
    """

    reasoning: str | None
    tools_format: str | None
    tools: Sequence[Mapping[str, Any]] | None = None
    thinking: str | None = None
    parallel: bool = True
    named: bool = False
    grammar: StructuredOutput | None = None

    def parser(self, params: SamplingParams) -> Parser:
        """A new parser, for one choice that is sampled so."""
        constrained, free_calls = params.structured is not None, self.grammar is None
        return Parser(self.reasoning, self.tools_format, self.tools, self.thinking, constrained, free_calls)

    @property
    def custom(self) -> frozenset[str]:
        """Names of the tools that the client declared as custom."""
        return frozenset(tool["function"]["name"] for tool in self.tools or () if tool.get("type") == "custom")

    def read(self, parser: Parser, delta: Delta) -> list[Piece]:
        """Return the pieces of a choice's delta, which `parser` has read so far."""
        pieces = parser.push(delta.text)
        if delta.finish_reason is not None:
            parser.cut = was_cut(delta)
            pieces += parser.finish()
        return self.kept(pieces)

    def kept(self, pieces: list[Piece]) -> list[Piece]:
        """These pieces without calls that the request doesn't take."""
        return pieces if self.parallel else [p for p in pieces if p.index == 0]

    def finish_reason(self, last: Delta, calls: Calls) -> str | None:
        """A choice's, by its last delta and the calls in all of them."""
        called = calls.any and last.finish_reason == "stop" and not self.named
        return "tool_calls" if called and not calls.cut(last) else last.finish_reason

    def sampling(self, params: SamplingParams) -> SamplingParams:
        """`params` so that the text has the calls that are demanded, in place of any other form, and the markers that
        the parsers look for, which may be special tokens."""
        markers: list[str] = []
        if self.reasoning and issubclass(kind := REASONING_PARSERS[self.reasoning], Think):
            markers += (kind.OPENS, kind.CLOSES)
        elif self.reasoning:
            markers += REASONING_PARSERS[self.reasoning].MARKERS
        if self.tools_format:
            markers += PARSERS[self.tools_format].MARKERS
        structured = self.grammar or (params.structured and self._behind_reasoning(self._or_calls(params.structured)))
        return params.read_as(tuple(dict.fromkeys(markers)), structured)

    def _or_calls(self, grammar: StructuredOutput) -> StructuredOutput:
        """A grammar is of what the model says: it may call a tool instead, where the request offers some."""
        if not self.tools or self.tools_format is None:
            return grammar
        markers = PARSERS[self.tools_format].MARKERS
        return grammar.unless(markers[:1], markers)

    def _behind_reasoning(self, grammar: StructuredOutput) -> StructuredOutput:
        """A grammar is of what the model answers: it may reason before."""
        kind = REASONING_PARSERS[self.reasoning] if self.reasoning else None
        if kind is None or self.thinking == "off":
            return grammar
        if not issubclass(kind, Think):
            raise RequestError(
                f"structured output can't be served where replies are in the format {self.reasoning}",
                grammar.field,
            )
        begun = self.thinking == "prompt" or kind.FORCED
        return grammar.after("" if begun else kind.OPENS, kind.CLOSES)


PLAIN = Speech(None, None)  # text as it comes


@dataclass(frozen=True)
class Formats:
    """The served model's formats (names of `REASONING_PARSERS` and `PARSERS`, or None), whether its chat template
    writes `tools` itself, and that template."""

    reasoning: str | None
    tools: str | None
    in_template: bool
    template: str | None = None

    @classmethod
    def of(cls, model_type: str, template: str | None, reasoning: str = "auto", tools: str = "auto") -> Formats:
        """Choose the formats that the flags name, and for "auto" those that the chat template shows; "none" is none."""
        found = parsers.reasoning_default(model_type, template), parsers.tool_default(model_type, template)
        chosen = [
            default if given == "auto" else given for given, default in zip((reasoning, tools), found, strict=True)
        ]
        names = (None if name == "none" else name for name in chosen)
        return cls(*names, parsers.mentions_tools(template or ""), template)

    def log(self, reasoning: str, tools: str) -> None:
        """Say at start what was chosen, and whether by flag."""
        for kind, name, given in (("reasoning", self.reasoning, reasoning), ("tool call", self.tools, tools)):
            why = "the default for this chat template" if given == "auto" else "by flag"
            log.info("%s parser: %s, %s", kind, name or "none", why)
        if self.tools and not self.in_template:
            log.warning("the chat template doesn't mention tools: they are described to the model in a system message")

    def variables(self, body: ChatRequest) -> dict[str, Any]:
        """Variables that the chat template sees beside messages and tools; those that the request names count most."""
        effort = {} if body.reasoning_effort is None else effort_variables(body.reasoning_effort, self.template)
        verbosity = {} if body.verbosity is None else {"verbosity": body.verbosity}
        return effort | verbosity | (body.chat_template_kwargs or {})

    def messages(self, body: ChatRequest) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """The messages and tools for the chat template. **Raises:** `RequestError` if it can't show them."""
        messages = [message.as_dict() for message in body.messages]
        tools = [_shown(tool) for tool in body.tools or ()] if body.tool_choice != "none" else None
        if tools and self.tools is None:
            raise RequestError(
                "tools need a tool call parser, and this server has none for its model; start it with "
                f"--tool-call-parser and one of {', '.join(PARSERS)}, or leave tools out",
                "tools",
            )
        history = any("tool_calls" in message or message["role"] == "tool" for message in messages)
        if self.in_template and Harmony in (REASONING_PARSERS.get(self.reasoning), PARSERS.get(self.tools)):
            return as_template_takes(messages, tools)
        if self.in_template or not (tools or history):
            return messages, tools or None
        if self.tools is not None and PARSERS[self.tools] is not PARSERS["hermes"]:
            raise RequestError(
                f"the model's chat template doesn't mention tools, and they can't be described for the parser "
                f"{self.tools}; start the server with --tool-call-parser hermes, or leave tools out",
                "tools",
            )
        return write_tools(messages, tools), None

    def speech(self, body: ChatRequest, prompt: Sequence[int], tokenizer: Tokenizer | None) -> Speech:
        """How the replies to this prompt are read. **Raises:** `RequestError` for a demand that can't be met."""
        if tokenizer is None:
            return PLAIN
        tools = (self.tools, body.tools) if body.tools and body.tool_choice != "none" else (None, None)
        named = body.tool_choice.name if isinstance(body.tool_choice, Named) else None
        parallel, thinking = body.parallel_tool_calls is not False, self._thinking(body, prompt, tokenizer)
        grammar = None
        if named is not None or body.tool_choice == "required":
            how = {"special_ids": tokenizer.added_tokens, "reasoning": self.reasoning, "thinking": thinking}
            grammar = tool_call_grammar(body.tools, self.tools, named, parallel, **how)
        return Speech(self.reasoning, *tools, thinking, parallel, named is not None, grammar)

    def _thinking(self, body: ChatRequest, prompt: Sequence[int], tokenizer: Tokenizer) -> str | None:
        """Whether the prompt has opened a block of reasoning ("prompt"), is past one ("off"), or neither. Text of an
        answer that goes on is past it, unless it opens a block itself."""
        kind = REASONING_PARSERS[self.reasoning] if self.reasoning else None
        if kind is None or not issubclass(kind, Think):
            return None
        if body.continue_final_message:
            begun = str(body.messages[-1].content or "")
            return "prompt" if begun.rfind(kind.OPENS) > begun.rfind(kind.CLOSES) else "off"
        tail = tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False).rstrip()
        return "prompt" if tail.endswith(kind.OPENS) else "off" if tail.endswith(kind.CLOSES) else None


def _shown(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as templates write it: a function, whose `strict` is for the grammar alone."""
    return {"type": "function", "function": {key: value for key, value in tool["function"].items() if key != "strict"}}


def why_no_chat(tokenizer: Tokenizer | None, vocab_size: int) -> str | None:
    """Why the model can't answer even a short chat; None if it can."""
    if tokenizer is None:
        return "the model has no tokenizer; add tokenizer.json to its folder"
    try:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
    except TokenizerError as error:
        return " ".join(str(error).split())
    if not ids:
        return "the chat template writes nothing"
    if (largest := max(ids)) >= vocab_size:
        return f"they have token id {largest}, and the model's are 0 to {vocab_size - 1}; get the tokenizer made for it"
    return None


def was_cut(last: Delta) -> bool:
    """Whether a choice, by its last delta, ended before the model ended it: at a limit or a stop of the request's."""
    return last.finish_reason != "stop" or last.stop_reason is not None


class Calls:
    """The calls of one choice, as far as they have come: `any`, and the arguments of the last."""

    def __init__(self):
        self.any = False
        self._arguments: list[str] = []

    def add(self, pieces: Sequence[Piece]) -> Calls:
        for piece in pieces:
            if piece.kind == CALL:
                self.any, self._arguments = True, []
            elif piece.kind == ARGUMENTS:
                self._arguments.append(piece.text)
        return self

    def cut(self, last: Delta) -> bool:
        """Whether a stop string or token of the request, and not the model, ended the last call in its arguments."""
        if not self.any or last.stop_reason is None:
            return False
        try:
            parse("".join(self._arguments).encode())
        except ValueError:
            return True
        return False


def write_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[dict]:
    """The chat for a template that takes roles and contents only."""
    written: list[dict[str, Any]] = []
    if tools:
        introduction = INTRODUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        written.append({"role": "system", "content": introduction})
    for message in messages:
        plain = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        if plain["role"] in ("system", "developer") and [each["role"] for each in written] == ["system"]:
            written[0] = {**plain, "content": _followed(plain["content"], written[0]["content"])}
        elif plain["role"] == "tool":
            if isinstance(plain["content"], list):  # with pictures
                ends = [{"type": "text", "text": text} for text in ("<tool_response>\n", "\n</tool_response>")]
                written.append({"role": "user", "content": [ends[0], *plain["content"], ends[1]]})
                continue
            result = f"<tool_response>\n{plain['content']}\n</tool_response>"
            if written and str(written[-1].get("content", "")).endswith("</tool_response>"):
                written[-1]["content"] += f"\n{result}"
            else:
                written.append({"role": "user", "content": result})
        else:
            calls = "\n".join(_call(call["function"]) for call in message.get("tool_calls") or ())
            if calls:
                plain["content"] = _followed(plain["content"], calls, "\n") if plain["content"] else calls
            written.append(plain)
    return written


def _followed(content: str | list[dict[str, Any]], text: str, between: str = "\n\n") -> str | list[dict[str, Any]]:
    """A message's content, which may have pictures, and a text behind it."""
    more = between + text
    return content + more if isinstance(content, str) else [*content, {"type": "text", "text": more}]


def _call(function: Mapping[str, Any]) -> str:
    name, arguments = json.dumps(function["name"], ensure_ascii=False), function["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {written}}}\n</tool_call>'
