"""A byte-level tokenizer and an image reader of Qwen2-VL's kind, whose pictures take at most 64 tokens."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend

from jaxspec.images.image_reader import ImageReader, image_reader
from jaxspec.text.tokenizer import Tokenizer
from tests.support.tokenizers import BYTES

IMAGE, OPENS, CLOSES = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # which stand for the image's tokens here, too
IMAGE_ID = BYTES.added_tokens[IMAGE]
TEMPLATE = (
    "{%- for m in messages %}{{ m.role + ':' }}"
    "{%- if m.content is string %}{{ m.content }}{%- else %}{%- for part in m.content %}"
    "{%- if part.type == 'image' %}{{ '" + OPENS + IMAGE + CLOSES + "' }}{%- else %}{{ part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}{{ ';' }}{%- endfor %}"
)
CONFIG = {
    "model_type": "qwen2_vl",
    "vision_config": {},
    "image_token_id": IMAGE_ID,
    "vision_start_token_id": BYTES.added_tokens[OPENS],
    "vision_end_token_id": BYTES.added_tokens[CLOSES],
}
FILES = {"preprocessor_config.json": {"min_pixels": 28 * 28, "max_pixels": 64 * 28 * 28}}


def seeing_tokenizer(template: str = TEMPLATE) -> Tokenizer:
    return Tokenizer.from_backend(Backend.from_str(BYTES.to_json()), template)


def reader(tokenizer: Tokenizer = BYTES) -> ImageReader:
    return image_reader(CONFIG, FILES, tokenizer)
