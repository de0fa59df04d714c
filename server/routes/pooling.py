"""The routes of models that are published for embeddings or scores: `/v1/embeddings`, `/v1/score`, `/v1/rerank`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from jaxspec import RequestError
from server.http.errors import ApiError
from server.protocol import CompletionRequest
from server.protocol.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from server.protocol.response_models import Embeddings, Ranking, Scores
from server.replies.pooling import AnswerReply, EmbeddingReply, SimilarityReply, question
from server.routes.serving import Serving

PROMPT = re.compile(r"prompt(?:\[(\d+)\])?")  # at fault: the only one, or that of a number


def add(app: FastAPI, serving: Serving) -> None:
    async def ids(texts: list[str] | list[list[int]], special: bool | None) -> list[list[int]]:
        body = CompletionRequest(prompt=texts, add_special_tokens=special)
        return [prompt.ids for prompt in await serving.prompts(body)]

    async def scored(body: ScoreRequest | RerankRequest, request: Request, **options: Any) -> Response:
        lora = serving.check(body.model)
        pooling, pairs = serving.pooling, body.pairs
        if pooling is None:
            raise _generates(serving.name, "scores")
        if pooling.embeds and body.instruction is not None:
            raise RequestError("embeddings take no instruction; write it into the text", "instruction")
        name, model = f"score-{request.state.request_id}", lora or serving.name

        def place(pair: int) -> str:
            """The longer text of a pair, which is one prompt."""
            query, document = map(len, pairs[pair])
            return body.place(pair, document >= query)

        async def make() -> SimilarityReply | AnswerReply:
            if pooling.embeds:
                prompts = await ids([text for pair in pairs for text in pair], None)
                return SimilarityReply(prompts, name, model, pooling, **options)
            with _fields(place):
                prompts = await ids([question(*pair, body.instruction) for pair in pairs], False)
            return AnswerReply(prompts, _answers(), name, model, **options)

        # Two prompts a pair: its texts, or the two answers to one question.
        with _fields(lambda k: body.place(*divmod(k, 2)) if pooling.embeds else place(k // 2)):
            return await serving.answer(request, make(), None, False, body.priority, lora, pooled=True)

    def _answers() -> tuple[int, int]:
        encoded = [serving.llm.tokenizer.encode(word, False) for word in serving.pooling.answers]
        if bad := [word for word, ids in zip(serving.pooling.answers, encoded, strict=True) if len(ids) != 1]:
            raise ApiError(400, f"{bad[0]!r} isn't one token of this model's, so it can't judge by it")
        return encoded[0][0], encoded[1][0]

    @app.post("/v1/embeddings", responses={200: {"model": Embeddings}})
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Embed texts. Longer inputs than the context are refused."""
        lora = serving.check(body.model)
        if serving.pooling is None or not serving.pooling.embeds:
            raise _generates(serving.name, "embeddings", serving.pooling is not None)
        width = serving.llm.model_config.hidden_size
        if body.dimensions is not None and body.dimensions > width:
            raise RequestError(f"dimensions must be from 1 to {width}, got {body.dimensions}", "dimensions")

        async def make() -> EmbeddingReply:
            prompts, name = await ids(body.input, body.add_special_tokens), f"embd-{request.state.request_id}"
            packed = body.encoding_format == "base64"
            return EmbeddingReply(prompts, name, lora or serving.name, serving.pooling, body.dimensions, packed)

        several = len(body.input) > 1
        with _fields(lambda k: f"input[{k}]" if several else "input"):
            return await serving.answer(request, make(), None, False, body.priority, lora, pooled=True)

    @app.post("/v1/score", responses={200: {"model": Scores}})
    @app.post("/score", include_in_schema=False)
    async def score(body: ScoreRequest, request: Request) -> Response:
        """Score pairs of texts: a reranker's probability of yes, or the cosine of two embeddings."""
        return await scored(body, request)

    @app.post("/v1/rerank", responses={200: {"model": Ranking}})
    @app.post("/rerank", include_in_schema=False)
    @app.post("/v2/rerank", include_in_schema=False)
    async def rerank(body: RerankRequest, request: Request) -> Response:
        """Put documents in order by their scores for a query, the best first."""
        shown = {"documents": body.documents, "top_n": body.top_n, "texts": body.return_documents is not False}
        return await scored(body, request, **shown)


@contextmanager
def _fields(place: Callable[[int], str]) -> Iterator[None]:
    """Let errors of a prompt name the field that holds it, by the prompt's number."""
    try:
        yield
    except RequestError as error:
        if (found := PROMPT.fullmatch(error.param or "")) is None:
            raise
        raise RequestError(str(error), place(int(found[1] or 0)), error.code) from error


def _generates(name: str, wanted: str, scores: bool = False) -> ApiError:
    what = "scores pairs of texts (/v1/score)" if scores else "generates text"
    return ApiError(
        400,
        f"the model {name!r} {what}: its checkpoint doesn't say how {wanted} are made of its hidden states; "
        "serve one that is published for it, or say how by --pooling",
    )
