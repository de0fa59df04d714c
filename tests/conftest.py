"""Setup of every test: the CPU unless another platform is set, exact float32 matmuls, a compilation cache on disk.

The platform must be chosen before jax is first imported, so this file sets it before importing anything of ours.
"""

import asyncio
import functools
import gc
import inspect
import itertools
import os
import ssl
import sys
from pathlib import Path
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # `make test-gpu` sets it to cuda
if os.environ["JAX_PLATFORMS"] == "cpu":
    # Most of the suite's time goes into compiling programs that run for milliseconds; optimising them would take longer
    # than it saves, and so would cutting them into parts for threads. XLA's older emitters compile a fusion in a third
    # of the time of the newer ones, each of whose fusions goes through a pipeline of MLIR passes of its own. A GPU
    # compiles with its own settings: tests there run what is served.
    flags = (
        "backend_optimization_level=0",
        "llvm_disable_expensive_passes=true",
        "cpu_parallel_codegen_split_count=1",
        "backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    )
    os.environ.setdefault("XLA_FLAGS", " ".join(f"--xla_{flag}" for flag in flags))
    # Locations in lowered programs without the lines that called them: a tenth of the time that lowering and compiling
    # an engine's programs take.
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
    # A compiled program's key is its text as it is. To leave out names of operations, jax copies each program and goes
    # through all of it in Python: 20 ms of an interpreted kernel's. In the environment, so that servers have the same.
    os.environ.setdefault("JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY", "true")
    # An interpreted kernel's threads wait for one another on jax's own, of which there are as many as cores: on two,
    # those that were waited for found none left, and the test stood still. No kernel has as many as these.
    os.environ.setdefault("PJRT_NPROC", "8")
    # Collect garbage rarely. Importing all test files makes a million objects that stay, and so does tracing; looking
    # through them took each worker 3 s before its first test.
    gc.set_threshold(100_000, 20, 100)

import jax
import pytest
from _pytest.assertion import rewrite
from jax._src.lru_cache import LRUCache

from tests.support import checked, eager, interpreting

# What signatures say of shapes and dtypes is checked whenever these are called, or traced: where arrays are computed.
# Elsewhere tests give what isn't allowed on purpose, to see the errors.
ATTENTION = ("paged_attention", "prompt_attention", "write_heads")
KERNELS = ("dense.few_rows", "dense.weight_stream", "experts.expert_plan", *(f"attention.{name}" for name in ATTENTION))
CHECKED = ("decoder", "cache.mixers", "models", *(f"pallas.{name}" for name in KERNELS), "sampling")
checked.install([f"jaxspec.{name}" for name in CHECKED])

if os.environ["JAX_PLATFORMS"] == "cpu":
    eager.install()
    interpreting.install()

ROOT = Path(__file__).resolve().parent.parent
COMPILED, MOST_BYTES = ROOT / ".cache" / "jax-tests", 2 * 1024**3

jax.config.update("jax_default_matmul_precision", "highest")  # comparisons with float32 expectations need every bit
# Many tests build the same tiny engine; a program compiled by one, or by an earlier run, is read back by the others.
jax.config.update("jax_compilation_cache_dir", str(COMPILED))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

# Those of five seconds of processor time and more.
LONGEST = """
    models engine sharding pictures hybrid_models lowering eagle texts objectives quantisation expert_few
    few_rows programs loop few_rows_fp8 decode_attention fp8_tiles deterministic expert_stream
    ragged_verification block_drafters paged_attention weight_updates drafter_weights few_rows_layers host_cache
    engines skipped_drafts examples fp8_layers tile_matmul soak mtp_modules trees lossless acceptance drills
    data_parallel continued hybrid portable_experts expert_four prompt_attention assistant eagle_trees
    deterministic_hybrid kernels operations combined moe sampling portable_attention live delta_step expert_fp8
    suffix distribution nonsense llm hosts latent_models gated_delta following ladder rollout delta_chunk mxfp4
    seeing block_trees serve errors shipped token_map reported adapters accuracy pooling write_heads dflash
    scoring staged_start expert_plan draft_count peer_sum functional dflash2 checkpoint portable_delta
    own_kind_and_format
"""


# Each HTTP client reads all certificates that this machine trusts, for 60 ms. They may share them.
ssl.create_default_context = functools.cache(ssl.create_default_context)
# filelock has Python look at each event that an auditor may want, each import and each look at a frame, for forks.
with mock.patch.object(sys, "addaudithook"):
    import filelock  # noqa: F401


def _put(self: LRUCache, key: str, value: bytes) -> None:
    """In place of jax's, which with a limit of bytes looks at every file each time, under a lock that readers wait for,
    and without one lets readers see half a file."""
    loose = self.path / f"{key}.{os.getpid()}"
    loose.write_bytes(value)
    os.replace(loose, self.path / f"{key}-cache")


LRUCache.put = _put


def pytest_configure(config):
    """Keep the newest of the compiled programs, up to a limit. Before workers start: they read none meanwhile."""
    if hasattr(config, "workerinput"):
        return _rewrite_share(config, int(config.workerinput["workerid"][2:]), config.workerinput["workercount"])
    if not COMPILED.is_dir():
        return
    # Not those that are being written: a test of another run may start a Python that comes here.
    whole = [entry for entry in os.scandir(COMPILED) if entry.name.endswith("-cache")]
    files = [(entry.stat().st_mtime, entry.stat().st_size, entry.path) for entry in whole]
    total = itertools.accumulate(size for _, size, _ in sorted(files, reverse=True))
    for kept, (_, _, path) in zip(total, sorted(files, reverse=True), strict=True):
        if kept > MOST_BYTES:
            Path(path).unlink(missing_ok=True)


def _rewrite_share(config, number: int, count: int) -> None:
    """Rewrite assertions of this worker's share of files. All workers import all files, and in a fresh checkout each
    would rewrite all: 12 s of processor time."""
    state = config.stash[rewrite.assertstate_key]
    for path in [] if sys.dont_write_bytecode else sorted(ROOT.glob("tests/**/test_*.py"))[number::count]:
        kept = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(path, kept) is None:
            kept.parent.mkdir(exist_ok=True)
            source, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(state, code, source, kept)


def pytest_collection_modifyitems(items):
    """The longest files first: workers take whole files in this order, and none should be left with one at the end."""
    place = {f"test_{name}": i for i, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is a coroutine function in an event loop of its own, for five minutes at most."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**given), 300))
    return True


_unfreeze, _unfrozen = gc.unfreeze, []
gc.unfreeze = lambda: (_unfreeze(), _unfrozen.append(True))


def pytest_runtest_teardown():
    """Freeze again what a server that ended in a test has unfrozen, so that the next one doesn't look through it."""
    if _unfrozen:
        _unfrozen.clear()
        gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _forget_programs(request):
    """Drop a file's compiled programs after it, and the engines that it keeps: on a CPU each program holds some memory
    mappings, of which Linux allows a process 65,530, and one more is a segmentation fault.

    What the file before left is collected here, not after it: until then its last test's fixtures were in use. What
    stays isn't looked through again, which each time took a third of a second.
    """
    gc.collect()
    gc.freeze()
    yield
    for value in vars(request.module).values():
        if hasattr(value, "cache_clear") and value.__module__ in (request.module.__name__, "tests.support.engines"):
            value.cache_clear()
    jax.clear_caches()
