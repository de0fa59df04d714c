"""A tiny random Qwen3.5 checkpoint that reads pictures: tower, MTP module, byte-level tokenizer, processor, template.

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
    "{%- if part.type == 'image' %}{{ '" + OPENS + IMAGE + CLOSES + "' }}{%- else %}{{ part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}{{ '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
_root = tempfile.TemporaryDirectory(prefix="jaxspec-seeing-")


@functools.cache
def seeing_checkpoint() -> Path:
    """A picture has 4 x 4 pixels a token, and 64 tokens at most."""
    folder = Path(shutil.copytree(GOLDEN / "qwen3_5", Path(_root.name) / "seeing"))
    write_byte_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in (OPENS, IMAGE, CLOSES)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    hf, rng = json.loads((folder / "config.json").read_text()), np.random.default_rng(62)
    hf["text_config"] |= {"vocab_size": VOCAB, "eos_token_id": tokenizer.token_to_id("<|im_end|>")}
    hf |= {"image_token_id": tokenizer.token_to_id(IMAGE), "vision_start_token_id": tokenizer.token_to_id(OPENS)}
    hf |= {"vision_end_token_id": tokenizer.token_to_id(CLOSES), "video_token_id": VOCAB - 1}
    (folder / "config.json").write_text(json.dumps(hf))
    sizes = {"min_pixels": 16, "max_pixels": 64 * 16, "patch_size": 2, "merge_size": 2, "temporal_patch_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes))
    held = load_file(folder / "model.safetensors")
    ends = [name for name in held if name.endswith(("embed_tokens.weight", "lm_head.weight"))]
    rewrite(folder, {name: rng.standard_normal((VOCAB, 32)).astype(held[name].dtype) for name in ends})
    return folder
