"""The greedy chain of a block's drafts in one kernel: each draft's embedding, by a matrix, adds to the next logits."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from jaxspec.models.weights import Weight
from jaxspec.pallas.dense import markov_chain
from jaxspec.pallas.hopper import too_few_processors
from jaxspec.pallas.operation import HOPPER, Implementation
from jaxspec.parallel.collectives import devices


def greedy_chain(
    base: Float[Array, "b n v"], newest: Int[Array, " b"], before: Float[Array, "w k"], after: Weight
) -> Int[Array, "b n"] | None:
    """The tokens of n steps behind the `newest` ones, as `markov_chain.chain` takes them; None where no kernel
    serves."""
    call = base, newest, before, after
    return CHAIN.run(*call) if CHAIN.takes(*call) else None


def _refused(base, newest, before, after) -> str | None:
    if devices() > 1 or after.quantised or after.adapters is not None:
        return "a matrix that isn't whole and unquantised"
    (b, _, v), (_, rank) = base.shape, before.shape
    return markov_chain.supported(b, rank, v, (before.dtype, after.dtype)) or too_few_processors(markov_chain.BLOCKS)


def _run(base, newest, before, after):
    return markov_chain.chain(base, before[newest], before, after.unquantised)


CHAIN = Implementation("markov_chain", HOPPER, _refused, _run)
