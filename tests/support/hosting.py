"""A host cache behind an engine that other tests use without one."""

from __future__ import annotations

import contextlib
import dataclasses

from jaxspec.engine.tiers.host_cache import HostCache, kinds_of
from jaxspec.scheduling.audit import audit


@contextlib.contextmanager
def host_cache(llm, pages=1000, disk=None, disk_gb=1.0):
    """Give an engine a cache of so many pages, and as many snapshots, in the host's memory until the block ends.
    `disk`: a folder for a disk's tier behind it, of `disk_gb`."""
    core = llm.engine
    sizes = [core.runner.programs.block_bytes(kind, core.runner.state) for kind in kinds_of(core.runner)]
    config = core.runner.config
    core.runner.config = dataclasses.replace(
        config, disk_kv_gb=disk_gb if disk else 0.0, disk_kv_path=disk and str(disk)
    )
    cache = HostCache(core.runner, pages * sum(sizes))
    core.runner.config = config
    assert core.flush_cache()
    try:
        attach(core, cache)
        yield cache
        while core.busy:
            core.step()
        audit(core.scheduler)
        check(cache)
    finally:
        if disk:
            cache.tier.disk, cache._hear = None, lambda wait: None  # its files stay
            cache.disk.close()
        core.scheduler.flush()
        attach(core, None)


def attach(core, cache):
    tier = cache and cache.tier
    core.host_cache, scheduler = cache, core.scheduler
    scheduler.host = scheduler.trees[0]._host = tier
    if scheduler.snapshots is not None:
        scheduler.snapshots._host = tier
    if cache is not None:
        tier.serves(scheduler.trees[0])
        cache.serves(scheduler)


def check(cache):
    """Nothing is on its way, and the bytes of blocks add up."""
    tier = cache.tier
    assert not (cache._storing or cache._loads or cache._slices or tier.backlog or cache._writing)
    blocks = tier._blocks.values()
    assert not any(block.pins for block in blocks)
    assert tier.used == sum(block.size for block in blocks) <= tier.capacity
    assert {key for keys in tier._next.values() for key in keys} == set(tier._blocks)
