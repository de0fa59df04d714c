"""Warm-up: which programs it compiles, and when it keeps them."""

import dataclasses
import itertools
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxspec import LLM, pallas
from jaxspec.compiling import xla_options
from jaxspec.compiling.ladder import sizes_of
from jaxspec.compiling.programs import Programs
from jaxspec.compiling.round_timing import group
from jaxspec.engine import defaults
from jaxspec.rounds.packing import fit
from jaxspec.rounds.programs import LOGPROBS, MODES
from tests.support.engines import OPTIONS, checkpoint, uncompiled


def test_warm_up_compiles_for_any_number_of_requests(monkeypatch):
    """With programs that aren't compiled: to compile one of each size for the test above would take a minute."""
    compiled = uncompiled(monkeypatch)
    monkeypatch.setattr(defaults, "CPU", dataclasses.replace(defaults.CPU, some_drafts=True))
    llm = LLM(checkpoint(), "ngram", **OPTIONS | {"skip_warmup": False, "few_programs": False})
    warm, made, table = list(compiled), llm.engine.runner, llm.engine.scheduler.table
    assert made.drafts == (0, 1, 2, 4)
    for mode, count in itertools.product(MODES, (1, 2, 3)):
        numbers = made.round_times[group("round", mode, fit(count, sizes_of(made.shapes, "round", mode)))]
        assert tuple(numbers) == ((0, 4) if mode == LOGPROBS else made.drafts)
        for rounds, drafts in itertools.product((1, 4), numbers):
            made.round(list(range(count)), table, mode, rounds, drafts)
        made.first(list(range(min(count, 2))), table, mode)  # of as many as a prefill has blocks
    assert compiled == warm and {size for kind, size in warm if kind == "rounds_sampled"} == {1, 2, 3}


@pytest.mark.parametrize("hopper,dtype", [(True, jnp.bfloat16), (False, jnp.bfloat16), (True, jnp.float8_e4m3fn)])
def test_xla_tries_fewer_candidates_beside_hoppers_kernels(monkeypatch, hopper, dtype):
    programs = LLM(checkpoint(), **OPTIONS).engine.runner.programs
    monkeypatch.setattr(pallas.hopper, "kernels_run_here", lambda kernels: hopper)
    monkeypatch.setattr(programs, "_params", ({"layer": jnp.zeros(2, dtype), "norm": jnp.ones(2)}, None))
    given = {}

    class Lowered:
        def compile(self, options):
            jax.jit(lambda x: x).lower(0).compile(options)  # an option that XLA doesn't know is an error
            given[one] = options

    for one in (("round_greedy", 1), ("round_greedy", 8), ("prefill", 1)):
        programs._compile(*one, Lowered())
    triton = [options.get("xla_gpu_enable_triton_gemm", True) for options in given.values()]
    fewer = hopper and dtype == jnp.bfloat16
    assert programs.shapes.block >= 8 and triton == ([True, False, False] if fewer else [True] * 3)
    assert all(("xla_gpu_autotune_level" in options) == fewer for options in given.values())
    monkeypatch.setattr(programs, "division", SimpleNamespace(peers=True))
    programs._compile(*one, Lowered())  # no device runs a candidate while another waits for it
    assert given[one]["xla_gpu_autotune_level"] == 0


def test_xla_flags_count_for_more_than_fewer_candidates(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=4 --xla_gpu_enable_triton_gemm=true")
    assert list(xla_options.autotuning(jnp.zeros(2), 8)) == ["xla_gpu_experimental_enable_fusion_autotuner"]


def test_warm_up_keeps_programs_once_all_are_lowered(monkeypatch):
    """To keep one stops Python for a while, and those that aren't lowered yet can't be compiled."""
    done = []
    uncompiled(monkeypatch)
    monkeypatch.setattr(Programs, "_lower", lambda *_: done.append("lowered") or (None, None))
    monkeypatch.setattr(Programs, "_keep", lambda *_: done.append("kept"))
    programs = LLM(checkpoint(), "ngram", **OPTIONS | {"skip_warmup": False}).engine.runner.programs
    assert done == ["lowered"] * len(programs._compiled) + ["kept"] * len(programs._compiled)


def test_a_program_that_fails_ends_a_warm_up(monkeypatch):
    lowered = []
    monkeypatch.setattr(Programs, "_lower", lambda self, *one: time.sleep(0.05) or lowered.append(one) or (None, None))

    def fail(*_):
        raise RuntimeError("no room for this program")

    monkeypatch.setattr(Programs, "_compile", fail)
    with pytest.raises(RuntimeError, match="no room for this program"):
        LLM(checkpoint(), "ngram", **OPTIONS | {"skip_warmup": False, "few_programs": False})
    assert 0 < len(lowered) < 10


class FullUntil:
    """A lowered program whose compilation finds no memory so many times, unless nothing is tried."""

    def __init__(self, times: int, words: str = "RESOURCE_EXHAUSTED"):
        self.times, self.words = times, words

    def compile(self, options):
        if self.times and options.get("xla_gpu_autotune_level") != 0:
            self.times -= 1
            raise jax.errors.JaxRuntimeError(f"{self.words}: while trying to allocate 1.17GiB")
        return options


@pytest.mark.parametrize("times,tried", [(0, True), (1, True), (2, False)])
def test_programs_compile_where_there_is_no_room_to_try_kernels(caplog, times, tried):
    made = xla_options.compiled(FullUntil(times), {"a": 1}, "round_greedy 8")
    assert made == ({"a": 1} if tried else {"a": 1} | xla_options.NOTHING_TIMED)
    assert ("no memory left to try kernels for round_greedy 8" in caplog.text) != tried


def test_other_faults_of_a_compilation_are_not_tried_again():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        xla_options.compiled(FullUntil(1, "INTERNAL"), {}, "round_greedy 8")
