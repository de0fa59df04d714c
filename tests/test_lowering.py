"""Kernels that another process lowers are those that this one would have made, and none is lost with a process."""

import os
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


@pytest.fixture(scope="module")
def processes():
    """One, which is up, and writes locations of one line as this process does: a caller's differ."""
    option = "jax_traceback_in_locations_limit"
    before, os.environ[option.upper()] = getattr(jax.config, option), "1"
    jax.config.update(option, 1)
    hopper.pretend(FEW)
    made = Processes(1)
    del os.environ[option.upper()]
    wait_until(lambda: made._all[0].is_up())
    yield made
    made.stop()
    hopper.pretend(None)
    jax.config.update(option, before)


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


def test_another_process_makes_the_same_module(processes):
    """Of a kernel whose share-out follows from the number of multiprocessors, which a process without a GPU is told."""
    kv, ints = ((2, 4, 2, 1, 64, 128), jnp.bfloat16), jnp.int32
    shapes = ((60, 1, 4, 128), jnp.bfloat16), kv, ((), ints), ((60, 4), ints), ((60,), ints)
    call = call_of(_attend, *shapes, none=2)
    there, tree = processes._all[0].lower(call.packed())
    here, own = call.lower()
    assert there.mlir_module_serialized == here.mlir_module_serialized
    assert tree == own and there.out_avals == here.out_avals
    few = division(60, 128)
    hopper.pretend(None)
    assert division(60, 128) != few
    hopper.pretend(FEW)


def test_what_it_cannot_find_is_lowered_here(processes):
    @lower_once("local")
    def local(x, *, interpret=False):
        return x + 1

    exported, _ = processes.lower(call_of(local, ((8,), jnp.float32)))
    assert "add" in exported.mlir_module()


def test_errors_are_raised_here(processes):
    with pytest.raises(TypeError, match="unexpected"):
        processes.lower(call_of(quantise_rows, ((512, 1024), jnp.bfloat16), unexpected=1))
    assert processes._all[0].alive


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
