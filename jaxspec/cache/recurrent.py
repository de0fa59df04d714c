"""Recurrent states, the memory of fixed size: S = decay S + u k', and the windows of convolutions before them.

Each group of layers whose states have one shape has a pool of state slots: 0 to n - 1 are those of the n request slots,
n is the dummy's, and those from n + 1 on hold snapshots, states behind prefixes in the prefix tree. All groups have the
same slots. What a round adds to a state is kept as records, which the next round replays (`delta_pool`).
"""

from __future__ import annotations

import flax.struct
import jax

from jaxspec.models.memory import Recurrence
from jaxspec.models.model_config import ModelConfig
from jaxspec.pallas.recurrence import delta_pool
from jaxspec.pallas.recurrence.causal_conv import Windows, empty_windows
from jaxspec.pallas.recurrence.delta_pool import DeltaPool

NOTHING = -1  # as a state slot to start from: the state before any token; to keep a snapshot in: none is kept


@flax.struct.dataclass
class States:
    """The states of a group of layers after the tokens so far, by slot, and the newest inputs of their convolution;
    either is None where there is none."""

    delta: DeltaPool | None
    windows: Windows | None


def empty_states(config: ModelConfig, slots: int, rows: int, dtype: str, state_dtype: str) -> tuple[States, ...]:
    """States before any token, of each group, in `state_dtype`; a convolution's are inputs, in `dtype`."""

    def empty(memory: Recurrence, layers: int) -> States:
        if not memory.value_heads:
            kept = memory.channels, memory.taps, memory.dtype or dtype
            return States(None, empty_windows(layers, slots, rows, *kept))
        delta = delta_pool.empty(
            layers,
            slots,
            rows,
            key_heads=memory.key_heads,
            value_heads=memory.value_heads,
            key_width=memory.key_dim,
            value_width=memory.value_dim,
            dtype=state_dtype,
            key_dtype=dtype,
            channel_decay=memory.channel_decay,
        )
        if not memory.channels:
            return States(delta, None)
        return States(delta, empty_windows(layers, slots, rows, memory.channels, memory.taps, dtype))

    return tuple(empty(memory, layers) for memory, layers in config.decoder.groups(Recurrence).items())


def state_bytes(config: ModelConfig, rows: int, dtype: str, state_dtype: str = "float32") -> tuple[int, int]:
    """Bytes of one state slot, and of the states in it alone, without the records of a round of `rows` rows."""
    slot = jax.eval_shape(lambda: empty_states(config, 1, rows, dtype, state_dtype))
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    return size(slot), size([group.delta.state for group in slot if group.delta])
