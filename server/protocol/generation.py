"""The fields that all routes share that generate text from a prompt or a chat."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, PlainValidator, create_model, model_validator

from jaxspec.config.request import (
    MAX_LOGIT_BIAS,
    MAX_STOP_IDS,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    NUMBERS,
    TOKEN_IDS,
    RequestError,
    SamplingParams,
)
from server.protocol.base import (
    BOUNDS,
    REQUEST_ID,
    Body,
    CacheSalt,
    Integer,
    Priority,
    Text,
    TokenId,
    as_text,
    at_most,
    check_text,
    describe_ranges,
    read_each,
    shown,
)
from server.protocol.described import add_rules, any_of, is_true, null
from server.protocol.structured import ONE_GRAMMAR, StructuredFields

StopString = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]
Stop = StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)]
BiasedToken = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
Biases = Annotated[dict[BiasedToken, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_LOGIT_BIAS)]


def _stop(value: Any) -> list[str]:
    if isinstance(value, str):
        value = [check_text(value)]
    if not isinstance(value, list):
        raise RequestError(f"must be a string or a list of strings, got {shown(value)}")
    if len(value) > MAX_STOPS:
        raise RequestError(f"takes at most {MAX_STOPS} strings, got {len(value)}")
    return [item for item in read_each(value, as_text) if item]  # an empty one is none


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise RequestError(
            f'must be an object from token id to number, for example {{"50256": -100}}, got {shown(value)}'
        )
    if len(value) > MAX_LOGIT_BIAS:
        raise RequestError(f"has {len(value)} entries, at most {MAX_LOGIT_BIAS} are allowed")
    if bad := [key for key in value if not (key.isascii() and key.isdecimal() and len(key) < 12)]:
        raise RequestError(f"takes as keys {TOKEN_IDS}, got {shown(bad[0])}")
    return {int(key): bias for key, bias in value.items()}


def _id(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(REQUEST_ID, value):
        raise RequestError(f"must be 1 to 128 letters, digits and any of . _ : / + = @ -, got {shown(value)}")
    return value


Id = Annotated[str, PlainValidator(_id, json_schema_input_type=Annotated[str, Field(pattern=f"^{REQUEST_ID}$")])]


def check_limit(limit: int | None, least: int | None) -> None:
    """A request may ask for no tokens, which `SamplingParams` knows nothing of."""
    low, high = BOUNDS["max_tokens"].values()
    if limit is not None and not low <= limit <= high:
        raise RequestError(
            f"max_tokens must be an integer from {low} to {high}, got {limit}; leave it out for the default",
            "max_tokens",
        )
    if limit == 0 and least:
        raise RequestError(f"min_tokens ({least}) must not exceed max_tokens (0)", "min_tokens")


# The numbers of `SamplingParams` that all APIs have under one name.
Numbers = create_model(
    "Numbers", __base__=Body, **dict.fromkeys(NUMBERS, (float | None, None)), top_k=(Integer | None, None)
)


class Sampled(Numbers):
    """The fields that sampling has under one name in all APIs. None, everywhere, means the default."""

    stop: Annotated[list[str], PlainValidator(_stop, json_schema_input_type=Stop)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS), at_most(MAX_STOP_IDS, "ids")] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Annotated[dict[int, float], PlainValidator(_logit_bias, json_schema_input_type=Biases)] | None = None
    speculative: bool | None = None


class StreamOptions(Body):
    """`include_usage`: a last chunk with the usage. `continuous_usage_stats`: each chunk has the usage so far."""

    IGNORED = frozenset({"include_obfuscation"})
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


STREAM_RULE = any_of(null("stream_options"), is_true("stream"))


class Streamed(Body):
    """A body whose answer may come as events."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self):
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", "stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


def describe_generation(schema: dict[str, Any]) -> None:
    """Add to the JSON schema what the validators of every generating body check."""
    describe_ranges(schema)
    add_rules(schema, STREAM_RULE, ONE_GRAMMAR)


class Generation(StructuredFields, Sampled, Streamed):
    """Fields that both completion routes share. None, everywhere, means the default of `SamplingParams`."""

    model_config = ConfigDict(json_schema_extra=describe_generation)
    IGNORED = frozenset(
        {
            *("user", "metadata", "service_tier", "safety_identifier"),
            *("prompt_cache_key", "prompt_cache_retention", "prediction"),
            "guided_decoding_backend",
        }
    )
    UNSUPPORTED: ClassVar[dict[str, tuple]] = {
        "logits_processors": (),
        "bad_words": ([],),
        "use_beam_search": (False,),
        "length_penalty": (1, 1.0),
        "spaces_between_special_tokens": (True,),
        "no_stop_trim": (False,),
        # routers add these to every request
        **dict.fromkeys(("return_hidden_states", "return_routed_experts"), (False,)),
        **dict.fromkeys(("separate_reasoning", "stream_reasoning", "include_reasoning"), (True,)),
        "truncate_prompt_tokens": (),
        "allowed_token_ids": ([],),
    }

    model: str | None = None
    n: Integer | None = None
    seed: Integer | None = None
    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Integer | None = None
    store: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    token_sources: bool | None = None
    fixed_drafts: bool | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    lora_path: Text | None = None  # SGLang's: an adapter's name
    request_id: Id | None = None  # vLLM's: what the response's id ends in
    rid: Id | None = None  # SGLang's: the response's id

    @property
    def limit(self) -> int | None:
        """The most tokens to generate, or None where the client doesn't say."""
        return self.max_tokens

    @property
    def no_tokens(self) -> bool:
        """Whether nothing is to follow the prompt, which is how one has it scored."""
        return self.limit == 0

    def _sampling(self, defaults: Mapping[str, Any], **overrides: Any) -> SamplingParams:
        """`defaults` where the client says nothing. **Raises:** `RequestError` for a value out of range.

        The engine always generates a token, even when it won't be shown (`no_tokens`).
        """
        check_limit(self.limit, self.min_tokens)
        if self.no_tokens:
            overrides |= {"max_tokens": 1, "no_tokens": True}
        given = {name: getattr(self, name) for name in _SHARED if getattr(self, name) is not None}
        return SamplingParams(**{**defaults, "structured": self.structured(), **given, **overrides})


# What `SamplingParams` doesn't have. Each other field of `Generation` is an argument of that name.
_OF_THE_REPLY = {
    *("model", "stream", "stream_options", "store", "request_id", "rid"),
    *("return_token_ids", "return_tokens_as_token_ids", "priority", "lora_path"),
}
_OTHERS = {*_OF_THE_REPLY, *StructuredFields.model_fields}
_SHARED = tuple(name for name in Generation.model_fields if name not in _OTHERS)
