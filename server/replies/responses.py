"""The response of `/v1/responses`: items of reasoning, text and function calls, whole or as OpenAI's typed events.

Invariant: there is one way from pieces to items, and events tell of its steps. So the events, accumulated, say what the
whole response says; each item is done before the next is added, and sequence numbers count from 0 without a gap.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxspec.config.request import Delta, SamplingParams, TokenLogprobs
from server.chat.speech import Calls, Speech
from server.http.errors import ApiError
from server.parsers import ARGUMENTS, CALL, CONTENT, REASONING, Piece
from server.protocol.response_tools import Origin
from server.protocol.tools import INPUT
from server.replies.custom_input import CustomInput
from server.replies.logprobs import TokenNames, chat_logprobs
from server.replies.reasoning import ReasoningTokens
from server.replies.reply import Job, Prompt, encode, media_tokens
from server.replies.speculation import Speculation


@dataclass(frozen=True)
class Part:
    """A part of an item: its type, the names of events about its text and about itself, and the item's field."""

    type: str
    text_events: str
    events: str = "content_part"
    field: str = "content"


TEXT, THOUGHT = Part("output_text", "output_text"), Part("reasoning_text", "reasoning_text")
SUMMARY = Part("summary_text", "reasoning_summary_text", "reasoning_summary_part", "summary")


class ResponsesReply:
    """**Arguments:** `head` has the fields of the response that the request decides; `speech` reads the text;
    `origin` gives the tool that a function's name stands for; `done` is called with the response once it has ended
    without failing. Reasoning is the content of its item, or `as_summary` its summary.
    """

    def __init__(
        self,
        prompt: Prompt,
        params: SamplingParams,
        names: TokenNames,
        head: dict[str, Any],
        speech: Speech,
        *,
        stream: bool = False,
        as_summary: bool = False,
        origin: Callable[[str], Origin] = Origin,
        done: Callable[[dict[str, Any]], None] = lambda response: None,
    ):
        self.id = new_id("resp")
        self._prompt, self._params, self._names = prompt, params, names
        self._speech, self._parser, self._stream, self._done = speech, speech.parser(params), stream, done
        self._origin = origin
        self._parts = {CONTENT: TEXT, REASONING: SUMMARY if as_summary else THOUGHT}
        self._response = {"id": self.id, "object": "response", "created_at": int(time.time()), "status": "in_progress"}
        self._response |= {"error": None, "incomplete_details": None, **head, "output": [], "usage": None}
        self._calls = Calls()
        self._sequence = 0
        self._kind: str | None = None  # of the item that is open
        self._text: list[str] = []  # of its part, or its arguments
        self._custom: CustomInput | None = None  # of a custom tool's call
        self._logprobs: list[TokenLogprobs] = []  # of its part
        self._untold: list[TokenLogprobs] = []  # of tokens whose text hasn't come yet
        self._tokens = self._cached = 0
        self._reasoning = ReasoningTokens(speech, params, names.tokenizer) if speech.reasoning else None
        self._speculation = Speculation()

    def jobs(self) -> list[Job]:
        return [Job(self._prompt.ids, self._params, self.id, images=self._prompt.images)]

    def chunks(self, prompt: int, delta: Delta) -> str:
        """The events to send for a delta."""
        events = ""
        if self._sequence == 0:
            events += self._event("response.created", response=self._response)
            events += self._event("response.in_progress", response=self._response)
        return events + self._advance(delta)

    def take(self, prompt: int, delta: Delta) -> None:
        """Gather a delta for `whole`."""
        self._advance(delta)

    def whole(self) -> dict[str, Any]:
        return self._response

    def closing(self) -> str:
        """The last event of a stream that went well: what became of the response is its name."""
        return self._event(f"response.{self._response['status']}", response=self._response)

    def failed(self, error: ApiError) -> str:
        """The last events of a stream that failed."""
        told = {"code": "server_error", "message": error.body["error"]["message"]}
        events = self._close("incomplete")
        self._response |= {"status": "failed", "error": told, "usage": self._usage()}
        return events + self._event("response.failed", response=self._response)

    # -- deltas to items -----------------------------------------------------------------------------------------------

    def _advance(self, delta: Delta) -> str:
        self._tokens += len(delta.token_ids)
        if self._reasoning:
            self._reasoning.take(delta)
        self._untold += delta.logprobs or ()
        pieces = self._speech.read(self._parser, delta)
        self._calls.add(pieces)
        events = "".join([self._take(piece) for piece in pieces])
        return events if delta.finish_reason is None else events + self._end(delta)

    def _take(self, piece: Piece) -> str:
        events = ""
        if piece.kind == CALL or (piece.kind in self._parts and piece.kind != self._kind):
            events = self._close("completed") + self._open(piece)
        if piece.kind == CALL:
            return events
        self._text.append(piece.text)
        told, self._untold = self._untold, []
        if piece.kind == ARGUMENTS and self._custom:
            return events + self._input_delta(self._custom.push(piece.text))
        if piece.kind == ARGUMENTS:
            return events + self._of_item("response.function_call_arguments.delta", delta=piece.text)
        more: dict[str, Any] = {}
        if piece.kind == CONTENT:
            more["logprobs"] = self._names_of(told)
            self._logprobs += told
        return events + self._of_part(f"{self._parts[piece.kind].text_events}.delta", delta=piece.text, **more)

    def _open(self, piece: Piece) -> str:
        """Add the item that a piece begins."""
        self._kind, self._text, self._logprobs, self._custom = piece.kind, [], [], None
        item: dict[str, Any] = {"id": new_id({CONTENT: "msg", REASONING: "rs", CALL: "fc"}[piece.kind])}
        if piece.kind == CALL:
            origin = self._origin(piece.text)
            self._custom = CustomInput() if origin.custom else None
            item |= origin.call(piece.id)
        elif piece.kind == REASONING:
            item |= {"type": "reasoning", "summary": [], self._parts[REASONING].field: []}
        else:
            item |= {"type": "message", "role": "assistant", "content": []}
        self._response["output"].append(item | {"status": "in_progress"})
        events = self._event("response.output_item.added", output_index=self._index, item=self._item)
        if piece.kind == CALL:
            return events
        return events + self._of_part(f"{self._parts[self._kind].events}.added", part=self._part())

    def _close(self, status: str) -> str:
        """Finish the item that is open, if one is."""
        if self._kind is None:
            return ""
        text, item = "".join(self._text), self._item
        if self._custom:
            events = self._input_delta(self._custom.finish())
            item[INPUT] = self._custom.text
            events += self._of_item("response.custom_tool_call_input.done", input=item[INPUT])
        elif self._kind == CALL:
            item["arguments"] = text
            events = self._of_item("response.function_call_arguments.done", name=item["name"], arguments=text)
        else:
            part, kind = self._part(), self._parts[self._kind]
            more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            events = self._of_part(f"{kind.text_events}.done", text=text, **more)
            events += self._of_part(f"{kind.events}.done", part=part)
            item[kind.field] = [part]
        item["status"] = status
        self._kind = None
        return events + self._event("response.output_item.done", output_index=self._index, item=item)

    def _end(self, last: Delta) -> str:
        """Finish the response."""
        status = {"stop": "completed", "length": "incomplete"}.get(last.finish_reason, "failed")
        events = ""
        if self._kind == CONTENT:
            self._logprobs += self._untold
        if not self._response["output"] and status != "failed":  # a reply that is empty is an empty message
            events += self._open(Piece(CONTENT, ""))
        cut = self._kind == CALL and self._calls.cut(last)
        events += self._close("completed" if status == "completed" and not cut else "incomplete")
        self._cached = last.metrics.cached_tokens
        self._speculation.add(last.metrics)
        self._response |= {"status": status, "usage": self._usage(), "completed_at": int(time.time())}
        if status == "incomplete":
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._response |= self._speculation.fields()
        if status == "failed":
            self._response["error"] = {"code": "server_error", "message": "the request was aborted"}
        else:
            self._done(self._response)
        return events

    def _usage(self) -> dict[str, Any]:
        given = len(self._prompt.ids)
        return {
            "input_tokens": given,
            "input_tokens_details": {
                "cached_tokens": self._cached,
                "cache_write_tokens": 0,
                **media_tokens(self._prompt),
            },
            "output_tokens": self._tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning.count if self._reasoning else 0},
            "total_tokens": given + self._tokens,
        }

    # -- events --------------------------------------------------------------------------------------------------------

    @property
    def _index(self) -> int:
        return len(self._response["output"]) - 1

    @property
    def _item(self) -> dict[str, Any]:
        return self._response["output"][-1]

    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self._parts[self._kind].type, "text": "".join(self._text)}
        if self._kind == CONTENT:
            part |= {"annotations": [], "logprobs": self._names_of(self._logprobs)}
        return part

    def _names_of(self, entries: list[TokenLogprobs]) -> list[dict[str, Any]]:
        return chat_logprobs(self._names, entries)["content"] if entries else []

    def _input_delta(self, text: str) -> str:
        return self._of_item("response.custom_tool_call_input.delta", delta=text) if text else ""

    def _of_part(self, kind: str, **fields: Any) -> str:
        return self._of_item(f"response.{kind}", **{f"{self._parts[self._kind].field}_index": 0}, **fields)

    def _of_item(self, kind: str, **fields: Any) -> str:
        return self._event(kind, item_id=self._item["id"], output_index=self._index, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        if not self._stream:
            return ""
        number, self._sequence = self._sequence, self._sequence + 1
        return f"event: {kind}\ndata: {encode({'type': kind, 'sequence_number': number, **fields})}\n\n"


def new_id(prefix: str) -> str:
    """A new item's or response's id."""
    return f"{prefix}_{secrets.token_hex(16)}"
