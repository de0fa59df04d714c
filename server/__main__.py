"""`python -m server`: options, engine, HTTP server, in that order, and a clean end to all three.

Invariants: what a user can get wrong (a flag, a file, a port in use) is one line on stderr and exit status 2, and the
port is tried before the model is loaded. Told to stop, the process ends within `--drain-seconds` and `LAST_SECONDS`,
whatever hangs; where Python itself does, `stop_watcher` ends it a second later. One whose engine has died or doesn't
come back ends by itself, with exit status 1.
"""

from __future__ import annotations

import gc

gc.disable()  # what is imported stays; looking through it again and again takes half a second of three

import argparse
import errno
import faulthandler
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import NoReturn

import jax
import uvicorn

from jaxspec import AsyncLLM, CheckpointError, ConfigError, EngineConfig
from jaxspec.checkpoint import Pooling, locate
from jaxspec.cli import called, without_traceback
from jaxspec.compiling.executable_store import source_digest
from jaxspec.config.flags import engine_options
from jaxspec.config.lazy_transformers import spare_torch
from jaxspec.config.own_code import blame
from jaxspec.engine.async_llm import EngineDead
from jaxspec.parallel.hosts import Follower, Leader, join
from jaxspec.replicas.data_parallel import DataParallelLLM
from jaxspec.replicas.follower import follow
from jaxspec.text.errors import TokenizerError
from jaxspec.text.tokenizer import Tokenizer
from server import logs
from server.app import create_app
from server.chat.speech import why_no_chat
from server.cli.options import UsageError, parse
from server.http.connections import Connection, allow_open_files
from server.http.cors import cors_options, host_names
from server.http.gate import Refusals
from server.media.flags import media_rules
from server.prompt_log import PromptLog
from server.stop_watcher import StopWatcher
from server.tracing import Tracer

gc.enable()

log = logging.getLogger("jaxspec.server")

CLOSE_SECONDS = 3  # for the engine to end its step, once requests have had their time
# A step of the engine takes the interpreter's lock some ten times, and waits this long for each while the event loop
# is busy. Of 3 ms that makes 54 at Python's 5 ms, 9 at 0.5 and 6 at 0.2. Below that the loop loses more than is won.
SWITCH_SECONDS = 0.0002
YOUNG_OBJECTS = 5000  # made between two collections, which then take a millisecond; Python's 700 are two requests'
LAST_SECONDS = 5  # for that, and for those whose requests were cut off to be told
WATCH_SECONDS = 3  # more, before it is killed
# Daemons, but the interpreter's end waits for what they run, or trips over it.
WAITED_FOR = ("jaxspec-engine", "jaxspec-programs", "jaxspec-weights")
_loaded = threading.Event()  # there is an engine to be closed
_watcher = StopWatcher()


def main(argv: list[str] | None = None) -> int:
    """Serve until interrupted; returns the exit status: 0, 1 if the engine failed, 2 for what a user can get wrong."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    faulthandler.enable(sys.__stderr__)  # native code that crashes then says under which Python
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        logs.set_up(args.log_level, args.log_format)
        if args.node_rank:
            return _follow(args)
        _watcher.start(args.drain_seconds + LAST_SECONDS + WATCH_SECONDS, args.log_format)
        log_of = lambda path: nullcontext() if path is None else closing(PromptLog(path))  # noqa: E731
        endpoint, name = args.otlp_traces_endpoint, (args.served_model_name or [args.model])[0]
        tracer = None if endpoint is None else Tracer(endpoint, name)
        with _bind(args.host, args.port) as listener, log_of(args.log_prompts) as kept:
            pooling = _pooling(args)
            llm = _start(args)
            _loaded.set()
            try:
                status = _serve(llm, args, listener, kept, tracer, pooling)
            finally:
                ended = llm.close(CLOSE_SECONDS)
            return status if ended else 1
    except KeyboardInterrupt:
        log.info("stopped")
    except (UsageError, ConfigError, CheckpointError, TokenizerError) as error:
        print(f"{called('serve', 'server')}: {error}", file=sys.stderr)
        return 2
    except EngineDead as error:
        print(f"{called('serve', 'server')}: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        if said := blame(error):
            print(f"{called('serve', 'server')}: {said}", file=sys.stderr)
            return 2
        if not _lacks_memory(error):
            raise
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        allowed = "" if limit == resource.RLIM_INFINITY else f"; RLIMIT_AS (`ulimit -v`) allows {limit / 2**20:.0f} MiB"
        print(f"{called('serve', 'server')}: the system gives this process no more memory{allowed}", file=sys.stderr)
        return 2
    finally:
        _watcher.stop()
    return 0


def _lacks_memory(error: Exception) -> bool:
    """Whether an allocation failed: of objects, of a thread's stack, or of a process or file in memory."""
    no_room = isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EAGAIN)
    return isinstance(error, MemoryError) or no_room or "can't start new thread" in str(error)


def _pooling(args: argparse.Namespace) -> Pooling | None:
    """How the model makes embeddings or scores, if it does; hidden states are then reported."""
    if args.pooling == "none":
        return None
    if args.pooling != "auto":
        pooling = Pooling(args.pooling)
    else:
        pooling = locate(args.model, args.revision, load_format=args.load_format).pooling
    if pooling is not None and pooling.embeds:
        args.enable_return_hidden_states = True
    if pooling is not None:
        log.info("%s are served, pooled by %s", "embeddings" if pooling.embeds else "scores", pooling.kind)
    return pooling


def _start(args: argparse.Namespace) -> AsyncLLM | DataParallelLLM:
    """The engine, or several, or one over several hosts."""
    spare_torch()
    options = engine_options(args)
    limits = {name: getattr(args, name) for name in ("max_queued_requests", "request_timeout", "watchdog_timeout")}
    limits["staged_start"] = not args.wait_for_programs
    if args.dp_size > 1:
        return DataParallelLLM(**options, **limits)
    if args.nnodes > 1:
        limits["hosts"] = _join(args, EngineConfig(**options))
    return AsyncLLM(**options, **limits)


def _join(args: argparse.Namespace, options: EngineConfig) -> Leader | Follower:
    token = args.dist_token or os.environ.get("JAXSPEC_DIST_TOKEN") or None
    return join(args.nnodes, args.node_rank, args.dist_init_addr, options, source_digest(), token)


def _follow(args: argparse.Namespace) -> int:
    """Be a node other than node 0, until that one ends. Returns the exit status.

    Whoever stops all nodes at once sends each SIGTERM; node 0 then drains, for which it needs the others.
    """
    signal.signal(signal.SIGTERM, lambda *_: log.info("told to stop; this node ends once node 0 does"))
    options = EngineConfig(**engine_options(args))
    follow(options, _join(args, options))
    log.info("node 0 has ended, and so does this one")
    return 0


def run() -> NoReturn:
    """`main` as a process of its own, which ends even if a thread of it doesn't."""
    status = without_traceback(main)
    logging.shutdown()
    threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    left = any(not thread.daemon or thread.name in WAITED_FOR for thread in threads)
    if left or jax.distributed.is_initialized():  # whose end waits for all hosts, and one may be gone
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _serve(
    llm: AsyncLLM,
    args: argparse.Namespace,
    listener: socket.socket,
    kept: PromptLog | None = None,
    tracer: Tracer | None = None,
    pooling: Pooling | None = None,
) -> int:
    sys.setswitchinterval(SWITCH_SECONDS)
    api_key = args.api_key or os.environ.get("JAXSPEC_API_KEY")
    if api_key == "":
        log.warning("JAXSPEC_API_KEY is set and empty: no key is required")
    sampling = llm.sampling if args.sampling_defaults == "model" else {}
    if sampling:
        said = ", ".join(f"{name} {value:g}" for name, value in sampling.items())
        log.info("requests that don't say otherwise: %s, by the model's generation_config.json", said)
    app = create_app(
        llm,
        args.served_model_name,
        api_key,
        sampling,
        reasoning_parser=args.reasoning_parser,
        tool_call_parser=args.tool_call_parser,
        cors=cors_options(args),
        prompt_log=kept,
        hosts=host_names(args, listener.getsockname()[0], bool(api_key)),
        tracer=tracer,
        media=media_rules(args),
        rollout_routes=args.enable_rollout_routes,
        pools=pooling,
    )
    connections = allow_open_files(args.max_connections)
    config = uvicorn.Config(
        app,
        http=partial(Connection, max_connections=connections, idle_timeout=args.idle_timeout, refusals=Refusals()),
        ws="none",  # a WebSocket would be without the connection's limits, and no route takes one
        lifespan="off",  # the app has none; a second Ctrl-C would end uvicorn's with a traceback
        log_config=None,
        log_level=max(logging.getLevelNamesMapping()[args.log_level.upper()], logging.WARNING),
        access_log=args.access_log,
        timeout_graceful_shutdown=args.drain_seconds + LAST_SECONDS,
    )
    if args.access_log:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    name = (args.served_model_name or [llm.config.model])[0]
    example = _example(llm.tokenizer, llm.model_config.vocab_size)
    server = _Server(config, llm, _greeting(name, listener, bool(api_key), *example), args.drain_seconds)
    try:
        with _heap_at_rest():
            server.run(sockets=[listener])
    except KeyboardInterrupt:  # uvicorn sends the signal that stopped it once more
        log.info("stopped")
    return 1 if server.failed else 0


@contextmanager
def _heap_at_rest() -> Iterator[None]:
    """Spare the garbage collector what was loaded: hundreds of thousands of objects that stay until the end.

    It would look through all of them every few hundred requests, a tenth of a second to half a second in which no
    thread runs. The rest it looks through less often, since requests leave next to no cycles behind.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


class _Server(uvicorn.Server):
    """Says that it is ready once it accepts connections, and stops when its engine has: `failed` then.

    `drain_seconds` after it was told to stop, it closes the engine, so that requests that still run end with an error
    that says why, where uvicorn would cut them off. As long it waits for a stuck step before it gives it up.
    """

    def __init__(self, config: uvicorn.Config, llm: AsyncLLM, greeting: str, drain_seconds: float):
        super().__init__(config)
        self._llm, self._greeting, self._drain = llm, greeting, drain_seconds
        self._stuck_since: float | None = None
        self._ended = threading.Event()
        self.failed = False

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            super().run(sockets)
        finally:
            self._ended.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        _watcher.listen()  # uvicorn wakes the loop ten times a second, which is when Python then hears a signal
        if self.started:
            log.info("%s", self._greeting)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        _watcher.heard()
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        self.failed = self._engine_failed()
        return await super().on_tick(counter) or self.failed

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if not self.failed:
            running = len(self.server_state.tasks)
            log.info("told to stop; requests with %g seconds to finish (--drain-seconds): %d", self._drain, running)
        threading.Thread(target=self._end, name="jaxspec-end", daemon=True).start()
        await super().shutdown(sockets)
        if self.force_exit and self.server_state.tasks:
            log.warning("told to stop once more; requests cut off: %d", len(self.server_state.tasks))

    def _engine_failed(self) -> bool:
        llm, now = self._llm, time.monotonic()
        if llm.error is not None:
            log.critical("the engine has ended, so the server does")
            return True
        if not llm.stuck:
            self._stuck_since = None
            return False
        if self._stuck_since is None:
            self._stuck_since = now
            log.critical(
                "a step has run for %.0f seconds (--watchdog-timeout %g): /health is 503 now, and the server ends "
                "unless it returns within %g seconds more",
                llm.step_seconds,
                llm.watchdog_timeout,
                self._drain,
            )
        if now - self._stuck_since < self._drain:
            return False
        llm.give_up(EngineDead(f"a step hasn't returned for {llm.step_seconds:.0f} seconds"))
        return True

    def _end(self) -> None:
        """Close the engine once requests have had their time, then leave if the server doesn't end by itself.

        In a thread of its own, because what hangs may be the event loop.
        """
        if self._llm.error is None and self._ended.wait(self._drain):
            return
        if self._llm.error is None and (left := len(self.server_state.tasks)):
            log.warning("requests cut off, as they still ran after %g seconds (--drain-seconds): %d", self._drain, left)
        self.failed |= not self._llm.close(CLOSE_SECONDS)
        if not self._ended.wait(LAST_SECONDS - CLOSE_SECONDS):
            _leave()


def _example(tokenizer: Tokenizer | None, vocab_size: int) -> tuple[str, str]:
    """A route, and a prompt in its body, that the model can answer. Logs why, if that is no chat."""
    if (why := why_no_chat(tokenizer, vocab_size)) is None:
        return "chat/completions", '"messages": [{"role": "user", "content": "What is the capital of France?"}]'
    log.warning("chats will fail: %s", why)
    text = "The capital of France is"
    reads = tokenizer is not None and max(tokenizer.encode(text), default=vocab_size) < vocab_size
    return "completions", f'"prompt": "{text}"' if reads else '"prompt": [1, 2, 3], "return_token_ids": true'


def _greeting(name: str, listener: socket.socket, needs_key: bool, route: str, prompt: str) -> str:
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url, hint, header = f"http://{host}:{port}", "", ""
    if needs_key:
        hint = ", with the API key in $JAXSPEC_API_KEY"
        header = """ -H "Authorization: Bearer $JAXSPEC_API_KEY" \\\n   """
    return (
        f"{name} is ready at {url}/v1; try{hint}:\n"
        f"  curl {url}/v1/{route} -H 'Content-Type: application/json' \\\n   {header}"
        f""" -d '{{{prompt}, "temperature": 0, "max_tokens": 64}}'"""
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
        if error.errno == errno.EADDRNOTAVAIL:
            hint = "--host is an address of this machine: 127.0.0.1, or 0.0.0.0 for all that it has"
        raise UsageError(f"can't listen on {host} port {port}: {error.strerror}; {hint}") from error
    return listener


def _interrupt(*_: object) -> None:
    """End `main`, from loading or after serving; the process too, if that takes too long, as compiling does."""
    _watcher.heard()
    timer = threading.Timer(LAST_SECONDS, _leave)
    timer.daemon = True
    timer.start()
    raise KeyboardInterrupt


def _leave() -> NoReturn:
    if _loaded.is_set():
        log.critical("the server was told to stop and something in it doesn't end; the process ends without it")
    else:
        log.info("stopped before it was ready; a program that was being compiled is lost")
    logging.shutdown()
    os._exit(1 if _loaded.is_set() else 0)


if __name__ == "__main__":
    run()
