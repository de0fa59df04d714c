"""The host's memory behind the page pool: what comes back is what a cold start computes, drafts and states included.
The disk behind that: what a later start finds there, and what is lost when a disk fails."""

import dataclasses
import errno
import os
import shutil
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxspec import LLM, ConfigError, SamplingParams
from jaxspec.engine.tiers import disk_files
from jaxspec.engine.tiers import host_cache as module
from jaxspec.engine.tiers.disk_files import HEADER, DiskFiles, identity
from jaxspec.parallel.hosts import Leader
from jaxspec.scheduling.host_tier import Copy
from jaxspec.scheduling.kept_blocks import Block
from jaxspec.scheduling.sequence import Status
from tests.drafters import test_block_drafters as blocks
from tests.drafters import test_dflash as dflash
from tests.engine import test_hybrid as hybrid
from tests.engine import test_lossless as lossless
from tests.support import engines, heads
from tests.support.hosting import check, host_cache
from tests.support.sample import rare
from tests.support.tiny import tiny_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LENGTHS = (97, 90, 80, 65, 64, 41, 33)  # more than twice the pool's pages
FEW = 24  # pages in the host's memory: fewer than the prompts have


def engine(draft):
    if draft == "hybrid":
        return hybrid.engine("qwen3_5", "mtp"), hybrid.VOCAB
    if draft == "eagle3":
        return lossless.engine("qwen3", str(heads.folder_for(draft))), 256
    if draft == "dflash":
        return dflash.watched_engine(), 256
    if draft == "dspark":
        return engines.engine(f"dspark:{blocks.folder(draft)}"), 256
    return engines.engine(draft), 256


def conversations(vocab, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).tolist() for n in LENGTHS]


def said(outs):
    return [(out.token_ids, out.metrics.verify_rounds) for out in outs]


def alone(llm, prompts, settings=GREEDY):
    return [out for prompt in prompts for out in llm.generate([prompt], settings)]


def settle(llm):
    """Let copies and the disk's thread end what they have to do."""
    while llm.engine.busy:
        llm.engine.step()


def from_disk(outs):
    return sum(out.metrics.cached_on_disk for out in outs)


# A hybrid's pages and states, with its drafter's, are in test_hybrid.py, whose engine they are.
@pytest.mark.parametrize("draft", [*map(rare, ("hybrid", "ngram", "eagle3", "dflash", "dspark", engines.SELF))])
def test_what_comes_back_is_what_a_cold_start_computes(draft):
    """Rounds are compared too: a drafter whose cache didn't come back would draft worse. Then many at once."""
    llm, vocab = engine(draft)
    prompts = conversations(vocab)
    with host_cache(llm) as cache:
        cold = alone(llm, prompts)
        assert not any(out.metrics.cached_on_host for out in cold)
        assert sum(len(prompt) for prompt in prompts) > 2 * 208
        warm = alone(llm, prompts)
        assert said(warm) == said(cold)
        page = llm.engine.config.page_size
        for out in warm:
            whole = (len(out.prompt_token_ids) - 1) // page * page
            assert out.metrics.cached_tokens == whole, "no page is lost to drafts or states"
        assert sum(out.metrics.cached_on_host for out in warm) > 208
        following = [prompt + out.token_ids + [7] for prompt, out in zip(prompts, cold, strict=True)]
        turned = llm.generate(following, GREEDY)  # together: loads, prompts and rounds in the same steps
        assert sum(out.metrics.cached_on_host for out in turned) > 208
        figures = cache.figures
        assert figures.loaded_blocks and not (figures.lost_blocks or figures.failed_loads or figures.damaged_blocks)
    assert [out.token_ids for out in alone(llm, following)] == [out.token_ids for out in turned]


@pytest.mark.parametrize("draft", [*map(rare, ("ngram", "hybrid", "eagle3"))])
def test_a_later_start_finds_what_left_the_memory_drafts_and_states_included(draft, tmp_path):
    llm, vocab = engine(draft)
    prompts = conversations(vocab)[:4]
    with host_cache(llm, FEW, tmp_path) as cache:
        cold = alone(llm, prompts)
        settle(llm)
        assert cache.disk_figures.written_bytes and not cache.disk_figures.lost_blocks
        kept = {path.name for path in cache.disk.folder.iterdir()}
    with host_cache(llm, FEW, tmp_path) as cache:  # another start: nothing is in the host's memory
        assert not len(cache.tier)
        again = alone(llm, prompts)
        assert said(again) == said(cold) and from_disk(again) > 60
        assert not (cache.figures.damaged_blocks or cache.disk_figures.lost_blocks)
        assert kept <= {path.name for path in cache.disk.folder.iterdir()}
        assert llm.engine.stats()["disk_cached_tokens_total"] >= from_disk(again)
        assert llm.engine.flush_cache()
        settle(llm)
        cache.disk.close()
        assert [path.name for path in cache.disk.folder.iterdir()] == ["lock"]


def test_preempted_and_aborted_requests_leave_the_tiers_whole(monkeypatch):
    llm, vocab = engine("ngram")
    prompts = conversations(vocab)
    with host_cache(llm) as cache:
        alone(llm, prompts[:3])
        monkeypatch.setattr(llm.engine.scheduler, "waiting", type(llm.engine.scheduler.waiting)())
        for prompt in prompts[:3]:
            llm.engine.add(llm.engine.prepare(prompt, GREEDY))
        llm.engine.step()
        loading = llm.engine.scheduler.loading[:]
        assert loading
        llm.engine.scheduler.preempt(loading[0])
        llm.engine.abort(loading[-1].owner.request.id)
        while llm.engine.busy:
            llm.engine.step()
        check(cache)
    long = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    together = llm.generate(prompts[3:], long)
    with host_cache(llm):
        again = llm.generate(prompts[3:], long)
        assert [out.token_ids for out in again] == [out.token_ids for out in together]
        assert sum(out.metrics.preemptions for out in again)


def flipped(block):
    words = np.array(block.data)
    words[3] ^= 1 << 7
    block.data = jax.device_put(words, block.data.sharding)


@pytest.mark.parametrize("draft", [*map(rare, ("ngram", "hybrid"))])
def test_a_changed_bit_costs_a_page_and_nothing_else(draft):
    llm, vocab = engine(draft)
    prompts = conversations(vocab)
    with host_cache(llm) as cache:
        cold = alone(llm, prompts)
        for block in list(cache.tier._blocks.values())[::5]:
            flipped(block)
        assert said(alone(llm, prompts)) == said(cold)
        assert cache.figures.damaged_blocks and cache.figures.failed_loads
        assert said(alone(llm, prompts)) == said(cold), "they are copied anew"


@pytest.mark.parametrize("to_host", [True, False], ids=["store", "load"])
@pytest.mark.parametrize(
    "error", [jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED"), MemoryError()], ids=["jax", "host"]
)
def test_a_copy_that_fails_loses_cached_pages_alone(to_host, error, monkeypatch):
    llm, vocab = engine("ngram")
    prompts, put, calls = conversations(vocab)[:4], jax.device_put, []

    def failing(x, to=None, **kwargs):
        if isinstance(to, list) and (to[0].memory_kind == "pinned_host") == to_host:
            calls.append(to)
            if len(calls) % 3:
                raise error
        return put(x, to, **kwargs)

    with host_cache(llm) as cache:
        cold = alone(llm, prompts)
        with monkeypatch.context() as patch:
            patch.setattr(module.jax, "device_put", failing)
            assert said(alone(llm, prompts)) == said(cold)
            other = alone(llm, conversations(vocab, 1)[:4])
            assert said(alone(llm, prompts)) == said(cold)
        assert cache.figures.lost_blocks and calls
        assert said(alone(llm, conversations(vocab, 1)[:4])) == said(other)


def test_a_page_that_finds_no_room_is_skipped_and_not_lost(monkeypatch):
    llm, vocab = engine("ngram")
    with host_cache(llm) as cache:
        monkeypatch.setattr(cache.tier, "make_room", lambda size: False)  # as while loads read all blocks
        alone(llm, conversations(vocab)[:2])
        assert cache.tier.skipped and not cache.figures.lost_blocks


@pytest.mark.parametrize("draft", [*map(rare, ("ngram", "hybrid"))])
def test_memory_is_bounded_by_the_option_and_the_oldest_go_first(draft, monkeypatch):
    llm, vocab = engine(draft)
    prompts, most = conversations(vocab), []
    with host_cache(llm, pages=20) as cache:
        free, step = cache.tier.make_room, llm.engine.step
        monkeypatch.setattr(cache.tier, "make_room", lambda size: most.append(cache.tier.used) or free(size))
        monkeypatch.setattr(llm.engine, "step", lambda: most.append(cache.tier.used) or step())
        cold = alone(llm, prompts)
        assert said(alone(llm, prompts)) == said(cold)
        assert cache.tier.capacity // 2 < max(most) <= cache.tier.capacity and cache.tier.evicted
        newest = alone(llm, prompts[-2:-1])
        assert newest[0].metrics.cached_tokens


def test_a_flush_and_new_weights_leave_nothing_on_the_host():
    llm, vocab = engine("ngram")
    prompts = conversations(vocab)[:4]
    with host_cache(llm) as cache:
        alone(llm, prompts)
        assert len(cache.tier)
        assert llm.engine.flush_cache() and not len(cache.tier) and not cache.tier.used
        assert not any(out.metrics.cached_tokens for out in alone(llm, prompts))
        llm.engine.scheduler.change_version(0)
        assert not len(cache.tier)
        alone(llm, prompts[2:])
        kept = len(cache.tier)
        alone(llm, conversations(vocab, 2)[:3])
        assert len(cache.tier) > kept


def test_no_reload_that_takes_longer_than_computing(monkeypatch):
    llm, vocab = engine("ngram")
    prompts = conversations(vocab)[:5]
    with host_cache(llm) as cache:
        cold = alone(llm, prompts)
        monkeypatch.setattr(cache.tier, "speed", 1.0)
        monkeypatch.setattr(type(llm.engine.prefill_budget), "token", 1e-6)
        slow = alone(llm, prompts)
        assert said(slow) == said(cold) and not any(out.metrics.cached_on_host for out in slow)
        assert cache.tier.declined >= len(prompts) - 2
        monkeypatch.setattr(type(llm.engine.prefill_budget), "token", 1e3)
        assert any(out.metrics.cached_on_host for out in alone(llm, prompts))
        assert len(cache.tier._late) == 3, "nothing else ran, so their waits count"
        did = []
        with monkeypatch.context() as patch:
            patch.setattr(cache.tier, "to_copy", lambda room: [Copy(b"key", b"", 1, False)])
            for name in ("_begin", "_store"):
                patch.setattr(cache, name, lambda *given, name=name: did.append(name))
            cache.store([SimpleNamespace(status=Status.LOADING)])
        assert did == ["_begin", "_store"], "the link isn't kept idle while copies the other way are dispatched"


def test_a_size_that_cannot_be_is_refused_with_words(monkeypatch):
    runner = engines.engine("ngram").engine.runner
    with pytest.raises(ConfigError, match=r"--host-kv-gb \S+: one page of 8 tokens takes"):
        module.HostCache(runner, 1074)
    with pytest.raises(ConfigError, match="more than this machine has"):
        module.HostCache(runner, 2**50)
    monkeypatch.setattr(runner, "hosts", object.__new__(Leader))
    with pytest.raises(ConfigError, match="several hosts"):
        module.HostCache(runner, 2**30)


def test_the_options_give_an_engine_its_caches(caplog, tmp_path):
    options = {"host_kv_gb": 0.25, "disk_kv_gb": 0.5, "disk_kv_path": str(tmp_path)}
    llm = LLM(engines.checkpoint(), "ngram", **engines.SMALL | options)
    cache = llm.engine.host_cache
    assert llm.engine.stats()["disk_cache_bytes"] == 2**29
    assert llm.engine.stats()["host_cache_bytes"] == 2**28 and llm.engine.scheduler.host is cache.tier
    with caplog.at_level("INFO", "jaxspec"):
        cache._warm_up()
    assert cache.tier.speed and "which come back at" in caplog.text
    assert cache.tier.disk.speed and f"in {tmp_path}/0, read at" in caplog.text
    assert not (list(DiskFiles(str(tmp_path), None).results(0.1)) or cache.disk.pending)
    cache.close()
    assert [path.name for path in (tmp_path / "0").iterdir()] == ["lock"], "what was timed is gone"
    llm = LLM(engines.checkpoint(), "ngram", **engines.SMALL | {"host_kv_gb": 0.25, "disable_prefix_cache": True})
    assert llm.engine.host_cache is None


def flip(path):
    data = bytearray(path.read_bytes())
    data[HEADER + 5] ^= 1
    path.write_bytes(data)


def spoil_head(path):
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-4])


@pytest.mark.parametrize(
    ("harm", "running"),
    [(flip, True), (os.unlink, True), (spoil_head, False), (cut, False)],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_files_that_changed_cost_pages_and_nothing_else(harm, running, tmp_path):
    llm, vocab = engine("ngram")
    prompts = conversations(vocab)[:3]

    def harmed(cache):
        for path in sorted(cache.disk.folder.glob("?" * 32))[::4]:
            harm(path)

    with host_cache(llm, FEW, tmp_path) as cache:
        cold = alone(llm, prompts)
        settle(llm)
        if not running:
            harmed(cache)
    with host_cache(llm, FEW, tmp_path) as cache:
        if running:
            while not len(cache.tier.disk):
                cache._hear(0.01)
            harmed(cache)
        again = alone(llm, prompts)
        assert said(again) == said(cold)
        lost = cache.figures.damaged_blocks, cache.disk_figures.lost_blocks, cache.figures.failed_loads
        assert [bool(each) for each in lost] == [harm is flip, harm is os.unlink, running]
        settle(llm)
        assert said(alone(llm, prompts)) == said(cold)


@pytest.mark.parametrize("what", ["full", "removed"])
def test_a_disk_that_fails_while_it_serves_costs_pages_and_nothing_else(what, tmp_path, monkeypatch, caplog):
    llm, vocab = engine("ngram")
    prompts, others = conversations(vocab)[:3], conversations(vocab, 1)[:2]
    with host_cache(llm, FEW, tmp_path) as cache:
        cold = alone(llm, prompts)
        settle(llm)
        with monkeypatch.context() as patch:
            if what == "removed":
                shutil.rmtree(cache.disk.folder)
            else:

                def refuse(*_):
                    raise OSError(28, "No space left on device")

                patch.setattr(disk_files.os, "replace", refuse)
            alone(llm, others)
            settle(llm)
            assert not list(cache.disk.folder.glob("*.part"))
            assert said(alone(llm, prompts)) == said(cold)
            settle(llm)
        assert cache.disk_figures.lost_blocks
        assert said(alone(llm, prompts)) == said(cold)
        settle(llm)
        for path in cache.disk.folder.glob("?" * 32):
            path.unlink()
        alone(llm, others)
        assert said(alone(llm, prompts)) == said(cold)
    written, read = (f"file couldn't be {done}" for done in ("written", "read"))
    found = [each for each in (written, read) for record in caplog.records if each in record.message]
    assert found == ([written, read] if what == "full" else [read]), "one line for each kind"


def test_other_weights_find_nothing_and_the_same_find_theirs(tmp_path, monkeypatch):
    llm, vocab = engine("ngram")
    prompts = conversations(vocab)[:3]
    with host_cache(llm, 20, tmp_path):
        alone(llm, prompts)
        settle(llm)
    runner = llm.engine.runner
    own = identity(runner)
    leaves, tree = jax.tree.flatten(runner.model.params)
    leaves[-1] = leaves[-1].at[(0,) * leaves[-1].ndim].add(1e-3)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "model", dataclasses.replace(runner.model, params=jax.tree.unflatten(tree, leaves)))
        assert identity(runner) != own
        with host_cache(llm, 20, tmp_path) as cache:
            assert not from_disk(alone(llm, prompts)) and len(cache.tier.disk)
    assert identity(runner) == own
    with host_cache(llm, 20, tmp_path):
        assert from_disk(alone(llm, prompts))


def test_files_of_another_engine_are_not_found():
    """Unless the engines differ in the numbers of pages, slots and tokens alone."""

    def of(draft="ngram", **options):
        model = engines.checkpoint()
        llm = LLM(model, draft.replace("self", model), num_draft_tokens=3, **engines.CROWDED | options)
        return identity(llm.engine.runner)

    own = of()
    assert own == of(max_total_tokens=104, max_running_requests=2, context_length=96)
    changes = [{"page_size": 16}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "fp8"}, {"quantization": "int4"}]
    changes += [{"quantization": "fp8", "fp8_activations": each} for each in ("on", "off")]
    others = [of(**each) for each in changes] + [of("suffix"), of(engines.SELF), of("ngram?max_match=8")]
    assert len({own, *others}) == 1 + len(others)


def test_new_weights_leave_the_files_and_a_bound_holds(tmp_path):
    llm, vocab = engine("ngram")
    prompts = conversations(vocab)
    page = llm.engine.runner.programs.block_bytes("pages", llm.engine.runner.state)
    with host_cache(llm, 20, tmp_path, disk_gb=(page + HEADER) * 12 / 2**30) as cache:
        cold = alone(llm, prompts)
        settle(llm)
        assert cache.tier.disk.evicted and len(cache.tier.disk) <= 12
        cache.disk.delete([b"x"])
        deadline = time.monotonic() + 5
        while cache.disk._jobs.others and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(list(cache.disk.folder.glob("?" * 32))) <= 12
        files = len(cache.tier.disk)
        llm.engine.scheduler.change_version(0)
        cache.know_weights()
        assert len(cache.tier.disk) == files and not len(cache.tier)
        assert said(alone(llm, prompts)) == said(cold)


def test_no_reload_from_a_disk_that_takes_longer_than_computing(tmp_path, monkeypatch):
    llm, vocab = engine("ngram")
    prompts = conversations(vocab)[:4]
    with host_cache(llm, FEW, tmp_path) as cache:
        cold = alone(llm, prompts)
        settle(llm)
        monkeypatch.setattr(type(llm.engine.prefill_budget), "token", 1e-6)
        cache.tier.took(10**9, 1e-3, at_start=True)
        cache.tier.disk.took(1, 1.0, at_start=True)
        slow = alone(llm, prompts)
        assert said(slow) == said(cold) and not from_disk(slow)
        monkeypatch.setattr(type(llm.engine.prefill_budget), "token", 1e6)
        assert from_disk(alone(llm, prompts))


def test_a_slow_disk_holds_up_nobody_else(tmp_path, monkeypatch):
    """While one prompt's pages are read, another's rounds go on."""
    llm, vocab = engine("ngram")
    prompts = conversations(vocab)[:3]
    with host_cache(llm, 20, tmp_path):
        cold = alone(llm, prompts)
        settle(llm)
    gate, load = threading.Event(), disk_files._load

    def slow(*given):
        assert gate.wait(20)
        return load(*given)

    monkeypatch.setattr(disk_files, "_load", slow)
    with host_cache(llm, 20, tmp_path) as cache:
        while not len(cache.tier.disk):
            cache._hear(0.01)
        core = llm.engine
        first = core.prepare(prompts[2], GREEDY)
        core.add(first)
        core.step()
        assert core.scheduler.loading
        other = core.prepare(conversations(vocab, 5)[4], GREEDY)
        core.add(other)
        while other.id in core.requests:
            core.step()
        assert first.id in core.requests and core.scheduler.loading
        monkeypatch.setattr(module, "STALLED", -1e9)  # the disk never answers
        tokens = []
        while first.id in core.requests:
            tokens += [token for delta in core.step() for token in delta.token_ids]
        assert tokens == cold[2].token_ids and not core.scheduler.loading
        gate.set()


def test_a_full_disk_is_read_at_a_start_and_none_of_its_samples_stays(tmp_path, monkeypatch):
    files = DiskFiles(str(tmp_path), jax.device_put)
    save, calls = disk_files._save, []

    def refuse(*given):
        calls.append(given)
        if len(calls) > 3:
            raise OSError(error, os.strerror(error))
        save(*given)

    monkeypatch.setattr(disk_files, "_save", refuse)
    error = errno.ENOSPC
    assert files.speed(10) is None
    error = errno.EROFS
    with pytest.raises(ConfigError, match="Read-only file system"):
        files.speed(10)
    files.close()
    assert [path.name for path in files.folder.iterdir()] == ["lock"]


def test_a_disk_whose_files_cannot_be_read_ends_a_start(tmp_path, monkeypatch):
    def refuse(*given):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    files = DiskFiles(str(tmp_path), jax.device_put)
    monkeypatch.setattr(disk_files, "_load", refuse)
    with pytest.raises(ConfigError, match="a file couldn't be read"):
        files.speed(10)
    files.close()


@pytest.mark.parametrize("name", ["_claimed", "_save", "_load"])
def test_a_disk_that_never_answers_ends_a_start(name, tmp_path, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(disk_files, "START_SECONDS", 0.2)
    monkeypatch.setattr(disk_files, "CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(disk_files, name, lambda *given: gate.wait(20))
    with pytest.raises(ConfigError, match=r"hasn't answered in 0.2 s. Give another folder"):
        DiskFiles(str(tmp_path), jax.device_put).speed(10)
    gate.set()


def test_two_engines_that_share_a_folder_have_files_of_their_own(tmp_path):
    made = [DiskFiles(str(tmp_path), jax.device_put) for _ in range(2)]
    assert [each.folder.name for each in made] == ["0", "1"]
    made[0].close()
    third = DiskFiles(str(tmp_path), jax.device_put)
    assert third.folder.name == "0"
    for each in (made[1], third):
        each.close()


def test_a_file_comes_back_as_it_was_and_halves_are_deleted(tmp_path):
    words = np.arange(10, dtype=np.uint32)
    block = Block(b"k" * 16, b"p" * 16, words.nbytes, True, jax.device_put(words), np.array([7, 9], np.uint32))
    (tmp_path / "0").mkdir(mode=0o700)
    (tmp_path / "0" / "dead.part").write_bytes(b"half")
    files = DiskFiles(str(tmp_path), jax.device_put)
    files.write([block])
    (result,) = files.results(10)
    assert result.error is None and not list(files.folder.glob("*.part"))
    files.close()
    files = DiskFiles(str(tmp_path), jax.device_put)
    (found,) = files.results(10)
    assert (found.kind, found.block.key, found.block.parent, found.block.missed) == (
        "found",
        b"k" * 16,
        b"p" * 16,
        True,
    )
    assert found.block.size == words.nbytes + HEADER
    files.read([Block(b"k" * 16, b"", words.nbytes, True)])
    (read,) = files.results(10)
    assert np.array_equal(read.data, words) and read.checksums.tolist() == [7, 9]
    assert files.folder.stat().st_mode & 0o77 == 0 == (files.folder / block.key.hex()).stat().st_mode & 0o77
    files.close()


def test_a_folder_that_cannot_be_is_refused_with_words(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--disk-kv-path: no pages can be kept there"):
        DiskFiles(str(tmp_path / "file"), None)
    (tmp_path / "0").mkdir()
    (tmp_path / "0").chmod(0o777)
    with pytest.raises(ConfigError, match=r"there: others can write to \S*/0, until you run `chmod"):
        DiskFiles(str(tmp_path), None)
    with pytest.raises(ConfigError, match="Give that a size, too, with --host-kv-gb"):
        engines.LLM(engines.checkpoint(), "ngram", **engines.SMALL | {"disk_kv_gb": 1.0})
    with pytest.raises(ConfigError, match="--disk-kv-path needs --disk-kv-gb"):
        engines.LLM(engines.checkpoint(), "ngram", **engines.SMALL | {"disk_kv_path": str(tmp_path)})


def neighbour(name):
    """An engine whose pages are of another kind."""
    changes = {"fp8": {"kv_cache_dtype": "fp8"}, "deterministic": {"deterministic": True, "dtype": "bfloat16"}}
    model = str(tiny_checkpoint("deepseek_v3", 256, 2)) if name == "latent" else engines.checkpoint()
    return LLM(model, "ngram", num_draft_tokens=3, **engines.CROWDED | changes.get(name, {}))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["fp8", "latent", "deterministic"])
def test_pages_of_other_kinds_come_back_as_they_were(name):
    llm, prompts = neighbour(name), conversations(256)
    with host_cache(llm) as cache:
        cold = alone(llm, prompts)
        assert said(alone(llm, prompts)) == said(cold)
        assert cache.figures.loaded_blocks and not cache.figures.damaged_blocks
