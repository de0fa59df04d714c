"""What vLLM and SGLang call options whose names here are others, so that who types those is told ours."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

ELSEWHERE = {
    **dict.fromkeys(("max_model_len", "context_len"), "context_length"),
    **dict.fromkeys(("speculative_algorithm", "speculative_config", "speculative_model"), "draft"),
    **dict.fromkeys(("speculative_draft_model_path", "speculative_draft_model"), "draft"),
    **dict.fromkeys(("speculative_num_draft_tokens", "num_speculative_tokens"), "num_draft_tokens"),
    **dict.fromkeys(("disable_radix_cache", "no_enable_prefix_caching"), "disable_prefix_cache"),
    **dict.fromkeys(("mamba_ssm_dtype", "mamba_ssm_cache_dtype"), "state_dtype"),
    "block_size": "page_size",
    "disable_overlap_schedule": "disable_overlap",
    "generation_config": "sampling_defaults",  # the server's, which isn't an engine's
    "gpu_memory_utilization": "mem_fraction_static",
    "max_num_batched_tokens": "chunked_prefill_size",
    "max_num_seqs": "max_running_requests",
    "model_path": "model",
    "random_seed": "seed",
    "speculative_eagle_topk": "topk",
    "speculative_num_steps": "num_steps",
}
SEVERAL_GPUS = frozenset(
    {
        *("tp", "tp_size", "tensor_parallel_size", "pp", "pp_size", "pipeline_parallel_size"),
        *("dp", "dp_size", "data_parallel_size", "ep", "ep_size", "expert_parallel_size", "enable_expert_parallel"),
    }
)


def meant(name: str, known: Sequence[str], spell: Callable[[str], str] = str) -> str:
    """What an option that isn't among those `known` may have meant, to be added to an error; "" if nobody can tell."""
    if name in SEVERAL_GPUS:
        return "; jaxspec serves on one GPU"
    if ELSEWHERE.get(name) in known:
        return f"; here it is {spell(ELSEWHERE[name])}"
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {spell(near[0])}?" if near else ""
