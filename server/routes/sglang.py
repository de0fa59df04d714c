"""SGLang's own routes: generate from text or token ids, and abort."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from jaxspec import RequestError
from jaxspec.config.request import REPORTS
from server.generate import placed, refusals
from server.http.gate import needs_key
from server.protocol import CompletionRequest
from server.protocol.sglang import NAMES, AbortRequest, GenerateRequest
from server.replies import Job, Prompt
from server.replies.sglang import GenerateReply
from server.routes.serving import Serving


def add(app: FastAPI, serving: Serving) -> None:
    @app.post("/generate")
    @app.put("/generate")
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Continue one or several prompts."""
        for lora in body.adapters():
            serving.check(lora=lora)
        with _their_fields("input_ids" if body.text is None else "text"):
            params = body.sampling(serving.sampling)

            async def make() -> GenerateReply:
                prompts = await _prompts(serving, body)
                work, chosen = zip(prompts, params, body.ids(), body.adapters(), strict=True), body.rid is not None
                jobs = [
                    Job(prompt.ids, each, name, chosen=chosen, images=prompt.images, lora=lora)
                    for prompt, each, name, lora in work
                ]
                options = {"several": body.several, "name_tokens": bool(body.return_text_in_logprobs)}
                return GenerateReply(jobs, body.starts(), body.no_tokens(), serving.texts, **options)

            return await serving.answer(request, make(), body.stream, priority=body.priority)

    @app.post("/abort_request")
    async def abort_request(body: AbortRequest, request: Request) -> JSONResponse:
        """End a request, or all. They are answered with what they have so far; an unknown id does nothing."""
        serving.check()
        if body.abort_all and not request.state.trusted:
            raise needs_key("abort_all")
        serving.abort(None if body.abort_all else body.rid)
        return JSONResponse({"success": True})


async def _prompts(serving: Serving, body: GenerateRequest) -> list[Prompt]:
    """The prompts of a body, with their pictures. **Raises:** `RequestError`."""
    pictures = [await serving.read_media(sources) for sources in body.images()]
    texts, context = body.prompts, serving.llm.config.context_length
    if not any(pictures):
        return await serving.prompts(CompletionRequest(prompt=texts))
    reader = serving.llm.image_reader
    if body.text is not None:
        texts = [reader.placeholder.stand(text, len(each)) for text, each in zip(texts, pictures, strict=True)]
    prompts, found = await serving.prompts(CompletionRequest(prompt=texts)), []
    for number, (prompt, each) in enumerate(zip(prompts, pictures, strict=True)):
        with refusals(f"prompt[{number}]" if len(prompts) > 1 else "prompt", context):
            found.append(placed(prompt, reader, each, context))
    return found


@contextmanager
def _their_fields(prompt: str) -> Iterator[None]:
    """Let errors name a field as SGLang's clients write it."""
    try:
        yield
    except RequestError as error:
        message = str(error)
        for ours, theirs in NAMES.items():
            message = re.sub(rf"\b{ours}\b", theirs, message)
        same = {name: name for name in ("rid", "priority", *REPORTS)}
        own = {"request_id": "rid", "cache_salt": "extra_key"}
        param = (own | same).get(error.param)
        if (error.param or "").startswith("image_data"):
            param = error.param
        if (error.param or "").startswith("prompt"):
            param = prompt + error.param.removeprefix("prompt")
        if param is None and error.param:
            param = f"sampling_params.{NAMES.get(error.param, error.param)}"
        raise RequestError(message, param, error.code) from error
