"""The bodies of SGLang's own routes: `/generate` and `/abort_request`."""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, PlainValidator, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from jaxspec.config.request import MAX_LOGPROBS, REPORTS, RequestError, SamplingParams, StructuredOutput
from jaxspec.images.chats import Media
from server.protocol.base import (
    Body,
    Integer,
    Priority,
    Text,
    as_text,
    check_text,
    describe_ranges,
    read_each,
    shown,
    whole,
)
from server.protocol.completion import MAX_COMPLETIONS, Ids, Several, as_ids, read_prompts
from server.protocol.described import NULL, add_rules, any_of, fields, is_true, null, one_of
from server.protocol.generation import Sampled, check_limit
from server.protocol.structured import Grammar, Regex, Schema, naming

# SGLang's names of `SamplingParams`' fields, where they differ.
NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
ANY_JSON = "$$ANY$$"  # SGLang's schema of any object, which its send_one --json sends
GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}  # and the keyword of each in StructuredOutput


def _describe_sampling(schema: dict[str, Any]) -> None:
    describe_ranges(schema)
    add_rules(schema, any_of(*(null(*(GRAMMARS.keys() - {kept})) for kept in GRAMMARS)))


class Sampling(Sampled):
    """`sampling_params`. None, everywhere, means the default."""

    model_config = ConfigDict(json_schema_extra=_describe_sampling)

    UNSUPPORTED: ClassVar[dict[str, tuple]] = {
        **dict.fromkeys(("structural_tag", "stop_regex"), ()),
        "custom_params": ({},),
        "spaces_between_special_tokens": (True,),
        "stream_interval": (1,),
    }

    n: Integer | None = None
    sampling_seed: Integer | None = None
    max_new_tokens: Integer | None = None
    min_new_tokens: Integer | None = None
    no_stop_trim: bool | None = None
    json_schema: Schema | None = None
    regex: Regex | None = None
    ebnf: Grammar | None = None

    @property
    def no_tokens(self) -> bool:
        """Whether nothing is to follow the prompt, which is how one has it scored."""
        return self.max_new_tokens == 0

    def params(self, defaults: Mapping[str, Any], **reports: Any) -> SamplingParams:
        """With `defaults` where the client says nothing. **Raises:** `RequestError` for a value out of range.

        The engine always generates a token, even when it won't be shown (`no_tokens`).
        """
        given = {name: value for name in Sampling.model_fields if (value := getattr(self, name)) is not None}
        grammars = {name: given.pop(name) for name in GRAMMARS if name in given}
        if len(grammars) > 1:
            first, second, *_ = grammars
            raise RequestError(f"{first} and {second} each say what the text must be; send one", second)
        for name, value in grammars.items():
            with naming(name):
                value = True if (name, value) == ("json_schema", ANY_JSON) else value
                given["structured"] = StructuredOutput(**{GRAMMARS[name]: value, "name": name})
        check_limit(self.max_new_tokens, self.min_new_tokens)
        if self.no_tokens:
            given |= {"max_new_tokens": 1, "no_tokens": True}
        for ours, theirs in (*NAMES.items(), ("include_stop_str_in_output", "no_stop_trim")):
            if theirs in given:
                given[ours] = given.pop(theirs)
        return SamplingParams(**{**defaults, **given, **reports})


def _all_settings(value: Any, listed: ValidatorFunctionWrapHandler) -> list[Sampling]:
    """One object's errors name its fields, a list's also the place in it."""
    if isinstance(value, dict):
        return [Sampling.model_validate(value)]
    if not isinstance(value, list):
        raise RequestError(f"must be an object, or a list with one for each prompt, got {shown(value)}")
    return listed(value)


def _texts(value: Any) -> Any:
    """A text, or a list of them."""
    if isinstance(value, str):
        return check_text(value)
    if not isinstance(value, list) or not value:
        raise RequestError(f"must be a string or a list of strings, not empty, got {shown(value)}")
    return read_each(value, as_text)


def _one_or_each(
    kind: type, what: str, least: int | None = None, most: int | None = None, unique: bool = False
) -> PlainValidator:
    """Takes a value of a kind, for all prompts, or a list with one for each; integers from `least` to `most`. In a list
    that must be `unique`, no two are equal."""
    lowest, highest = -math.inf if least is None else least, math.inf if most is None else most

    def one(value: Any, allowed: str = what) -> Any:
        found = whole(value) if kind is int else value
        if type(found) is not kind or (kind is int and not lowest <= found <= highest):
            raise RequestError(f"must be {allowed}, got {shown(value)}")
        return found

    def check(value: Any) -> Any:
        if not isinstance(value, list):
            return one(value, f"{what} or a list with one for each prompt")
        values = read_each(value, one)
        if unique and len(set(values)) < len(values):
            again = Counter(values).most_common(1)[0][0]
            raise RequestError(f"is {shown(again)} for several prompts; give each prompt one of its own")
        return values

    described = Annotated[kind, Field(ge=least, le=most)]
    several = Annotated[list[described], Several, Field(json_schema_extra={"uniqueItems": unique})]
    return PlainValidator(check, json_schema_input_type=described | several)


def _ids(value: Any) -> Any:
    """A list of token ids, or several. The engine checks them against the vocabulary."""
    if not isinstance(value, list) or not value or [] in value:
        raise RequestError(
            f"must be a list of token ids or a list of such lists, none of them empty, got {shown(value)}"
        )
    return read_prompts(value, as_ids) if isinstance(value[0], list) else as_ids(value)


def _images(value: Any) -> Any:
    """A picture, a list of them, or a list of lists."""
    every = [each for one in _listed(value) for each in _listed(one)]
    if not all(isinstance(each, str) or (each is None and isinstance(value, list)) for each in every):
        raise RequestError(
            "must be a picture's URL or base64, a list of them, or a list with such a list for each prompt"
        )
    return value


def _describe_generate(schema: dict[str, Any]) -> None:
    describe_ranges(schema)
    silent = {"anyOf": [{"enum": [None, False]}, {"type": "array", "items": {"const": False}}]}
    nothing = {"anyOf": [NULL, {"maxItems": 0}]}
    add_rules(
        schema,
        one_of("text", "input_ids"),
        any_of(fields(token_ids_logprob=nothing), fields(return_logprob=silent)),
    )


Texts = str | Annotated[list[str], Several]
Prompts = Ids | Annotated[list[Ids], Several]
Settings = Sampling | Annotated[list[Sampling], Field(max_length=MAX_COMPLETIONS)]


Adapters = str | Annotated[list[str | None], Several]


def _adapters(value: Any) -> Any:
    """An adapter's name, or for each prompt one or null."""
    if not all(isinstance(each, str) or (each is None and isinstance(value, list)) for each in _listed(value)):
        raise RequestError(
            f"must be an adapter's name, or a list with a name or null for each prompt, got {shown(value)}"
        )
    return value


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


Image = Annotated[str, Field(json_schema_extra={"pattern": "^data:"})]
_AnyImages = Image | Annotated[list[Image | list[Image]], Several]
Images = Annotated[Any, PlainValidator(_images, json_schema_input_type=_AnyImages)]


def of_one_prompt(given: Any) -> list[Media]:
    """A prompt's pictures."""
    flat = [each for one in _listed(given) for each in _listed(one)]
    return [Media(f"image_data[{i}]", _as_url(url)) for i, url in enumerate(flat) if url is not None]


class GenerateRequest(Body):
    """One prompt, or a list of them, as `text` or `input_ids`. Other fields may then be lists too."""

    model_config = ConfigDict(json_schema_extra=_describe_generate)
    IGNORED = frozenset(
        {
            *("log_metrics", "no_logs", "custom_labels", "external_trace_header", "received_time", "modalities"),
            *("session_id", "conversation_id", "routing_key"),
        }
    )
    UNSUPPORTED: ClassVar[dict[str, tuple]] = {
        **dict.fromkeys(("input_embeds", "video_data", "audio_data"), ([],)),
        **dict.fromkeys(("session_params", "lora_id", "custom_logit_processor"), ()),
        **dict.fromkeys(("return_entropy", "return_bytes", "background"), (False,)),
        **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank"), ()),
    }

    text: Annotated[Any, PlainValidator(_texts, json_schema_input_type=Texts)] | None = None
    input_ids: Annotated[Any, PlainValidator(_ids, json_schema_input_type=Prompts)] | None = None
    sampling_params: Annotated[list[Sampling], WrapValidator(_all_settings, json_schema_input_type=Settings)] | None = (
        None
    )
    image_data: Images | None = None
    rid: Annotated[Any, _one_or_each(str, "a string", unique=True)] | None = None
    stream: bool | None = None
    priority: Priority | None = None
    lora_path: Annotated[Any, PlainValidator(_adapters, json_schema_input_type=Adapters)] | None = None
    extra_key: Annotated[Any, _one_or_each(str, "a string")] | None = None  # vLLM's cache_salt
    return_logprob: Annotated[Any, _one_or_each(bool, "true or false")] | None = None
    logprob_start_len: Annotated[Any, _one_or_each(int, "an integer")] | None = None
    top_logprobs_num: (
        Annotated[Any, _one_or_each(int, f"an integer from 0 to {MAX_LOGPROBS}", 0, MAX_LOGPROBS)] | None
    ) = None
    return_text_in_logprobs: bool | None = None
    return_hidden_states: Annotated[Any, _one_or_each(bool, "true or false")] | None = None
    return_routed_experts: Annotated[Any, _one_or_each(bool, "true or false")] | None = None
    token_ids_logprob: list[Any] | None = (
        None  # bench_serving sends some always, and without return_logprob they ask for nothing
    )

    @model_validator(mode="after")
    def _agree(self):
        if (self.text is None) == (self.input_ids is None):
            given = "neither" if self.text is None else "both"
            raise RequestError(f"send text or input_ids; {given} was given", "text")
        for name in (
            "rid",
            "lora_path",
            "extra_key",
            "return_logprob",
            "logprob_start_len",
            "top_logprobs_num",
            *REPORTS,
        ):
            value = getattr(self, name)
            if isinstance(value, list) and len(value) != len(self.prompts):
                raise RequestError(f"has {len(value)} entries for {len(self.prompts)} prompts", name)
        settings = self.sampling_params or [Sampling()]
        if len(settings) not in (1, len(self.prompts)):
            raise RequestError(f"has {len(settings)} entries for {len(self.prompts)} prompts", "sampling_params")
        if len({each.n or 1 for each in settings}) > 1:
            raise RequestError("n must be the same for all prompts of a request", "sampling_params")
        if (asked := len(self.prompts) * (settings[0].n or 1)) > MAX_COMPLETIONS:
            raise RequestError(f"{asked} completions are asked for, at most {MAX_COMPLETIONS} in one request", "text")
        if self.token_ids_logprob and any(self._each("return_logprob")):
            raise RequestError("is not supported by this server with return_logprob", "token_ids_logprob")
        return self

    @property
    def several(self) -> bool:
        """Whether the response is a list: for a list of prompts, or several completions of one."""
        return self._batch or any((each.n or 1) > 1 for each in self.sampling_params or ())

    @property
    def _batch(self) -> bool:
        return isinstance(self.text, list) or (self.text is None and isinstance(self.input_ids[0], list))

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        given = self.input_ids if self.text is None else self.text
        return given if isinstance(given, list) and not (given and isinstance(given[0], int)) else [given]

    def images(self) -> list[list[Media]]:
        """For each prompt its pictures. A picture for several prompts is in each; base64
        without a URL's beginning is SGLang's, too."""
        given, prompts = self.image_data, len(self.prompts)
        if not self._batch:
            return [of_one_prompt(given)]
        if not isinstance(given, list):
            given = [given] * prompts
        elif given and len(given) != prompts:
            raise RequestError(f"image_data has {len(given)} entries for {prompts} prompts", "image_data")
        return [
            [Media(f"image_data[{i}][{j}]", _as_url(url)) for j, url in enumerate(_listed(each)) if url is not None]
            for i, each in enumerate(given or [[]] * prompts)
        ]

    def ids(self) -> list[str]:
        """A request id for each prompt; one string given for several is the beginning of theirs."""
        if isinstance(self.rid, list):
            return self.rid
        base = self.rid or secrets.token_hex(16)
        return [base] if len(self.prompts) == 1 else [f"{base}_{i}" for i in range(len(self.prompts))]

    def starts(self) -> list[int]:
        """From which token on each prompt's log-probabilities are reported; -1: none of them."""
        return [-1 if each is None else each for each in self._each("logprob_start_len")]

    def sampling(self, defaults: Mapping[str, Any]) -> list[SamplingParams]:
        """Settings for each prompt. **Raises:** `RequestError` for a value out of range."""
        settings = self._settings()
        reported = zip(self._each("return_logprob"), self._each("top_logprobs_num"), self.starts(), strict=True)
        rows = zip(*([bool(each) for each in self._each(name)] for name in REPORTS), strict=True)
        salts, all_params = self._each("extra_key"), []
        for each, (wanted, top, start), kept, salt in zip(settings, reported, rows, salts, strict=True):
            top, more = (top or 0) if wanted else None, dict(zip(REPORTS, kept, strict=True)) | {"cache_salt": salt}
            all_params.append(each.params(defaults, logprobs=top, prompt_logprobs=None if start < 0 else top, **more))
        return all_params

    def adapters(self) -> list[str | None]:
        """For each prompt, the name of its adapter."""
        return self._each("lora_path")

    def no_tokens(self) -> list[bool]:
        """For each prompt, whether nothing is to follow it."""
        return [each.no_tokens for each in self._settings()]

    def _settings(self) -> list[Sampling]:
        settings = self.sampling_params or [Sampling()]
        return settings if len(settings) > 1 else settings * len(self.prompts)

    def _each(self, name: str) -> list[Any]:
        value = getattr(self, name)
        return value if isinstance(value, list) else [value] * len(self.prompts)


def _as_url(text: str) -> str:
    known = ("data:", "http:", "https:", "file:", "/")
    return text if text[:8].lower().startswith(known) and not text.startswith("/9j/") else f"data:;base64,{text}"


def _describe_abort(schema: dict[str, Any]) -> None:
    add_rules(schema, any_of(fields(("rid",), rid={"type": "string", "minLength": 1}), is_true("abort_all")))


class AbortRequest(Body):
    """Which requests of `/generate`, or of any route by its response's id, to end."""

    model_config = ConfigDict(json_schema_extra=_describe_abort)
    IGNORED = frozenset({"abort_message"})
    rid: Text | None = None
    abort_all: bool | None = None

    @model_validator(mode="after")
    def _names_some(self):
        if not self.rid and not self.abort_all:
            raise RequestError("send the rid of a request, or abort_all: true", "rid")
        return self
