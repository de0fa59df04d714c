"""What a request may say: field names, types, and which fields are accepted, ignored or refused.

Invariant: nothing that would change the answer is dropped in silence. A field is used, or known not to matter
(`IGNORED`), or refused by name. Ranges are `SamplingParams`' business, so the API and the offline engine can't differ.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, PlainValidator, model_validator

from jaxspec.request import MAX_LOGPROBS, RequestError, SamplingParams

OPENAI_MAX_TOKENS = 16  # of /v1/completions, when a request gives none
MAX_COMPLETIONS = 2048  # of one request, prompts times n: all of them wait in the engine at once
# What the tokenizer's own method takes: to set one would change how the prompt is made, not what the template sees.
RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        *("messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("self", "tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
    }
)

Prompt = str | list[str] | list[int] | list[list[int]]


def _check_text(text: str) -> str:
    """Refuse what JSON can spell and UTF-8 can't: it could be neither tokenised nor sent back."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the text has a lone surrogate at character {error.start}") from None
    return text


Text = Annotated[str, AfterValidator(_check_text)]


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """A list of prompts, whichever of OpenAI's four spellings was used. Token ids are checked against the vocabulary
    by the engine, which knows it."""
    if isinstance(value, str):
        return [_check_text(value)]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return [_check_text(item) for item in value]
        if all(type(item) is int for item in value):
            return [value]
        if all(isinstance(item, list) and all(type(token) is int for token in item) for item in value):
            return value
    raise RequestError(
        "must be a string, a list of strings, a list of token ids or a list of lists of token ids, none of them empty"
    )


def _stop(value: Any) -> list[str]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
        raise RequestError(f"must be a string or a list of strings, got {value!r}")
    return [_check_text(item) for item in strings]


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise RequestError(f'must be an object from token id to number, for example {{"50256": -100}}, got {value!r}')
    if bad := [key for key in value if not key.isdecimal()]:
        raise RequestError(f"keys must be token ids, got {bad[0]!r}")
    return {int(key): bias for key, bias in value.items()}


def _content(value: Any) -> str:
    """A message's text. Parts are joined by a newline, as vLLM does for templates that take a string."""
    if isinstance(value, str):
        return _check_text(value)
    if not isinstance(value, list):
        raise RequestError(f"must be a string or a list of text parts, got {value!r}")
    texts = []
    for place, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            given = f"type {kind!r}" if kind else repr(part)
            raise RequestError(f"part {place} has {given}, which is not supported; this server reads text only")
        if not isinstance(part.get("text"), str):
            raise RequestError(f"part {place} needs a string as its text, got {part.get('text')!r}")
        texts.append(_check_text(part["text"]))
    return "\n".join(texts)


class Body(BaseModel):
    """A JSON object whose unknown fields are refused with the nearest known name."""

    model_config = ConfigDict(strict=True, extra="forbid")
    IGNORED: ClassVar[frozenset[str]] = frozenset()
    # Fields that other servers know and that would change the answer, with the values of each that ask for nothing.
    UNSUPPORTED: ClassVar[dict[str, tuple]] = {}

    @model_validator(mode="before")
    @classmethod
    def _know_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if name in cls.model_fields:
                kept[name] = value
            elif name in cls.UNSUPPORTED:
                if value is not None and value not in cls.UNSUPPORTED[name]:
                    raise RequestError(f"{name} is not supported by this server; leave it out", name)
            elif name not in cls.IGNORED:
                near = difflib.get_close_matches(name, cls.model_fields, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known fields: {', '.join(sorted(cls.model_fields))}"
                raise RequestError(f"unknown field {name!r}; {hint}", name)
        return kept


class StreamOptions(Body):
    IGNORED = frozenset({"include_obfuscation"})
    UNSUPPORTED: ClassVar[dict[str, tuple]] = {"continuous_usage_stats": (False,)}
    include_usage: bool | None = None


class Message(Body):
    """One chat message. A reply of this server can be sent back as it is: its empty extra fields are accepted."""

    UNSUPPORTED: ClassVar[dict[str, tuple]] = {
        "refusal": (),
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "tool_calls": ([],),
        "tool_call_id": (),
        "reasoning_content": ("",),
        "reasoning": ("",),
    }
    role: Text
    content: Annotated[str, PlainValidator(_content, json_schema_input_type=str | list[dict])]
    name: Text | None = None

    def as_dict(self) -> dict[str, str]:
        """What a chat template sees."""
        return {"role": self.role, "content": self.content} | ({"name": self.name} if self.name is not None else {})


class Generation(Body):
    """Fields that both completion routes share. None, everywhere, means the default of `SamplingParams`."""

    IGNORED = frozenset(
        {
            *("user", "metadata", "store", "service_tier", "safety_identifier"),
            *("prompt_cache_key", "prompt_cache_retention", "prediction"),
        }
    )
    UNSUPPORTED: ClassVar[dict[str, tuple]] = {
        **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), ()),
        **dict.fromkeys(("json_schema", "regex", "ebnf", "logits_processors", "lora_path"), ()),
        "priority": (0,),
        "bad_words": ([],),
        "use_beam_search": (False,),
        "length_penalty": (1, 1.0),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "include_stop_str_in_output": (False,),
        "no_stop_trim": (False,),
        "truncate_prompt_tokens": (),
        "allowed_token_ids": ([],),
        "response_format": ({"type": "text"},),
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
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: (
        Annotated[dict[int, float], PlainValidator(_logit_bias, json_schema_input_type=dict[str, float])] | None
    ) = None
    prompt_logprobs: int | None = None
    speculative: bool | None = None

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
        return SamplingParams(**{**defaults, **given, **overrides})


_SHARED = tuple(name for name in Generation.model_fields if name not in ("model", "stream", "stream_options"))


class ChatRequest(Generation):
    """The body of `/v1/chat/completions`."""

    IGNORED = Generation.IGNORED | {"parallel_tool_calls"}  # without tools there is nothing to parallelise
    UNSUPPORTED: ClassVar[dict[str, tuple]] = {
        **Generation.UNSUPPORTED,
        **dict.fromkeys(("function_call", "audio", "reasoning_effort", "verbosity", "web_search_options"), ()),
        **dict.fromkeys(("chat_template", "documents"), ()),
        "tools": ([],),
        "tool_choice": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "echo": (False,),
        "add_special_tokens": (False,),  # the template writes them
    }

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _agree(self):
        if not self.messages:
            raise RequestError("messages must hold at least one message", "messages")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise RequestError(
                f"max_completion_tokens ({self.max_completion_tokens}) and max_tokens ({self.max_tokens}) mean the "
                "same and differ; send one",
                "max_completion_tokens",
            )
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "add_generation_prompt opens a new message and continue_final_message continues the last one; send one",
                "continue_final_message",
            )
        if bad := sorted(RESERVED_TEMPLATE_KWARGS & set(self.chat_template_kwargs or {})):
            raise RequestError(f"{bad[0]!r} can't be set here; it is not the template's to see", "chat_template_kwargs")
        return self

    @property
    def limit_name(self) -> str:
        """The field that the client wrote `max_tokens` in."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def sampling(self, defaults: Mapping[str, Any]) -> SamplingParams:
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise RequestError(
                f"top_logprobs must be an integer from 0 to {MAX_LOGPROBS}, got {self.top_logprobs}", "top_logprobs"
            )
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._sampling(defaults, max_tokens=limit, logprobs=logprobs)


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
