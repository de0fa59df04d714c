"""A node other than node 0: it runs the programs that node 0 dispatches, on its own devices' part of the model."""

from __future__ import annotations

import logging

import jax

from jaxspec.config.engine_config import EngineConfig
from jaxspec.engine.runner import Runner
from jaxspec.parallel.hosts import Follower

log = logging.getLogger("jaxspec")


def follow(options: EngineConfig, hosts: Follower) -> None:
    """Load this node's part, and repeat what node 0 does until it ends.

    **Raises:** as `Runner`; whatever a program raises.
    """
    runner = Runner(options, hosts=hosts)
    log.info("node %d is ready and follows node 0", hosts.rank)
    replay(runner, hosts)


def replay(runner: Runner, hosts: Follower) -> None:
    """Run programs as they are told. Node 0 is at most one ahead of the results that it has read, and so is this node:
    it waits for the result before the last."""
    opened: tuple = ()  # what the programs of a round with grammars hand on: proposal, logits, features
    results: list[jax.Array] = []
    while (order := hosts.order()) is not None:
        kind, arrays = order
        stage = kind.partition("_")[0]
        if stage == "reset":
            runner.reset()
        elif stage in ("admit", "clear"):
            runner.state = getattr(runner.programs, stage)(runner.state, *arrays)
        else:
            packed, *masks = arrays
            handed = opened if stage == "conclude" else (opened[0].replace(probs=None),) if stage == "forward" else ()
            runner.state, *out = runner.programs.dispatch(kind, runner.state, packed, *handed, *masks)
            match stage:
                case "draft":
                    opened = (out[0],)
                case "forward":
                    opened += tuple(out)
                case "first" | "round" | "rounds" | "conclude" | "masked":
                    results.append(out[0])
            if len(results) > 1:
                jax.block_until_ready(results.pop(0))
