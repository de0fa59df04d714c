"""Programs that another process lowers are those that this one would have made, and none is lost with a process."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
import sys
import threading
import time
from concurrent.futures import CancelledError

import jax
import numpy as np
import pytest

from jaxspec.compiling import ladder
from jaxspec.compiling.ladder import ladder_of
from jaxspec.compiling.lowering import Given, Module, Order, Process, Processes
from jaxspec.compiling.lowering_process import lowering_of
from jaxspec.compiling.programs import Programs
from jaxspec.config.engine_config import EngineConfig
from jaxspec.drafters.base import Drafter
from jaxspec.engine import defaults, runner
from jaxspec.pallas import hopper
from jaxspec.pallas.attention.decode_attention import division
from tests.compiling.test_programs import WIDE
from tests.support.engines import SELF, engine
from tests.support.sample import rare
from tests.support.tiny import tiny_config

FEW = 114  # multiprocessors, of a smaller card than this process lowers for by itself


def given(programs: Programs, state, processors=None) -> bytes:
    return Given.of(programs.made_of(), state, "auto", processors).packed()


@pytest.fixture(scope="module")
def here() -> runner.Runner:
    """Runner of an engine on this CPU, whose drafter is a model."""
    return engine(SELF).engine.runner


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> runner.Runner:
    """Runner of an engine with a GPU's defaults, whose model has kernels."""
    folder = tmp_path_factory.mktemp("wide")
    (folder / "config.json").write_text(json.dumps(tiny_config("qwen3", **WIDE)))
    options = dict(load_format="dummy", dtype="bfloat16", skip_warmup=True, max_total_tokens=2048)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(defaults, "here", lambda: defaults.GPU)
        return runner.Runner(EngineConfig(model=str(folder), draft="ngram", max_running_requests=8, **options))


@pytest.fixture(scope="module")
def processes(here, wide):
    """One that lowers for this CPU, one for a GPU, and the first program of the latter."""
    both = Process(given(here.programs, here.state)), Process(given(wide.programs, wide.state, FEW))
    for each in both:
        each.come_up()
    yield *both, both[1].lower(("conclude_logprobs", 8))
    for each in both:
        each.stop()


@pytest.mark.parametrize(
    "kind", ["prefill", rare("round_greedy"), rare("round_sampled"), "admit", rare("conclude_sampled")]
)
def test_a_program_of_another_process_computes_the_same_bits(here, processes, kind):
    programs = here.programs
    size = next(n for k, n in ladder_of(here.shapes) if k == kind)
    arguments = programs._arguments(kind, size, here.state)
    lowered, kernels = processes[0].lower((kind, size)).lower(arguments, 0 if kind == "admit" else 2)
    other, own = lowered.compile(), programs._lower(kind, size, here.state)[0].compile()
    assert not kernels and other.in_tree == own.in_tree and other.out_tree == own.out_tree
    alias = [program.memory_analysis().alias_size_in_bytes for program in (own, other)]
    assert alias[0] == alias[1] > 0
    bits = np.random.default_rng(0)
    filled = lambda x: bits.integers(0, 2, x.shape).astype(x.dtype)  # noqa: E731
    results = []
    for program in (own, other):
        handed = jax.tree.map(filled, programs._handed(kind, size, here.state))
        bits = np.random.default_rng(0)
        results.append(program(*jax.tree.map(jax.numpy.copy, arguments), *handed))
    for one, two in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(one, two)


def targets(text: str) -> set[str]:
    return set(re.findall(r"custom_call @(\w+)", text)) | set(re.findall(r'kernel_hash = "(?:[^"\\]|\\.)*"', text))


def test_a_gpus_program_has_the_kernels_that_it_would_have_here(wide, processes):
    """Their modules are equal, so that XLA compiles each once. The number of multiprocessors is a GPU's elsewhere."""
    kind, size = "round_sampled", 8
    made = processes[1].lower((kind, size))
    hopper.lower_for(FEW)
    try:
        few = division(60, 128)
        own = Module.of(wide.programs._jits[kind], wide.programs._arguments(kind, size, wide.state), tuple, "cuda")
    finally:
        hopper.lower_for(None)
    assert few != division(60, 128)
    texts = [jax.export.deserialize(bytearray(each.exported)).mlir_module() for each in (made, own)]
    assert targets(texts[0]) == targets(texts[1]) and len(targets(texts[0])) > 3
    alone = {kernel.name for kernel in (*processes[2].alone, *made.alone)}
    assert "decode_attention" in made.kernels and made.kernels.keys() >= alone > set()


def test_what_a_process_cannot_lower_is_told(processes, caplog):
    with caplog.at_level("WARNING"):
        assert processes[0].lower(("round_greedy_9", 1)) is None
    assert "round_greedy_9 1 is lowered here, more slowly" in caplog.text and "KeyError" in caplog.text
    assert processes[0].alive


def helped(here, monkeypatch, processes: Processes) -> tuple[Programs, list]:
    """Programs that these lower, and those that are compiled."""
    programs, compiled = Programs(*here.programs.made_of()), []
    monkeypatch.setattr(Processes, "begin", lambda *_: processes)
    monkeypatch.setattr("jaxspec.compiling.programs.FEW", 0)
    monkeypatch.setattr(Programs, "_compile", lambda self, kind, size, _: compiled.append((kind, size)))
    return programs, compiled


def test_processes_lower_before_anybody_asks(here, monkeypatch):
    """Compile the requested programs alone, lowered by processes beforehand, all of which end afterwards."""
    wanted = [one for one in ladder_of(here.shapes) if one[0] in ("first_greedy", "admit")]
    processes = Processes(1, given(here.programs, here.state), [("forward", 1), *wanted[::-1], ("nothing", 1)])
    while processes._lowered.keys() != {("forward", 1), *wanted, ("nothing", 1)}:
        time.sleep(0.01)
    programs, compiled = helped(here, monkeypatch, processes)
    monkeypatch.setattr(Programs, "_lower", lambda *_: pytest.fail("it is lowered already"))
    programs.warm_up(here.state, lambda one: one[0] in ("first_greedy", "admit"))
    assert sorted(compiled) == sorted(wanted) and len(wanted) > 1
    assert not processes._lowered and not any(each.alive for each in processes.all) and programs._others is None


def test_the_first_in_order_is_taken_first(here):
    processes = Processes(1, given(here.programs, here.state), order := [("nothing", n) for n in range(4)])
    while len(processes._lowered) < 4:
        time.sleep(0.01)
    processes.keep(set(order[1:]))
    assert [processes.take() for _ in order[1:]] == [(one, None) for one in order[1:]]
    processes.stop()


def test_kernels_of_a_programs_arguments_come_with_it(processes):
    """Arguments are the results of programs before it, and their shapes come of tracing those, kernels and all."""
    first = processes[2]
    assert {kernel.name for kernel in first.alone} >= {"decode_attention"} and "decode_attention" in first.kernels


def test_a_dead_process_loses_no_program(here, monkeypatch, caplog):
    """It dies while it lowers the first."""
    lower = Process.lower
    monkeypatch.setattr(Process, "lower", lambda self, one: self._process.kill() or lower(self, one))
    wanted = [one for one in ladder_of(here.shapes) if one[0] in ("first_greedy", "admit")]
    programs, compiled = helped(here, monkeypatch, Processes(1, given(here.programs, here.state), wanted))
    with caplog.at_level("WARNING"):
        programs.warm_up(here.state, lambda one: one[0] in ("first_greedy", "admit"))
    assert sorted(compiled) == sorted(wanted) and len(wanted) > 1
    assert "another process couldn't: it died" in caplog.text and "without other processes" in caplog.text


@pytest.mark.exhaustive  # nor does a dead process
def test_an_answer_that_cannot_be_read_loses_no_program(here, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda raised: failed.append(raised.exc_type))
    monkeypatch.setattr(Process, "lower", lambda self, one: pickle.loads(b"not a module"))
    failed, programs = [], [("admit", 1), ("admit", 2)]
    processes = Processes(1, given(here.programs, here.state), programs)
    assert sorted(processes.take() for _ in programs) == [(one, None) for one in programs]
    assert failed == [pickle.UnpicklingError] and not processes.all[0].alive


def test_the_second_stage_is_lowered_while_the_first_compiles(here, monkeypatch):
    begun = []
    monkeypatch.setattr(Processes, "begin", lambda *given: begun.append(given[-1]))
    programs = Programs(*here.programs.made_of())
    compiling = threading.Event()

    def compile_first(self, kind, size, _):
        compiling.set()
        while not begun:
            time.sleep(0.01)
        raise RuntimeError("it can't be compiled")

    monkeypatch.setattr(Programs, "_lower", lambda *_: (None, None))
    monkeypatch.setattr(Programs, "_compile", compile_first)
    with pytest.raises(RuntimeError):
        programs.warm_up_in_stages(here.state)
    first = ladder.essential(here.shapes)
    assert compiling.is_set() and len(begun) == 1
    assert set(begun[0]) == set(ladder_of(here.shapes)) - first and programs._others is None


def test_a_process_that_finds_no_class_says_so(caplog):
    made = Processes(1, b"cnowhere\nDrafter\n.", [("admit", 1)])
    with caplog.at_level("WARNING"):
        assert made.take() == (("admit", 1), None)
    assert "No module named 'nowhere'" in caplog.text
    made.stop()


def test_processes_that_do_not_come_up_are_not_waited_for(caplog, monkeypatch):
    monkeypatch.setattr(Process, "come_up", lambda self: self._process.wait())
    made = Processes(1, b"", [("admit", 1)])
    made._late = 0
    with caplog.at_level("WARNING"):
        assert made.take() == (("admit", 1), None)
    assert "none came up in 60 s" in caplog.text
    made.stop()


@pytest.mark.parametrize("of_a_script", [False, True])
def test_a_drafter_that_another_process_lacks_is_lowered_here(here, monkeypatch, caplog, of_a_script):
    @dataclasses.dataclass(frozen=True)
    class Local(Drafter):
        num_draft_tokens: int = 3

    if of_a_script:
        Local.__module__, Local.__qualname__ = "__main__", "Local"
        monkeypatch.setattr(sys.modules["__main__"], "Local", Local, raising=False)
    config, _, shapes = here.programs._made_of
    programs = Programs(config, Local(), shapes, *here.programs._params)
    monkeypatch.setattr(hopper, "kernels_here", lambda: None)
    monkeypatch.setattr("jaxspec.compiling.lowering.cores", lambda: 16)
    with caplog.at_level("DEBUG"):
        programs._begin_lowering(ladder_of(shapes), here.state)
    assert programs._others is None
    assert "programs are lowered by this process alone" in caplog.text


def test_processes_share_programs_out_by_their_kernels():
    order = Order(
        [("prefill", 1), ("round_greedy", 1), ("round_greedy", 2), ("round_sampled", 1), ("round_sampled", 2)]
    )
    assert order.take("a") == ("prefill", 1)
    assert order.take("b") == ("round_greedy", 1)
    assert order.take("a") == ("round_greedy", 2)  # nobody's yet
    assert order.take("b") == ("round_sampled", 1)
    assert order.take("b") == ("round_sampled", 2)  # another's, but nothing else is left
    order = Order([("round_greedy", 1), ("round_greedy", 2)])
    assert [order.take(None) for _ in range(3)] == [("round_greedy", 1), ("round_greedy", 2), None]


def test_a_process_that_is_stopped_ends_what_waits_for_it(here):
    made = Processes(1, given(here.programs, here.state), [("admit", 1)])
    made.stop()
    with pytest.raises(CancelledError):
        made.all[0].lower(("admit", 1))
    with pytest.raises(CancelledError):
        made.take()


@pytest.mark.parametrize("family,sizes,kernel", [
    ("deepseek_v3", {"kv_lora_rank": 256, "num_hidden_layers": 1, "first_k_dense_replace": 1}, "portable_latent"),
    rare("nemotron_h", {}, "portable_delta_step"),
])  # fmt: skip
def test_tritons_kernels_are_lowered_without_a_gpu(monkeypatch, tmp_path, family, sizes, kernel):
    """Hopper has no kernel of its own for these."""
    monkeypatch.setattr(defaults, "here", lambda: defaults.GPU)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(family, **WIDE | sizes)))
    options = dict(load_format="dummy", dtype="bfloat16", skip_warmup=True, max_total_tokens=2048)
    made = runner.Runner(EngineConfig(model=str(tmp_path), max_running_requests=45, **options))
    try:
        lower = lowering_of(Given.of(made.programs.made_of(), made.state, "auto", FEW))
        module = lower(("round_greedy", 45))
    finally:
        hopper.lower_for(None)
    assert kernel in module.kernels
    assert "__gpu$xla.gpu.triton" in jax.export.deserialize(bytearray(module.exported)).mlir_module()
