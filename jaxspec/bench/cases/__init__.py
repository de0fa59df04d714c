"""The cases of `bench kernels`: operations at the sizes that models have, their plain forms, bytes and FLOPs."""

from __future__ import annotations

from jaxspec.bench.cases import attention, divided, latent, linear_attention, matmuls, mixtures, pictures
from jaxspec.bench.cases.case import Case
from jaxspec.models.fp8 import BLOCK
from jaxspec.models.weights import Fp8, Int4, Nvfp4
from jaxspec.pallas.hopper import kernels_here

__all__ = ["Case", "make_cases"]

DECODE = (
    *((b, context, t) for t in (1, 4) for b, context in ((1, 1024), (1, 16384), (8, 1024), (32, 4096), (128, 1152))),
)  # requests, tokens each, rows each
LATENTS = tuple(
    (b, 4096, t, heads) for heads in (16, 128) for t in (1, 4) for b in (1, 8, 32, 128)
)  # requests, tokens each, rows each, heads: one of eight GPUs' of DeepSeek-V3's, and all of them
PICTURES = ((512, 16, 16, 72), (1024, 16, 16, 72), (2048, 16, 16, 72))  # pixels of a side, of a patch's; heads, columns
PROMPTS = ((1, 1024), (1, 2048), (1, 8192), (16, 512))  # prompts, tokens each
WINDOWS = {  # by tokens, how many of them a row sees (None: all): a window should cost what it holds
    1024: (128, None),
    8192: (128, 1024, 4096, None),
    32768: (128, 1024, 4096, None),
}
QWEN3 = 4096, 32, 8, 128, 12288, True
FEW_ROWS = {  # model width, query heads, KV heads, their width, MLP width, whether queries and keys are normed
    (576, 9, 3, 64, 1536, False): (8, 32, 64),  # SmolLM2-135M's
    QWEN3: (8,),  # Qwen3-8B's
}
POST_NORMS = (2816, 1, 3), (2816, 2, 1), (5376, 1, 1)  # model width, parts, norms that follow: Gemma 4's 26B and 31B
LAYER = 4096, 12288, 6144  # Qwen3-8B's model width, MLP width, columns of q, k and v
ROWS = (1, 8, 9, 12, 16, 32, 128)
MANY_ROWS = (256, 512, 1024, 2048)
FP8_ROWS = {  # rows of products with FP8 weights; with quantised activations by blocks, and by token and tensor
    Fp8(BLOCK): (1, 8, 32, 64, 128, 256, 512, 2048),
    Fp8(BLOCK, activations=True): (8, 128, 512, 2048),
    Fp8(None, activations=True): (2048,),
}
MIXTURES = {  # model width, expert width, experts, experts of a token
    "35B-A3B": (2048, 512, 256, 8),  # Qwen3.5's
    "30B-A3B": (2048, 768, 128, 8),  # Qwen3's
}
ACTIVATED = {  # the same of experts that SiLU doesn't gate, and how they differ
    "Gemma 4 26B": ((2816, 704, 128, 8), {"activation": "gelu_tanh"}),
    "Nemotron 3 Nano": ((2688, 1856, 128, 6), {"activation": "relu2", "gated": False}),
}
EXPERTS = {"FP8": Fp8(BLOCK), "INT4": Int4(128), "NVFP4": Nvfp4()}  # formats beside bfloat16
TOKENS = (1, 4, 8, 32, 128, 512, 1024, 8192)
DELTA = 16, 32, 128  # Qwen3-Next's and Qwen3.5-35B-A3B's linear attention: key heads, value heads, width of both
STATES = 8, 64, 64, 128  # Nemotron 3 Nano's state spaces: groups, heads, their width, that of states
STEPS = tuple((b, t) for t in (1, 4, 8) for b in (1, 8, 32, 128))  # requests, rows each
CHUNKS = ((1, 1024), (1, 8192), (16, 512))  # prompts, tokens each
SMALL = {
    "decode": ((2, 40, 1), (3, 17, 4)),
    "latents": ((2, 40, 1, 4),),
    "pictures": ((64, 16, 2, 24),),
    "prompts": ((2, 100),),
    "windows": {40: (8, None)},
    "mixtures": {"small": (64, 32, 8, 2)},
    "tokens": (3, 20),
    "delta": (1, 2, 16),
    "states": (1, 2, 16, 8),
    "steps": ((2, 3),),
    "chunks": ((2, 100),),
    "layer": (64, 64, 96),
    "many": (20,),
    "fp8": {Fp8(BLOCK): (3,), Fp8(BLOCK, activations=True): (3,), Fp8(None, activations=True): (3,)},
}


def make_cases(small: bool) -> list[Case]:
    """All cases, at Qwen3-8B's sizes and those of two mixtures of experts, or at tiny ones."""
    layers, dtype = (2, "float32") if small else (16, "bfloat16")
    full = {"decode": DECODE, "latents": LATENTS, "prompts": PROMPTS, "windows": WINDOWS, "mixtures": MIXTURES}
    full |= {"pictures": PICTURES, "tokens": TOKENS, "states": STATES}
    full |= {"delta": DELTA, "steps": STEPS, "chunks": CHUNKS, "layer": LAYER, "many": MANY_ROWS, "fp8": FP8_ROWS}
    sizes = SMALL if small else full
    cases = [attention.decode_attention(b, context, t, layers, dtype) for b, context, t in sizes["decode"]]
    cases += [latent.decode(*each, layers // 2, dtype) for each in sizes["latents"]]
    few = [each for each in sizes["latents"] if small or each[2] == 1]
    cases += [latent.decode(*each, layers // 2, dtype, "float8_e4m3fn") for each in few]
    cases += [pictures.attention(*each, layers, dtype) for each in sizes["pictures"]]
    cases += [attention.prompt_attention(count, length, layers, dtype) for count, length in sizes["prompts"]]
    for context, window in [(context, window) for context, each in sizes["windows"].items() for window in each]:
        cases += [attention.decode_attention(b, context, t, layers, dtype, window) for b, t in ((2, 1), (4, 4))]
        if window or (1, context) not in sizes["prompts"]:
            cases.append(attention.prompt_attention(1, context, layers, dtype, window))
    fp8, rounds, prompts = {"kv": "float8_e4m3fn"}, sizes["decode"], sizes["prompts"]
    rounds = rounds[:1] if small else rounds
    cases += [attention.decode_attention(b, context, t, layers, dtype, **fp8) for b, context, t in rounds]
    for of in (attention.prompt_attention, attention.cache_write, attention.prompt_heads):
        cases += [of(count, length, layers, dtype, **fp8) for count, length in prompts]
    cases += [attention.round_heads(b, context, t, layers, dtype, **fp8) for b, context, t in rounds]
    named = [(name, t, widths) for name, widths in sizes["mixtures"].items() for t in sizes["tokens"]]
    cases += [mixtures.experts_mlp(f"experts {name}", t, *widths, layers // 2, dtype) for name, t, widths in named]
    for title, kind in ({} if small else EXPERTS).items():
        few = [(f"{title} experts {name}", t, *widths) for name, t, widths in named if t in ROWS]
        cases += [mixtures.experts_mlp(*each, layers // 2, dtype, kind=kind) for each in few]
    for name, (widths, how) in ({} if small else ACTIVATED).items():
        few = [t for t in sizes["tokens"] if t in ROWS]
        cases += [mixtures.experts_mlp(f"experts {name}", t, *widths, layers // 2, dtype, **how) for t in few]
    cases += [mixtures.router(name, t, *widths[2:], layers) for name, t, widths in named]
    for of in (attention.cache_write, attention.prompt_heads):
        cases += [of(count, length, layers, dtype) for count, length in sizes["prompts"]]
    cases += [attention.round_heads(b, context, t, layers, dtype) for b, context, t in sizes["decode"]]
    delta = *sizes["delta"], layers, dtype
    for of in (linear_attention.convolution, linear_attention.delta_step):
        cases += [of(b, t, *delta) for b, t in sizes["steps"]]
    cases += [linear_attention.channel_step(b, t, *sizes["delta"][1:], layers, dtype) for b, t in sizes["steps"]]
    for of in (linear_attention.prompt_convolution, linear_attention.delta_chunk):
        cases += [of(count, length, *delta) for count, length in sizes["chunks"]]
    states = *sizes["states"], layers, dtype
    cases += [linear_attention.state_step(b, t, *states) for b, t in sizes["steps"]]
    cases += [linear_attention.state_chunk(count, length, *states) for count, length in sizes["chunks"]]
    for rows in sizes["many"]:
        cases += matmuls.projections(rows, *sizes["layer"], layers // 2, dtype)
    for fmt, counts in sizes["fp8"].items():
        for rows in counts:
            cases += matmuls.projections(rows, *sizes["layer"], layers // 2, dtype, fmt)
    if not small and kernels_here() is None:  # there is no other path to it: a model without it has plain layers
        cases += [matmuls.layer_matmuls(rows, *LAYER, layers=8) for rows in ROWS]
        cases += [matmuls.layer_matmuls(rows, *LAYER, layers=8, quantised=True) for rows in (9, 16, 32, 64, 128)]
        few = [(rows, widths) for widths, counts in FEW_ROWS.items() for rows in counts]
        cases += [matmuls.few_rows_layer(rows, *widths, layers=layers) for rows, widths in few]
        cases += [matmuls.few_rows_layer(rows, *QWEN3, layers=8, quantised=True) for rows in (8, 16, 32)]
        cases += [matmuls.post_norms(8, *sizes, layers=layers) for sizes in POST_NORMS]
        cases += [matmuls.draft_chain(rows, 7, 151936, 256) for rows in (1, 8, 32, 128)]
        cases += divided.make_cases()
    return cases
