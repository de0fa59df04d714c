"""A stand-in for `AsyncLLM` that answers by rule, so that the protocol can be tested without a model.

It completes any prompt with `TEXT`, one token (a UTF-8 byte) at a time, and records what it was asked and what was
aborted. Magic prompts set off what a real engine does rarely: see `FakeLLM.check` and `generate`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import cache

from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.request import (
    CONTEXT_EXCEEDED,
    TOKEN_SOURCES,
    Delta,
    RequestError,
    RequestMetrics,
    SamplingParams,
    TokenLogprobs,
    of_prompt,
)
from jaxspec.engine.async_llm import EngineDead
from jaxspec.engine.tiers import host_cache
from jaxspec.images.image_reader import ImageReader
from jaxspec.images.picture import PlacedPicture, Prompt
from jaxspec.models.model_config import ModelConfig
from jaxspec.text.tokenizer import Tokenizer
from tests.support.tiny import BYTE_VOCAB, tiny_checkpoint, tiny_config

TEXT = "héllo, wörld ☃!"
CONTEXT = 256


@cache
def byte_tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(tiny_checkpoint(vocab=BYTE_VOCAB, tokenizer=True))


@dataclass
class FakeLLM:
    """`gate`, when closed, holds every stream after its first delta: the engine of a busy server."""

    config: EngineConfig = field(default_factory=lambda: EngineConfig(model="fake/model", context_length=CONTEXT))
    model_config: ModelConfig = field(default_factory=lambda: ModelConfig.from_hf(tiny_config(vocab=BYTE_VOCAB)))
    tokenizer: Tokenizer | None = field(default_factory=byte_tokenizer)
    sampling: dict[str, float] = field(default_factory=dict)
    error: BaseException | None = None
    open: bool = True
    ready: bool = True
    stuck: bool = False
    text: str | None = None  # what it says; None: `TEXT`
    endless: bool = False  # the text is told again and again
    step_seconds: float = 0.0
    engines: int = 0  # as of `DataParallelLLM`, which lists them
    lost: dict[int, str] = field(default_factory=dict)  # why some of them have ended
    watchdog_timeout: float = 300.0
    started: list[tuple[list[int], SamplingParams]] = field(default_factory=list)
    running: int = 0
    aborted: int = 0
    flushed: int = 0
    aborts: set[str | None] = field(default_factory=set)
    names: list[str | None] = field(default_factory=list)
    clients: list[str] = field(default_factory=list)
    priorities: list[int] = field(default_factory=list)
    image_reader: ImageReader | None = None
    vocab: int = BYTE_VOCAB
    adapters: dict[str, str] = field(default_factory=dict)
    loras: list[str | None] = field(default_factory=list)
    images: list[tuple[PlacedPicture, ...]] = field(default_factory=list)
    controls: list[tuple[str, dict]] = field(default_factory=list)

    @property
    def no_pictures(self) -> str | None:
        return None if self.image_reader else f"{self.config.model} has no vision"

    @property
    def said(self) -> str:
        return TEXT if self.text is None else self.text

    devices = ("cpu:0 cpu",)

    async def check(self, requests: list[tuple[list[int], SamplingParams]]) -> None:
        for number, (prompt, params) in enumerate(requests):
            with of_prompt(number):
                self.prepare(prompt.tokens if isinstance(prompt, Prompt) else prompt, params)

    def prepare(self, prompt: list[int], params: SamplingParams) -> None:
        if bad := [token for token in prompt if not 0 <= token < self.vocab]:
            raise RequestError(f"token id {bad[0]} is outside the vocabulary, 0 to {self.vocab - 1}", "prompt")
        for name in ("stop_token_ids", "logit_bias"):
            if bad := [token for token in getattr(params, name) if token >= self.vocab]:
                raise RequestError(f"{name}: token id {bad[0]} is outside the vocabulary, 0 to {self.vocab - 1}", name)
        if params.structured is not None and params.structured.kind == "regex":
            try:
                re.compile(params.structured.text)
            except re.error as error:
                raise RequestError(f"regex: {error}", params.structured.name) from error
        if not 0 < len(prompt) < CONTEXT:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, allowed are 1 to {CONTEXT - 1}", "prompt", CONTEXT_EXCEEDED
            )
        if params.max_tokens is not None and params.max_tokens > CONTEXT:
            raise RequestError(f"the context is {CONTEXT} tokens; lower max_tokens", "max_tokens")

    async def generate(
        self, prompt: list[int] | Prompt, params: SamplingParams, request_id=None, client="", priority=0, lora=None
    ) -> AsyncIterator[Delta]:
        prompt, images = (prompt.tokens, prompt.images) if isinstance(prompt, Prompt) else (prompt, ())
        self.prepare(prompt, params)
        if self.error is not None:
            raise EngineDead("the engine has stopped") from self.error
        self.started.append((prompt, params))
        self.names.append(request_id)
        self.clients.append(client)
        self.priorities.append(priority)
        self.loras.append(lora)
        self.images.append(images)
        self.running += 1
        done = False
        try:
            async for delta in self._deltas(prompt, params):
                yield delta
                if self.aborts & {None, request_id}:
                    latency = RequestMetrics(latency=0.05, prompt_tokens=len(prompt))
                    yield Delta("id", delta.index, finish_reason="abort", metrics=latency)
                    break
            done = True
        finally:
            self.running -= 1
            self.aborted += not done

    async def _deltas(self, prompt: list[int], params: SamplingParams) -> AsyncIterator[Delta]:
        text = bytes(prompt).decode() if max(prompt) < 256 else ""
        if "boom" in text:
            raise ZeroDivisionError("a secret of the engine")
        tokens = list(self.said.encode())[: params.max_tokens]
        while self.endless:
            yield Delta("id", 0, 1000 * TEXT, tokens)
            await asyncio.sleep(0)
        known = None
        if params.prompt_logprobs is not None:
            known = [None, *(entry(token, params.prompt_logprobs) for token in prompt[1:])]
        order = reversed(range(params.n)) if "reverse" in text else range(params.n)
        indices = list(order)
        for place, token in enumerate(tokens):
            for index in indices:
                yield self._delta(index, tokens, place, token, prompt, params, known if place == 0 else None)
            if "late failure" in text or "die" in text:
                self.error = RuntimeError("a secret") if "die" in text else None
                raise EngineDead("the engine has stopped") if "die" in text else KeyError("a secret")
            while not self.open:
                await asyncio.sleep(0.005)
                if not self.ready:
                    raise EngineDead("the engine has stopped")
            await asyncio.sleep(0)

    def _delta(self, index, tokens, place, token, prompt, params, known) -> Delta:
        """One token; characters of several bytes show with their last."""
        shown = lambda n: bytes(tokens[:n]).decode("utf-8", "ignore")  # noqa: E731
        delta = Delta("id", index, shown(place + 1)[len(shown(place)) :], [token])
        if params.logprobs is not None:
            delta.logprobs = [entry(token, params.logprobs)]
        if params.token_sources:
            delta.token_sources = [TOKEN_SOURCES[place % len(TOKEN_SOURCES)]]
        if index == 0:
            delta.prompt_logprobs = known
        if place + 1 == len(tokens):
            delta.finish_reason = "stop" if len(tokens) == len(self.said.encode()) else "length"
            delta.metrics = metrics = RequestMetrics(0.004, 0.01, 0.05, len(prompt), cached_tokens=2)
            metrics.output_tokens, metrics.verify_rounds, metrics.verified_tokens = len(tokens), 5, 9
            metrics.acceptance_histogram = [0, 0, 0]
            if params.speculative:
                metrics.drafted_tokens, metrics.acceptance_histogram = 8, [1, 1, 2]
        return delta

    def stats(self) -> dict:
        figures = self._figures()
        each = lambda i: {"engine": i, "held": i, "ready": i == 0, "error": self.lost.get(i)}  # noqa: E731
        listed = [figures | each(i) for i in range(self.engines)]
        return figures | ({"engines": listed} if listed else {})

    def _figures(self) -> dict:
        return {
            "weight_version": "default",
            "adapters": {"places": 4, "running": [], "waiting": []} if self.adapters else None,
            "num_running": self.running,
            "num_waiting": 0,
            "total_pages": 10,
            "free_pages": 7,
            "cached_pages": 1,
            "page_size": 16,
            "prompt_tokens_total": 5,
            "images_total": 2,
            **dict.fromkeys(("host_cached_tokens_total", "disk_cached_tokens_total"), 0),
            **host_cache.stats(None),
            "image_tokens_total": 3,
            "encoded_images_total": 1,
            "cached_tokens_total": 2,
            "generation_tokens_total": 9,
            "rested_rounds_total": 0,
            "verify_rounds_total": 4,
            "verified_tokens_total": 9,
            "avg_spec_accept_length": 2.25,
            "drafted_per_position": [4, 3],
            "accepted_per_position": [3, 1],
            "step_tokens": {"bounds": [1, 8], "counts": [0, 2, 1], "sum": 25},
            "forced_tokens_total": 0,
            "nonfinite_total": 0,
            "preemptions_total": 0,
            "compiles_total": 6,
            "dispatches": {"round": 4},
            "drafts": 2,
            "rounds_by_drafts": {0: 1, 2: 3},
            "requests_total": {"stop": 3, "abort": 1},
            "ready": self.ready,
            "step_seconds": self.step_seconds,
            "refused_total": 2,
            "engine_failures_total": 1,
        }

    def abort(self, request_id: str | None = None) -> None:
        self.aborts.add(request_id)
        self.open |= request_id is None or request_id in self.names

    def close(self, timeout: float = 0) -> bool:
        self.ready = False
        return not self.stuck

    def give_up(self, error: BaseException) -> None:
        self.ready, self.error = False, error

    async def control(self, action: str, **given) -> dict:
        self.controls.append((action, given))
        if given.get("target") == "/nothing":
            raise RequestError("there is nothing", "model_path")
        return {"weight_version": given.get("version") or "default", "paused": None, "released": [], "requests": 3}

    async def flush_cache(self) -> bool:
        self.flushed += not self.running
        return not self.running


def entry(token: int, wanted: int) -> TokenLogprobs:
    """A log-probability by rule: the token itself second, and one that couldn't be at the end."""
    top = ((ord("?"), -0.1), (token, -1.5), (ord("#"), float("-inf")))
    return TokenLogprobs(token, -1.5, top[:wanted])
