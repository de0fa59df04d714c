"""vLLM's routes for those who tokenise elsewhere: from token ids to token ids, and the end of requests by their ids."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from server.generate import placed, refusals
from server.protocol.sglang import of_one_prompt
from server.protocol.token_ids import AbortRequests, TokensRequest
from server.replies import Prompt
from server.replies.token_ids import TokensReply
from server.routes.serving import Serving


def add(app: FastAPI, serving: Serving) -> None:
    @app.post("/inference/v1/generate")
    async def generate(body: TokensRequest, request: Request) -> Response:
        """Go on from token ids. The response has token ids alone."""
        lora = serving.check(body.model)
        asked, experts = body.sampling_params, serving.llm.config.enable_return_routed_experts
        given = {"return_routed_experts": experts, "cache_salt": body.cache_salt}
        params = asked.params(serving.sampling, **given)

        async def make() -> TokensReply:
            pictures = await serving.read_media(of_one_prompt(body.image_data))
            with refusals("token_ids", context := serving.llm.config.context_length):
                prompt = placed(Prompt(body.token_ids), serving.llm.image_reader, pictures, context)
            return TokensReply(
                [prompt],
                params,
                lora or serving.name,
                serving.ids,
                id=body.request_id or request.state.request_id,
                include_usage=body.include_usage,
                continuous_usage=body.continuous_usage,
                report_prompt=params.prompt_logprobs is not None,
                return_token_ids=True,
                no_tokens=params.no_tokens,
            )

        return await serving.answer(request, make(), body.stream, priority=body.priority, lora=lora)

    @app.post("/abort_requests")
    async def abort_requests(body: AbortRequests) -> JSONResponse:
        """End requests. They are answered with what they have so far; an unknown id does nothing."""
        serving.check()
        for name in body.request_ids:
            serving.abort(name)
        return JSONResponse(None)
