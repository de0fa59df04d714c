"""Responses: deltas in, OpenAI's objects out, whole or chunk by chunk.

Invariant: the chunks of a stream, joined, say what the whole response says. A chunk is encoded from plain dicts with
its constant head made once, because hundreds of streams each send one per round.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from jaxspec.config.request import Delta, SamplingParams, TokenLogprobs
from jaxspec.images import picture as engine
from jaxspec.images.picture import PlacedPicture
from jaxspec.text.detokenizer import Detokenizer
from server.http.errors import ApiError
from server.replies.logprobs import TokenNames, prompt_logprobs
from server.replies.speculation import Speculation

encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
DONE = "data: [DONE]\n\n"


@dataclass(slots=True)
class Prompt:
    """A prompt ready for the engine, with its pictures; `echo` is the text to show before each of its completions."""

    ids: list[int]
    echo: str | None = None
    images: tuple[PlacedPicture, ...] = ()


def media_tokens(*prompts: Prompt | Job) -> dict[str, int]:
    """The details of `usage` that count the rows of pictures, and of videos, where there are some."""
    found: dict[str, int] = {}
    for each in (placed.picture for prompt in prompts for placed in prompt.images):
        name = "video_tokens" if each.video else "image_tokens"
        found[name] = found.get(name, 0) + each.tokens
    return found


def cached_by_tier(cached: int, on_host: int, on_disk: int) -> dict[str, dict[str, int]]:
    """The detail that says where cached tokens came from, as SGLang has it, where some didn't come from the device."""
    tiers = {"device": cached - on_host - on_disk, "host": on_host}
    tiers |= {"storage": on_disk} if on_disk else {}
    return {"cached_tokens_details": tiers} if on_host or on_disk else {}


@dataclass(slots=True)
class Choice:
    """One completion, gathered for a whole response."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    sources: list[tuple[str, str]] = field(default_factory=list)
    last: Delta | None = None


def event(data: str) -> str:
    return f"data: {data}\n\n"


@dataclass(slots=True)
class Job:
    """A prompt for the engine, with the request id that the engine is to know it by. `response`: the response's id, by
    which a client may abort it, where that is another. `chosen`: the client chose that id, for this request alone.
    `lora`: its adapter's name."""

    ids: list[int]
    params: SamplingParams
    id: str
    response: str | None = None
    chosen: bool = False
    images: tuple[PlacedPicture, ...] = ()
    lora: str | None = None

    @property
    def prompt(self) -> list[int] | engine.Prompt:
        """The prompt as the engine takes it."""
        return engine.Prompt(self.ids, self.images) if self.images else self.ids

    @property
    def name(self) -> str:
        """The id that its client knows."""
        return self.response or self.id


class Answer(Protocol):
    """Answer to a client, from the deltas of its `jobs`: `chunks`, then `closing` or `failed`, for a stream of events;
    `take`, then `whole`, otherwise."""

    def jobs(self) -> list[Job]: ...
    def chunks(self, prompt: int, delta: Delta) -> str: ...
    def closing(self) -> str: ...
    def failed(self, error: ApiError) -> str: ...
    def take(self, prompt: int, delta: Delta) -> None: ...
    def whole(self) -> Any: ...


class Reply:
    """A response under construction: one prompt or several, `params.n` choices each, in OpenAI's order.

    Feed it each delta with the number of its prompt: `chunks` for a stream, `take` and then `whole` otherwise. Its `id`
    is made of the `request_id`, as vLLM has it, unless it is given. `continuous_usage`: each chunk says the usage so
    far. `no_tokens`: of what is generated, a token a choice, nothing is shown or counted. `return_token_ids` shows the
    tokens of prompts and choices, as vLLM does.
    """

    PREFIX: ClassVar[str]
    OBJECT: ClassVar[str]
    CHUNK: ClassVar[str]

    def __init__(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        model: str,
        names: TokenNames,
        *,
        id: str | None = None,
        request_id: str | None = None,
        include_usage: bool = False,
        continuous_usage: bool = False,
        report_prompt: bool = False,
        return_token_ids: bool = False,
        no_tokens: bool = False,
    ):
        self.prompts, self.params, self.names = prompts, params, names
        self.include_usage, self.report_prompt = include_usage, report_prompt
        self.return_token_ids = return_token_ids
        self._continuous_usage, self._no_tokens = continuous_usage, no_tokens
        self._chosen = id is not None
        self.id = id or self.PREFIX + (request_id or secrets.token_hex(16))
        self._base = {"created": int(time.time()), "model": model}
        head = encode({"id": self.id, "object": self.CHUNK, **self._base})
        self._head = head[:-1] + ',"choices":['
        self._tail = '],"usage":null}' if include_usage else "]}"
        self._tokens = 0
        self._cached = self._on_host = self._on_disk = 0
        self._choices = [Choice() for _ in range(len(prompts) * params.n)]
        self._unfinished = len(self._choices)
        self._last: Delta | None = None  # the delta that ends the last choice
        self._speculation = Speculation()
        self._prompt_entries: dict[int, list[TokenLogprobs | None]] = {}
        self._opened: set[int] = set()
        self._held: dict[int, list[Delta]] = {}
        self._texts: dict[int, Detokenizer] = {}

    def jobs(self) -> list[Job]:
        """The prompts by the response's id, so that the log calls a request what its client does, and some digits:
        clients may send an `X-Request-Id` again while it is in use, and the engine takes an id once."""
        own = lambda: f"{self.id}-{secrets.token_hex(4)}"  # noqa: E731
        return [Job(each.ids, self.params, own(), self.id, self._chosen, each.images) for each in self.prompts]

    def chunks(self, prompt: int, delta: Delta) -> str:
        """The events to send for a delta; empty when it has nothing to show yet."""
        delta = self._count(prompt, delta)
        if prompt in self._opened:
            return self._chunk(self._piece(prompt, delta), self._figures(delta))
        waiting = self._held.setdefault(prompt, [])
        waiting.append(delta)
        if self.params.prompt_logprobs is not None and prompt not in self._prompt_entries:
            return ""  # what is said about the prompt comes first, and completion 0 brings it
        self._opened.add(prompt)
        n = self.params.n
        events = [self._opening(prompt, prompt * n + i) for i in range(n)]
        events += [self._chunk(self._piece(prompt, each), self._figures(each)) for each in self._held.pop(prompt)]
        return "".join(events)

    def closing(self) -> str:
        """The last events of a stream that went well."""
        if not self.include_usage:
            return DONE
        last = {"id": self.id, "object": self.CHUNK, **self._base, "choices": [], "usage": self.usage()}
        last |= self._speculation.fields()
        return event(encode(last)) + DONE

    def failed(self, error: ApiError) -> str:
        """The last events of a stream that failed."""
        return event(encode(error.body)) + DONE

    def take(self, prompt: int, delta: Delta) -> None:
        """Gather a delta for `whole`."""
        delta = self._count(prompt, delta)
        index = prompt * self.params.n + delta.index
        choice = self._choices[index]
        choice.text.append(delta.text)
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs or ()
        choice.sources += self._sources(index, delta)
        if delta.finish_reason is not None:
            choice.last = delta

    def whole(self) -> dict[str, Any]:
        """The response, once every choice has finished."""
        n = self.params.n
        choices = [self._whole_choice(index // n, index, choice) for index, choice in enumerate(self._choices)]
        for shown, choice in zip(choices, self._choices, strict=True):
            if self.return_token_ids:
                shown["token_ids"] = choice.token_ids
            if self.params.token_sources:
                shown["token_sources"] = choice.sources
        whole = {"id": self.id, "object": self.OBJECT, **self._base, "choices": choices, "usage": self.usage()}
        return whole | self._speculation.fields()

    def usage(self) -> dict[str, Any]:
        """Tokens so far; a prompt counts once, however many completions it has."""
        prompt = sum(len(each.ids) for each in self.prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._tokens,
            "total_tokens": prompt + self._tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached}
            | cached_by_tier(self._cached, self._on_host, self._on_disk)
            | media_tokens(*self.prompts),
        }

    def _count(self, prompt: int, delta: Delta) -> Delta:
        """Note a delta's figures, and return what of it is shown."""
        if self._no_tokens:
            told = {"metrics": delta.metrics, "prompt_logprobs": delta.prompt_logprobs}
            delta = Delta(delta.request_id, delta.index, finish_reason="length", **told)
        self._tokens += len(delta.token_ids)
        if delta.prompt_logprobs is not None:
            self._prompt_entries[prompt] = delta.prompt_logprobs
        elif delta.finish_reason == "abort":  # perhaps before anything was known of the prompt
            self._prompt_entries.setdefault(prompt, [None] * len(self.prompts[prompt].ids))
        if delta.finish_reason is not None:
            self._unfinished -= 1
            self._last = delta if not self._unfinished else None
        if delta.metrics is not None:
            self._speculation.add(delta.metrics)
            if delta.index == 0:
                self._cached += delta.metrics.cached_tokens
                self._on_host += delta.metrics.cached_on_host
                self._on_disk += delta.metrics.cached_on_disk
        return delta

    def _figures(self, delta: Delta) -> dict[str, Any]:
        """Figures of speculation, beside the last choice's end. A stream with a chunk for usage has them there."""
        return self._speculation.fields() if delta is self._last and not self.include_usage else {}

    def _chunk(self, choice: dict[str, Any] | None, beside: dict[str, Any] | None = None) -> str:
        """A chunk of one choice, with further fields `beside` its list of choices."""
        if choice is None:
            return ""
        tail = f'],"usage":{encode(self.usage())}}}' if self._continuous_usage else self._tail
        if beside:
            tail = f"{tail[:-1]},{encode(beside)[1:]}"
        return event(f"{self._head}{encode(choice)}{tail}")

    def _piece(self, prompt: int, delta: Delta) -> dict[str, Any] | None:
        shows_tokens = delta.token_sources or (self.return_token_ids and delta.token_ids)
        if not (delta.text or delta.logprobs or shows_tokens or delta.finish_reason):
            return None
        index = prompt * self.params.n + delta.index
        choice = self._part(index, delta)
        if delta.token_sources:
            choice["token_sources"] = self._sources(index, delta)
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _sources(self, index: int, delta: Delta) -> list[tuple[str, str]]:
        """Each token's text, as the model wrote it, and how it came (`request.TOKEN_SOURCES`), if asked for.

        The characters of a token are those that it completes; special tokens, such as the end's, have none.
        """
        if not delta.token_sources:
            return []
        if self.names.tokenizer is None:
            return list(zip(map(self.names.text, delta.token_ids), delta.token_sources, strict=True))
        if index not in self._texts:
            prompt = self.prompts[index // self.params.n]
            self._texts[index] = Detokenizer(self.names.tokenizer, prompt_ids=prompt.ids)
        texts = [self._texts[index].push((token,))[0] for token in delta.token_ids]
        return list(zip(texts, delta.token_sources, strict=True))

    def _report(self, prompt: int) -> dict[str, Any]:
        """Fields that vLLM adds about a prompt on request: in each choice of a completion, once in a chat."""
        report: dict[str, Any] = {}
        if self.report_prompt:
            report["prompt_logprobs"] = prompt_logprobs(self.names, self._prompt_entries[prompt])
        if self.return_token_ids:
            report["prompt_token_ids"] = self.prompts[prompt].ids
        return report

    def _opening(self, prompt: int, index: int) -> str:
        """The events of a choice before its first token."""
        raise NotImplementedError

    def _part(self, index: int, delta: Delta) -> dict[str, Any]:
        """A delta as a choice of a chunk."""
        raise NotImplementedError

    def _whole_choice(self, prompt: int, index: int, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError
