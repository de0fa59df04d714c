"""The log's lines about an engine that is ready: its memory plan, and what its options came to."""

from __future__ import annotations

import logging
import time

from jaxspec.cache.memory_plan import MemoryPlan
from jaxspec.checkpoint import Model
from jaxspec.compiling.programs import Programs, programs_there
from jaxspec.drafters.loading import LoadedDrafter

log = logging.getLogger("jaxspec")


def report_start(
    started: float,
    plan: MemoryPlan,
    model: Model,
    draft: LoadedDrafter,
    programs: Programs,
    page_dtype: str,
    lacks_snapshots: bool,
) -> None:
    """Log what a start that began then came to. `lacks_snapshots`: there is no room for any, and the prefix cache needs
    some."""
    drafter = draft.drafter
    log.info("%s", plan)
    if model.kv_scales is not None:
        used = "are" if page_dtype.startswith("float8") else "aren't"
        log.info("the checkpoint's scales of keys and values %s used: %s pages", used, page_dtype)
    if lacks_snapshots:
        log.info("the prefix cache is off: a hybrid needs state snapshots for it, and there is no room for any")
    if drafter.topk > 1:
        log.info(
            "drafts are trees of %d tokens, up to %d deep. A sampled request accepts a draft if the target draws it "
            "(target-only sampling); chains (--topk 1) use the drafter's probabilities too (block verification)",
            drafter.num_draft_tokens,
            drafter.longest,
        )
    seconds, name = time.monotonic() - started, f"{model.name} with --draft {draft.name}"
    log.info("ready in %.1f s: %s, %s", seconds, name, programs_there(programs))
