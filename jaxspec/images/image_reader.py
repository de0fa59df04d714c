"""How one checkpoint takes pictures and videos: from any source to its place in a prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxspec.config.json_values import positive
from jaxspec.config.options import ConfigError
from jaxspec.config.request import CONTEXT_EXCEEDED, RequestError
from jaxspec.images.chats import Media
from jaxspec.images.picture import Picture, PlacedPicture, Video
from jaxspec.images.processors import GEMMA, GEMMA4, Processor, read_processor
from jaxspec.images.reading import read_picture
from jaxspec.images.video import open_clip
from jaxspec.images.video_processor import VideoProcessor, read_video_processor
from jaxspec.text.placeholders import Placeholder, expand
from jaxspec.text.tokenizer import Tokenizer

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


@dataclass(frozen=True)
class ImageReader:
    """A checkpoint's processor, and the placeholder that its prompts have for a picture. `videos`, `of_video`: the same
    of videos; None: the model reads none."""

    processor: Processor
    placeholder: Placeholder
    videos: VideoProcessor | None = None
    of_video: Placeholder | None = None

    def within(self, tokens: int) -> ImageReader:
        """This reader, which makes pictures so small that each fills at most so many rows, if it can."""
        videos = self.videos and dataclasses.replace(self.videos, limit=tokens)
        return dataclasses.replace(self, processor=self.processor.within(tokens), videos=videos)

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

    def read_media(
        self, source: Any, media: Media, room: int, check: Callable[[], None] = lambda: None
    ) -> Picture | Video:
        """Read and preprocess a picture or video, `media`, that may fill at most `room` rows. `source`: what of it
        `read_picture` or `open_clip` takes. `check`: as of `open_clip`.

        **Raises:** `RequestError`.
        """
        if not media.video:
            return self.read(source, room)
        if self.videos is None:
            raise RequestError("this model reads no videos; send some frames as pictures")
        processor = self.videos if media.rate is None else dataclasses.replace(self.videos, rate=media.rate)
        return processor(open_clip(source, check), room)

    def write(
        self, tokenizer: Tokenizer, messages: list[dict[str, Any]], media: Sequence[Picture | Video], **template: Any
    ) -> str:
        """A chat's text as the template writes it, with a placeholder's token for each picture.

        **Raises:** `TokenizerError` for texts with placeholders of their own, and as `Tokenizer.write_chat`.
        """
        for message in messages:
            content = message.get("content")
            for part in content if isinstance(content, list) else [{"text": content}]:
                for each in filter(None, (self.placeholder, self.of_video)):
                    each.check(str(part.get("text") or ""))
        videos = [each.times for each in media if isinstance(each, Video)]
        text = self.placeholder.settle(tokenizer.write_chat(messages, **template), len(media) - len(videos))
        return self.of_video.settle_videos(text, videos) if videos else text

    def place(
        self, ids: Sequence[int], media: Sequence[Picture | Video]
    ) -> tuple[list[int], tuple[PlacedPicture, ...]]:
        """A prompt's token ids with rows for each picture, and the pictures with their places.

        **Raises:** `TokenizerError` unless `ids` have one placeholder's token for each picture, and each of a video's.
        """
        pictures = [each for one in media for each in (one.pictures if isinstance(one, Video) else (one,))]
        stand = [(self.of_video if each.video else self.placeholder, each.tokens) for each in pictures]
        ids, starts = expand(ids, stand)
        return ids, tuple(map(PlacedPicture, pictures, starts))


def image_reader(
    hf: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]], tokenizer: Tokenizer | None
) -> ImageReader | None:
    """The reader of a checkpoint's pictures and videos; None for a model without vision or without a tokenizer.

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
    if hf["model_type"] not in (*GEMMA, *GEMMA4):
        opens, closes = (special(f"vision_{end}_token_id")[0] for end in ("start", "end"))
        placeholder = Placeholder(image, image, opens + image + closes, image, token)
        if "video_token_id" not in hf:
            return ImageReader(processor, placeholder)
        video, token = special("video_token_id")
        whole, videos = opens + video + closes, read_video_processor(processor, files)
        return ImageReader(processor, placeholder, videos, Placeholder(whole, whole, whole, video, token))
    begins, _ = special("boi_token_id", "boi_token_index")
    ends, _ = special("eoi_token_id", "eoi_token_index")
    if hf["model_type"] in GEMMA4:
        return ImageReader(processor, Placeholder(image, begins + image + ends, image, image, token))
    return ImageReader(processor, Placeholder(begins, f"\n\n{begins}{image}{ends}\n\n", begins, image, token))
