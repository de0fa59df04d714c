"""Time the host cache on a GPU: `python -m scripts.gpu.host_cache CONFIG_FOLDER [--tokens 8192] [--host-kv-gb 6]`.

It prints the link's plain speed (one pinned array of 1 GiB to the device), the speed of reloads, and the time to the
first token of one prompt: computed, from the device, and from the host. Weights are dummies.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxspec import LLM, SamplingParams


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--draft", default="none")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--pool", type=int, default=20480, help="tokens in the page pool")
    parser.add_argument("--host-kv-gb", type=float, default=6.0)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    options = {"load_format": "dummy", "dtype": "bfloat16", "few_programs": True, "draft_policy": "fixed"}
    options |= {"max_running_requests": 4, "context_length": given.tokens + 512, "max_total_tokens": given.pool}
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
    before = llm.engine.stats()
    for turn in range(3):
        for prompt, text in zip(prompts, texts, strict=True):
            out = ask(prompt)
            print(f"  turn {turn}: {out.metrics.cached_on_host} tokens from the host, {1e3 * out.metrics.ttft:.1f} ms")
            if out.metrics.cached_on_host:
                reloaded.append(out.metrics.ttft)
            assert out.token_ids == text, "the text changed"
    after = llm.engine.stats()
    milliseconds = lambda times: 1e3 * statistics.median(times) if times else float("nan")  # noqa: E731
    print(
        f"{given.tokens} tokens: computed {milliseconds(cold):.1f} ms, from the device {milliseconds(device):.1f} ms, "
        f"from the host {milliseconds(reloaded):.1f} ms"
    )
    bytes_each = (after["host_cache_loaded_bytes_total"] - before["host_cache_loaded_bytes_total"]) / max(
        after["host_cache_loads_total"] - before["host_cache_loads_total"], 1
    )
    print(f"reload: {bytes_each / 1e9:.2f} GB, {bytes_each / 1e6 / milliseconds(reloaded):.1f} GB/s of the whole TTFT")
    print({key: value for key, value in after.items() if key.startswith("host_cache")})


if __name__ == "__main__":
    main()
