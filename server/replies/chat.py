"""A chat's response: text read by the model's parsers into reasoning, content and tool calls.

Each choice has a parser of its own. Log-probabilities are those of all tokens generated, reasoning and markup among
them, and stand with the delta that brought the tokens, whatever came of their text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxspec.config.request import Delta, SamplingParams
from server.chat.speech import PLAIN, Calls, Speech, was_cut
from server.parsers import ARGUMENTS, CALL, CONTENT, REASONING, Parser, Piece
from server.protocol.tools import INPUT
from server.replies.custom_input import CUSTOM_CALL, CUSTOM_INPUT, CustomCalls
from server.replies.logprobs import chat_logprobs
from server.replies.reasoning import ReasoningTokens
from server.replies.reply import Choice, Prompt, Reply


class ChatReply(Reply):
    PREFIX, OBJECT, CHUNK = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, prompts: Sequence[Prompt], params: SamplingParams, *args: Any, speech: Speech = PLAIN, **options: Any
    ):
        super().__init__(prompts, params, *args, **options)
        self.speech = speech
        self._parsers: dict[int, Parser] = {}
        self._calls: dict[int, Calls] = {}
        self._custom_names = speech.custom
        self._custom: dict[int, CustomCalls] = {}
        self._reasoning: dict[int, ReasoningTokens] = {}  # by choice, if the model reasons

    def whole(self) -> dict[str, Any]:
        return super().whole() | self._report(0)

    def usage(self) -> dict[str, Any]:
        reasoning = sum(choice.count for choice in self._reasoning.values())
        return super().usage() | {"completion_tokens_details": {"reasoning_tokens": reasoning}}

    def _count(self, prompt: int, delta: Delta) -> Delta:
        delta = super()._count(prompt, delta)
        if self.speech.reasoning:
            index = prompt * self.params.n + delta.index
            if index not in self._reasoning:
                self._reasoning[index] = ReasoningTokens(self.speech, self.params, self.names.tokenizer)
            self._reasoning[index].take(delta)
        return delta

    def _opening(self, prompt: int, index: int) -> str:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._chunk(choice, self._report(prompt) if index == 0 else None)

    def _piece(self, prompt: int, delta: Delta) -> dict[str, Any] | None:
        piece = super()._piece(prompt, delta)
        index = prompt * self.params.n + delta.index
        if piece == {"index": index, "delta": {}, "logprobs": None, "finish_reason": None}:
            return None  # all of its text waits
        return piece

    def _part(self, index: int, delta: Delta) -> dict[str, Any]:
        parser = self._parsers.get(index) or self._parsers.setdefault(index, self.speech.parser(self.params))
        pieces = self.speech.read(parser, delta)
        calls = self._calls.setdefault(index, Calls()).add(pieces)
        if self._custom_names:
            custom = self._custom.setdefault(index, CustomCalls(self._custom_names))
            pieces = custom.read(pieces, delta.finish_reason is not None)
        return {
            "index": index,
            "delta": _delta(pieces),
            "logprobs": chat_logprobs(self.names, delta.logprobs) if delta.logprobs else None,
            "finish_reason": self.speech.finish_reason(delta, calls),
        }

    def _whole_choice(self, prompt: int, index: int, choice: Choice) -> dict[str, Any]:
        parser = self.speech.parser(self.params)
        parser.cut = was_cut(choice.last)
        pieces = self.speech.kept(parser.push("".join(choice.text)) + parser.finish())
        return {
            "index": index,
            "message": self._message(CustomCalls(self._custom_names).read(pieces, True)),
            "logprobs": None if self.params.logprobs is None else chat_logprobs(self.names, choice.logprobs),
            "finish_reason": self.speech.finish_reason(choice.last, Calls().add(pieces)),
            "stop_reason": choice.last.stop_reason,
        }

    def _message(self, pieces: list[Piece]) -> dict[str, Any]:
        said = _delta(pieces)
        calls = [{key: value for key, value in call.items() if key != "index"} for call in said.get("tool_calls", ())]
        reasoning = said.get("reasoning_content")
        content = said.get("content", None if calls or reasoning else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.speech.reasoning:
            message["reasoning_content"] = reasoning
        return message | ({"tool_calls": calls} if calls else {})


def _delta(pieces: list[Piece]) -> dict[str, Any]:
    """Pieces as OpenAI's delta: a call's first part has its id, type and name; later parts more of its arguments."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if piece.kind == CONTENT:
            delta["content"] = delta.get("content", "") + piece.text
        elif piece.kind == REASONING:
            delta["reasoning_content"] = delta.get("reasoning_content", "") + piece.text
        elif piece.kind == CALL:
            function = {"name": piece.text, "arguments": ""}
            calls[piece.index] = {"index": piece.index, "id": piece.id, "type": "function", "function": function}
        elif piece.kind == CUSTOM_CALL:
            custom = {"name": piece.text, INPUT: ""}
            calls[piece.index] = {"index": piece.index, "id": piece.id, "type": "custom", "custom": custom}
        elif piece.kind == CUSTOM_INPUT and piece.text:
            call = calls.setdefault(piece.index, {"index": piece.index, "custom": {INPUT: ""}})
            call["custom"][INPUT] += piece.text
        elif piece.kind == ARGUMENTS:
            call = calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += piece.text
    return delta | ({"tool_calls": list(calls.values())} if calls else {})
