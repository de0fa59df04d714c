"""Programs of a vision tower: kept for the next start, made behind a start in stages, with the kernels requested."""

import threading
import types

import jax
import numpy as np
import pytest

from jaxspec.checkpoint.vision import dummy
from jaxspec.compiling import tower_programs, xla_options
from jaxspec.compiling.tower_programs import TowerPrograms
from jaxspec.decoder.towers import places
from jaxspec.engine.async_llm import AsyncLLM
from jaxspec.models.vision import QwenTower
from jaxspec.pallas import hopper

TOWER = QwenTower(1, 8, 2, 8, 6, 4, 4, 2)
SIZES, ROWS = (16, 32), 5


class Store(dict):
    """Keeps programs as `Executables` does, which can't on a CPU."""

    def load(self, key, arguments):
        return self.get((key, str(jax.tree.map(np.shape, arguments))))

    def save(self, key, arguments, program, notes):
        self[key, str(jax.tree.map(np.shape, arguments))] = program, notes


@pytest.fixture
def traced(monkeypatch):
    """The kernels requested at each trace of the tower."""
    requested, embed = [], tower_programs.embed_pictures
    monkeypatch.setattr(
        tower_programs, "embed_pictures", lambda *of: requested.append(hopper.requested_kernels()) or embed(*of)
    )
    return requested


def programs(store=None, params=None):
    return TowerPrograms(TOWER, params or dummy(TOWER, "float32", 0), ROWS, SIZES, None, store)


def test_a_second_start_finds_all_programs(traced):
    store, params = Store(), dummy(TOWER, "float32", 0)
    first = programs(store, params)
    first.warm_up("float32", staged=False)
    assert len(traced) == len(SIZES) and first.largest is first.get(32, "float32")
    again = programs(store, jax.eval_shape(lambda: params))
    again.warm_up("float32", staged=False)
    assert len(traced) == len(SIZES) == len(store)
    patches, into = places(TOWER, [(1, 4, 4)], 16), np.array([0, 4, 2, 1])
    pixels = np.ones((16, TOWER.patch), np.float32)
    held = again.get(16, "float32")(params, np.zeros((ROWS, TOWER.out), np.float32), pixels, patches, into)
    assert np.asarray(held).any(1).tolist() == [True, True, True, False, True]


def test_programs_behind_a_start_have_the_kernels_requested_then(traced, monkeypatch):
    go, made = threading.Event(), TowerPrograms._made
    monkeypatch.setattr(TowerPrograms, "_made", lambda *of: go.wait(30) and made(*of))
    with hopper.use_kernels("plain"):
        here = programs()
    here.warm_up("float32", staged=True)
    assert here.starting and here.largest is None
    go.set()
    here._behind.join(30)
    assert not here.starting and traced == ["plain"] * len(SIZES) and here.largest is not None


def test_a_tower_is_compiled_where_there_is_no_room_to_try_kernels(monkeypatch, caplog):
    asked, compiled = [], jax.stages.Lowered.compile

    def full(lowered, options=None):
        asked.append(options)
        if options.get("xla_gpu_autotune_level") != 0:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: while trying to allocate 1.17GiB")
        return compiled(lowered)

    monkeypatch.setattr(jax.stages.Lowered, "compile", full)
    assert programs().get(16, "float32") is not None
    assert asked == [{}, {}, xla_options.NOTHING_TIMED]
    assert "no memory left to try kernels for pictures of 16 patches" in caplog.text


def test_prompts_with_pictures_wait_for_a_start_in_stages():
    added, llm = [], AsyncLLM.__new__(AsyncLLM)
    runner = types.SimpleNamespace(lacks_tower=True, programs=types.SimpleNamespace(lacks=lambda *_: False))
    llm.engine, llm._early = types.SimpleNamespace(runner=runner, add=added.append), []
    params = types.SimpleNamespace(prompt_logprobs=None)
    text, seen = (
        types.SimpleNamespace(params=params, matchers=None, adapter=None, pictures=each) for each in (None, 1)
    )
    for each in (seen, text):
        llm._begin(each, types.SimpleNamespace())
    assert added == [text]
    runner.lacks_tower = False
    llm._begin_early()
    assert added == [text, seen]
