"""The memory plan's arithmetic, and the layout that it pays for."""

import dataclasses
import os
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxspec.cache import memory_plan as cache
from jaxspec.cache.memory_plan import POOL_SHARE, POOL_SHARES, plan_memory
from jaxspec.cache.paged import PageLayout, Rows, kv_bytes_per_token
from jaxspec.config.options import ConfigError
from jaxspec.models.model_config import ModelConfig
from tests.support.tiny import tiny_config

MIB = 2**20


def plan(monkeypatch, device_bytes, share="1", **changes):
    """A plan on a device of which XLA may use `device_bytes`, which is `share` of it."""
    monkeypatch.setenv(POOL_SHARE, share) if share else monkeypatch.delenv(POOL_SHARE, raising=False)
    stats = None if device_bytes is None else {"bytes_limit": device_bytes}
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(memory_stats=lambda: stats)])
    figures = {
        "weight_bytes": 40 * MIB,
        "draft_weight_bytes": 10 * MIB,
        "bytes_per_token": 1024,
        "slot_bytes": 5 * MIB,
        "workspace_bytes": 8 * MIB,
        "page_size": 16,
        "mem_fraction": 0.5,
        "max_total_tokens": None,
        "most_useful_tokens": 10**9,
    }
    return plan_memory(**figures | changes)


def test_the_pool_gets_what_the_fraction_leaves(monkeypatch):
    made = plan(monkeypatch, 200 * MIB)
    assert made.kv_bytes == 45 * MIB  # half of 200, less 40, 10 and 5; the dummy page included
    assert made.tokens == 45 * 1024 - 16
    assert made.num_pages == 45 * 1024 // 16


def test_workspace_and_room_to_compile_are_never_given_away(monkeypatch):
    assert plan(monkeypatch, 200 * MIB, mem_fraction=0.99).kv_bytes == (200 - 8 - 10 - 55) * MIB


def test_the_fraction_is_of_the_whole_device(monkeypatch):
    assert plan(monkeypatch, 200 * MIB, share="0.5", mem_fraction=0.4).kv_bytes == (0.4 * 400 - 55) * MIB
    assert plan(monkeypatch, 200 * MIB, share="0.5", mem_fraction=0.9).kv_bytes == (200 - 8 - 10 - 55) * MIB


def test_jax_that_was_used_before_leaves_less(monkeypatch):
    """XLA then has its default share, and others' arrays take of that: the engine needs the room it has elsewhere."""
    stats = {"bytes_limit": 150 * MIB, "bytes_in_use": 20 * MIB}
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(memory_stats=lambda: stats)])
    assert cache.memory_in_use() == 20 * MIB
    for others in (0, 20 * MIB):
        made = plan(monkeypatch, 150 * MIB, None, mem_fraction=0.88, other_bytes=others, workspace_bytes=0)
        assert made.device_bytes == 200 * MIB
        free = 150 * MIB - others
        assert made.total - others == pytest.approx(free * 0.88 / 0.95, rel=1e-3)
    assert re.search(r"other arrays +20\.0 MiB", str(made))


def claim(monkeypatch, caplog, used, **environment):
    """Call `claim_device` on a GPU that jax has `used` or not: the pool's shares it sets, and its log."""
    for name in POOL_SHARES:
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"XLA_FLAGS": ""} | environment).items():
        monkeypatch.setenv(name, value)
    stats = {"bytes_limit": 60 * 2**30}
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(memory_stats=lambda: stats)])
    monkeypatch.setattr(cache.xla_bridge, "backends_are_initialized", lambda: used)
    caplog.clear()
    cache.claim_device()
    return {name: os.environ[name] for name in POOL_SHARES if name in os.environ}, caplog.text


def test_a_share_that_comes_too_late_is_told(monkeypatch, caplog):
    monkeypatch.setenv(POOL_SHARE, "")  # so that it is as before, after this test
    assert claim(monkeypatch, caplog, used=False) == ({POOL_SHARE: "0.95"}, "")
    environment, told = claim(monkeypatch, caplog, used=True)
    assert environment == {} and "60.00 GiB of 80.00 GiB" in told and "make the LLM before" in told
    assert cache.device_memory() == (80 * 2**30, 60 * 2**30)
    for used in (False, True):
        for name in POOL_SHARES:  # the user's own is left alone: with both names set, XLA would not start
            assert claim(monkeypatch, caplog, used, **{name: "0.5"}) == ({name: "0.5"}, "")
            assert cache.device_memory() == (120 * 2**30, 60 * 2**30)


def test_devices_that_wait_for_one_that_never_comes_end_the_process(monkeypatch, caplog):
    """Follow the user's setting, if there is one; on several hosts a node may come late."""
    monkeypatch.setenv(POOL_SHARE, "")
    flags, several = lambda: os.environ["XLA_FLAGS"], [False]
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: several[0])
    claim(monkeypatch, caplog, used=False, XLA_FLAGS="--xla_gpu_autotune_level=0")
    assert flags() == f"--xla_gpu_autotune_level=0 {cache.STUCK}=30"
    claim(monkeypatch, caplog, used=False, XLA_FLAGS=f"{cache.STUCK}=5")
    assert flags() == f"{cache.STUCK}=5"
    claim(monkeypatch, caplog, used=True)
    assert not flags()
    several[0] = True
    claim(monkeypatch, caplog, used=False)
    assert not flags()


def test_no_more_than_is_useful(monkeypatch):
    made = plan(monkeypatch, 200 * MIB, most_useful_tokens=1000)
    assert made.tokens == 1008 and made.num_pages == 64  # rounded up to whole pages, and the dummy page


def test_max_total_tokens_decides(monkeypatch):
    for device in (None, 200 * MIB):
        assert plan(monkeypatch, device, max_total_tokens=100).tokens == 112
        assert plan(monkeypatch, device, max_total_tokens=1).num_pages == 2


def test_a_cpu_pool_is_at_most_two_gib(monkeypatch):
    assert plan(monkeypatch, None).tokens * 1024 == 2**31
    assert plan(monkeypatch, None, most_useful_tokens=160).tokens == 160
    assert plan(monkeypatch, None, bytes_per_token=2**40).num_pages == 2


def test_no_room_is_an_error_with_the_arithmetic(monkeypatch):
    with pytest.raises(ConfigError) as error:
        plan(monkeypatch, 200 * MIB, mem_fraction=0.2)
    message = str(error.value)
    for figure in ("0.20 GiB", "--mem-fraction-static 0.2 ", "40.0 MiB", "50.0 MiB", "5.0 MiB", "0.0 MiB"):
        assert figure in message
    assert "--max-running-requests" in message
    page = 16 * 1024
    fits = (55 * MIB + 2 * page) / (200 * MIB)
    assert plan(monkeypatch, 200 * MIB, mem_fraction=fits + 1e-6).num_pages == 2
    with pytest.raises(ConfigError):
        plan(monkeypatch, 200 * MIB, mem_fraction=fits - 1e-6)


def test_the_printed_plan_adds_up(monkeypatch):
    text = str(plan(monkeypatch, 200 * MIB))
    figures = {name.strip(): float(size) for name, size in re.findall(r"^  (.{14}) +([\d.]+) MiB", text, re.M)}
    assert figures == pytest.approx({
        "weights": 40, "draft weights": 10, "KV cache": 45, "request slots": 5, "workspace": 8, "left": 92,
    })  # fmt: skip
    assert "46064 tokens in pages of 16" in text and "of 0.20 GiB" in text
    assert "left" not in str(plan(monkeypatch, None))


@pytest.mark.parametrize("dtype,size", [("float32", 4), ("bfloat16", 2)])
def test_a_page_takes_what_the_plan_counts(dtype, size):
    config = ModelConfig.from_hf(tiny_config())
    kv = PageLayout(7, 8, dtype).kv(config)
    assert kv.shape == (2, 7, 2, 2, 8, 16)
    assert kv_bytes_per_token(config, dtype) == 2 * 2 * 2 * 16 * size
    assert kv.nbytes == 7 * 8 * kv_bytes_per_token(config, dtype)


def test_rows_that_are_padding_are_written_to_the_dummy_page():
    """Rows beyond the count, before place 0 and past the table: their pages are others' or nobody's."""
    kv = jnp.zeros((1, 5, 2, 1, 4, 8))
    start, count = jnp.array([2, -2, 6, 0]), jnp.array([4, 4, 4, 0])
    rows = Rows(start, count, jnp.array([[1, 2], [3, 4], [1, 2], [3, 4]]))
    page, slot = rows._slots(kv, 5)
    assert page.tolist() == [[1, 1, 2, 2, 0], [0, 0, 3, 3, 0], [2, 2, 0, 0, 0], [0] * 5]
    assert rows.written(kv, 5).tolist() == [
        [6, 7, 8, 9, -1],
        [-1, -1, 12, 13, -1],
        [10, 11, -1, -1, -1],
        [-1] * 5,
    ]
    ones = jnp.ones((4, 5, 1, 8))
    kv = rows.write(kv, jnp.int32(0), ones, ones)
    written = [(int(p), int(s)) for p, s in zip(*jnp.nonzero(kv[0, 1:, 0, 0, :, 0]), strict=True)]
    assert written == [(0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1)], "counted from page 1"
    assert slot.tolist()[0][:4] == [2, 3, 0, 1]


def test_what_fp8_cannot_hold_is_clipped():
    kv = jnp.zeros((1, 2, 2, 1, 4, 8), jnp.float8_e4m3fn)
    rows = Rows(jnp.array([0]), jnp.array([2]), jnp.array([[1]]))
    k = jnp.stack([jnp.full((1, 8), 1e6), jnp.full((1, 8), 1.5)])[None]
    kv = rows.write(kv, jnp.int32(0), k, -k).astype(jnp.float32)
    assert kv[0, 1, :, 0, :2, 0].tolist() == [[448.0, 1.5], [-448.0, -1.5]]


@pytest.mark.parametrize("dtype,cache", [("float16", "float16"), ("float16", "bfloat16"), ("float32", "float16")])
def test_a_cache_stays_finite_whatever_overflows(dtype, cache):
    """Who is given the page later reads all of it, with weight zero where it isn't theirs: NaN would stay NaN."""
    kv = jnp.zeros((1, 2, 2, 1, 4, 8), cache)
    rows = Rows(jnp.array([0]), jnp.array([3]), jnp.array([[1]]))
    k = jnp.broadcast_to(jnp.array([jnp.inf, jnp.nan, 1.5], dtype)[None, :, None, None], (1, 3, 1, 8))
    kv = rows.write(kv, jnp.int32(0), k, -k)
    assert jnp.isfinite(kv).all() and kv[0, 1, :, 0, 2, 0].tolist() == [1.5, -1.5]
    assert jnp.isfinite(rows.compact(kv, jnp.array([[0, 2]]), jnp.array([2]))).all()


def test_the_plan_says_what_the_process_takes_of_the_host(monkeypatch):
    """On a CPU beside what is planned, which is the host's memory too."""
    held = cache.resident_memory()
    block = bytearray(512 * MIB)
    assert cache.resident_memory() - held > 256 * MIB and len(block), "other threads may free some meanwhile"
    on_cpu = dataclasses.replace(plan(monkeypatch, None, max_total_tokens=16), host_bytes=2**30)
    assert re.search(r"host +0\.95 GiB  Python.*; 1\.00 GiB resident so far", str(on_cpu)), "1 GiB less 55 MiB"
    on_gpu = dataclasses.replace(plan(monkeypatch, 200 * MIB), host_bytes=2**30)
    assert re.search(r"host +1\.00 GiB  Python.* programs$", str(on_gpu))
    assert "host" not in str(dataclasses.replace(on_cpu, host_bytes=0))
