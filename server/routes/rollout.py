"""Routes for those who train what is served: new weights, pauses, and memory given back, as SGLang and vLLM name them.

`http.gate` refuses those that change something to a server without an API key, unless --enable-rollout-routes is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import FastAPI, Query
from fastapi.responses import JSONResponse

from jaxspec import CheckpointError, ConfigError, RequestError
from server.protocol.rollout import NewVersion, Pause, Tags, UpdateFromDisk
from server.routes.serving import Serving

PAUSES = {"abort": "abort", "wait": "wait", "keep": "in_place"}  # vLLM's names, and ours
GRAPHS = "cuda_graph"  # SGLang's tag of what isn't here
Tagged = Annotated[list[str] | None, Query()]


def add(app: FastAPI, serving: Serving) -> None:
    async def control(action: str, **given: Any) -> dict[str, Any]:
        serving.check()
        return await serving.llm.control(action, **given)

    async def memory(action: str, tags: list[str] | None) -> None:
        await control(action, tags=None if tags is None else [tag for tag in tags if tag != GRAPHS])

    _add_sglangs(app, control, memory)
    _add_vllms(app, control, memory, serving.llm.flush_cache)


def _add_sglangs(app: FastAPI, control: Callable[..., Any], memory: Callable[..., Any]) -> None:
    @app.post("/update_weights_from_disk", responses={400: {"description": "The weights stay as they were"}})
    async def update_weights_from_disk(body: UpdateFromDisk) -> JSONResponse:
        """Load weights from a folder. Requests before it finish on the old ones, unless there is a pause."""
        given = {"version": body.weight_version, "flush": body.flush_cache is not False}
        try:
            state = await control(
                "update",
                target=body.model_path,
                draft=body.draft_model_path,
                abort=bool(body.abort_all_requests),
                **given,
            )
        except (CheckpointError, ConfigError, RequestError) as error:
            return JSONResponse({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        paused = state["requests"] if state["paused"] else 0
        message = f"the weights are those of version {state['weight_version']}"
        return JSONResponse({"success": True, "message": message, "num_paused_requests": paused})

    @app.get("/get_weight_version")
    @app.get("/weight_version", include_in_schema=False)
    async def get_weight_version() -> dict:
        """Name the weights' version."""
        return {"weight_version": (await control("state"))["weight_version"]}

    @app.post("/update_weight_version")
    async def update_weight_version(body: NewVersion) -> dict:
        """Call the weights another version."""
        await control("rename", version=body.new_version)
        return {"success": True, "message": "the version has the new name", "new_version": body.new_version}

    @app.post("/pause_generation")
    async def pause_generation(body: Pause) -> dict:
        """Stop: end all requests ("abort"), compute them again later ("retract"), or keep them ("in_place")."""
        await control("pause", mode=body.mode or "abort")
        return {"status": "ok", "message": "generation is paused"}

    @app.post("/continue_generation")
    async def continue_generation() -> dict:
        """End a pause."""
        await control("resume")
        return {"status": "ok", "message": "generation goes on"}

    @app.post("/release_memory_occupation")
    async def release_memory_occupation(body: Tags) -> JSONResponse:
        """Give memory back; requests wait until it is resumed."""
        await memory("release", body.tags)
        return JSONResponse(None)

    @app.post("/resume_memory_occupation")
    async def resume_memory_occupation(body: Tags) -> JSONResponse:
        """Take memory again."""
        await memory("restore", body.tags)
        return JSONResponse(None)


def _add_vllms(
    app: FastAPI, control: Callable[..., Any], memory: Callable[..., Any], flush_cache: Callable[[], Any]
) -> None:
    @app.post("/sleep")
    async def sleep(level: Annotated[int, Query(ge=0, le=2)] = 1, tags: Tagged = None) -> JSONResponse:
        """Give memory back; at level 0 only pause. At level 2 too the weights are kept by the host."""
        if level == 0:
            await control("pause", mode="in_place")
        else:
            await memory("release", tags)
        return JSONResponse(None)

    @app.post("/wake_up")
    async def wake_up(tags: Tagged = None) -> JSONResponse:
        """Undo `/sleep`."""
        await memory("restore", tags)
        if not (await control("state"))["released"]:
            await control("resume")
        return JSONResponse(None)

    @app.get("/is_sleeping")
    async def is_sleeping() -> dict:
        """Whether memory is given back."""
        return {"is_sleeping": bool((await control("state"))["released"])}

    @app.post("/pause")
    async def pause(mode: str = "abort", clear_cache: bool = True) -> dict:
        """Pause by vLLM's modes: "abort", "wait" until requests have finished, or "keep" them."""
        if mode not in PAUSES:
            raise RequestError(f"mode must be one of {', '.join(PAUSES)}, got {mode!r}", "mode")
        await control("pause", mode=PAUSES[mode])
        if clear_cache:
            await flush_cache()
        return {"status": "paused"}

    @app.post("/resume")
    async def resume() -> dict:
        """End a pause."""
        await control("resume")
        return {"status": "resumed"}

    @app.get("/is_paused")
    async def is_paused() -> dict:
        """Whether there is a pause."""
        return {"is_paused": (await control("state"))["paused"] is not None}

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> dict:
        """Empty the prefix tree, if no request runs."""
        return {"success": await flush_cache()}
