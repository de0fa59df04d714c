"""Compiled programs kept on disk. A second start then neither traces nor lowers them, which takes most of its time;
XLA's own cache would spare it only the compiling.

A program's key is everything that made it: jaxspec's source, jax, the device, XLA's flags, the caller's `key`, and the
arguments' shapes. A file that can't be read is compiled again.

Invariant: nothing of a file is parsed unless its SHA-256 is that of what was written under this key, and nobody but
this user and root could have written it: a program runs with all rights of the process, and pickles run code.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import pickle
import secrets
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable

from jaxspec.checkpoint.demo import cache_folder

log = logging.getLogger("jaxspec")

CHECKSUM_BYTES = hashlib.sha256().digest_size


def enable_compilation_cache() -> None:
    """Keep compiled programs on disk, so that a second start is quick, unless the user set jax's own option.

    If the folder can't be written, a warning says so and each start compiles.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    folder = cache_folder() / "programs"
    try:
        make_private(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
    except OSError as error:
        log.warning("compiled programs can't be kept in %s, so each start compiles them: %s", folder, error)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.02)


class Executables:
    """The programs in `folder`, for this version of everything. `made_by`: the part of the key that all of them
    share. `devices`: those that run them; None: the first one, where jax would take all there are."""

    def __init__(self, folder: Path, made_by: Any, devices: list[jax.Device] | None = None):
        device = jax.devices()[0]
        versions = made_by, jax.__version__, jaxlib.__version__, device.device_kind, device.client.platform_version
        flags = {name: value for name, value in os.environ.items() if name.startswith(("XLA_", "JAX_"))}
        self._key = *versions, sorted(flags.items()), jax.config.jax_default_matmul_precision, source_digest()
        self._folder, self._devices = folder, devices or [device]
        self._warned = False

    def load(self, key: Any, arguments: Any) -> tuple[jax.stages.Compiled, Any] | None:
        """The program that was saved under `key` for arguments of these shapes, with its notes; or None."""
        return self._read(
            self._path(key, arguments),
            lambda kept: (
                serialize_executable.deserialize_and_load(*kept[0], execution_devices=self._devices),
                kept[1],
            ),
        )

    def recall(self, key: Any) -> Any:
        """Read what was noted under `key`; None if there is nothing."""
        return self._read(self._path(key, ()), lambda kept: kept)

    def note(self, key: Any, value: Any) -> None:
        """Keep figures beside the programs that they are about."""
        self._write(self._path(key, ()), lambda: pickle.dumps(value))

    def save(self, key: Any, arguments: Any, program: jax.stages.Compiled, notes: Any) -> None:
        """Keep a program and notes about it. One that can't be kept is compiled again at the next start."""
        self._write(self._path(key, arguments), lambda: pickle.dumps((serialize_executable.serialize(program), notes)))

    def _read[T](self, path: Path, restore: Callable[[Any], T]) -> T | None:
        """Restore what `_write` kept; None if there is nothing that can be used, which the log explains."""
        try:
            refuse_unless_private(self._folder, self._folder.stat())
            with path.open("rb") as file:
                refuse_unless_private(path, os.fstat(file.fileno()))
                checksum, data = file.read(CHECKSUM_BYTES), file.read()
            if checksum != _checksum(path, data):
                raise ValueError("its checksum differs, so it was damaged or is another program's")
            return restore(pickle.loads(data))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except NotPrivate as error:
            said = "no program of it is run, so each start compiles them; $JAXSPEC_CACHE may name another folder"
            log.log(self._level(), "%s; %s", error, said)
        except Exception as error:
            log.warning("%s can't be used, so the program is compiled again: %s", path, error)
        return None

    def _write(self, path: Path, serialise: Callable[[], bytes]) -> None:
        try:
            data = serialise()
            make_private(self._folder)
            # So that no other process ever sees half a file; containers that share the folder may share numbers, too.
            loose = path.with_suffix(f".{os.getpid()}-{secrets.token_hex(4)}")
            try:
                loose.touch(0o600, exist_ok=False)
                loose.write_bytes(_checksum(path, data) + data)
                os.replace(loose, path)
            finally:
                loose.unlink(missing_ok=True)  # of a disk that is full, say
        except Exception as error:
            said = "compiled programs can't be kept in %s, so each start compiles them: %s"
            log.log(self._level(), said, self._folder, error)

    def _level(self) -> int:
        """Severity of a fault of the folder, which would else be a warning for each of dozens of programs."""
        level, self._warned = logging.DEBUG if self._warned else logging.WARNING, True
        return level

    def _path(self, key: Any, arguments: Any) -> Path:
        leaves, tree = jax.tree.flatten(arguments)
        shapes = [(x.shape, str(x.dtype), str(getattr(getattr(x, "sharding", None), "spec", ""))) for x in leaves]
        whole = repr((self._key, key, shapes, str(tree)))
        return self._folder / hashlib.sha256(whole.encode()).hexdigest()[:32]


class NotPrivate(PermissionError):
    """A file or folder that others could have written to."""


def refuse_unless_private(path: Path, status: os.stat_result) -> None:
    """**Raises:** `NotPrivate` for a file or folder that a user other than this one and root can write to.

    A folder above it needs no look: whoever replaces `path` there becomes its owner.
    """
    if status.st_uid not in (os.geteuid(), 0):
        raise NotPrivate(f"{path} belongs to user {status.st_uid}, not to this one")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotPrivate(f"others can write to {path}, until you run `chmod -R go-w` on it")


def make_private(folder: Path) -> None:
    """Make a folder for this user alone, unless there is one. **Raises:** `NotPrivate`, `OSError`."""
    folder.mkdir(0o700, parents=True, exist_ok=True)
    refuse_unless_private(folder, folder.stat())


def _checksum(path: Path, data: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + data).digest()


@functools.cache
def source_digest(root: Path = Path(__file__).parent.parent) -> str:
    """A digest of every Python file below a folder, this package's by default."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
