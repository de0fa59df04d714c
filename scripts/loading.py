"""How fast a checkpoint is read, beside `dd`, and beside a plain copy to the device:
`python -m scripts.loading FOLDER [--send]`.

Files are dropped from the page cache before each run, unless --cached. Without --send, parameters are put together and
sent nowhere, so a CPU's conversions don't count. With --write, a FOLDER that has a config.json alone first gets the
weights of that model, of no meaning, in bfloat16 and in files of 4 GB (`scripts/configs.py` writes such folders).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.checkpoint import ModelFolder, load_model, params
from jaxspec.models.families import MODELS

SHARD = 4 * 10**9  # bytes of a file
FULL = 2**28  # bytes of an array of the plain copy


def write(folder: Path, declared: Any) -> None:
    """Write the weights of these declarations."""
    shapes = {name: shape for param in jax.tree.leaves(declared) for name, shape in param.stored().items()}
    shards: list[dict] = [{}]
    for name, shape in shapes.items():
        begin = max((entry["data_offsets"][1] for entry in shards[-1].values()), default=0)
        if begin >= SHARD:
            shards.append({})
            begin = 0
        offsets = [begin, begin + 2 * math.prod(shape)]
        shards[-1][name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": offsets}
    noise = np.random.default_rng(0).integers(0, 2**14, 2**23, np.uint16).tobytes()  # numbers less than 2
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(files, shards, strict=True):
        header = json.dumps(shard).encode()
        left = max(entry["data_offsets"][1] for entry in shard.values())
        with (folder / name).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            while left:
                left -= file.write(noise[:left])
            os.fsync(file.fileno())
    places = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


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


def copy(arrays: list[np.ndarray], size: int, devices: list[jax.Device]) -> None:
    """Send `size` bytes to devices in turn, as jax does it, two arrays on each at a time."""
    sent: list[jax.Array] = []
    for i in range(size // FULL):
        sent.append(jax.device_put(arrays[i % len(arrays)], devices[i % len(devices)]))
        if len(sent) >= 2 * len(devices):
            sent.pop(0).block_until_ready()
    jax.block_until_ready(sent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("folder", type=Path)
    add("--write", action="store_true", help="write weights for the folder's config.json first")
    add("--cached", action="store_true", help="leave files in the page cache: the link's speed, not the disk's")
    add("--send", action="store_true", help="load onto the device")
    add("--tp-size", type=int, default=1)
    add("--threads", type=int, nargs="+", default=[1, 8, 16])
    add("--repeats", type=int, default=3)
    given = parser.parse_args()
    config = given.folder / "config.json"
    files = ModelFolder(given.folder, config, weights=not given.write)
    declared = MODELS[files.config.model_type].tensors(files.config.decoder)
    if given.write:
        write(given.folder, declared)
        files = ModelFolder(given.folder, config)
    size = sum(file.stat().st_size for file in files.files)
    direct = "" if given.cached else "iflag=direct"
    dd = "; ".join(f"dd if={file} of=/dev/null bs=16M {direct} status=none" for file in files.files)
    devices = jax.local_devices()[: given.tp_size]
    arrays = [np.full(FULL, i, np.uint8) for i in range(4)] if given.send else []

    def load(threads: int) -> None:
        if given.send:
            loaded = load_model(str(given.folder), load_threads=threads, tp_size=given.tp_size)
            jax.block_until_ready(loaded.params)
        else:
            params.assemble(declared, files.stored(), "bfloat16", threads=threads)

    def ready() -> None:
        if not given.cached:
            drop(given.folder)

    if not given.send:
        params._placed = lambda *_: jax.numpy.zeros(())
    for _ in range(given.repeats):
        ready()
        timed("dd", size, lambda: subprocess.run(dd, shell=True, check=True))
        if given.send:
            timed("plain copy to the device", size // FULL * FULL, lambda: copy(arrays, size, devices))
        for threads in given.threads:
            ready()
            timed(f"{threads} threads", size, lambda n=threads: load(n))


if __name__ == "__main__":
    main()
