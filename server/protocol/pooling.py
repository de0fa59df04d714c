"""The bodies of `/v1/embeddings`, OpenAI's, and of `/v1/score` and `/v1/rerank`, as vLLM and Cohere have them."""

from __future__ import annotations

from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from jaxspec.config.request import RequestError
from server.protocol.base import Body, Integer, Priority, Text, at_most, check_text, shown
from server.protocol.completion import MAX_COMPLETIONS, as_prompts
from server.protocol.completion import Prompt as AnyPrompt

MAX_PAIRS = MAX_COMPLETIONS // 2  # each of which is two prompts
Several = Field(min_length=1, json_schema_extra={"maxItems": MAX_PAIRS})
PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
# vLLM's, with the values that ask for what is done anyway
SAME = {"use_activation": (True,), "mm_processor_kwargs": ({},), "truncate_prompt_tokens": ()}


def _texts(value: Any, listed: ValidatorFunctionWrapHandler) -> list[str]:
    """One text or several; a list's errors name the place in it. **Raises:** `RequestError`."""
    if isinstance(value, str):
        return [check_text(value)]
    if not isinstance(value, list) or not value:
        raise RequestError(f"must be a text, or a list of texts that isn't empty, got {shown(value)}")
    return listed(value)


Listed = Annotated[list[Text], Several, at_most(MAX_PAIRS, "texts")]
Texts = Annotated[Listed, WrapValidator(_texts, json_schema_input_type=Text | Listed)]


class EmbeddingRequest(Body):
    """One input or several, all of them texts or all token ids."""

    IGNORED = frozenset({"user"})
    UNSUPPORTED = SAME | {"embed_dtype": ("float32",), "endianness": ("native", "little")}

    model: str | None = None
    input: Annotated[list, PlainValidator(as_prompts, json_schema_input_type=AnyPrompt)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[Integer, Field(ge=1)] | None = None
    add_special_tokens: bool | None = None
    priority: Priority | None = None


class _Scored(Body):
    IGNORED = frozenset({"user"})
    UNSUPPORTED = SAME

    model: str | None = None
    instruction: Text | None = None
    priority: Priority | None = None

    @staticmethod
    def _pairs(queries: list[str], documents: list[str]) -> list[tuple[str, str]]:
        """Each query with its document, or one with all."""
        if len(queries) not in (1, len(documents)):
            raise RequestError(f"{len(queries)} texts can't be paired with {len(documents)}; send one, or as many")
        return list(zip(queries * (len(documents) // len(queries)), documents, strict=True))


class ScoreRequest(_Scored):
    """Pairs of texts, under one of the pairs of names that vLLM has for them."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None

    def _given(self) -> tuple[str, ...]:
        return tuple(name for name in dict.fromkeys(chain(*PAIRS)) if getattr(self, name) is not None)

    @model_validator(mode="after")
    def _agree(self):
        if (given := self._given()) not in PAIRS:
            raise RequestError("send text_1 and text_2, or queries and documents", min(given, default="text_1"))
        return self

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """**Raises:** `RequestError` for numbers of texts that don't agree."""
        return self._pairs(*(getattr(self, name) for name in self._given()))

    def place(self, pair: int, side: int) -> str:
        """The field of a pair's first text (0) or second, with the place of a list's."""
        name = self._given()[side]
        return f"{name}[{pair}]" if len(getattr(self, name)) > 1 else name


class RerankRequest(_Scored):
    """A query, and documents to put in order."""

    query: Text
    documents: Annotated[list[Text], Several, at_most(MAX_PAIRS, "documents")]
    top_n: Annotated[Integer, Field(ge=0)] | None = None
    return_documents: bool | None = None

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return self._pairs([self.query], self.documents)

    def place(self, pair: int, side: int) -> str:
        """The field of a pair's first text (0) or second, with its place among the documents."""
        return f"documents[{pair}]" if side else "query"
