"""A chat's response."""

from __future__ import annotations

from typing import Any

from jaxspec.request import Delta
from server.logprobs import chat_logprobs
from server.replies.reply import Choice, Reply


class ChatReply(Reply):
    PREFIX, OBJECT, CHUNK = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def whole(self) -> dict[str, Any]:
        return super().whole() | self._report(0)

    def _opening(self, prompt: int, index: int) -> str:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._chunk(choice, self._report(prompt) if index == 0 else None)

    def _part(self, index: int, delta: Delta) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": chat_logprobs(self.names, delta.logprobs) if delta.logprobs else None,
            "finish_reason": delta.finish_reason,
        }

    def _whole_choice(self, prompt: int, index: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": None if self.params.logprobs is None else chat_logprobs(self.names, choice.logprobs),
            "finish_reason": choice.last.finish_reason,
            "stop_reason": choice.last.stop_reason,
        }
