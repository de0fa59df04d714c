"""vLLM's routes about the tokenizer: text to tokens and back, and what the tokenizer is."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI

from jaxspec import RequestError
from jaxspec.engine.async_llm import LONG_PROMPT
from jaxspec.text.tokenizer import Tokenizer
from server.http.errors import ApiError
from server.protocol import CompletionRequest
from server.protocol.tokens import DetokenizeRequest, TokenizeRequest
from server.routes.serving import Serving


def add(app: FastAPI, serving: Serving) -> None:
    tokenizer = serving.llm.tokenizer

    def needed() -> Tokenizer:
        if tokenizer is None:
            raise ApiError(404, "this model has no tokenizer; add tokenizer.json to its folder")
        return tokenizer

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """The token ids of a prompt or a chat, as a request with it would have them."""
        serving.check(body.model)
        known = needed()
        body.sampling(serving.sampling)  # so that a body is refused here if it would be as a chat
        if body.messages is not None:
            prompt = await serving.chat_prompt(body)
        else:
            text = CompletionRequest(prompt=body.prompt, add_special_tokens=body.add_special_tokens)
            (prompt,) = await serving.prompts(text)
        return {
            "count": len(prompt.ids),
            "max_model_len": serving.llm.config.context_length,
            "tokens": prompt.ids,
            "token_strs": known.pieces(prompt.ids) if body.return_token_strs else None,
        }

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        """The text of token ids, special tokens included."""
        serving.check(body.model)
        known = needed()
        vocab = serving.llm.model_config.vocab_size
        if (bad := next((token for token in body.tokens if not 0 <= token < vocab), None)) is not None:
            raise RequestError(f"token id {bad} is outside the vocabulary, 0 to {vocab - 1}", "tokens")
        if len(body.tokens) > LONG_PROMPT:
            return {"prompt": await asyncio.to_thread(known.decode, body.tokens, False)}
        return {"prompt": known.decode(body.tokens, False)}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        """The tokenizer's class, special tokens and chat template."""
        return needed().settings()
