"""Target models. `MODELS` maps a config's `model_type` to the module that declares its parameters and its forward.

A family module has `QK_NORM: bool`, `parameters(config) -> pytree of Param` and
`forward(params, config, tokens, positions, mixer, cache, capture, wanted) -> Hidden` and
`unembed(params, hidden) -> logits`. One with linear attention in some of its layers has `HYBRID = True` too, one with
experts `NORM_TOPK_PROB: bool`, for configs that don't say.
"""

from jaxspec.models import llama, qwen3, qwen3_5, qwen3_5_moe, qwen3_moe, qwen3_next

MODELS = {
    "llama": llama,
    "qwen3": qwen3,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
}
