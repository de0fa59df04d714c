"""SGLang's own routes: generate from text or token ids, and abort."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from jaxspec import RequestError
from server.protocol import CompletionRequest
from server.protocol.sglang import NAMES, AbortRequest, GenerateRequest
from server.replies import Job
from server.replies.sglang import GenerateReply
from server.routes.serving import Serving


def add(app: FastAPI, serving: Serving) -> None:
    @app.post("/generate")
    @app.put("/generate")
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Continue one or several prompts."""
        serving.check()
        with _their_fields("input_ids" if body.text is None else "text"):
            params = body.sampling(serving.sampling)

            async def make() -> GenerateReply:
                prompts = await serving.prompts(CompletionRequest(prompt=body.prompts))
                work = zip(prompts, params, body.ids(), strict=True)
                jobs = [Job(prompt.ids, each, name, chosen=body.rid is not None) for prompt, each, name in work]
                options = {"several": body.several, "name_tokens": bool(body.return_text_in_logprobs)}
                return GenerateReply(jobs, body.starts(), body.no_tokens(), serving.texts, **options)

            return await serving.answer(request, make(), body.stream)

    @app.post("/abort_request")
    async def abort_request(body: AbortRequest) -> JSONResponse:
        """End a request, or all. They are answered with what they have so far; an unknown id does nothing."""
        serving.check()
        serving.abort(None if body.abort_all else body.rid)
        return JSONResponse({"success": True})


@contextmanager
def _their_fields(prompt: str) -> Iterator[None]:
    """Let errors name a field as SGLang's clients write it."""
    try:
        yield
    except RequestError as error:
        message = str(error)
        for ours, theirs in NAMES.items():
            message = re.sub(rf"\b{ours}\b", theirs, message)
        param = {"request_id": "rid", "rid": "rid", "prompt": prompt}.get(error.param)
        if param is None and error.param:
            param = f"sampling_params.{NAMES.get(error.param, error.param)}"
        raise RequestError(message, param, error.code) from error
