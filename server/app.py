"""The FastAPI application: what stands before the routes, and the routes.

Invariant: a route that generates refuses a request (wrong model, bad field, dead engine) before the engine sees it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

import jaxspec
from jaxspec import AsyncLLM, ConfigError
from jaxspec.checkpoint import Pooling
from server.chat.speech import Formats
from server.http import errors, openapi
from server.http.body import BodyRoute
from server.http.cors import EXPOSED
from server.http.gate import Gate
from server.http.request_times import RequestTimes
from server.media.pictures import MediaRules
from server.metrics import Metrics
from server.prompt_log import PromptLog
from server.routes import (
    adapters,
    generation,
    health,
    information,
    messages,
    playground,
    pooling,
    profile,
    responses,
    rollout,
    sglang,
    token_ids,
    tokens,
)
from server.routes.serving import Serving
from server.tracing import Tracer


def create_app(
    llm: AsyncLLM,
    served_name: str | Sequence[str] | None = None,
    api_key: str | None = None,
    sampling: Mapping[str, Any] | None = None,
    *,
    reasoning_parser: str = "auto",
    tool_call_parser: str = "auto",
    cors: dict[str, Any] | None = None,
    prompt_log: PromptLog | None = None,
    hosts: Sequence[str] | None = None,
    tracer: Tracer | None = None,
    media: MediaRules | None = None,
    rollout_routes: bool = False,
    pools: Pooling | None = None,
) -> FastAPI:
    """The server's application over a running engine, which stays the caller's to close.

    **Arguments:**

    - `served_name`: the model's name in the API, or several, of which responses have the first; None is the engine's.
    - `api_key`: must come with every request but those to `gate.OPEN_PATHS`; None: no key is asked for.
    - `sampling`: settings of `SamplingParams` for requests that don't say otherwise.
    - `reasoning_parser`, `tool_call_parser`: names of `server.parsers`, "auto" for what the chat template shows, or
      "none".
    - `cors`: options of `CORSMiddleware`; None: no page of another origin may call.
    - `prompt_log`: keeps texts, and stays the caller's to close. `tracer` sends traces.
    - `hosts`: names that the server answers to beside this machine's own; None: any.
    - `media`: where pictures may come from. `pools`: how a model for embeddings or scores makes them.
    - `rollout_routes`: open `gate.GUARDED_PATHS` where there is no key.
    """
    app = FastAPI(title="jaxspec", version=jaxspec.__version__, docs_url=None, redoc_url=None)
    app.router.route_class = BodyRoute
    origins = cors["allow_origins"] if cors else ()
    app.add_middleware(Gate, api_key=api_key, hosts=hosts, origins=origins, rollout_routes=rollout_routes)
    if cors is not None:
        app.add_middleware(CORSMiddleware, expose_headers=EXPOSED, **cors)
    errors.install(app)
    name, *aliases = ([served_name] if isinstance(served_name, str) else served_name) or [llm.config.model]
    template = llm.tokenizer.chat_template if llm.tokenizer else None
    formats = Formats.of(llm.model_config.model_type, template, reasoning_parser, tool_call_parser)
    formats.log(reasoning_parser, tool_call_parser)
    metrics = Metrics(llm.stats, llm.config, name)
    app.add_middleware(RequestTimes, observe=metrics.http.observe)  # outermost
    where = media or MediaRules()
    if taken := {name, *aliases}.intersection(llm.adapters):
        raise ConfigError(f"--lora-modules: {taken.pop()} is the model's own name; give the adapter another")
    serving = Serving(llm, name, metrics, sampling or {}, formats, prompt_log, tracer, where, aliases, pools)
    texts = generation, responses, messages, sglang, token_ids
    engine = adapters, rollout, profile
    for routes in (*texts, tokens, health, information, pooling, *engine, playground):
        routes.add(app, serving)
    openapi.describe(app, llm.model_config.vocab_size)
    return app
