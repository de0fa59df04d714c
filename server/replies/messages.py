"""The response of `/v1/messages`: blocks of thinking, text and tool use, whole or as Anthropic's events.

Invariant: there is one way from pieces to blocks, and events tell of its steps. A block is closed before the next one
begins, and blocks count from 0.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from typing import Any

from jaxspec.config.request import Delta, SamplingParams
from server.chat.speech import Calls, Speech
from server.http.errors import ApiError, as_anthropic
from server.http.json_reader import parse
from server.parsers import ARGUMENTS, CALL, CONTENT, REASONING, Piece
from server.protocol.base import check_text
from server.protocol.message_blocks import carrying
from server.replies.logprobs import TokenNames
from server.replies.reasoning import ReasoningTokens
from server.replies.reply import Job, Prompt, encode

BLOCKS = {CONTENT: "text", REASONING: "thinking"}


class MessagesReply:
    """**Arguments:** `limit` is the client's `max_tokens`, of which 0 shows nothing; `shows_thinking` False leaves the
    text of thinking out, as `display: omitted` asks; the signature carries it then, so that the next turn's prompt has
    it.
    """

    def __init__(
        self,
        prompt: Prompt,
        params: SamplingParams,
        model: str,
        speech: Speech,
        names: TokenNames,
        *,
        limit: int,
        stream: bool = False,
        shows_thinking: bool = True,
    ):
        self.id = f"msg_{secrets.token_hex(12)}"
        self._prompt, self._params, self._speech, self._limit = prompt, params, speech, limit
        self._parser, self._stream, self._shows_thinking = speech.parser(params), stream, shows_thinking
        self._message = {"id": self.id, "type": "message", "role": "assistant", "model": model, "content": []}
        self._message |= {"stop_reason": None, "stop_sequence": None, "usage": None}
        self._calls = Calls()
        self._reasoning = ReasoningTokens(speech, params, names.tokenizer) if speech.reasoning else None
        self._kind: str | None = None  # of the block that is open
        self._text: list[str] = []  # of it, or its arguments
        self._began = False
        self._tokens = self._cached = 0
        self._estimated = 0  # tokens of thinking that events have told of

    def jobs(self) -> list[Job]:
        return [Job(self._prompt.ids, self._params, self.id, images=self._prompt.images)]

    def chunks(self, prompt: int, delta: Delta) -> str:
        """The events to send for a delta."""
        events = ""
        if not self._began:
            self._began = True
            head = self._message | {"content": [], "usage": self._usage()}
            events = self._event("message_start", message=head) + self._event("ping")
        return events + self._advance(delta)

    def take(self, prompt: int, delta: Delta) -> None:
        """Gather a delta for `whole`."""
        self._advance(delta)

    def whole(self) -> dict[str, Any]:
        return self._message

    def closing(self) -> str:
        """The last event of a stream that went well."""
        return self._event("message_stop")

    def failed(self, error: ApiError) -> str:
        """The last event of a stream that failed."""
        return self._event(**as_anthropic(error.status, error.body))

    # -- deltas to blocks ----------------------------------------------------------------------------------------------

    def _advance(self, delta: Delta) -> str:
        if self._limit == 0:  # the engine always generates a token
            end = "length" if delta.finish_reason == "stop" else delta.finish_reason
            delta = dataclasses.replace(delta, text="", token_ids=[], finish_reason=end)
        self._tokens += len(delta.token_ids)
        if self._reasoning:
            self._reasoning.take(delta)
        pieces = self._speech.read(self._parser, delta)
        self._calls.add(pieces)
        events = "".join([self._take(piece) for piece in pieces])
        return events if delta.finish_reason is None else events + self._end(delta)

    def _take(self, piece: Piece) -> str:
        events = ""
        if piece.kind == CALL or (piece.kind in BLOCKS and piece.kind != self._kind):
            events = self._close() + self._open(piece)
        if piece.kind == CALL or not piece.text:
            return events
        self._text.append(piece.text)
        if piece.kind == ARGUMENTS:
            return events + self._delta("input_json_delta", partial_json=piece.text)
        if piece.kind == CONTENT:
            return events + self._delta("text_delta", text=piece.text)
        if self._shows_thinking:
            return events + self._delta("thinking_delta", thinking=piece.text)
        more, self._estimated = self._thinking_tokens - self._estimated, self._thinking_tokens
        return events + self._delta("thinking_delta", thinking="", estimated_tokens=more)  # clients give up on silence

    def _open(self, piece: Piece) -> str:
        """Add the block that a piece begins."""
        self._kind, self._text = piece.kind, []
        if piece.kind == CALL:
            block: dict[str, Any] = {"type": "tool_use", "id": piece.id, "name": piece.text, "input": {}}
        elif piece.kind == REASONING:
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            block = {"type": "text", "text": ""}
        self._message["content"].append(block)
        return self._event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> str:
        """Finish the block that is open, if one is."""
        if self._kind is None:
            return ""
        text, block, events = "".join(self._text), self._message["content"][-1], ""
        if self._kind == CALL:
            block["input"] = _object(text)
        elif self._kind == REASONING:
            block["thinking"] = text if self._shows_thinking else ""
            shown = self._shows_thinking  # then the signature is accepted back unread
            block["signature"] = hashlib.sha256(text.encode()).hexdigest() if shown else carrying(text)
            events = self._delta("signature_delta", signature=block["signature"])
        else:
            block["text"] = text
        self._kind = None
        return events + self._event("content_block_stop", index=self._index)

    def _end(self, last: Delta) -> str:
        """Finish the message. **Raises:** `ApiError` if the request was aborted, for which no stop reason stands."""
        if last.finish_reason not in ("stop", "length"):
            raise ApiError(500, "the request was aborted", kind="server_error")
        self._cached = last.metrics.cached_tokens
        ends = {"stop_reason": self._stop_reason(last), "stop_sequence": None}
        if ends["stop_reason"] == "stop_sequence":
            ends["stop_sequence"] = last.stop_reason
        events = self._close()
        version = last.metrics.weight_version
        self._message |= {**ends, "usage": self._usage(), "weight_version": version}
        return events + self._event("message_delta", delta=ends, usage=self._usage(), weight_version=version)

    def _stop_reason(self, last: Delta) -> str:
        if last.finish_reason == "length":
            return "max_tokens" if self._tokens >= self._limit else "model_context_window_exceeded"
        if self._calls.any and not self._calls.cut(last):
            return "tool_use"
        return "stop_sequence" if isinstance(last.stop_reason, str) else "end_turn"

    def _usage(self) -> dict[str, Any]:
        """Tokens so far. Those of the prompt that the cache had don't count as input, as Anthropic has it."""
        return {
            "input_tokens": len(self._prompt.ids) - self._cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._cached,
            "output_tokens": self._tokens,
            "output_tokens_details": {"thinking_tokens": self._thinking_tokens},
        }

    @property
    def _thinking_tokens(self) -> int:
        return self._reasoning.count if self._reasoning else 0

    # -- events --------------------------------------------------------------------------------------------------------

    @property
    def _index(self) -> int:
        return len(self._message["content"]) - 1

    def _delta(self, kind: str, **fields: Any) -> str:
        return self._event("content_block_delta", index=self._index, delta={"type": kind, **fields})

    def _event(self, type: str, **fields: Any) -> str:
        if not self._stream:
            return ""
        return f"event: {type}\ndata: {encode({'type': type, **fields})}\n\n"


def _object(arguments: str) -> dict[str, Any]:
    """A call's arguments; an empty object where they were cut off, are none, or JSON can't spell them again."""
    try:
        found = parse(arguments.encode())
        check_text(encode(found))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
