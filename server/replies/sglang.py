"""The response of SGLang's `/generate`: an object for each completion, or a list of them.

Invariant: each event of a stream says all that came so far (text, token ids, log-probabilities), as SGLang's does, so
the last of a completion is what the whole response says of it.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxspec.config.request import Delta, TokenLogprobs
from server.http.errors import ApiError
from server.replies.logprobs import FLOOR, TokenNames
from server.replies.reply import DONE, Job, cached_by_tier, encode, event, media_tokens
from server.replies.speculation import Speculation


@dataclass(slots=True)
class Output:
    """A completion so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: Delta | None = None


class GenerateReply:
    """**Arguments:** `starts`: for each job, from which prompt token on log-probabilities are shown, -1 for none.
    `no_tokens`: for each, whether what is generated isn't shown.
    `several`: the response is a list, and the events of a stream carry an `index`. `name_tokens`: log-probabilities
    come with their tokens' texts.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        starts: Sequence[int],
        no_tokens: Sequence[bool],
        names: TokenNames,
        *,
        several: bool,
        name_tokens: bool,
    ):
        self._jobs, self._starts, self._no_tokens, self._names = list(jobs), starts, no_tokens, names
        self._several, self._name_tokens = several, name_tokens
        self._n = jobs[0].params.n
        self._outputs = [Output() for _ in range(len(jobs) * self._n)]
        self._prompt_entries: dict[int, list[TokenLogprobs | None]] = {}

    def jobs(self) -> list[Job]:
        return self._jobs

    def take(self, prompt: int, delta: Delta) -> None:
        output = self._outputs[prompt * self._n + delta.index]
        if self._no_tokens[prompt] and delta.finish_reason != "abort":
            delta = replace(delta, text="", token_ids=[], logprobs=None, finish_reason="length")
        output.text += delta.text
        output.token_ids += delta.token_ids
        output.logprobs += delta.logprobs or ()
        if delta.prompt_logprobs is not None:
            self._prompt_entries[prompt] = delta.prompt_logprobs
        if delta.finish_reason is not None:
            output.last = delta

    def whole(self) -> Any:
        shown = [self._shown(index) for index in range(len(self._outputs))]
        return shown if self._several else shown[0]

    def chunks(self, prompt: int, delta: Delta) -> str:
        self.take(prompt, delta)
        index = prompt * self._n + delta.index
        return event(encode(self._shown(index) | ({"index": index} if self._several else {})))

    def closing(self) -> str:
        return DONE

    def failed(self, error: ApiError) -> str:
        return event(encode(error.body)) + DONE

    def _shown(self, index: int) -> dict[str, Any]:
        output, (prompt, choice) = self._outputs[index], divmod(index, self._n)
        job = self._jobs[prompt]
        meta: dict[str, Any] = {
            "id": job.id if self._n == 1 else f"{job.id}_{choice}",
            "finish_reason": self._finish_reason(output),
            "prompt_tokens": len(job.ids),
            **media_tokens(job),
            "completion_tokens": len(output.token_ids),
        }
        if job.params.logprobs is not None:
            meta |= self._logprobs(prompt, output)
        if output.last is not None:
            meta |= self._figures(output.last) | self._rows(prompt, output.last)
        return {"text": output.text, "output_ids": output.token_ids, "meta_info": meta}

    def _finish_reason(self, output: Output) -> dict[str, Any] | None:
        if output.last is None:
            return None
        if output.last.finish_reason == "stop":
            matched = output.last.stop_reason
            return {"type": "stop", "matched": output.token_ids[-1] if matched is None else matched}
        if output.last.finish_reason == "length":
            return {"type": "length", "length": len(output.token_ids)}
        return {"type": "abort", "message": "the request was aborted"}

    def _figures(self, last: Delta) -> dict[str, Any]:
        """Figures of a completion that has ended."""
        metrics, drafts = last.metrics, Speculation()
        drafts.add(metrics)
        figures = {
            "weight_version": metrics.weight_version,
            "cached_tokens": metrics.cached_tokens,
            **cached_by_tier(metrics.cached_tokens, metrics.cached_on_host, metrics.cached_on_disk),
            "e2e_latency": metrics.latency,
            "spec_verify_ct": metrics.verify_rounds,
        }
        if drafts.drafted:
            figures |= {
                "spec_accept_length": metrics.accept_length,
                "spec_accept_rate": drafts.accepted / drafts.drafted,
                "spec_accept_token_num": drafts.accepted,
                "spec_draft_token_num": drafts.drafted,
                "spec_accept_histogram": drafts.histogram,
            }
        return figures

    def _rows(self, prompt: int, last: Delta) -> dict[str, Any]:
        """Rows of prompt and text: hidden states, the prompt's in one list, and experts i32[t, l, k] in base64."""
        shown: dict[str, Any] = {}
        if last.hidden_states is not None:
            rows, length = last.hidden_states.tolist(), len(self._jobs[prompt].ids)
            shown["hidden_states"] = [rows[:length], *rows[length:]]
        if last.routed_experts is not None:
            shown["routed_experts"] = base64.b64encode(last.routed_experts.tobytes()).decode()
        return shown

    def _logprobs(self, prompt: int, output: Output) -> dict[str, list]:
        """Log-probabilities of output tokens, and of prompt tokens from the requested start; the first has none."""
        job, start = self._jobs[prompt], self._starts[prompt]
        entries, ids = self._prompt_entries.get(prompt), job.ids[start:] if start >= 0 else []
        known = [None, *entries[start + 1 :]] if ids and entries is not None else []
        shown = {
            "input_token_logprobs": [self._item(token, entry) for token, entry in zip(ids, known, strict=False)],
            "output_token_logprobs": [self._item(entry.token_id, entry) for entry in output.logprobs],
        }
        if job.params.logprobs:
            shown["input_top_logprobs"] = [self._top(entry) for entry in known]
            shown["output_top_logprobs"] = [self._top(entry) for entry in output.logprobs]
        return shown

    def _item(self, token: int, entry: TokenLogprobs | None) -> tuple[float | None, int, str | None]:
        return self._triple(token, None if entry is None else entry.logprob)

    def _top(self, entry: TokenLogprobs | None) -> list[tuple] | None:
        return None if entry is None else [self._triple(token, logprob) for token, logprob in entry.top]

    def _triple(self, token: int, logprob: float | None) -> tuple[float | None, int, str | None]:
        text = self._names.text(token) if self._name_tokens else None
        return None if logprob is None else max(logprob, FLOOR), token, text
