"""A completion's response: a text that goes on, with the prompt before it if it is to be echoed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxspec.config.request import Delta, SamplingParams, TokenLogprobs
from server.replies.logprobs import Offsets, completion_logprobs
from server.replies.reply import Choice, Prompt, Reply


class CompletionReply(Reply):
    PREFIX, OBJECT, CHUNK = "cmpl-", "text_completion", "text_completion"

    def __init__(self, prompts: Sequence[Prompt], params: SamplingParams, *args: Any, **options: Any):
        super().__init__(prompts, params, *args, **options)
        self._offsets = [
            Offsets(self.names.tokenizer, len(prompt.echo or ""), prompt.ids, skip=params.skip_special_tokens)
            for prompt in prompts
            for _ in range(params.n)
        ]

    def _opening(self, prompt: int, index: int) -> str:
        echo, report = self.prompts[prompt].echo, self._report(prompt)
        if echo is None and not report:
            return ""
        logprobs = None
        if echo is not None and self.params.logprobs is not None:
            logprobs = self._echo_logprobs(prompt)
        return self._chunk({"index": index, "text": echo or "", "logprobs": logprobs, "finish_reason": None, **report})

    def _part(self, index: int, delta: Delta) -> dict[str, Any]:
        logprobs = self._logprobs(index, delta.logprobs) if delta.logprobs else None
        return {"index": index, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish_reason}

    def _whole_choice(self, prompt: int, index: int, choice: Choice) -> dict[str, Any]:
        echo, logprobs = self.prompts[prompt].echo, None
        if self.params.logprobs is not None:
            logprobs = self._logprobs(index, choice.logprobs)
            if echo is not None:
                before = self._echo_logprobs(prompt)
                logprobs = {key: before[key] + logprobs[key] for key in logprobs}
        return {
            "index": index,
            "text": (echo or "") + "".join(choice.text),
            "logprobs": logprobs,
            "finish_reason": choice.last.finish_reason,
            "stop_reason": choice.last.stop_reason,
            **self._report(prompt),
        }

    def _logprobs(self, index: int, entries: list[TokenLogprobs]) -> dict[str, list]:
        return completion_logprobs(self.names, [(e.token_id, e) for e in entries], self._offsets[index])

    def _echo_logprobs(self, prompt: int) -> dict[str, list]:
        given = self.prompts[prompt]
        entries = zip(given.ids, self._prompt_entries[prompt], strict=True)
        return completion_logprobs(self.names, entries, Offsets(self.names.tokenizer, echo=given.echo))
