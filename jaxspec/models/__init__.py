"""Target models. `MODELS` maps a config's `model_type` to the module that declares its parameters and its forward.

A family module has `QK_NORM: bool`, `parameters(config) -> pytree of Param` and
`forward(params, config, tokens, positions, attention, cache, capture) -> Hidden` and
`unembed(params, hidden) -> logits`. One with experts has `NORM_TOPK_PROB: bool` too, for configs that don't say.
"""

from jaxspec.models import llama, qwen3, qwen3_moe

MODELS = {"llama": llama, "qwen3": qwen3, "qwen3_moe": qwen3_moe}
