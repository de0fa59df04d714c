"""How one checkpoint takes pictures: from any source to a `Picture`, and its place in a prompt's token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxspec.config.json_values import positive
from jaxspec.config.options import ConfigError
from jaxspec.config.request import CONTEXT_EXCEEDED, RequestError
from jaxspec.images.picture import Picture, PlacedPicture
from jaxspec.images.processors import GEMMA, Processor, read_processor
from jaxspec.images.reading import read_picture
from jaxspec.text.placeholders import Placeholder
from jaxspec.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ImageReader:
    """A checkpoint's processor, and the placeholder that its prompts have for a picture."""

    processor: Processor
    placeholder: Placeholder

    def read(self, source: Any, room: int) -> Picture:
        """Read and preprocess a picture that may fill at most `room` rows, which is checked before it is preprocessed.

        **Raises:** `RequestError`.
        """
        rgb = read_picture(source)
        height, width = rgb.shape[:2]
        if (tokens := self.processor.tokens(height, width)) > room:
            raise RequestError(
                f"the picture of {width} x {height} pixels takes {tokens} tokens, and the context has room for {room}; "
                "send a smaller one",
                code=CONTEXT_EXCEEDED,
            )
        return self.processor(rgb)

    def write(self, tokenizer: Tokenizer, messages: list[dict[str, Any]], pictures: int, **template: Any) -> str:
        """A chat's text as the template writes it, with a placeholder's token for each picture.

        **Raises:** `TokenizerError` for texts with placeholders of their own, and as `Tokenizer.write_chat`.
        """
        for message in messages:
            content = message.get("content")
            for part in content if isinstance(content, list) else [{"text": content}]:
                self.placeholder.check(str(part.get("text") or ""))
        return self.placeholder.settle(tokenizer.write_chat(messages, **template), pictures)

    def place(self, ids: Sequence[int], pictures: Sequence[Picture]) -> tuple[list[int], tuple[PlacedPicture, ...]]:
        """A prompt's token ids with rows for each picture, and the pictures with their places.

        **Raises:** `TokenizerError` unless `ids` have one placeholder's token for each picture.
        """
        ids, starts = self.placeholder.expand(ids, [picture.tokens for picture in pictures])
        return ids, tuple(map(PlacedPicture, pictures, starts))


def image_reader(
    hf: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]], tokenizer: Tokenizer | None
) -> ImageReader | None:
    """The reader of a checkpoint's pictures; None for a model without vision or without a tokenizer.

    **Arguments:** as `read_processor`'s.

    **Raises:** `ConfigError` naming file and key.
    """
    if tokenizer is None or (processor := read_processor(hf, files)) is None:
        return None

    def special(*keys: str) -> tuple[str, int]:
        token = positive(hf, next((key for key in keys if key in hf), keys[0]))
        if not (text := tokenizer.token_text(token)):
            raise ConfigError(f"config.json: {keys[0]} {token} is no token of the tokenizer")
        return text, token

    image, token = special("image_token_id", "image_token_index")
    if hf["model_type"] not in GEMMA:
        opens, closes = (special(f"vision_{end}_token_id")[0] for end in ("start", "end"))
        return ImageReader(processor, Placeholder(image, image, opens + image + closes, image, token))
    begins, _ = special("boi_token_id", "boi_token_index")
    ends, _ = special("eoi_token_id", "eoi_token_index")
    return ImageReader(processor, Placeholder(begins, f"\n\n{begins}{image}{ends}\n\n", begins, image, token))
