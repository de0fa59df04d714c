"""Make tests/golden/rope.json: rotary frequencies as transformers scales them, of every family and kind of scaling.

Runs in the same environment as make_llama_qwen3.py. Each entry has a `config` as a config.json would have it, the
`frequencies` that transformers makes of it, float32, and the factor of cosines and sines.
"""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SIZES = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=32, max_position_embeddings=512)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_5_text", "gpt_oss")
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128)
SCALINGS = (
    dict(rope_type="linear", factor=2.5),
    dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
         original_max_position_embeddings=128),
    YARN,
    dict(YARN, attention_factor=0.9, beta_fast=8.0, beta_slow=2.0),
    dict(YARN, mscale=1.0, mscale_all_dim=0.7),
    dict(YARN, truncate=False, beta_fast=6.0),
    dict(rope_type="longrope", original_max_position_embeddings=128),
)  # fmt: skip


def main() -> None:
    entries = []
    for family in FAMILIES:
        for scaling in SCALINGS:
            rope = {"rope_theta": 5000.0, **scaling}
            if family == "qwen3_5_text":
                rope |= {"partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2], "mrope_interleaved": True}
            if scaling["rope_type"] == "longrope":
                pairs = int(16 * rope.get("partial_rotary_factor", 1))
                rope |= {"short_factor": [1.5] * pairs, "long_factor": [1 + 0.4 * i for i in range(pairs)]}
            config = {"model_type": family, **SIZES, "rope_parameters": rope}
            read = AutoConfig.for_model(**config)
            frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](read, "cpu", seq_len=512)
            entries.append({"config": config, "frequencies": frequencies.tolist(), "factor": factor})
    lines = ",\n".join(map(json.dumps, entries))
    (Path(__file__).resolve().parent / "rope.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
