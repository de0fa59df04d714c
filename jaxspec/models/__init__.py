"""Target models. `MODELS` maps a config's `model_type` to the module of its family.

A family has two functions, and nothing else: `read(hf) -> Decoder` describes what a config.json computes, and
`tensors(decoder) -> pytree of Param` declares the arrays, by their names in its checkpoints. What a config.json may be
silent about is in the family's `DEFAULTS`, if it has any; `read` is given them too. Added tokens that end its texts,
whatever the files say, are in `ENDS`. A decoder's equations and the ways to run them are in `jaxspec.decoder`.
"""

from jaxspec.config.engine_config import DEFAULTS, FAMILIES
from jaxspec.models import (
    gemma3,
    glm4,
    gpt_oss,
    llama,
    mistral,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
)

MODELS = {
    "gemma3": gemma3,
    "glm4": glm4,
    "gpt_oss": gpt_oss,
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
}
FAMILIES.update({name: family.read for name, family in MODELS.items()})
DEFAULTS.update({name: family.DEFAULTS for name, family in MODELS.items() if hasattr(family, "DEFAULTS")})
