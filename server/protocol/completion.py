"""The body of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import PlainValidator, model_validator

from jaxspec.request import RequestError, SamplingParams
from server.protocol.base import check_text
from server.protocol.generation import Generation

OPENAI_MAX_TOKENS = 16  # of /v1/completions, when a request gives none
MAX_COMPLETIONS = 2048  # of one request, prompts times n: all of them wait in the engine at once
Prompt = str | list[str] | list[int] | list[list[int]]


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """A list of prompts, whichever of OpenAI's four spellings was used. Token ids are checked against the vocabulary
    by the engine, which knows it."""
    if isinstance(value, str):
        return [check_text(value)]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return [check_text(item) for item in value]
        if all(type(item) is int for item in value):
            return [value]
        if all(isinstance(item, list) and all(type(token) is int for token in item) for item in value):
            return value
    raise RequestError(
        "must be a string, a list of strings, a list of token ids or a list of lists of token ids, none of them empty"
    )


class CompletionRequest(Generation):
    """The body of `/v1/completions`."""

    UNSUPPORTED: ClassVar[dict[str, tuple]] = {**Generation.UNSUPPORTED, "suffix": ("",)}

    prompt: Annotated[list, PlainValidator(_prompts, json_schema_input_type=Prompt)]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _best_of_is_n(self):
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(
                f"best_of ({self.best_of}) is supported only when it equals n ({self.n or 1})", "best_of"
            )
        return self

    @property
    def only_echo(self) -> bool:
        """Whether nothing is to follow the prompt, which is how one has it scored."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The engine's settings. It always generates a token, even when it won't be shown (`only_echo`)."""
        prompt_logprobs = self.prompt_logprobs
        if self.echo and self.logprobs is not None:  # the echoed tokens are reported like the generated ones
            prompt_logprobs = max(self.logprobs, prompt_logprobs or 0)
        if self.only_echo and self.min_tokens:
            raise RequestError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens (0)", "min_tokens")
        limit = OPENAI_MAX_TOKENS if self.max_tokens is None else self.max_tokens + self.only_echo
        params = self._sampling(defaults, max_tokens=limit, logprobs=self.logprobs, prompt_logprobs=prompt_logprobs)
        if (asked := len(self.prompt) * params.n) > MAX_COMPLETIONS:
            raise RequestError(
                f"{len(self.prompt)} prompts with n {params.n} ask for {asked} completions, at most {MAX_COMPLETIONS} "
                "in one request; send several",
                "prompt",
            )
        return params
