"""Requests on their way into the engine: checked against model and pool, and tokenised.

Whatever could never be served is refused here, before the scheduler or the device hear of it.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxspec.checkpoint.peft import Adapter
from jaxspec.config.json_values import shown
from jaxspec.config.options import as_python
from jaxspec.config.request import (
    MAX_STOP_IDS,
    PRIORITIES,
    REPORTS,
    RequestError,
    RequestMetrics,
    SamplingParams,
    StructuredOutput,
    TokenLogprobs,
)
from jaxspec.engine.adapters import UNKNOWN
from jaxspec.engine.pictures import MOST_PATCHES
from jaxspec.engine.runner import Runner
from jaxspec.images.picture import PlacedPicture, Prompt
from jaxspec.images.placement import Placement
from jaxspec.rounds.programs import GREEDY, LOGPROBS, SAMPLED
from jaxspec.sampling.sampling import adjusts
from jaxspec.scheduling.scheduler import Scheduler
from jaxspec.scheduling.sequence import SequenceState, Status
from jaxspec.structured.grammar import Grammars, Matcher
from jaxspec.text.detokenizer import Detokenizer
from jaxspec.text.errors import TokenizerError


@dataclass(eq=False, slots=True)
class Choice:
    """One completion of a request: its sequence and its text so far."""

    request: Request
    index: int
    seq: SequenceState
    detokenizer: Detokenizer | None
    metrics: RequestMetrics
    matcher: Matcher | None = None  # where it is in its grammar
    answered: bool = False  # a delta has been sent


@dataclass(eq=False, slots=True)
class Request:
    """A validated request on its way through the engine."""

    id: str
    prompt: str | None
    tokens: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    limit: int
    mode: str  # the first of `programs.MODES` that serves it
    fixed_drafts: bool  # as asked, or it samples under a seed: its text must not depend on other requests
    added: float
    client: str = ""  # as of `AsyncLLM.generate`
    priority: int = 0
    pictures: Placement | None = None
    adapter: Adapter | None = None
    matchers: list[Matcher] | None = None  # of its completions, if a grammar constrains them
    choices: list[Choice] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def unfinished(self) -> list[Choice]:
        return [choice for choice in self.choices if choice.seq.status is not Status.FINISHED]


class Intake:
    """Makes requests for one engine. Any thread may call it: it changes nothing but its own random numbers."""

    def __init__(self, runner: Runner, scheduler: Scheduler):
        # Not the runner's own model: its params change, and this would hold on to the old ones.
        self.model = dataclasses.replace(runner.model, params=None, tower=None)
        self.config, self.grammars, self.scheduler = runner.config, runner.grammars, scheduler
        self.no_pictures, self.adapters = runner.no_pictures, runner.adapters
        self._seeds = np.random.default_rng(self.config.seed)

    def check(self, prompt: str | list[int] | Prompt, params: SamplingParams) -> None:
        """Check a request as `prepare` does, but for its grammar. **Raises:** `RequestError`."""
        self._checked(prompt, params)

    async def compiled(self, wanted: StructuredOutput) -> None:
        """Have a grammar compiled beside the event loop, so that `prepare` finds it.

        **Raises:** `RequestError` naming the field; `Busy` while others are compiled.
        """
        await self._grammars(wanted).compiled(wanted)

    def _grammars(self, wanted: StructuredOutput) -> Grammars:
        if self.grammars is not None:
            return self.grammars
        if self.config.disable_structured_output:
            flag = "deterministic" if self.config.deterministic else "disable-structured-output"
            why = f"this engine was started with --{flag}; start it without"
        elif self.model.tokenizer is None:
            why = (
                f"{self.model.name} has no tokenizer, and a grammar needs one; add tokenizer.json to the model's folder"
            )
        else:
            why = f"{self.model.name} names no end token, and a grammar needs one; add eos_token_id to its config"
        raise RequestError(f"structured output can't be served: {why}", wanted.name or wanted.kind)

    def prepare(
        self,
        prompt: str | list[int] | Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        client: str = "",
        priority: int = 0,
        lora: str | None = None,
    ) -> Request:
        """Check a request against model and pool, and tokenise it. Touches no engine state. `lora`: its adapter's name.

        **Raises:** `RequestError` for anything that could never be served; `Busy` as `compiled`.
        """
        self._check_priority(priority := as_python(priority))
        adapter = self._adapter(lora)
        tokens, stop_ids, limit = self._checked(prompt, params)
        images = prompt.images if isinstance(prompt, Prompt) else ()
        seeded = params.seed is not None or self.config.seed is not None
        return Request(
            id=request_id or secrets.token_hex(8),
            prompt=prompt if isinstance(prompt, str) else None,
            tokens=tokens,
            params=params,
            seed=int(self._seeds.integers(2**63)) if params.seed is None else params.seed,
            stop_ids=stop_ids,
            limit=limit,
            mode=_mode(params),
            fixed_drafts=params.fixed_drafts or (params.temperature > 0 and seeded),
            added=time.monotonic(),
            client=client,
            priority=priority,
            pictures=Placement.of(tuple(images), self.model.config.tower.merge) if images else None,
            adapter=adapter,
            matchers=None if params.structured is None else self._matchers(params),
        )

    def _adapter(self, name: str | None) -> Adapter | None:
        if name is not None and self.adapters is None:
            raise RequestError(
                f"the adapter {shown(name)} isn't loaded: this engine serves none. Start it with --lora-modules or "
                "--enable-lora",
                "lora",
                UNKNOWN,
            )
        return None if self.adapters is None else self.adapters.find(name)

    def _check_priority(self, priority: int) -> None:
        low, high = PRIORITIES
        if isinstance(priority, bool) or not isinstance(priority, int) or not low <= priority <= high:
            raise RequestError(f"priority must be an integer from {low} to {high}, got {shown(priority)}", "priority")
        if priority and self.config.schedule_policy == "fcfs":
            raise RequestError(
                f"priority is {priority}, but this server goes by order of arrival; leave it out, or start the server "
                "with --schedule-policy priority",
                "priority",
            )

    def _checked(
        self, prompt: str | list[int] | Prompt, params: SamplingParams
    ) -> tuple[list[int], frozenset[int], int]:
        """A request's tokens, end tokens and limit."""
        tokens = self._tokens(prompt.tokens if isinstance(prompt, Prompt) else prompt)
        self._check_ids(tokens, params)
        if isinstance(prompt, Prompt) and prompt.images:
            self._check_images(prompt.images, len(tokens))
        if params.stop and self.model.tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer, which this model doesn't have; use stop_token_ids", "stop"
            )
        for name in REPORTS:
            if getattr(params, name) and not getattr(self.config, flag := f"enable_{name}"):
                raise RequestError(
                    f"{name} can't be served: this engine doesn't keep that; start it with --{flag.replace('_', '-')}",
                    name,
                )
        stop_ids = self._stop_ids(params)
        limit = self.scheduler.check(len(tokens), params.max_tokens, params.min_tokens, params.no_tokens)
        return tokens, stop_ids, limit

    def _check_ids(self, tokens: list[int], params: SamplingParams) -> None:
        """Check that all token ids of a request are of the vocabulary."""
        vocab = self.model.config.vocab_size
        if tokens and not (set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) < vocab):
            bad = next(t for t in tokens if type(t) is not int or not 0 <= t < vocab)
            problem = (
                f"token id {bad} is outside the vocabulary" if type(bad) is int else f"{shown(bad)} is no token id"
            )
            raise RequestError(f"{problem}, ints from 0 to {vocab - 1}", "prompt")
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            if (bad := next((t for t in ids if t >= vocab), None)) is not None:
                raise RequestError(f"{name}: token id {bad} is outside the vocabulary, 0 to {vocab - 1}", name)

    def _check_images(self, images: Sequence[PlacedPicture], length: int) -> None:
        """Check that the model reads pictures, and that these are its, one behind the other in the prompt."""
        if self.no_pictures is not None:
            raise RequestError(f"this prompt has pictures, and {self.no_pictures}", "images")
        tower, end = self.model.config.tower, 0
        for number, placed in enumerate(images):
            picture, shape = placed.picture, placed.picture.pixels.shape
            patches = math.prod(picture.grid)
            if shape != (patches, tower.patch) or picture.tokens * tower.per_token != patches or picture.grid[0] != 1:
                raise RequestError(
                    f"image {number} has pixels {list(shape)}, a grid {list(picture.grid)} and {picture.tokens} "
                    f"tokens; {self.model.name} takes one frame of patches of {tower.patch} values, "
                    f"{tower.per_token} a token",
                    "images",
                )
            if patches > MOST_PATCHES:
                raise RequestError(
                    f"image {number} has {patches} patches, at most {MOST_PATCHES} are allowed; send a smaller one",
                    "images",
                )
            if placed.start < end or placed.start + picture.tokens > length:
                raise RequestError(
                    f"image {number} takes places {placed.start} to {placed.start + picture.tokens - 1} of a prompt of "
                    f"{length} tokens, and must begin at {end} or later and end within it",
                    "images",
                )
            end = placed.start + picture.tokens

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Token ids that end the text, the model's own among them unless it is to go on."""
        ends = not params.ignore_eos or params.structured is not None  # a grammar's text ends where the grammar does
        stop_ids = frozenset(params.stop_token_ids) | (frozenset(self.model.eos_ids) if ends else frozenset())
        if len(stop_ids) > MAX_STOP_IDS:
            raise RequestError(
                f"{len(stop_ids)} token ids would end this request (the model's own included), at most {MAX_STOP_IDS}",
                "stop_token_ids",
            )
        return stop_ids

    def _matchers(self, params: SamplingParams) -> list[Matcher]:
        grammars = self._grammars(params.structured)
        grammar = grammars.compile(params.structured)
        return [grammars.start(grammar, avoid_end=params.ignore_eos) for _ in range(params.n)]

    def _tokens(self, prompt: str | list[int] | np.ndarray) -> list[int]:
        prompt = as_python(prompt)
        if isinstance(prompt, list | tuple):
            plain = set(map(type, prompt)) <= {int}
            return list(prompt) if plain else list(map(as_python, prompt))
        if not isinstance(prompt, str):
            raise RequestError(f"a prompt must be a string or a list of token ids, got {shown(prompt)}", "prompt")
        if self.model.tokenizer is None:
            raise RequestError(
                f"{self.model.name} has no tokenizer: give the prompt as a list of token ids, or add "
                "tokenizer.json to the model's folder",
                "prompt",
            )
        try:
            return self.model.tokenizer.encode(prompt)
        except TokenizerError as error:
            raise RequestError(str(error), "prompt") from error


def _mode(params: SamplingParams) -> str:
    """The least of the round's modes that does what the request asks for."""
    if params.logprobs is not None:
        return LOGPROBS
    return GREEDY if params.temperature == 0 and not adjusts(params) else SAMPLED
