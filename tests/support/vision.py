"""A byte-level tokenizer and an image reader of Qwen3-VL's kind, whose pictures take at most 64 tokens."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend

from jaxspec.images.image_reader import ImageReader, image_reader
from jaxspec.text.tokenizer import Tokenizer
from tests.support.tokenizers import BYTES

IMAGE, OPENS, CLOSES = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # which stand for the image's tokens here, too
VIDEO = "<|video_pad|>"
IMAGE_ID = BYTES.added_tokens[IMAGE]
TEMPLATE = (
    "{%- for m in messages %}{{ m.role + ':' }}"
    "{%- if m.content is string %}{{ m.content }}{%- else %}{%- for part in m.content %}"
    "{%- if part.type == 'image' %}{{ '" + OPENS + IMAGE + CLOSES + "' }}"
    "{%- elif part.type == 'video' %}{{ '" + OPENS + VIDEO + CLOSES + "' }}{%- else %}{{ part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}{{ ';' }}{%- endfor %}"
)


def seeing_tokenizer(template: str = TEMPLATE) -> Tokenizer:
    backend = Backend.from_str(BYTES.to_json())
    backend.add_special_tokens([VIDEO])
    return Tokenizer.from_backend(backend, template)


SEEING = seeing_tokenizer()
CONFIG = {
    "model_type": "qwen3_vl",
    "vision_config": {"patch_size": 14},
    "image_token_id": IMAGE_ID,
    "video_token_id": SEEING.added_tokens[VIDEO],
    "vision_start_token_id": BYTES.added_tokens[OPENS],
    "vision_end_token_id": BYTES.added_tokens[CLOSES],
}
FILES = {
    "preprocessor_config.json": {"min_pixels": 28 * 28, "max_pixels": 64 * 28 * 28},
    "video_preprocessor_config.json": {"size": {"shortest_edge": 28 * 28, "longest_edge": 64 * 28 * 28}},
}


def reader(tokenizer: Tokenizer = SEEING) -> ImageReader:
    return image_reader(CONFIG, FILES, tokenizer)
