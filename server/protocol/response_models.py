"""Models of responses, for the API's description: the server writes them as plain dicts (`server.replies`).

Invariant: every response that the tests ask for is valid against these, with no field besides.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Object(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class Error(Object):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Object):
    """Body of every response of status 400 and above."""

    error: Error


class PooledUsage(Object):
    prompt_tokens: int
    total_tokens: int


class Embedding(Object):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Object):
    """Body of `/v1/embeddings`. With `encoding_format` base64 an embedding is float32, the lowest byte first."""

    id: str
    object: Literal["list"]
    created: int
    data: list[Embedding]
    model: str
    usage: PooledUsage


class Score(Object):
    object: Literal["score"]
    index: int
    score: float


class Scores(Object):
    """Body of `/v1/score`, in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PooledUsage


class RankedText(Object):
    text: str


class Ranked(Object):
    index: int
    document: RankedText | None = None
    relevance_score: float


class Ranking(Object):
    """Body of `/v1/rerank`, the best first."""

    id: str
    model: str
    usage: PooledUsage
    results: list[Ranked]


class CachedTokensDetails(Object):
    device: int
    host: int
    storage: int | None = None  # from the disk, where some did


class PromptTokensDetails(Object):
    cached_tokens: int
    cached_tokens_details: CachedTokensDetails | None = None  # where some didn't come from the device
    image_tokens: int | None = None  # where the prompt has pictures
    video_tokens: int | None = None  # where it has videos


class CompletionTokensDetails(Object):
    reasoning_tokens: int


class Usage(Object):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChatUsage(Usage):
    completion_tokens_details: CompletionTokensDetails


class Speculation(Object):
    """vLLM's figures of a request's drafts."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class RequestMetrics(Object):
    speculative_decoding: Speculation


class PromptLogprob(Object):
    logprob: float
    rank: int | None
    decoded_token: str


class Extras(Object):
    """Fields that are there if they were asked for."""

    prompt_logprobs: list[dict[str, PromptLogprob] | None] = []
    prompt_token_ids: list[int] = []


class ChoiceExtras(Object):
    token_ids: list[int] = []
    token_sources: list[list[str]] = []
    stop_reason: int | str | None = None


class TopLogprob(Object):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Object):
    content: list[ChatLogprob]
    refusal: None


class Function(Object):
    name: str = ""
    arguments: str


class ToolCall(Object):
    """A call; in a stream, its first part has id, type and name, and `index` says whose a part is."""

    index: int = 0
    id: str = ""
    type: Literal["function"] = "function"
    function: Function


class Custom(Object):
    name: str = ""
    input: str


class CustomToolCall(Object):
    """A custom tool's call, in a stream in parts as a function's."""

    index: int = 0
    id: str = ""
    type: Literal["custom"] = "custom"
    custom: Custom


class ChatMessage(Object):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall | CustomToolCall] = []


class ChatDelta(Object):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCall | CustomToolCall] = []


FinishReason = Literal["stop", "length", "abort", "tool_calls"]


class ChatChoice(ChoiceExtras):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatChunkChoice(ChoiceExtras):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class Response(Object):
    id: str
    created: int
    model: str
    metrics: RequestMetrics | None = None
    weight_version: str | None = None


class ChatCompletion(Response, Extras):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: ChatUsage


class ChatCompletionChunk(Response, Extras):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: ChatUsage | None = None


class CompletionLogprobs(Object):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ChoiceExtras, Extras):
    """A choice, whole or in a chunk of a stream, where all but the last have no `finish_reason`."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(Response):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(Object):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    # Anthropic's
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class ModelList(Object):
    object: Literal["list"]
    data: list[ModelCard]
    # Anthropic's
    has_more: bool
    first_id: str
    last_id: str


class Health(Object):
    """`lost`: of several engines those that have ended, by their numbers, with the reasons."""

    status: Literal["ok", "degraded"]
    lost: dict[str, str] | None = None


class Started(Object):
    started: bool


class Flushed(Object):
    flushed: Literal[True]
