"""The bodies of SGLang's own routes: `/generate` and `/abort_request`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, PlainValidator, model_validator

from jaxspec.request import RequestError, SamplingParams
from server.protocol.base import Body, Text
from server.protocol.completion import MAX_COMPLETIONS
from server.protocol.generation import _logit_bias, _stop

MAX_NEW_TOKENS = 128  # SGLang's, when a request gives none
# SGLang's names of `SamplingParams`' fields, where they differ.
NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}


class Sampling(Body):
    """`sampling_params`. None, everywhere, means the default."""

    UNSUPPORTED: ClassVar[dict[str, tuple]] = {
        **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag", "stop_regex"), ()),
        "custom_params": ({},),
        "spaces_between_special_tokens": (True,),
        "stream_interval": (1,),
    }

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    sampling_seed: int | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    stop: Annotated[list[str], PlainValidator(_stop, json_schema_input_type=str | list[str])] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: (
        Annotated[dict[int, float], PlainValidator(_logit_bias, json_schema_input_type=dict[str, float])] | None
    ) = None
    speculative: bool | None = None

    def params(self, defaults: Mapping[str, Any], **reports: int | None) -> SamplingParams:
        """With `defaults` where the client says nothing. **Raises:** `RequestError` for a value out of range."""
        given = {name: value for name in Sampling.model_fields if (value := getattr(self, name)) is not None}
        for ours, theirs in (*NAMES.items(), ("include_stop_str_in_output", "no_stop_trim")):
            if theirs in given:
                given[ours] = given.pop(theirs)
        return SamplingParams(**{"max_tokens": MAX_NEW_TOKENS, **defaults, **given, **reports})


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, dict) else value


def _ids(value: Any) -> Any:
    """A list of token ids, or several. The engine checks them against the vocabulary."""
    if isinstance(value, list) and value:
        if all(type(token) is int for token in value):
            return value
        if all(isinstance(ids, list) and ids and all(type(token) is int for token in ids) for ids in value):
            return value
    raise RequestError("must be a list of token ids or a list of such lists, none of them empty")


class GenerateRequest(Body):
    """One prompt, or a list of them, as `text` or `input_ids`. Other fields may then be lists too."""

    IGNORED = frozenset(
        {
            *("log_metrics", "no_logs", "custom_labels", "external_trace_header", "received_time", "modalities"),
            *("session_id", "conversation_id", "routing_key"),
        }
    )
    UNSUPPORTED: ClassVar[dict[str, tuple]] = {
        **dict.fromkeys(("input_embeds", "image_data", "video_data", "audio_data", "token_ids_logprob"), ([],)),
        **dict.fromkeys(("session_params", "lora_path", "lora_id", "custom_logit_processor", "extra_key"), ()),
        **dict.fromkeys(("return_hidden_states", "return_routed_experts", "background", "return_entropy"), (False,)),
        **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank"), ()),
        "priority": (0,),
    }

    text: Text | list[Text] | None = None
    input_ids: Annotated[Any, PlainValidator(_ids, json_schema_input_type=list[int] | list[list[int]])] | None = None
    sampling_params: (
        Annotated[list[Sampling], BeforeValidator(_listed, json_schema_input_type=Sampling | list[Sampling])] | None
    ) = None
    rid: Text | list[Text] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool | None = None

    @model_validator(mode="after")
    def _agree(self):
        if (self.text is None) == (self.input_ids is None):
            given = "neither" if self.text is None else "both"
            raise RequestError(f"send text or input_ids; {given} was given", "text")
        if not self.prompts:
            raise RequestError("must hold at least one prompt", "text")
        for name in ("rid", "return_logprob", "logprob_start_len", "top_logprobs_num"):
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
        return self

    @property
    def several(self) -> bool:
        """Whether the response is a list: for a list of prompts, or several completions of one."""
        batch = isinstance(self.text, list) or (self.text is None and isinstance(self.input_ids[0], list))
        return batch or any((each.n or 1) > 1 for each in self.sampling_params or ())

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        given = self.input_ids if self.text is None else self.text
        return given if isinstance(given, list) and not (given and isinstance(given[0], int)) else [given]

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
        settings = self.sampling_params or [Sampling()]
        settings = settings if len(settings) > 1 else settings * len(self.prompts)
        reported = zip(self._each("return_logprob"), self._each("top_logprobs_num"), self.starts(), strict=True)
        all_params = []
        for each, (wanted, top, start) in zip(settings, reported, strict=True):
            top = (top or 0) if wanted else None
            all_params.append(each.params(defaults, logprobs=top, prompt_logprobs=None if start < 0 else top))
        return all_params

    def _each(self, name: str) -> list[Any]:
        value = getattr(self, name)
        return value if isinstance(value, list) else [value] * len(self.prompts)


class AbortRequest(Body):
    """Which requests of `/generate`, or of any route by its response's id, to end."""

    IGNORED = frozenset({"abort_message"})
    rid: Text | None = None
    abort_all: bool | None = None

    @model_validator(mode="after")
    def _names_some(self):
        if not self.rid and not self.abort_all:
            raise RequestError("send the rid of a request, or abort_all: true", "rid")
        return self
