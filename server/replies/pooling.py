"""Embeddings and scores, from the hidden states and log-probabilities that the engine reports.

An embedding is a request of one token, whose prompt's hidden states are reported. A score by `YES_NO` is two scored
prompts: the question with either answer. The softmax of two logits is the sigmoid of a difference of log-probabilities.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.checkpoint.pooling import MEAN, Pooling
from jaxspec.config.request import Delta, RequestError, SamplingParams
from server.replies.reply import Job

ONE_TOKEN = {"temperature": 0.0, "max_tokens": 1}
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# As Qwen publishes it with Qwen3-Reranker; Qwen3-Embedding instructs the query alone.
JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
PAIR = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
ANSWER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def question(query: str, document: str, instruction: str | None) -> str:
    """The prompt to which a reranker says yes or no."""
    pair = PAIR.format(instruction=instruction or INSTRUCTION, query=query, document=document)
    return f"{JUDGE}{pair}{ANSWER}"


class _Pooled:
    """Gathers the last delta of each job, and what its prompt's tokens were worth."""

    def __init__(self, prompts: Sequence[list[int]], params: SamplingParams, name: str, model: str):
        self.id, self.model, self._prompts, self._params = name, model, prompts, params
        self._rows: list[Any] = [None] * len(prompts)

    def jobs(self) -> list[Job]:
        return [Job(ids, self._params, f"{self.id}-{i}", self.id) for i, ids in enumerate(self._prompts)]

    def take(self, prompt: int, delta: Delta) -> None:
        if delta.finish_reason == "abort":
            raise RequestError("the request was aborted")
        if delta.hidden_states is not None:
            self._rows[prompt] = delta.hidden_states
        if delta.prompt_logprobs is not None:
            self._rows[prompt] = delta.prompt_logprobs[-1].logprob

    def _listed(self, data: list[dict[str, Any]], tokens: int | None = None) -> dict[str, Any]:
        tokens = sum(map(len, self._prompts)) if tokens is None else tokens
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        head = {"id": self.id, "object": "list", "created": int(time.time())}
        return head | {"data": data, "model": self.model, "usage": usage}


class EmbeddingReply(_Pooled):
    """Embeddings, in OpenAI's form."""

    def __init__(
        self,
        prompts: Sequence[list[int]],
        name: str,
        model: str,
        pooling: Pooling,
        dimensions: int | None = None,
        base64: bool = False,
    ):
        super().__init__(prompts, SamplingParams(**ONE_TOKEN, return_hidden_states=True), name, model)
        self._pooling, self._dimensions, self._base64 = pooling, dimensions, base64

    def vectors(self) -> list[np.ndarray]:
        """One f32[d] a prompt."""
        vectors = []
        for rows, ids in zip(self._rows, self._prompts, strict=True):
            rows = np.asarray(rows[: len(ids)], np.float32)
            vector = rows.mean(axis=0) if self._pooling.kind == MEAN else rows[-1]
            vector = vector[: self._dimensions]
            vectors.append(vector / max(np.linalg.norm(vector), 1e-12) if self._pooling.normalized else vector)
        return vectors

    def whole(self) -> dict[str, Any]:
        packed = lambda vector: base64.b64encode(vector.astype("<f4").tobytes()).decode()  # noqa: E731
        written = packed if self._base64 else np.ndarray.tolist
        data = [
            {"object": "embedding", "index": i, "embedding": written(vector)} for i, vector in enumerate(self.vectors())
        ]
        return self._listed(data)


class _Scores:
    """Fields that scores share: vLLM's form, or Cohere's if there are `documents`, of which `top_n` are listed."""

    def __init__(self, *args: Any, documents: Sequence[str] = (), top_n: int | None = None, texts: bool = True):
        super().__init__(*args)
        self._documents, self._top_n, self._texts = documents, top_n, texts

    def whole(self) -> dict[str, Any]:
        scores, told = self.scores(), self._listed([])
        if not self._documents:
            data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
            return told | {"data": data}
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: self._top_n or None]
        shown = lambda i: {"document": {"text": self._documents[i]}} if self._texts else {}  # noqa: E731
        results = [{"index": i, **shown(i), "relevance_score": scores[i]} for i in order]
        return {"id": self.id, "model": self.model, "usage": told["usage"], "results": results}


class SimilarityReply(_Scores, EmbeddingReply):
    """Cosine similarities, of prompts that alternate: a pair's first text, its second, and so on."""

    def scores(self) -> list[float]:
        unit = [vector / max(np.linalg.norm(vector), 1e-12) for vector in self.vectors()]
        cosines = (float(first @ second) for first, second in zip(unit[::2], unit[1::2], strict=True))
        return [min(max(cosine, -1.0), 1.0) for cosine in cosines]  # rounding goes beyond


class AnswerReply(_Scores, _Pooled):
    """Probabilities of the second of two `answers` after each prompt."""

    def __init__(self, prompts: Sequence[list[int]], answers: tuple[int, int], *args: Any, **options: Any):
        both = [[*ids, answer] for ids in prompts for answer in answers]
        params = SamplingParams(**ONE_TOKEN, prompt_logprobs=0)
        super().__init__(both, params, *args, **options)

    def scores(self) -> list[float]:
        pairs = zip(self._rows[::2], self._rows[1::2], strict=True)
        return [1 / (1 + math.exp(min(no - yes, 700.0))) for no, yes in pairs]
