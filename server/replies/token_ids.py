"""The response of vLLM's route from token ids to token ids."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np

from jaxspec.config.request import Delta
from server.replies.logprobs import chat_logprobs
from server.replies.reply import Choice, Reply


class TokensReply(Reply):
    """Choices have `token_ids`, the end token among them, and no text. Experts are a `.npy` file in base64."""

    PREFIX, OBJECT, CHUNK = "", "generate", "generate.chunk"

    def whole(self) -> dict[str, Any]:
        return {"request_id": self.id, **super().whole(), "prompt_logprobs": None, **self._report(0)}

    def _opening(self, prompt: int, index: int) -> str:
        report = self._report(prompt)
        return self._chunk({"index": index, "token_ids": [], "finish_reason": None, **report}) if report else ""

    def _part(self, index: int, delta: Delta) -> dict[str, Any]:
        return self._shown(index, delta.logprobs, delta)

    def _whole_choice(self, prompt: int, index: int, choice: Choice) -> dict[str, Any]:
        return self._shown(index, choice.logprobs, choice.last)

    def _shown(self, index: int, entries: list | None, last: Delta) -> dict[str, Any]:
        reported = self.params.logprobs is not None and entries is not None
        shown = {
            "index": index,
            "logprobs": chat_logprobs(self.names, entries) if reported else None,
            "finish_reason": last.finish_reason,
        }
        if last.routed_experts is not None:
            file = io.BytesIO()
            np.save(file, last.routed_experts)
            shown["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        return shown
