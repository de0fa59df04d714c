"""Bodies of the routes that change weights, pause and give memory back, as SGLang has them."""

from __future__ import annotations

from typing import ClassVar

from server.protocol.base import Body, Text


class UpdateFromDisk(Body):
    """Where new weights are. `draft_model_path` is ours: the drafter's, which may come alone.

    A pause goes on until `/continue_generation`, whatever `keep_pause` says.
    """

    IGNORED = frozenset({"torch_empty_cache", "recapture_cuda_graph", "token_step", "keep_pause"})
    UNSUPPORTED: ClassVar[dict[str, tuple]] = {"load_format": ("auto", "safetensors"), "is_async": (False,)}

    model_path: Text | None = None
    draft_model_path: Text | None = None
    weight_version: Text | None = None
    abort_all_requests: bool | None = None
    flush_cache: bool | None = None


class NewVersion(Body):
    """A name for the weights, without a change."""

    UNSUPPORTED: ClassVar[dict[str, tuple]] = {"abort_all_requests": (False,)}

    new_version: Text


class Pause(Body):
    """How to pause: "abort", "retract" or "in_place"."""

    mode: Text | None = None


class Tags(Body):
    """Which memory: some of "kv_cache" and "weights", or all. A "cuda_graph" holds none here."""

    tags: list[Text] | None = None
