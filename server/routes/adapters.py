"""Routes that load and unload adapters, as vLLM and SGLang have them.

Invariant: without --lora-root they change nothing and read no file, and with it no file outside of that folder.
"""

from __future__ import annotations

import asyncio

from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse

from jaxspec import CheckpointError, RequestError
from jaxspec.engine.adapters import UNKNOWN, within
from server.http.errors import ApiError
from server.protocol.adapters import LoadAdapter, UnloadAdapter
from server.routes.serving import Serving


def add(app: FastAPI, serving: Serving) -> None:
    root = serving.llm.config.lora_root

    def allowed() -> None:
        serving.check()
        if root is None:
            raise ApiError(
                403,
                "clients may load no adapters here, since the server reads the folders that they name; start it with "
                "--lora-root DIR to allow those in a folder",
            )

    async def load(body: LoadAdapter) -> None:
        allowed()
        if body.lora_name in serving.names:
            raise ApiError(400, f"{body.lora_name!r} is the model's own name; choose another", param="lora_name")
        folder = await asyncio.to_thread(within, root, body.lora_path)
        given = {"name": body.lora_name, "path": folder, "replace": bool(body.load_inplace)}
        try:
            await serving.llm.control("load_adapter", **given)
        except CheckpointError as error:
            raise ApiError(400, str(error), param="lora_path") from error

    async def unload(body: UnloadAdapter) -> None:
        allowed()
        if body.lora_name not in serving.llm.adapters:
            raise ApiError(404, f"the adapter {body.lora_name!r} isn't loaded", param="lora_name", code=UNKNOWN)
        await serving.llm.control("unload_adapter", name=body.lora_name)

    def told(message: str = "") -> JSONResponse:
        """SGLang's answer."""
        status, loaded = 400 if message else 200, dict(serving.llm.adapters)
        return JSONResponse({"success": not message, "error_message": message, "loaded_adapters": loaded}, status)

    @app.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
    async def load_lora_adapter(body: LoadAdapter) -> str:
        """Load an adapter from a folder of the server."""
        await load(body)
        return f"Success: LoRA adapter '{body.lora_name}' added successfully."

    @app.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
    async def unload_lora_adapter(body: UnloadAdapter) -> str:
        """Serve an adapter no more. Requests that have begun with it go on."""
        await unload(body)
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."

    @app.post("/load_lora_adapter", responses={400: {"description": "The adapter can't be served"}})
    async def load_as_sglang(body: LoadAdapter) -> JSONResponse:
        """Load an adapter, with SGLang's answer."""
        try:
            await load(body)
        except (ApiError, RequestError) as error:
            if isinstance(error, ApiError) and error.status != 400:
                raise
            return told(str(error))
        return told()

    @app.post("/unload_lora_adapter", responses={400: {"description": "There is no such adapter"}})
    async def unload_as_sglang(body: UnloadAdapter) -> JSONResponse:
        """Unload an adapter, with SGLang's answer."""
        await unload(body)
        return told()
