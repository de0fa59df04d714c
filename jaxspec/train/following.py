"""A drafter that follows its target: between updates of the target's weights it learns from the newest texts."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int

from jaxspec.config.json_values import shown
from jaxspec.config.options import ConfigError
from jaxspec.drafters.blocks.domino import Domino
from jaxspec.drafters.blocks.dspark import DSpark
from jaxspec.drafters.blocks.lilicorr import LiLiCorr
from jaxspec.drafters.dflash import DERIVED, DFlash
from jaxspec.drafters.eagle import Eagle3
from jaxspec.engine.functional import integers
from jaxspec.engine.llm import LLM
from jaxspec.engine.scoring import any_order
from jaxspec.train.blocks.dflash import DFlashObjective
from jaxspec.train.blocks.domino import DominoObjective
from jaxspec.train.blocks.dspark import DSparkObjective
from jaxspec.train.blocks.lilicorr import LiLiCorrObjective
from jaxspec.train.continued import untrainable
from jaxspec.train.eagle3 import Eagle3Objective, MtpObjective
from jaxspec.train.loop import Settings, optimizer_of, step_function
from jaxspec.train.objective import Batch, Report

BLOCKS = {DFlash: DFlashObjective, DSpark: DSparkObjective, Domino: DominoObjective, LiLiCorr: LiLiCorrObjective}


class Follower:
    """Trains an engine's drafter on texts that its target wrote. The engine gets the result by `update_weights`:

        follower = Follower(llm, learning_rate=1e-4)
        follower.learn(texts, prompt_lengths)
        llm.update_weights(draft=follower.params())

    **Arguments:** `llm`: its drafter is an EAGLE-3 or MTP one, or of `BLOCKS`, unquantised and on one device.
    `learning_rate`: constant. `unroll`: of EAGLE-3 and MTP, drafts in a row to train on; None: as many as the engine
    drafts. `optimizer`: adamw or muon.

    **Raises:** `ConfigError` for another drafter, and for what is no engine, rate, unroll or optimizer.
    """

    def __init__(self, llm: LLM, learning_rate: float = 1e-4, unroll: int | None = None, optimizer: str = "adamw"):
        if not isinstance(llm, LLM):
            raise ConfigError(f"llm must be a jaxspec.LLM, whose drafter is to follow, got {shown(llm)}")
        if optimizer not in ("adamw", "muon"):
            raise ConfigError(f"optimizer must be adamw or muon, got {shown(optimizer)}")
        if not (isinstance(learning_rate, Real) and 0 < learning_rate < math.inf):
            raise ConfigError(f"learning_rate must be a number above 0, got {shown(learning_rate)}")
        if unroll is not None and not (type(unroll) is int and unroll >= 1):
            raise ConfigError(f"unroll must be an integer of at least 1, or None, got {shown(unroll)}")
        self._runner = runner = llm.engine.runner
        drafter, given = runner.draft.drafter, runner.draft.params
        reason = "it is on several devices" if runner.config.tp_size > 1 else untrainable(drafter, given)
        if reason is None and isinstance(drafter, DFlash) and type(drafter) not in BLOCKS:
            reason = f"of block drafters {', '.join(each.__name__ for each in BLOCKS)} can"
        if reason is not None:
            raise ConfigError(f"--draft {runner.draft.name} can't follow its target: {reason}")
        theirs = {id(array) for array in jax.tree.leaves(runner.model.params)}
        block = isinstance(drafter, DFlash)
        fixed = {"head_copy", *(("embed", "head", *DERIVED) if block else ())}
        own = {
            name: value
            for name, value in given.items()
            if name not in fixed and not any(_fixed(array, theirs) for array in jax.tree.leaves(value))
        }
        model = any_order(runner.model.config), runner.model.dtype, "soft"
        if block and unroll is not None:
            raise ConfigError(f"unroll is {unroll}, and --draft {runner.draft.name} drafts whole blocks; leave it out")
        if block:
            self._objective = BLOCKS[type(drafter)](drafter, *model, gamma=drafter.block_size / 2)
        else:
            kind = Eagle3Objective if isinstance(drafter, Eagle3) else MtpObjective
            self._objective = kind(drafter, *model, unroll or drafter.longest)
        settings = Settings(steps=1, learning_rate=learning_rate, optimizer=optimizer, weight_decay=0.0)
        change = optimizer_of(settings)
        trained = jax.tree.map(lambda x: jnp.array(x, jnp.float32), own)
        mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
        # Weights that were updated are committed to a device, others aren't. Placed alike, they have one program.
        self._place = NamedSharding(mesh, PartitionSpec())
        self._state = jax.device_put({"params": trained, "moments": change.init(trained)}, self._place)
        self._step = step_function(self._objective, change, mesh)
        self._rate, self._done = np.float32(learning_rate), 0

    def learn(
        self, tokens: Int[Any, "b t"], prompts: int | Int[Any, " b"], lengths: int | Int[Any, " b"] | None = None
    ) -> Report:
        """Take one step. The target's weights are the engine's at this moment.

        **Arguments:** `tokens`: int[b, t], shorter texts padded at their ends. `prompts`: how many tokens of each text
        are its prompt. `lengths`: how many tokens each text has; None: t.

        **Raises:** `RequestError` for other shapes, and for texts, prompts or lengths that can't be.
        """
        tokens = integers("tokens", tokens, ("b", "t"), 0, self._runner.model.config.vocab_size - 1)
        (b, t), each = tokens.shape, lambda value: np.full(b, value) if np.ndim(value) == 0 else value
        size = integers("lengths", each(t if lengths is None else lengths), (b,), 1, t)
        prompts = integers("prompts", each(prompts), (b,), 0, size)
        row = np.arange(t)
        answer = (row >= prompts[:, None]) & (row < size[:, None])
        batch = Batch(tokens, np.where(row < size[:, None], 0, size[:, None]).astype(np.int32), answer)
        self._state, report = self._step(self._state, *self._given(batch))
        self._done += 1
        return report

    def compile(self, b: int, t: int) -> None:
        """Compile the step for texts i32[b, t], which the first `learn` does otherwise."""
        tokens = np.zeros((b, t), np.int32)
        self._step.lower(self._state, *self._given(Batch(tokens, tokens, tokens > 0))).compile()

    def _given(self, batch: Batch) -> tuple[Any, ...]:
        """A step's arguments beside its state. What changes as a run goes on is as at its end."""
        params, learned = self._runner.draft.params, self._state["params"]
        frozen = {name: value for name, value in params.items() if name not in learned and name != "head_copy"}
        weights = jax.device_put((frozen, self._runner.model.params), self._place)
        return *weights, batch, self._rate, jax.random.key(self._done), np.float32(1.0)

    def params(self) -> dict[str, Any]:
        """The drafter's weights, as `LLM.update_weights` takes them: copies, since the next step overwrites its own."""
        return jax.tree.map(jnp.copy, self._state["params"])


def _fixed(array: Any, theirs: set[int]) -> bool:
    """Whether an array is the target's, or no weight."""
    return id(array) in theirs or not jnp.issubdtype(array.dtype, jnp.inexact)
