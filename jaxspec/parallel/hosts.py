"""Several hosts that run one model together: node 0 decides, and tells the others each program before it runs it.

Every node has the same mesh over all hosts' devices, the same programs, and its own devices' part of weights and
state. Node 0 alone has requests, scheduler and engine. The other nodes repeat what it dispatches (`replicas.follower`),
in order: the program's name and its arrays from the host, a few kilobytes. So no node waits for a device to learn what
comes next.

Invariant: all nodes start from the same options, source and shapes, or none serves. When one is gone, all end within
`SILENT_SECONDS`. Messages are JSON and bytes of arrays, are never unpickled, and have at most `MAX_MESSAGE` bytes.
Whoever connects while nodes gather, and says whatever, delays them by nothing and ends none: a node counts once both
sides have proved that they know the shared token (`--dist-token`), which itself is never sent. Messages aren't
encrypted, and jax's own service has no keys, so the network must still be one where nobody else connects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import json
import logging
import math
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jaxlib
import numpy as np

from jaxspec.config.options import ConfigError, flag
from jaxspec.parallel.channel import Channel

log = logging.getLogger("jaxspec")

START_SECONDS = 300.0  # in which all nodes must have come
BEAT_SECONDS = 1.0  # between two signs of life
SILENT_SECONDS = 10.0  # without one, after which a node counts as gone
NEXT_TRY = 0.2  # seconds
HELLO_SECONDS = 10.0  # in which whoever connects must have proved to be a node
MAX_HELLO = 2**16  # bytes of its message
MAX_GREETED = 64  # connections that prove so at once; a node that finds no room tries again
MAX_MESSAGE = 2**28  # bytes of any later one
END_SECONDS = 5.0  # in which a node that was told to ends
TUNES_ALONE = "--xla_gpu_shard_autotuning=false"
OWN = ("model", "revision")  # options that may differ: each node has its own folder


class HostLost(RuntimeError):
    """A node is gone, so the model can't be run any more."""


def encode(kind: str, value: Any = None, arrays: tuple[np.ndarray, ...] = ()) -> bytes:
    """A message: a line of JSON, and the arrays' bytes behind it."""
    head = json.dumps([kind, value, [(str(array.dtype), array.shape) for array in arrays]])
    return b"\n".join([head.encode(), b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)])


def decode(message: bytes) -> tuple[str, Any, list[np.ndarray]]:
    """Decode a message of `encode`. **Raises:** `ValueError` for anything else."""
    head, _, rest = message.partition(b"\n")
    try:
        kind, value, shapes = json.loads(head)
        arrays, start = [], 0
        for dtype, shape in shapes:
            if not isinstance(dtype, str) or min(shape, default=0) < 0:
                raise ValueError("not a message of a node: there is no such array")
            array = np.frombuffer(rest, np.dtype(dtype), math.prod(shape), start).reshape(shape)
            start += array.nbytes
            arrays.append(array)
    except (TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise ValueError(f"not a message of a node: {type(error).__name__}") from error
    return kind, value, arrays


class Node:
    """Another node, as this one sees it. A thread reads what it sends; another sends it signs of life."""

    def __init__(self, rank: int, channel: Channel, lost: Callable[[Node], None]):
        self.rank, self.error = rank, None
        self.farewell = False  # it said that it ends, so its end is no loss
        self.messages: queue.SimpleQueue[tuple[str, Any, list[np.ndarray]] | None] = queue.SimpleQueue()
        self.ended = threading.Event()
        self._channel, self._lost = channel, lost
        for run in (self._read, self._beat):
            threading.Thread(target=run, name=f"jaxspec-node-{rank}", daemon=True).start()

    def send(self, kind: str, value: Any = None) -> None:
        """**Raises:** `HostLost`."""
        self.pass_on(encode(kind, value))

    def pass_on(self, message: bytes) -> None:
        """Send what `encode` made. **Raises:** `HostLost`."""
        try:
            self._channel.send(message)
        except OSError as error:
            self.error = self.error or str(error)
            raise HostLost(f"node {self.rank} is gone: {self.error}") from error

    def receive(self, kind: str) -> Any:
        """Receive the node's next message, which must be of this kind, and return its value. **Raises:** `HostLost`;
        `ConfigError` if it refuses to go on."""
        message = self.messages.get()
        if message is None:
            raise HostLost(f"node {self.rank} is gone: {self.error}")
        got, value, _ = message
        if got == "refused":
            raise ConfigError(value)
        if got != kind:
            raise HostLost(f"node {self.rank} said {got!r} where {kind!r} was due")
        return value

    def close(self) -> None:
        self._channel.close()

    def _read(self) -> None:
        try:
            while True:
                message = decode(self._channel.receive())
                self.farewell |= message[0] in ("stop", "refused")
                if message[0] != "alive":
                    self.messages.put(message)
        except TimeoutError:
            self.error = self.error or f"it hasn't been heard for {SILENT_SECONDS:g} seconds"
        except (EOFError, OSError, ValueError) as error:
            self.error = self.error or str(error)
        self._channel.close()
        self.ended.set()
        self.messages.put(None)
        self._lost(self)

    def _beat(self) -> None:
        with contextlib.suppress(HostLost):
            while not self.ended.wait(BEAT_SECONDS):
                self.send("alive")


class Leader:
    """Node 0's side. `when_lost` is called, from another thread, with the error once a node is gone."""

    follows = False

    def __init__(self):
        self.when_lost: Callable[[HostLost], None] = end_process
        self._closing = False
        self._nodes: list[Node] = []

    def add(self, rank: int, channel: Channel) -> None:
        """Take a node in, in the order of ranks."""
        self._nodes = sorted([*self._nodes, Node(rank, channel, self._lose)], key=lambda node: node.rank)

    def welcome(self, ours: dict[str, str], theirs: dict[int, dict[str, str]]) -> None:
        """Let all nodes go on. **Raises:** `ConfigError` if one was started otherwise than this one."""
        for node in self._nodes:
            refuse_unless_alike(node, ours, theirs[node.rank], "was started with", "; start all nodes alike")
        for node in self._nodes:
            node.send("welcome")

    def agree(self, *sizes: int) -> list[int]:
        """The least of each size over all nodes, which all then have. **Raises:** `HostLost`."""
        each = [sizes, *(node.receive("sizes") for node in self._nodes)]
        least = [min(column) for column in zip(*each, strict=True)]
        for node in self._nodes:
            node.send("sizes", least)
        return least

    def meet(self, shapes: dict[str, str]) -> Callable[..., None]:
        """Wait until all nodes have their programs; return what broadcasts each dispatch.

        `shapes`: digests of what the programs were made of. **Raises:** `ConfigError` if a node has others.
        """
        for node in self._nodes:
            refuse_unless_alike(node, shapes, node.receive("shapes"), "has", "; its checkpoint or its devices differ")
        for node in self._nodes:
            node.send("go")
        return self.broadcast

    def broadcast(self, kind: str, *arrays: np.ndarray) -> None:
        """Have all nodes run a program with these arrays. **Raises:** `HostLost`."""
        message = encode("run", kind, arrays)
        for node in self._nodes:
            node.pass_on(message)

    def close(self, seconds: float = END_SECONDS) -> None:
        """Let the other nodes end, and wait for that."""
        self._closing = True
        for node in self._nodes:
            with contextlib.suppress(HostLost):
                node.send("stop")
        for node in self._nodes:
            node.ended.wait(seconds)
            node.close()

    def _lose(self, node: Node) -> None:
        if self._closing:
            return
        self._closing = True  # the others are ended, and needn't be reported
        error = HostLost(f"node {node.rank} is gone: {node.error}")
        log.critical("%s. The model can't be run without it, so all nodes end", error)
        for other in self._nodes:
            other.close()
        self.when_lost(error)


class Follower:
    """The side of any other node."""

    follows = True

    def __init__(self, rank: int, channel: Channel):
        self.rank = rank
        self._leader = Node(0, channel, self._lose)

    def agree(self, *sizes: int) -> list[int]:
        """Send this node's sizes and receive the least over all nodes; see `Leader.agree`."""
        self._leader.send("sizes", sizes)
        return self._leader.receive("sizes")

    def meet(self, shapes: dict[str, str]) -> None:
        """Wait until all nodes have their programs; see `Leader.meet`."""
        self._leader.send("shapes", shapes)
        self._leader.receive("go")

    def order(self) -> tuple[str, list[np.ndarray]] | None:
        """The next program that node 0 dispatches; None: it has ended, and so does this one."""
        message = self._leader.messages.get()
        return None if message is None or message[0] == "stop" else message[1:]

    def welcomed(self) -> None:
        """Wait until node 0 has all nodes and finds them alike. **Raises:** `ConfigError`."""
        self._leader.receive("welcome")

    def _lose(self, node: Node) -> None:
        if node.farewell:
            time.sleep(END_SECONDS)  # in which this process ends by itself, unless it was still loading
        else:
            log.critical("node 0 is gone (%s), so this node ends", node.error)
        end_process()


def join(nodes: int, rank: int, address: str, options: Any, source: str, token: str | None = None) -> Leader | Follower:
    """Meet the other nodes, check that all are alike, and start `jax.distributed`. Before jax sees a device.

    **Arguments:** `address` is HOST:PORT of node 0, where jax's service listens; ours does at the next port. `options`
    is an `EngineConfig`, `source` a digest of jaxspec's source, `token` a secret that all nodes share.

    **Raises:** `ConfigError` if not all come in time, or one was started otherwise.
    """
    host, _, port = address.rpartition(":")
    host, own = host.strip("[]"), int(port) + 1
    ours = facts(options, nodes, source)
    if token is None:
        log.warning("no --dist-token is set: whoever reaches %s port %d can join as a node", host, own)
    met = _gather(host, own, nodes, ours, token) if rank == 0 else _come(host, own, rank, ours, token)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM, which starts the drain
    # XLA would have nodes tune a program's kernels together, so each would wait for all others to compile it. But one
    # may compile it later, or have it on its disk.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {TUNES_ALONE}".strip()
    jax.distributed.initialize(address, nodes, rank, initialization_timeout=int(START_SECONDS))
    log.info("node %d of %d has met the others at %s", rank, nodes, address)
    return met


def facts(options: Any, nodes: int, source: str) -> dict[str, str]:
    """All that must be the same on every node, as text by its name."""
    given = {flag(name): value for name, value in dataclasses.asdict(options).items() if name not in OWN}
    versions = {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "jaxspec's source": source[:12]}
    flags = {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "")}
    return {name: str(value) for name, value in ({"--nnodes": nodes} | given | versions | flags).items()}


def refuse_unless_alike(node: Node, ours: dict[str, str], theirs: dict[str, str], verb: str, why: str) -> None:
    """**Raises:** `ConfigError`, which the other node gets too, naming the first thing that differs."""
    for name in ours:
        if theirs.get(name) != ours[name]:
            text = f"node {node.rank} {verb} {name} {theirs.get(name)}, and node 0 {ours[name]}{why}"
            with contextlib.suppress(HostLost):
                node.send("refused", text)
            raise ConfigError(text)


def _gather(host: str, port: int, nodes: int, ours: dict[str, str], token: str | None) -> Leader:
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise ConfigError(f"--dist-init-addr: node 0 can't listen on {host} port {port}: {error.strerror}") from error
    leader, theirs = Leader(), {}
    came: queue.SimpleQueue[tuple[int, dict[str, str], Channel]] = queue.SimpleQueue()
    greeting: list[threading.Thread] = []
    listener.settimeout(NEXT_TRY)
    end = time.monotonic() + START_SECONDS
    with listener:
        while len(theirs) < nodes - 1:
            if time.monotonic() > end:
                missing = ", ".join(str(rank) for rank in range(1, nodes) if rank not in theirs)
                raise ConfigError(f"--nnodes {nodes}: node {missing} didn't come in {START_SECONDS:g} seconds")
            with contextlib.suppress(TimeoutError):
                connection, (where, *_) = listener.accept()
                greeting = [thread for thread in greeting if thread.is_alive()]
                if len(greeting) == MAX_GREETED:
                    connection.close()
                    continue
                given = Channel(_prepared(connection), MAX_HELLO), where, nodes, token, came
                greeting.append(threading.Thread(target=_greet, args=given, name="jaxspec-greet", daemon=True))
                greeting[-1].start()
            while not came.empty():
                rank, facts, channel = came.get()
                if rank in theirs:
                    log.warning("node %d came twice; the second is sent away", rank)
                    channel.close()
                else:
                    theirs[rank] = facts
                    leader.add(rank, channel)
    leader.welcome(ours, theirs)
    return leader


def _greet(channel: Channel, where: str, nodes: int, token: str | None, came: queue.SimpleQueue) -> None:
    """Find out, in a thread of its own, if a connection is a node's; put its rank, facts and channel in `came`."""
    limit = threading.Timer(HELLO_SECONDS, channel.close)  # which wakes whoever waits for a byte now and then
    limit.start()
    try:
        ours = secrets.token_hex(16)
        channel.send(encode("challenge", ours))
        kind, said, _ = decode(channel.receive())
        rank, facts, theirs, proof = (said[name] for name in ("rank", "facts", "nonce", "proof"))
        if kind != "hello" or type(rank) is not int or not 0 < rank < nodes:
            raise ValueError("no such node is due")
        if not all(isinstance(text, str) for text in (theirs, proof, *facts, *facts.values())):
            raise ValueError("its facts aren't texts")
        if not _proves(proof, token, "node", ours, theirs, rank, facts):
            channel.send(encode("refused", f"--dist-token of node {rank} isn't node 0's; give all nodes the same"))
            raise ValueError("its --dist-token differs from this node's")
        channel.send(encode("accepted", _proof(token, "node 0", ours, theirs)))
        channel.most = MAX_MESSAGE
        came.put((rank, facts, channel))
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("a connection from %s isn't one of the nodes: %s", where, error)
        channel.close()
    finally:
        limit.cancel()


def _come(host: str, port: int, rank: int, ours: dict[str, str], token: str | None) -> Follower:
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            channel = Channel(_prepared(socket.create_connection((host, port), SILENT_SECONDS)), MAX_MESSAGE)
            _introduce(channel, rank, ours, token)
            break
        except ConfigError:
            raise
        except (OSError, EOFError, ValueError, TypeError) as error:
            if time.monotonic() > end:
                raise ConfigError(f"--dist-init-addr: node 0 isn't at {host} port {port}: {error}") from error
            time.sleep(NEXT_TRY)
    follower = Follower(rank, channel)
    follower.welcomed()
    return follower


def _introduce(channel: Channel, rank: int, facts: dict[str, str], token: str | None) -> None:
    """Prove to be a node, and have node 0 prove to be that. **Raises:** `ConfigError`; what a connection raises."""
    kind, theirs, _ = decode(channel.receive())
    if kind != "challenge":
        raise ValueError("what listens there is not node 0")
    ours = secrets.token_hex(16)
    proof = _proof(token, "node", theirs, ours, rank, facts)
    channel.send(encode("hello", {"rank": rank, "facts": facts, "nonce": ours, "proof": proof}))
    kind, said, _ = decode(channel.receive())
    if kind == "refused":
        raise ConfigError(said)
    if kind != "accepted" or not _proves(said, token, "node 0", theirs, ours):
        raise ConfigError("what answers as node 0 doesn't know this node's --dist-token")


def _proof(token: str | None, *said: Any) -> str:
    """A text that only those can make for what was said who know the token. Nonces in it make it good but once."""
    return hmac.new((token or "").encode(), json.dumps(said).encode(), "sha256").hexdigest()


def _proves(proof: str, token: str | None, *said: Any) -> bool:
    return hmac.compare_digest(proof.encode(), _proof(token, *said).encode())


def _prepared(end: socket.socket) -> socket.socket:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.settimeout(SILENT_SECONDS)
    return end


def end_process(*_: object) -> NoReturn:
    """End this process, whatever its threads wait for: a program whose partner is gone may never return."""
    logging.shutdown()
    os._exit(1)
