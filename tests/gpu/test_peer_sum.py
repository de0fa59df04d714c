"""The sum through peers' memory: ranks as blocks of one launch on any GPU, and as devices where there are several."""

from __future__ import annotations

import functools
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.bench import sums
from jaxspec.pallas.collectives import peer_sum
from jaxspec.pallas.dense.few_rows import Scaled
from jaxspec.parallel import peers, sharding

pytestmark = pytest.mark.gpu

several = pytest.mark.skipif(jax.local_device_count() < 2, reason="one GPU")
SHAPES = [(1, 1024), (8, 2048), (8, 4096), (8, 5120), (8, 8192), (32, 2048), (64, 8192), (128, 8192)]


def given(ranks: int, rows: int, width: int):
    """Each rank's part, the residual stream and a scale."""
    keys = jax.random.split(jax.random.key(rows + width), 3)
    parts = jax.random.normal(keys[0], (ranks, rows, width), jnp.bfloat16)
    x = jax.random.normal(keys[1], (rows, width), jnp.bfloat16)
    return parts, x, jax.random.normal(keys[2], (width,), jnp.bfloat16)


@functools.cache
def on_one_gpu(ranks: int):
    """Workspaces of so many ranks on the first device, and the operands that name them."""
    words = peer_sum.workspace_bytes(ranks) // 4
    memory = [jnp.full((words,), peer_sum.EMPTY, jnp.int32) for _ in range(ranks)]
    pointers = np.array([jax.block_until_ready(each).unsafe_buffer_pointer() for each in memory], np.uint64)
    return memory, jnp.asarray(pointers.view(np.int32).reshape(-1, 2)), jnp.zeros((1,), jnp.int32)


def same(made, wanted) -> None:
    """Bit by bit, but for the squares, which are summed in another order."""
    if not isinstance(made, tuple):
        np.testing.assert_array_equal(made, wanted)
        return
    out, scaled = made
    np.testing.assert_array_equal(out, wanted[0])
    np.testing.assert_array_equal(scaled.rows, wanted[1].rows)
    np.testing.assert_allclose(scaled.squares, wanted[1].squares, rtol=1e-5)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("rows,width", SHAPES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_as_blocks(ranks, rows, width, centred):
    """Again and again, so that buffers take turns, in one workspace for all shapes."""
    _, table, first = on_one_gpu(ranks)
    parts, x, scale = given(ranks, rows, width)
    each = jnp.broadcast_to(x, parts.shape)
    weights = jnp.ones((width, 3 * 64), jnp.bfloat16)
    cases = (None, None, None), (each, None, weights), (each, scale, None), (each, scale, weights)
    for residual, of, prefetch in cases:
        norm = centred and of is not None
        run = functools.partial(peer_sum.peer_sum, centred=norm)
        wanted = peer_sum.reference(None if residual is None else x, parts, of, norm)
        for _ in range(5):
            made = run(parts, table, first, residual, of, prefetch)
            for rank in range(ranks):
                one = made[rank] if of is None else (made[0][rank], Scaled(*(m[rank] for m in made[1])))
                same(jax.tree.map(np.asarray, one), jax.tree.map(np.asarray, wanted))
                first_of_all = made[0] if of is None else (made[0][0], Scaled(*(m[0] for m in made[1])))
                for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(first_of_all), strict=True):
                    assert (a == b).all(), "all ranks have the same bits"


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("rows,width", [(16, 2048), (32, 4096), (64, 8192)])
def test_partials_of_a_product(splits, rows, width):
    """They are added up and rounded before they are sent."""
    _, table, first = on_one_gpu(2)
    parts, x, _ = given(2, rows, width)
    partials = jnp.stack([parts.astype(jnp.float32) * (i + 1) / 7 for i in range(splits)], 1)
    rounded = functools.reduce(jnp.add, [partials[:, i] for i in range(splits)]).astype(jnp.bfloat16)
    for _ in range(5):
        made = peer_sum.peer_sum(partials, table, first, jnp.broadcast_to(x, parts.shape))
        for rank in range(2):
            np.testing.assert_array_equal(made[rank], peer_sum.reference(x, rounded))


def test_negative_zeros_arrive():
    """A word of two of them says that nothing has arrived yet, so they are sent as positive ones."""
    _, table, first = on_one_gpu(4)
    for rows in (8, 128):  # in one exchange and in two
        parts = jnp.full((4, rows, 4096), -0.0, jnp.bfloat16).at[:, :, ::3].set(-1.0)
        made = np.asarray(peer_sum.peer_sum(parts, table, first))
        np.testing.assert_array_equal(made, jnp.broadcast_to(peer_sum.reference(None, parts), made.shape))


@pytest.mark.parametrize("ranks", [2, 4])
def test_many_calls_of_different_sizes(ranks):
    """Blocks of a small call have fewer calls behind them than others; in one program, as layers are."""
    _, table, first = on_one_gpu(ranks)
    of = [given(ranks, rows, width) for rows, width in ((8, 4096), (1, 1024), (128, 4096), (32, 2048))]
    wanted = [peer_sum.reference(x, parts) for parts, x, _ in of]

    @jax.jit
    def run(of, table, first):
        made = []
        for parts, x, _ in [*of, *reversed(of)] * 5:
            made.append(peer_sum.peer_sum(parts, table, first, jnp.broadcast_to(x, parts.shape)))
        return made

    for _ in range(50):
        made = run(of, table, first)
    for out, want in zip(made, [*wanted, *reversed(wanted)] * 5, strict=True):
        np.testing.assert_array_equal(out[0], want)
        np.testing.assert_array_equal(out[1], want)


HANGS = """
import jax, jax.numpy as jnp
from tests.gpu import test_peer_sum as t
from jaxspec.pallas.collectives import peer_sum
_, table, first = t.on_one_gpu(2)
parts, x, _ = t.given(2, 8, 4096)
try:
    jax.block_until_ready(peer_sum.peer_sum(parts[0], table, first, x, limit=300_000_000))
except jax.errors.JaxRuntimeError as error:
    print("reported:", str(error)[:300])
"""


def test_a_peer_that_never_comes_is_an_error():
    """Start one of two ranks alone."""
    began = time.monotonic()
    run = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=120)
    print(run.stdout, run.stderr[-500:])
    assert "reported:" in run.stdout and time.monotonic() - began < 90


@several
@pytest.mark.parametrize("rows,width", SHAPES)
def test_devices(rows, width):
    mesh = sharding.mesh_of(jax.local_device_count())
    parts, x, scale = given(mesh.size, rows, width)
    opened, reason = opened_once()
    assert reason is None, reason
    for normed in (False, True):
        made = sums.program(mesh, opened.peers, normed, 1)(*sums.operands(mesh, parts, x, scale), opened.peers)
        made = jax.tree.map(np.asarray, made)
        wanted = jax.tree.map(
            np.asarray, peer_sum.reference(*((x,) if normed else (None,)), parts, scale if normed else None)
        )
        for rank in range(mesh.size):
            same(jax.tree.map(lambda each, rank=rank: each[rank], made), wanted)


@functools.cache
def opened_once():
    return peers.open_peers(sharding.mesh_of(jax.local_device_count()))
