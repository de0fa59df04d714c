"""The body of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import countOf
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator, model_validator

from jaxspec.config.request import RequestError, SamplingParams
from server.protocol.base import Integer, TokenId, as_text, check_text, read_each, shown, whole
from server.protocol.generation import Generation

OPENAI_MAX_TOKENS = 16  # of /v1/completions, when a request gives none
MAX_COMPLETIONS = 2048  # of one request, prompts times n: all of them wait in the engine at once
Ids = Annotated[list[TokenId], Field(min_length=1)]
Several = Field(min_length=1, max_length=MAX_COMPLETIONS)
Prompt = str | Annotated[list[str], Several] | Ids | Annotated[list[Ids], Several]


def as_prompts(value: Any) -> list[str] | list[list[int]]:
    """A list of prompts, whichever of OpenAI's four spellings was used. Token ids are checked against the vocabulary
    by the engine, which knows it."""
    if isinstance(value, str):
        return [check_text(value)]
    if not isinstance(value, list) or not value:
        raise RequestError(
            "must be a string, a list of strings, a list of token ids or a list of lists of token ids, none of them "
            f"empty, got {shown(value)}"
        )
    if isinstance(value[0], str):
        return read_prompts(value, as_text)
    return read_prompts(value, as_ids) if isinstance(value[0], list) else [as_ids(value)]


def read_prompts[T](values: list[Any], read: Callable[[Any], T]) -> list[T]:
    """Prompts of one kind: the first's, to which `read` holds the others."""
    if len(values) > MAX_COMPLETIONS:
        raise RequestError(f"has {len(values)} prompts, at most {MAX_COMPLETIONS} in one request; send several")
    return read_each(values, read)


def as_ids(values: Any) -> list[int]:
    """Token ids as integers. **Raises:** `RequestError`, with the place of the first that isn't one."""
    if not isinstance(values, list):
        raise RequestError(f"must be a list of token ids, got {shown(values)}")
    for each in (values, map(whole, values)):
        if countOf(map(type, given := list(each)), int) == len(given):
            return given
    place = next(place for place, each in enumerate(given) if type(each) is not int)
    raise RequestError(f"must be a token id, an integer, got {shown(values[place])}", f"[{place}]")


class CompletionRequest(Generation):
    """The body of `/v1/completions`."""

    UNSUPPORTED: ClassVar[dict[str, tuple]] = {**Generation.UNSUPPORTED, "suffix": ("",)}

    prompt: Annotated[list, PlainValidator(as_prompts, json_schema_input_type=Prompt)]
    logprobs: Integer | None = None
    echo: bool | None = None
    best_of: Integer | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _best_of_is_n(self):
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(
                f"best_of ({self.best_of}) is supported only when it equals n ({self.n or 1})", "best_of"
            )
        return self

    def sampling(self, defaults: Mapping[str, Any]) -> SamplingParams:
        prompt_logprobs = self.prompt_logprobs
        if self.echo and self.logprobs is not None:  # the echoed tokens are reported like the generated ones
            prompt_logprobs = max(self.logprobs, prompt_logprobs or 0)
        limit = OPENAI_MAX_TOKENS if self.limit is None else self.limit
        params = self._sampling(defaults, max_tokens=limit, logprobs=self.logprobs, prompt_logprobs=prompt_logprobs)
        if (asked := len(self.prompt) * params.n) > MAX_COMPLETIONS:
            raise RequestError(
                f"{len(self.prompt)} prompts with n {params.n} ask for {asked} completions, at most {MAX_COMPLETIONS} "
                "in one request; send several",
                "prompt",
            )
        return params
