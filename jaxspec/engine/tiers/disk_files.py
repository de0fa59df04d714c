"""Files of blocks (`--disk-kv-gb`): threads read and write them, so that no round waits for a disk.

A file has a block's key for its name, a line of JSON, and the block's words as they were in the host's memory, with the
checksums that the device made. It gets its name once it is whole, so a process that is killed leaves none in part. What
can't be read or written raises nothing: its result has the error, and costs a cached page.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import queue
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache.host_blocks import paged, stateful
from jaxspec.checkpoint.demo import cache_folder
from jaxspec.compiling.executable_store import NotPrivate, make_private, source_digest
from jaxspec.config.options import ConfigError
from jaxspec.engine.runner import Runner
from jaxspec.scheduling.kept_blocks import Block

log = logging.getLogger("jaxspec")

HEADER = 1024  # bytes before a file's words
PART = ".part"  # ends the name of a file that isn't whole
MOST_SERVERS = 64  # that share a folder
FULL = errno.ENOSPC, errno.EDQUOT
READERS = 4  # threads: one alone copies at a fraction of a fast disk's speed
SAMPLE = 8  # blocks whose reads are timed at start
CLOSE_SECONDS = 5.0  # for reads and writes that go on; a disk may never answer
START_SECONDS = 30.0  # for each step of a start, after which the disk counts as one that doesn't answer


@dataclass(eq=False)
class Result:
    """A block that was read or written, or a file that is there from before."""

    kind: str  # read, write or found
    block: Block
    data: jax.Array | None = None
    checksums: np.ndarray | None = None
    seconds: float = 0.0
    error: Exception | None = None


class Jobs:
    """Blocks to be read, each by one of several threads, and others, by one thread in their order."""

    def __init__(self):
        self.changed = threading.Condition()
        self.reads: deque[Block] = deque()
        self.others: deque[Block | bytes] = deque()  # blocks to be written, and keys of files to be deleted
        self.reading = 0  # threads that read now
        self.results: queue.SimpleQueue[Result] = queue.SimpleQueue()
        self.stopped = False

    def add(self, to: deque, jobs: list) -> None:
        with self.changed:
            to.extend(jobs)
            self.changed.notify_all()

    def next(self, of: deque) -> Block | bytes | None:
        """Wait for the next one; None at the end, before which files that go still do."""
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or of)
            while of and self.stopped and not isinstance(of[0], bytes):
                of.popleft()
            return of.popleft() if of else None

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify_all()


class DiskFiles:
    """The files in a folder of its own in `root`, which no other process uses meanwhile.

    `place` takes a block's words to the host's memory. **Raises:** `ConfigError` if nothing can be written there.
    """

    def __init__(self, root: str | None, place: Callable[[np.ndarray], jax.Array]):
        try:
            at = Path(root).expanduser() if root else cache_folder() / "kv"
            self.folder, lock, there = _in_time(partial(_claimed, at))
        except (OSError, NotPrivate) as error:
            raise ConfigError(f"--disk-kv-path: no pages can be kept there: {error}. Give another folder") from error
        self.pending = 0  # reads and writes whose results aren't known
        self._jobs = Jobs()
        work = [(_write_all, there), *[(_read_all, place)] * READERS]
        given = self._jobs, self.folder
        threads = [threading.Thread(target=do, args=(*given, of), name="disk-kv", daemon=True) for do, of in work]
        for thread in threads:
            thread.start()
        self._closed = weakref.finalize(self, _close, self._jobs, lock, threads)

    def read(self, blocks: list[Block]) -> None:
        self.pending += len(blocks)
        self._jobs.add(self._jobs.reads, blocks)

    def write(self, blocks: list[Block]) -> None:
        self.pending += len(blocks)
        self._jobs.add(self._jobs.others, blocks)

    def delete(self, keys: list[bytes]) -> None:
        if keys:
            self._jobs.add(self._jobs.others, keys)

    def results(self, wait: float = 0.0) -> Iterator[Result]:
        """All that is known by now; `wait`: so many seconds for the first."""
        while True:
            try:
                result = self._jobs.results.get(timeout=wait) if wait else self._jobs.results.get_nowait()
            except queue.Empty:
                return
            wait = 0.0
            self.pending -= result.kind != "found"
            yield result

    def speed(self, words: int) -> tuple[int, float] | None:
        """Bytes of some files of so many words, and the seconds that reading them took; None on a full disk.

        **Raises:** `ConfigError` if files can't be written or read there, or not in `START_SECONDS`.
        """
        zeros = np.zeros(words, np.uint32)
        blocks = [Block(b"speed%d" % i, b"", zeros.nbytes, False) for i in range(SAMPLE)]
        try:
            _in_time(partial(_save_samples, self.folder, blocks, zeros))
            return SAMPLE * zeros.nbytes, self._read_samples(blocks)
        except OSError as error:
            if error.errno in FULL:  # of an earlier start's pages, say, which can be read
                return None
            raise ConfigError(f"--disk-kv-path {self.folder}: {error}. Give another folder") from error
        finally:
            self.delete([block.key for block in blocks])

    def _read_samples(self, blocks: list[Block]) -> float:
        """Seconds that reading these takes. **Raises:** `OSError` if one can't be read, or not in `START_SECONDS`."""
        started, found = time.monotonic(), []
        self.read(blocks)
        while self.pending:
            if (left := started + START_SECONDS - time.monotonic()) <= 0:
                raise _no_answer()
            for result in self.results(left):
                if result.error is not None:
                    raise OSError(f"a file couldn't be read: {result.error}") from result.error
                found += [result] if result.kind == "found" else []
        seconds = time.monotonic() - started
        for result in found:
            self._jobs.results.put(result)
        return seconds

    def close(self) -> None:
        """End the threads, and let another process have the folder."""
        self._closed()


def identity(runner: Runner) -> bytes:
    """A digest of all that pages depend on beside tokens: weights, by their bits; code, layout and devices."""
    weights, structure = jax.tree.flatten((runner.model.params, runner.model.tower, runner.draft.params))
    sums = jax.device_get([_sum(x) for x in weights])
    of = lambda arrays: [(x.shape[0], x.shape[2:], str(x.dtype)) for x in arrays]  # noqa: E731  # not how many rows
    layout = of(paged(runner.state.cache, runner.state.draft)), of(stateful(runner.state.cache))
    drafter, config, scales = runner.draft.drafter, runner.config, runner.model.kv_scales
    made_by = type(drafter).__qualname__, drafter, runner.model.config, config.tp_size, config.page_size
    rounding = config.deterministic, runner.shapes.block, jax.devices()[0].device_kind, source_digest()
    parts = (
        [int(x) for x in sums],
        str(structure),
        layout,
        made_by,
        rounding,
        None if scales is None else scales.tolist(),
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


@jax.jit
def _sum(x: jax.Array) -> jax.Array:
    """A weighted sum of an array's bits, modulo 2**32, which a changed number changes: weights are odd."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        x = jax.lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}")
    weights = jnp.ones((), jnp.uint32)
    for axis in range(x.ndim):
        weights += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(2 * (0x4F1BBCDD >> axis))
    return jnp.sum(x.astype(jnp.uint32) * weights, dtype=jnp.uint32)


def _in_time(do: Callable[[], Any]) -> Any:
    """Run `do` in a thread of its own. **Raises:** what it raises; `TimeoutError` after `START_SECONDS`."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(do())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, name="disk-kv-start", daemon=True).start()
    if not wait_for([done], START_SECONDS).done:
        raise _no_answer()
    return done.result()


def _no_answer() -> TimeoutError:
    return TimeoutError(f"the disk hasn't answered in {START_SECONDS:g} s")


def _claimed(root: Path) -> tuple[Path, int, list[Path]]:
    """The first folder in `root` that no other process has, the descriptor that holds it, and the files in it."""
    root.mkdir(0o700, parents=True, exist_ok=True)
    for number in range(MOST_SERVERS):
        folder = root / str(number)
        make_private(folder)
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return folder, lock, [path for path in folder.iterdir() if path.name != "lock"]
        except BlockingIOError:
            os.close(lock)
    raise OSError(f"{MOST_SERVERS} engines use {root} already")


def _close(jobs: Jobs, lock: int, threads: list[threading.Thread]) -> None:
    jobs.stop()
    end = time.monotonic() + CLOSE_SECONDS  # jax aborts a process that ends in the middle of a copy
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0))
    os.close(lock)


def _write_all(jobs: Jobs, folder: Path, there: list[Path]) -> None:
    """Tell of the files that are there; write blocks and delete files until the end."""
    for block in _whole(there):
        jobs.results.put(Result("found", block))
    while (job := jobs.next(jobs.others)) is not None:
        if isinstance(job, bytes):
            _delete(folder / job.hex())
            continue
        result = Result("write", job)
        try:
            # An array keeps its numpy copy; this one is forgotten with it.
            shards = [shard.data for shard in job.data.addressable_shards]
            words = np.asarray(jax.make_array_from_single_device_arrays(job.data.shape, job.data.sharding, shards))
            folder.mkdir(0o700, parents=True, exist_ok=True)
            _save(folder / job.key.hex(), job, words, job.checksums)
        except Exception as error:  # a disk, or memory: the page is lost, and nothing else
            result.error = error
        jobs.results.put(result)


def _read_all(jobs: Jobs, folder: Path, place: Callable[[np.ndarray], jax.Array]) -> None:
    """Read blocks until the end."""
    while (block := jobs.next(jobs.reads)) is not None:
        result, started = Result("read", block), time.monotonic()
        with jobs.changed:
            jobs.reading += 1
        try:
            words = np.empty(block.size // 4, np.uint32)  # a CPU's array may keep it
            result.checksums = _load(folder / block.key.hex(), block.key, words)
            result.data = jax.block_until_ready(place(words))
        except Exception as error:  # as above
            result.error = error
        with jobs.changed:
            result.seconds = (time.monotonic() - started) / jobs.reading
            jobs.reading -= 1
        jobs.results.put(result)


def _whole(paths: list[Path]) -> list[Block]:
    """The blocks of whole files, the oldest first. Other files are deleted."""
    found: list[tuple[float, Block]] = []
    for path in paths:
        try:
            with path.open("rb") as file:
                about = _read_header(file.read(HEADER))
                size, written = os.fstat(file.fileno()).st_size, os.fstat(file.fileno()).st_mtime
            if path.name != about["key"] or size != about["size"] + HEADER:
                raise ValueError("it isn't whole")
        except (OSError, ValueError, KeyError, TypeError):
            _delete(path)
            continue
        key, parent = bytes.fromhex(about["key"]), bytes.fromhex(about["parent"])
        found.append((written, Block(key, parent, size, bool(about["missed"]))))
    return [block for _, block in sorted(found, key=lambda each: each[0])]


def _save(path: Path, block: Block, words: np.ndarray, checksums: np.ndarray) -> None:
    about = {"key": block.key.hex(), "parent": block.parent.hex(), "size": block.size, "missed": block.missed}
    text = json.dumps(about | {"checksums": checksums.tolist()})
    header = f"{zlib.crc32(text.encode()):08x} {text}".encode().ljust(HEADER)
    if len(header) > HEADER:
        raise ValueError(f"{len(header)} bytes about a block, more than {HEADER}")
    part = path.with_suffix(PART)
    try:
        with open(part, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(header)
            file.write(words.view(np.uint8).data)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)  # of a disk that is full, say


def _save_samples(folder: Path, blocks: list[Block], words: np.ndarray) -> None:
    """Write blocks that are read from the disk, not from the host's memory."""
    for block in blocks:
        _save(folder / block.key.hex(), block, words, np.zeros(1, np.uint32))
        with (folder / block.key.hex()).open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _load(path: Path, key: bytes, words: np.ndarray) -> np.ndarray:
    """Read a block's words; its checksums. **Raises:** `ValueError` for a file that isn't this block's."""
    size = words.nbytes
    with path.open("rb", buffering=0) as file:
        about = _read_header(file.read(HEADER))
        if about.get("key") != key.hex() or about.get("size") != size:
            raise ValueError(f"{path} is another block's")
        at, view = 0, memoryview(words).cast("B")
        while at < size:
            if not (count := file.readinto(view[at:])):
                raise ValueError(f"{path} is {size - at} bytes short")
            at += count
    return np.array(about["checksums"], np.uint32)


def _read_header(header: bytes) -> dict[str, Any]:
    """**Raises:** `ValueError` if it has changed."""
    checksum, _, text = header.rstrip().partition(b" ")
    if int(checksum or b"0", 16) != zlib.crc32(text):
        raise ValueError("its head has changed")
    about = json.loads(text)
    if not isinstance(about, dict):
        raise ValueError("its head is no object")
    return about


def _delete(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.debug("disk cache: %s can't be deleted: %s", path, error)
