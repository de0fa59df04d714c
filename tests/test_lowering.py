"""Kernels that another process lowers are those that this one would have made, and none is lost with a process."""

import hashlib
import os
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from jaxspec.pallas import hopper, lowering
from jaxspec.pallas.decode_attention import _attend, division
from jaxspec.pallas.fp8_quantise import quantise_rows
from jaxspec.pallas.lowering import Call, Processes
from jaxspec.pallas.once import lower_once

FEW = 114  # multiprocessors, of a smaller card than this process lowers for by itself
LINES = "JAX_TRACEBACK_IN_LOCATIONS_LIMIT"


@pytest.fixture(scope="module")
def processes():
    """One, which is up. The locations that it writes are of one line: their callers differ."""
    os.environ[LINES] = "1"
    hopper.pretend(FEW)
    made = Processes(1)
    hopper.pretend(None)
    del os.environ[LINES]
    wait_until(lambda: made._all[0].is_up())
    yield made
    made.stop()


def wait_until(condition, seconds=60):
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)


def call_of(function, *shapes, none=0, **static):
    """`none`: how many arguments behind those of these shapes are None."""
    given = *(jax.ShapeDtypeStruct(*shape) for shape in shapes), *[None] * none
    leaves, tree = jax.tree.flatten((given, {}))
    return Call(function, static, tree, tuple(leaves))


ALONE = """
import hashlib
from jaxspec.pallas import hopper
from tests.test_lowering import FEW, attention
hopper.pretend(FEW)
exported, tree = attention().lower()
print(hashlib.sha256(exported.mlir_module_serialized).hexdigest(), tree)
"""


def attention():
    """A kernel whose share-out follows from the number of multiprocessors, which a process without a GPU is told."""
    kv, ints = ((2, 4, 2, 1, 64, 128), jnp.bfloat16), jnp.int32
    return call_of(_attend, ((60, 1, 4, 128), jnp.bfloat16), kv, ((), ints), ((60, 4), ints), ((60,), ints), none=2)


def test_another_process_makes_the_same_module(processes):
    """As a process that lowers by itself. This one has traced parts of it for other tests, from other lines."""
    told = {"JAX_PLATFORMS": "cpu", LINES: "1"}
    alone = subprocess.run([sys.executable, "-c", ALONE], env=os.environ | told, capture_output=True, text=True)
    exported, tree = processes._all[0].lower(attention().packed())
    assert alone.stdout.split("\n")[0] == f"{hashlib.sha256(exported.mlir_module_serialized).hexdigest()} {tree}"
    many = division(60, 128)
    hopper.pretend(FEW)
    few = division(60, 128)
    hopper.pretend(None)
    assert many != few


def test_what_it_cannot_find_is_lowered_here(processes):
    @lower_once("local")
    def local(x, *, interpret=False):
        return x + 1

    exported, _ = processes.lower(call_of(local, ((8,), jnp.float32)))
    assert "add" in exported.mlir_module()


def test_errors_are_raised_here(processes, caplog):
    with caplog.at_level("WARNING"), pytest.raises(TypeError, match="unexpected"):
        processes.lower(call_of(quantise_rows, ((512, 1024), jnp.bfloat16), unexpected=1))
    assert processes._all[0].alive and "is lowered here, more slowly" in caplog.text


def test_one_thread_traces_at_a_time_but_for_kernels(processes):
    """A thread that waits for a kernel leaves its turn to another, and has it back afterwards."""
    order = []

    def trace(name, others):
        with lowering.lowering_by(processes):
            order.append(name)
            with lowering.waiting():
                others.wait(10)
            order.append(name)

    first = threading.Event()
    thread = threading.Thread(target=trace, args=("one", first))
    thread.start()
    wait_until(lambda: order)
    free = threading.Event()
    free.set()
    trace("other", free)
    first.set()
    thread.join()
    assert order == ["one", "other", "other", "one"]


def test_a_turn_is_not_waited_for_forever(processes):
    """jax traces a function once, and others wait for that. So who has the turn may wait for who left it."""
    traced = threading.Event()

    def trace():
        with lowering.lowering_by(processes):
            with lowering.waiting():
                started.set()
                other_has_it.wait(10)
            traced.set()

    started, other_has_it = threading.Event(), threading.Event()
    thread = threading.Thread(target=trace)
    thread.start()
    started.wait(10)
    with lowering.lowering_by(processes):
        other_has_it.set()
        assert traced.wait(10)
    thread.join()
    with lowering.lowering_by(processes):  # and it is free afterwards
        pass


def test_a_dead_process_loses_no_kernel():
    made = Processes(1)
    made._all[0]._process.kill()
    exported, _ = made.lower(call_of(quantise_rows, ((128, 256), jnp.bfloat16)))
    assert "mosaic_gpu" in exported.mlir_module()
    wait_until(lambda: not made._all[0].is_up() and not made._all[0].alive)
    made.stop()
