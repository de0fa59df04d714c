"""Time the host cache on a GPU: `python -m scripts.gpu.host_cache CONFIG_FOLDER [--tokens 8192] [--host-kv-gb 6]`.

It prints the link's plain speed (one pinned array of 1 GiB to the device), the speed of reloads, and the time to the
first token of one prompt: computed, from the device, and from the host. Of the last reload it prints when each slice of
pages was sent, had arrived, was written and was checked, and what programs and copies take by themselves. Weights are
dummies.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import time

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxspec import LLM, SamplingParams
from jaxspec.cache.host_blocks import PAGES
from jaxspec.engine.tiers.host_cache import HostCache, Slice


def link() -> float:
    """GB/s of a plain copy from pinned memory."""
    device = jax.local_devices()[0]
    there, here = (SingleDeviceSharding(device, memory_kind=kind) for kind in ("pinned_host", "device"))
    x, took = jax.block_until_ready(jax.device_put(np.ones(2**28, np.uint32), there)), []
    for _ in range(5):
        started = time.perf_counter()
        jax.block_until_ready(jax.device_put(x, here))
        took.append(time.perf_counter() - started)
    return x.nbytes / min(took) / 1e9


class Slices:
    """When each slice of a reload was sent, found to have arrived, written and checked; seconds since the first."""

    def __init__(self, cache: HostCache):
        self.times: dict[int, list[float]] = {}
        self._kept: list[Slice] = []  # so that no other slice gets its id
        send, write, check = cache._send, cache._write, cache._check

        def sent(idle: bool) -> None:
            send(idle)
            for part in cache._slices:
                self._note(part, 1)

        def written(part: Slice) -> None:
            self._note(part, 2)
            write(part)
            self._note(part, 3)

        def checked(part: Slice) -> None:
            check(part)
            self._note(part, 4)

        cache._send, cache._write, cache._check = sent, written, checked

    def _note(self, part: Slice, count: int) -> None:
        if id(part) not in self.times:
            self._kept.append(part)
        times = self.times.setdefault(id(part), [])
        if len(times) < count:
            times.append(time.perf_counter())

    def show(self, first: float, size: float) -> None:
        print("slice: ms since the prompt was given, when sent, arrived, written, checked")
        for i, times in enumerate(self.times.values()):
            print(f"  {i:2d} " + " ".join(f"{1e3 * (each - first):6.1f}" for each in times))
        arrived = max((times[1] for times in self.times.values() if times[1:]), default=math.inf) - first
        print(f"the last had arrived after {1e3 * arrived:.1f} ms: {size / arrived / 1e9:.1f} GB/s since the prompt")


def alone(llm: LLM) -> None:
    """Print what a slice's copy and its program take, with nothing else in flight, and several copies at once."""
    cache, runner = llm.engine.host_cache, llm.engine.runner
    rows = np.zeros(cache.bucket, np.int32)  # the dummy page
    blocks, _ = runner.programs.take(PAGES, runner.state, rows)
    there = jax.block_until_ready(jax.device_put(list(blocks), [cache._there] * cache.bucket))
    size = sum(block.nbytes for block in there)
    for count in (1, 2, 4, 16):
        started = time.perf_counter()
        here = [jax.device_put(there, [cache._here] * cache.bucket) for _ in range(count)]
        dispatched = time.perf_counter() - started
        jax.block_until_ready(here)
        took = time.perf_counter() - started
        print(
            f"copies of {count} x {cache.bucket} pages: dispatched after {1e3 * dispatched:.2f} ms, there after "
            f"{1e3 * took:.2f} ms, {count * size / took / 1e9:.1f} GB/s"
        )
    for _ in range(2):
        started = time.perf_counter()
        for _ in range(16):
            runner.state, checksums = runner.programs.put(PAGES, runner.state, rows, tuple(here[0]))
        dispatched = time.perf_counter() - started
        jax.block_until_ready(checksums)
        took = time.perf_counter() - started
    print(f"16 writes of {cache.bucket} pages: dispatched {1e3 * dispatched:.2f} ms, done {1e3 * took:.2f} ms")


def written(llm: LLM) -> None:
    """Wait until the disk has what left the host's memory: half a second without another block."""
    blocks = -1
    while blocks != (now := llm.engine.stats()["disk_cache_blocks"]):
        blocks = now
        for _ in range(50):
            llm.engine.step()
            time.sleep(0.01)
    print(f"on the disk: {blocks} blocks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--draft", default="none")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--pool", type=int, default=20480, help="tokens in the page pool")
    parser.add_argument("--host-kv-gb", type=float, default=6.0)
    parser.add_argument("--disk-kv-gb", type=float, default=0.0, help="less --host-kv-gb than the prompts take, too")
    parser.add_argument("--disk-kv-path")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    options = {"load_format": "dummy", "dtype": "bfloat16", "few_programs": True, "draft_policy": "fixed"}
    options |= {"max_running_requests": 4, "context_length": given.tokens + 512, "max_total_tokens": given.pool}
    options |= {"disk_kv_gb": given.disk_kv_gb, "disk_kv_path": given.disk_kv_path}
    llm = LLM(given.model, given.draft, host_kv_gb=given.host_kv_gb, disable_structured_output=True, **options)
    print(f"link: {link():.1f} GB/s")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1000, 30000, given.tokens).tolist() for _ in range(4)]
    ask = lambda prompt: llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))[0]  # noqa: E731
    ask(rng.integers(1000, 30000, given.tokens).tolist())
    cold, reloaded, device = [], [], []
    texts = []
    for prompt in prompts:  # the pool holds two of them
        out = ask(prompt)
        cold.append(out.metrics.ttft)
        again = ask(prompt)
        texts.append(again.token_ids)  # of a cached prefix, whose last rows a program of another size computes
        device.append(again.metrics.ttft)
    if given.disk_kv_gb:
        written(llm)
    before = llm.engine.stats()
    trace = Slices(llm.engine.host_cache)
    for turn in range(3):
        for prompt, text in zip(prompts, texts, strict=True):
            trace.times.clear()
            started = time.perf_counter()
            out = ask(prompt)
            of = out.metrics
            tiers = f"{of.cached_on_host} tokens from the host, {of.cached_on_disk} from the disk"
            print(f"  turn {turn}: {tiers}, {1e3 * of.ttft:.1f} ms")
            if of.cached_on_host + of.cached_on_disk:
                reloaded.append(out.metrics.ttft)
            assert out.token_ids == text, "the text changed"
    after = llm.engine.stats()
    bytes_each = (after["host_cache_loaded_bytes_total"] - before["host_cache_loaded_bytes_total"]) / max(
        after["host_cache_loads_total"] - before["host_cache_loads_total"], 1
    )
    trace.show(started, bytes_each)
    if not given.disk_kv_gb:
        alone(llm)
    milliseconds = lambda times: 1e3 * statistics.median(times) if times else float("nan")  # noqa: E731
    print(
        f"{given.tokens} tokens: computed {milliseconds(cold):.1f} ms, from the device {milliseconds(device):.1f} ms, "
        f"from the host {milliseconds(reloaded):.1f} ms"
    )
    print(f"reload: {bytes_each / 1e9:.2f} GB, {bytes_each / 1e6 / milliseconds(reloaded):.1f} GB/s of the whole TTFT")
    print({key: value for key, value in after.items() if key.startswith(("host_cache", "disk_cache"))})


if __name__ == "__main__":
    main()
