"""A process that lowers programs for another, which `lowering` starts: the inside."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pickle
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

import jax
from jax.sharding import AbstractMesh

from jaxspec.compiling.ladder import One
from jaxspec.compiling.lowering import ASKS, UP, Given, Module
from jaxspec.compiling.programs import Programs
from jaxspec.pallas import hopper


def answer(descriptor: int) -> None:
    """Lower what is asked for on the pipe until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the pipe's end is what counts
    logging.getLogger("jaxspec").propagate = False  # warnings go back with a program
    logging.getLogger("jaxspec").addHandler(logging.NullHandler())
    with contextlib.suppress(OSError, EOFError):
        pipe = Connection(descriptor)
        send = lambda answer: pipe.send_bytes(pickle.dumps(answer))  # noqa: E731
        send(ASKS)
        data = pipe.recv_bytes()
        try:
            lower = lowering_of(pickle.loads(data))
        except Exception as error:
            send(f"{type(error).__name__}: {error}")
            return
        send(UP)
        while True:
            one = pickle.loads(pipe.recv_bytes())
            try:
                result = lower(one)
            except Exception as error:  # whoever asked lowers it, and learns more
                result = f"{type(error).__name__}: {error}"
            send(result)


def lowering_of(given: Given) -> Callable[[One], Module]:
    """Function that lowers a program as the process that gave this would."""
    for name, value in given.options:
        jax.config.update(name, value)
    hopper.lower_for(given.processors)
    platform = "cpu" if given.processors is None else "cuda"
    made_of, alone = given.made_of, contextlib.nullcontext
    if (device := hopper.abstract_device()) is not None:  # Triton's lowering asks the mesh what GPU it is for
        *rest, division = made_of
        if division is None:
            alone = partial(jax.sharding.use_abstract_mesh, AbstractMesh((), (), abstract_device=device))
        else:
            division = dataclasses.replace(division, mesh=division.mesh.update(abstract_device=device))
        made_of = *rest, division
    with hopper.use_kernels(given.kernels):
        programs = Programs(*made_of)

    def lower(one: One) -> Module:
        with alone():
            return programs.exported(one, given.state, platform)

    return lower
