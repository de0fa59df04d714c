"""How fast a checkpoint is read, beside `dd`: `python -m scripts.loading FOLDER [--send]`.

Files are dropped from the page cache before each run. Without --send, parameters are put together and sent nowhere, so
a CPU's conversions don't count.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax

from jaxspec.checkpoint import ModelFolder, load_model, params
from jaxspec.models.families import MODELS


def drop(folder: Path) -> None:
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident() -> int:
    """Bytes of this process's own memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def timed(name: str, size: int, run: Callable[[], object]) -> None:
    before, peak, over = resident(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            peak[0] = max(peak[0], resident() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.monotonic()
    run()
    seconds = time.monotonic() - began
    over.set()
    watcher.join()
    print(f"{name}: {size / seconds / 1e9:.2f} GB/s, {peak[0] / 1e9:.2f} GB of host memory at peak", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--send", action="store_true", help="load onto the device")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 8, 16])
    given = parser.parse_args()
    files = ModelFolder(given.folder, given.folder / "config.json")
    declared = MODELS[files.config.model_type].tensors(files.config.decoder)
    size = sum(file.stat().st_size for file in files.files)
    dd = "; ".join(f"dd if={file} of=/dev/null bs=16M iflag=direct status=none" for file in files.files)

    def load(threads: int) -> None:
        if given.send:
            loaded = load_model(str(given.folder), load_threads=threads, tp_size=given.tp_size)
            jax.block_until_ready(loaded.params)
        else:
            params.assemble(declared, files.stored(), "bfloat16", threads=threads)

    if not given.send:
        params._placed = lambda *_: jax.numpy.zeros(())
    for _ in range(3):
        drop(given.folder)
        timed("dd", size, lambda: subprocess.run(dd, shell=True, check=True))
        for threads in given.threads:
            drop(given.folder)
            timed(f"{threads} threads", size, lambda n=threads: load(n))


if __name__ == "__main__":
    main()
