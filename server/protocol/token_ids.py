"""The bodies of vLLM's route from token ids to token ids, and of its `/abort_requests`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from jaxspec.config.request import SamplingParams
from server.protocol.base import Body, CacheSalt, Integer, Priority, Text, TokenId
from server.protocol.completion import MAX_COMPLETIONS
from server.protocol.described import add_rules
from server.protocol.generation import STREAM_RULE, Id, Sampled, Streamed, check_limit, describe_ranges
from server.protocol.sglang import Images
from server.protocol.structured import ONE_GRAMMAR, StructuredFields


def _describe_sampling(schema: dict[str, Any]) -> None:
    describe_ranges(schema)
    add_rules(schema, ONE_GRAMMAR)


def _describe(schema: dict[str, Any]) -> None:
    describe_ranges(schema)
    add_rules(schema, STREAM_RULE)


class TokenSampling(StructuredFields, Sampled):
    """`sampling_params`, as vLLM's class has them. None, everywhere, means the default."""

    model_config = ConfigDict(json_schema_extra=_describe_sampling)
    IGNORED = frozenset({"detokenize", "output_kind", "skip_clone"})
    UNSUPPORTED: ClassVar[dict[str, tuple]] = {
        **dict.fromkeys(("bad_words", "allowed_token_ids", "logprob_token_ids"), ([],)),
        **dict.fromkeys(("extra_args", "thinking_token_budget", "repetition_detection"), ()),
        **dict.fromkeys(("flat_logprobs", "skip_reading_prefix_cache"), (False,)),
        "spaces_between_special_tokens": (True,),
    }

    n: Integer | None = None
    seed: Integer | None = None
    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    logprobs: Integer | None = None
    prompt_logprobs: Integer | None = None
    include_stop_str_in_output: bool | None = None
    fixed_drafts: bool | None = None

    def params(self, defaults: Mapping[str, Any], **more: Any) -> SamplingParams:
        """With `defaults` where the client says nothing; the text may fill the context. **Raises:** `RequestError`."""
        check_limit(self.max_tokens, self.min_tokens)
        own = TokenSampling.model_fields.keys() - StructuredFields.model_fields.keys()
        given = {name: value for name in own if (value := getattr(self, name)) is not None}
        given |= {"max_tokens": 1, "no_tokens": True} if self.max_tokens == 0 else {}
        return SamplingParams(**{**defaults, "max_tokens": None, "structured": self.structured(), **given, **more})


class TokensRequest(Streamed):
    """Token ids to go on from."""

    model_config = ConfigDict(json_schema_extra=_describe)
    UNSUPPORTED: ClassVar[dict[str, tuple]] = {"kv_transfer_params": ()}

    token_ids: Annotated[list[TokenId], Field(min_length=1)]
    sampling_params: TokenSampling
    image_data: Images | None = None  # as in `/generate`; vLLM has `features`, tensors of its own processor
    cache_salt: CacheSalt | None = None
    model: str | None = None
    request_id: Id | None = None
    priority: Priority | None = None


class AbortRequests(Body):
    """Ids of requests to end, of any route."""

    request_ids: Annotated[list[Text], Field(max_length=MAX_COMPLETIONS)]
