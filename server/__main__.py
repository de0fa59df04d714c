"""`python -m server`: options, engine, HTTP server, in that order, and a clean end to all three.

Invariant: what a user can get wrong (a flag, a file, a port in use) is one line on stderr and exit status 2, and the
port is tried before the model is loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys

import uvicorn

from jaxspec import AsyncLLM, CheckpointError, ConfigError
from jaxspec.flags import engine_options
from jaxspec.tokenizer import TokenizerError
from server.app import create_app
from server.options import UsageError, parse

log = logging.getLogger("jaxspec.server")

GRACE_SECONDS = 5  # for running requests, once told to stop
CLOSE_SECONDS = 10  # for the engine to end its step, and those requests to be told


def main(argv: list[str] | None = None) -> int:
    """Serve until interrupted; returns the exit status."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        _set_up_logging(args.log_level)
        with _bind(args.host, args.port) as listener:
            llm = AsyncLLM(**engine_options(args))
            try:
                _serve(llm, args, listener)
            finally:
                llm.close()
    except KeyboardInterrupt:
        log.info("stopped")
    except (UsageError, ConfigError, CheckpointError, TokenizerError) as error:
        print(f"python -m server: {error}", file=sys.stderr)
        return 2
    return 0


def _serve(llm: AsyncLLM, args: argparse.Namespace, listener: socket.socket) -> None:
    api_key = args.api_key or os.environ.get("JAXSPEC_API_KEY")
    sampling = llm.engine.sampling if args.sampling_defaults == "model" else {}
    if sampling:
        said = ", ".join(f"{name} {value:g}" for name, value in sampling.items())
        log.info("requests that don't say otherwise: %s, by the model's generation_config.json", said)
    app = create_app(llm, args.served_model_name, api_key, sampling)
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level=max(logging.getLevelNamesMapping()[args.log_level.upper()], logging.WARNING),
        access_log=args.access_log,
        timeout_graceful_shutdown=GRACE_SECONDS + CLOSE_SECONDS,
    )
    if args.access_log:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    name = args.served_model_name or llm.config.model
    _Server(config, llm, _greeting(name, listener, bool(api_key))).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Says that it is ready once it accepts connections, and closes the engine `GRACE_SECONDS` after it was told to
    stop: so requests that still run end with an error that says why, where uvicorn would cut them off."""

    def __init__(self, config: uvicorn.Config, llm: AsyncLLM, greeting: str):
        super().__init__(config)
        self._llm, self._greeting = llm, greeting

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            log.info("%s", self._greeting)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(self._close_engine())
        await super().shutdown(sockets)
        closing.cancel()

    async def _close_engine(self) -> None:
        await asyncio.sleep(GRACE_SECONDS)
        await asyncio.to_thread(self._llm.close)


def _greeting(name: str, listener: socket.socket, needs_key: bool) -> str:
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url, hint, header = f"http://{host}:{port}", "", ""
    if needs_key:
        hint = ", with the API key in $JAXSPEC_API_KEY"
        header = """ -H "Authorization: Bearer $JAXSPEC_API_KEY" \\\n   """
    question = '[{"role": "user", "content": "What is the capital of France?"}]'
    return (
        f"{name} is ready at {url}/v1; try{hint}:\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n   {header}"
        f""" -d '{{"messages": {question}, "temperature": 0, "max_tokens": 64}}'"""
    )


def _bind(host: str, port: int) -> socket.socket:
    """Take the port. **Raises:** `UsageError` if it is in use, or the host isn't this machine's."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"--host {host}: {error.strerror}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        hint = "choose another with --port, or 0 for any that is free"
        raise UsageError(f"can't listen on {host} port {port}: {error.strerror}; {hint}") from error
    return listener


def _set_up_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S", force=True
    )
    for noisy in ("jax", "httpx", "urllib3", "filelock", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
