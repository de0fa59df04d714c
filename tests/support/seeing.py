"""Tiny random checkpoints that read pictures: tower, byte-level tokenizer, processor, template; Qwen3.5's MTP module.

Weights are those of tests/golden/pictures but for the vocabulary's, which has a token for each byte.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from tokenizers import AddedToken, Tokenizer

from tests.support.picture_prompts import GOLDEN
from tests.support.tiny import rewrite, write_byte_tokenizer

VOCAB = 320
OPENS, IMAGE, CLOSES = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.content is string %}{{ m.content }}{%- else %}{%- for part in m.content %}"
    "{%- if part.type == 'image' %}{{ 'PICTURE' }}{%- else %}{{ part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}{{ '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
WRITTEN = {"qwen3_5": OPENS + IMAGE + CLOSES, "gemma3": OPENS}  # for a picture, by a chat template
KEYS = {  # of the three tokens' ids in config.json
    "qwen3_5": ("image_token_id", "vision_start_token_id", "vision_end_token_id"),
    "gemma3": ("image_token_id", "boi_token_index", "eoi_token_index"),
}
_root = tempfile.TemporaryDirectory(prefix="jaxspec-seeing-")


@functools.cache
def seeing_checkpoint(family: str = "qwen3_5") -> Path:
    """A picture of Qwen's has 4 x 4 pixels a token, and 64 tokens at most; one of Gemma's has 16 tokens."""
    folder = Path(shutil.copytree(GOLDEN / family, Path(_root.name) / family))
    write_byte_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in (OPENS, IMAGE, CLOSES)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": TEMPLATE.replace("PICTURE", WRITTEN[family])})
    )
    hf, rng = json.loads((folder / "config.json").read_text()), np.random.default_rng(62)
    hf["text_config"] |= {"vocab_size": VOCAB, "eos_token_id": tokenizer.token_to_id("<|im_end|>")}
    for name, token in zip(KEYS[family], (IMAGE, OPENS, CLOSES), strict=True):
        hf[name] = tokenizer.token_to_id(token)
    hf = {key: value for key, value in hf.items() if key != "video_token_id"}
    (folder / "config.json").write_text(json.dumps(hf))
    sizes = {"min_pixels": 16, "max_pixels": 64 * 16, "patch_size": 2, "merge_size": 2, "temporal_patch_size": 2}
    if family == "qwen3_5":
        (folder / "preprocessor_config.json").write_text(json.dumps(sizes))
    held = load_file(folder / "model.safetensors")
    ends = [name for name in held if name.endswith(("embed_tokens.weight", "lm_head.weight"))]
    size = 0.05 if family == "gemma3" else 1.0  # tied: larger ones would say each token again
    drawn = lambda name: (size * rng.standard_normal((VOCAB, 32))).astype(held[name].dtype)  # noqa: E731
    rewrite(folder, {name: drawn(name) for name in ends})
    return folder
