"""Pictures of any source as arrays of RGB pixels, with limits that hold before memory is spent.

Invariant: a picture whose pixels would take more than `MAX_MEMORY` on the way is refused by its header.
"""

from __future__ import annotations

import io
import os
import struct
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, WebPImagePlugin

from jaxspec.config.request import RequestError

MAX_FILE = 20 * 2**20  # bytes
MAX_MEMORY = 192 * 2**20  # bytes, beside the file
WEBP = WebPImagePlugin.WebPImageFile.format
# Bytes that a decoder holds for each pixel: Pillow's own 4, the array's 3, and canvases or coefficients besides.
BYTES_PER_PIXEL = {"PNG": 8, "JPEG": 8, "GIF": 8, "BMP": 8, WEBP: 20}
FORMATS = tuple(BYTES_PER_PIXEL)  # a JPEG of several pictures, MPO, is opened as JPEG
PROGRESSIVE = 16  # of a JPEG whose parts come in turn
STRIP = 2**18  # pixels that are converted at once
ALLOWED = "PNG, JPEG, WebP, GIF or BMP"
ORIENTATION = 0x0112  # EXIF's tag
warnings.filterwarnings("ignore", module=r"PIL\.")  # of metadata, up to thousands of lines for each picture
# What a reader of a damaged or hostile file may raise.
BROKEN = (OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, EOFError, OverflowError, struct.error)


def read_picture(source: Any) -> np.ndarray:
    """Read a picture: u8[height, width, 3].

    **Arguments:** `source`: a file's bytes, its path, a `PIL.Image.Image`, or an array: u8[height, width, 3], [height,
    width, 4] with alpha, [height, width] or [height, width, 1] of grey.

    The first frame of an animation counts. A file's EXIF orientation is applied. Transparent pixels show white, and 16
    bits become 8.

    **Raises:** `RequestError` for anything that is no picture, is damaged, or is larger than allowed.
    """
    if isinstance(source, np.ndarray):
        return _of_array(source)
    if isinstance(source, Image.Image):
        return _decoded(source)
    if isinstance(source, str | os.PathLike):
        source = read_file(Path(source))
    if not isinstance(source, bytes | bytearray | memoryview):
        raise RequestError(
            f"a picture must be the bytes of a file, its path, a PIL image or an array, got {type(source).__name__}"
        )
    with open_file(source) as image:
        return _decoded(image)


def open_file(content: bytes, what: str = "picture", formats: tuple[str, ...] = FORMATS, allowed: str = ALLOWED) -> Any:
    """Open a file's picture, and read its header. **Raises:** `RequestError`, which calls it `what`."""
    if len(content) > MAX_FILE:
        raise RequestError(f"the {what}'s file has {len(content)} bytes, at most {MAX_FILE} are allowed")
    try:
        return Image.open(io.BytesIO(content), formats=formats)
    except Image.DecompressionBombError:
        most = MAX_MEMORY // min(BYTES_PER_PIXEL.values())
        raise RequestError(f"the {what} has more than {most} pixels; send a smaller one") from None
    except (*BROKEN, zlib.error) as error:
        raise RequestError(f"the {what} {_is(bytes(content[:256]))}; send {allowed}") from error


def read_file(path: Path, what: str = "picture") -> bytes:
    """Contents of a file that isn't too large. **Raises:** `RequestError`, which calls it `what`."""
    try:
        if (size := path.stat().st_size) > MAX_FILE:
            raise RequestError(f"{path} has {size} bytes, at most {MAX_FILE} are allowed")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"the {what} {path} can't be read: {error}") from error


def _is(start: bytes) -> str:
    """Say how a file that isn't read seems to be."""
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not start:
        return "is empty"
    if text.startswith((b"<svg", b"<?xml", b"<!doctype svg", b"<!--")):
        return "is SVG or XML, which is not supported"
    if start[4:8] == b"ftyp":
        return f"is {'AVIF' if b'avif' in start[:32] else 'HEIC or a video'}, which is not supported"
    if start.startswith((b"II*\0", b"MM\0*")):
        return "is TIFF, which is not supported"
    if start.startswith(b"%PDF"):
        return "is a PDF file, which is not supported"
    if text.startswith((b"<html", b"<!doctype html")):
        return "is a web page"
    return "is damaged or of a format that is not supported"


def check_size(width: int, height: int, bytes_per_pixel: int = 8, what: str = "picture") -> None:
    """**Raises:** `RequestError`, which calls it `what`, for no pixels or too many."""
    if width < 1 or height < 1:
        raise RequestError(f"the {what} is {width} x {height} pixels; it must have at least one")
    if width * height > (most := MAX_MEMORY // bytes_per_pixel):
        raise RequestError(f"the {what} is {width} x {height} pixels, at most {most} are allowed; send a smaller one")


def _of_array(array: np.ndarray) -> np.ndarray:
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        raise RequestError(
            f"a picture's array must be uint8 [height, width] or [height, width, 1, 3 or 4], got {array.dtype} "
            f"{list(array.shape)}"
        )
    check_size(array.shape[1], array.shape[0])
    return rgb_of(Image.fromarray(array[:, :, 0] if array.shape[2:] == (1,) else array))


def _decoded(image: Image.Image) -> np.ndarray:
    """Pixels of a picture whose header has been read."""
    memory = PROGRESSIVE if image.info.get("progressive") else BYTES_PER_PIXEL.get(image.format, 8)
    check_size(*image.size, memory)
    try:
        image.load()
        rgb = rgb_of(image)
    except MemoryError as error:
        raise RequestError("the picture takes more memory than there is; send a smaller one") from error
    except (*BROKEN, zlib.error) as error:
        raise RequestError(f"the picture is damaged: {str(error)[:100]}") from error
    turn = None
    with suppress(*BROKEN):  # metadata that can't be read turns nothing
        turn = TURNS.get(image.getexif().get(ORIENTATION))
    return rgb if turn is None else np.ascontiguousarray(turn(rgb))


# By EXIF's orientation, how a picture is turned upright.
TURNS: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    2: lambda rgb: rgb[:, ::-1],
    3: lambda rgb: rgb[::-1, ::-1],
    4: lambda rgb: rgb[::-1],
    5: lambda rgb: rgb.swapaxes(0, 1),
    6: lambda rgb: np.rot90(rgb, -1),
    7: lambda rgb: rgb[::-1, ::-1].swapaxes(0, 1),
    8: lambda rgb: np.rot90(rgb),
}


def rgb_of(image: Image.Image) -> np.ndarray:
    """A loaded picture's pixels as RGB, converted strip by strip."""
    width, height = image.size
    rgb = np.empty((height, width, 3), np.uint8)
    rows = max(1, STRIP // width)
    for top in range(0, height, rows):
        rgb[top : top + rows] = _opaque(image.crop((0, top, width, min(height, top + rows))))
    return rgb


def _opaque(image: Image.Image) -> Image.Image:
    """A picture in RGB, on white where it is transparent, as transformers' `convert_to_rgb` has it."""
    if image.mode.startswith("I"):  # 16 bits, which Pillow would cut off at 255
        grey = np.clip(np.asarray(image, np.float32), 0, 65535)
        image = Image.fromarray(np.round(grey / 257).astype(np.uint8))
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
