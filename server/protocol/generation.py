"""The fields that all routes share that generate text from a prompt or a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import PlainValidator, model_validator

from jaxspec.request import RequestError, SamplingParams
from server.protocol.base import Body, check_text
from server.protocol.structured import StructuredFields


def _stop(value: Any) -> list[str]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
        raise RequestError(f"must be a string or a list of strings, got {value!r}")
    return [check_text(item) for item in strings]


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise RequestError(f'must be an object from token id to number, for example {{"50256": -100}}, got {value!r}')
    if bad := [key for key in value if not key.isdecimal()]:
        raise RequestError(f"keys must be token ids, got {bad[0]!r}")
    return {int(key): bias for key, bias in value.items()}


class StreamOptions(Body):
    IGNORED = frozenset({"include_obfuscation"})
    UNSUPPORTED: ClassVar[dict[str, tuple]] = {"continuous_usage_stats": (False,)}
    include_usage: bool | None = None


class Generation(StructuredFields, Body):
    """Fields that both completion routes share. None, everywhere, means the default of `SamplingParams`."""

    IGNORED = frozenset(
        {
            *("user", "metadata", "store", "service_tier", "safety_identifier"),
            *("prompt_cache_key", "prompt_cache_retention", "prediction"),
            "guided_decoding_backend",
        }
    )
    UNSUPPORTED: ClassVar[dict[str, tuple]] = {
        **dict.fromkeys(("logits_processors", "lora_path"), ()),
        "priority": (0,),
        "bad_words": ([],),
        "use_beam_search": (False,),
        "length_penalty": (1, 1.0),
        "spaces_between_special_tokens": (True,),
        "no_stop_trim": (False,),
        "truncate_prompt_tokens": (),
        "allowed_token_ids": ([],),
    }

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Annotated[list[str], PlainValidator(_stop, json_schema_input_type=str | list[str])] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: (
        Annotated[dict[int, float], PlainValidator(_logit_bias, json_schema_input_type=dict[str, float])] | None
    ) = None
    prompt_logprobs: int | None = None
    speculative: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    token_sources: bool | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self):
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", "stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def _sampling(self, defaults: Mapping[str, Any], **overrides: Any) -> SamplingParams:
        """`defaults` where the client says nothing. **Raises:** `RequestError` for a value out of range."""
        given = {name: getattr(self, name) for name in _SHARED if getattr(self, name) is not None}
        return SamplingParams(**{**defaults, "structured": self.structured(), **given, **overrides})


_OF_THE_REPLY = ("model", "stream", "stream_options", "return_token_ids", "return_tokens_as_token_ids")
_OTHERS = {*_OF_THE_REPLY, *StructuredFields.model_fields}
_SHARED = tuple(name for name in Generation.model_fields if name not in _OTHERS)
