"""Sums that blocks of a cluster send into each other's shared memory.

`plgpu.async_store_smem` tells the other block's barrier how many bytes will come, in a way that also waits until all of
the thread's writes are in memory. At the end of a kernel of 10 us each call took 1.5. Here a receiving block tells its
own barrier once, at the start, so sends are bytes alone. The blocks meet in between, so that none sends to one that
hasn't begun. A thread's numbers go to the thread of the same number.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from jaxspec.pallas.dense.few_rows.registers import as_sums, four_sums
from jaxspec.pallas.dense.few_rows.share import GROUP, TILE, Share
from jaxspec.pallas.hopper import THREADS
from jaxspec.pallas.hopper.thread_ints import byte_at, const, mul, rem

PIECE = 4 * TILE * GROUP  # bytes of a group's sums of `GROUP` rows
BYTES = PIECE // THREADS  # of them a thread's
EXPECT = """{
mbarrier.init.shared::cta.b64 [$0], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;
}"""
SEND = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [$0], {$1, $2, $3, $4}, [$5];"
WAIT = """{
.reg .pred done;
AGAIN:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0], 0;
@!done bra AGAIN;
}"""
LOAD = "ld.shared::cta.v4.f32 {$0, $1, $2, $3}, [$4];"
_f32 = jnp.float32


class Sums(NamedTuple):
    """Sizes of sums that are sent without a `Share`: by `splits` blocks, of `groups` times `TILE` outputs. The first
    `finishers` blocks of a cluster receive the sums of `finished` rows each."""

    groups: int
    finished: int
    splits: int = 1
    finishers: int = 1


def scratch(share: Share | Sums) -> dict[str, Any]:
    """Shared memory for all parts of the sums that a block finishes, and for the barrier that counts their bytes."""
    return {
        "parts_s": plgpu.SMEM((share.splits, _pieces(share), TILE, GROUP), _f32),
        "sent_s": plgpu.SMEM((2,), jnp.int32),
    }


def expect(share: Share | Sums, sent_s: Any) -> None:
    """Tell the barrier at a block's start how many bytes it will receive. All of its threads do, and `meet` later."""
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=None)(partial(_expect, share))(sent_s)


def meet() -> None:
    """Wait until all blocks have begun to expect, which they did long before."""

    @plgpu.inline_mgpu(arg_types=(), return_type=None)
    def wait(_):
        mgpu.utils.inline_ptx("barrier.cluster.wait.aligned;", has_side_effects=True, convergent=True)

    wait()


def send(share: Share | Sums, split: Any, totals: Sequence[Any], parts_s: Any, sent_s: Any) -> None:
    """Send a part's sums, of one warpgroup, to the blocks that finish them."""
    types = *[plgpu.Layout.WGMMA] * share.groups, plgpu.RefType(), plgpu.RefType()
    plgpu.inline_mgpu(arg_types=types, return_type=None)(partial(_send, share))(*totals, parts_s.at[split], sent_s)


def receive(share: Share | Sums, parts_s: Any, sent_s: Any) -> list[Any]:
    """The sums over all parts of the rows that this block finishes, f32[TILE, rows] of each group."""
    one = plgpu.ShapeDtypeStruct((TILE, share.finished), _f32, layout=plgpu.Layout.WGMMA)
    types = plgpu.RefType(), plgpu.RefType()
    return plgpu.inline_mgpu(arg_types=types, return_type=[one] * share.groups)(partial(_receive, share))(
        parts_s, sent_s
    )


def _pieces(share: Share | Sums) -> int:
    return share.groups * share.finished // GROUP


def _expect(share, _, sent):
    thread = mgpu.utils.thread_idx()
    first = arith.cmpi(arith.CmpIPredicate.eq, thread, const(0))
    with mgpu.utils.when(first):
        mgpu.utils.inline_ptx(
            EXPECT, mgpu.utils.memref_ptr(sent), const(PIECE * share.splits * _pieces(share)), has_side_effects=True
        )
    mgpu.utils.inline_ptx("barrier.cluster.arrive.relaxed.aligned;", has_side_effects=True, convergent=True)


def _send(share, _, *refs):
    *totals, parts, sent = refs
    eights, each = share.finished // GROUP, share.groups * share.finished // GROUP
    own = byte_at(mgpu.utils.memref_ptr(parts), _thread_bytes())
    for block in range(share.finishers):
        place, barrier = (
            mgpu.utils.get_cluster_ptr(pointer, const(block), generic=False)
            for pointer in (own, mgpu.utils.memref_ptr(sent))
        )
        for i in range(each):
            g, n = divmod(i, eights)
            at = byte_at(place, i * PIECE)
            four = four_sums(totals[g], block * eights + n)
            mgpu.utils.inline_ptx(SEND, at, *four, barrier, has_side_effects=True)


def _receive(share, _, parts, sent):
    mgpu.utils.inline_ptx(WAIT, mgpu.utils.memref_ptr(sent), has_side_effects=True)
    own = byte_at(mgpu.utils.memref_ptr(parts), _thread_bytes())
    f32, each, made = ir.F32Type.get(), _pieces(share), []
    for i in range(each):
        total = None
        for split in range(share.splits):
            at = byte_at(own, (split * each + i) * PIECE)
            four = mgpu.utils.inline_ptx(LOAD, at, result_types=[f32] * 4, has_side_effects=True)
            total = four if total is None else [arith.addf(a, b) for a, b in zip(total, four, strict=True)]
        made.append(total)
    eights = share.finished // GROUP
    return [as_sums(made[g * eights : (g + 1) * eights]) for g in range(share.groups)]


def _thread_bytes():
    """Where a thread's numbers are in a piece."""
    return mul(rem(mgpu.utils.thread_idx(), THREADS), BYTES)
