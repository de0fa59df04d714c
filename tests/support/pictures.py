"""Pictures for tests: plain ones, and files that strangers may send."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
from PIL import Image


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, channels), dtype=np.uint8)


def encoded(picture: Image.Image | np.ndarray, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    picture = Image.fromarray(picture) if isinstance(picture, np.ndarray) else picture
    picture.save(file, kind, **options)
    return file.getvalue()


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width: int, height: int, *, depth: int = 8, color: int = 2, rows: bytes | None = None, more: bytes = b"",
        interlaced: int = 0) -> bytes:  # fmt: skip
    """A PNG that says it has this size; its `rows` may be fewer."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlaced))
    packed = zlib.compress(b"" if rows is None else rows, 9)
    return b"\x89PNG\r\n\x1a\n" + header + more + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


@cache
def blank_rows(width: int, height: int, bytes_per_pixel: int = 3) -> bytes:
    return bytes((1 + width * bytes_per_pixel) * height)


RIGHT, WRONG, EITHER = "right", "wrong", "either"


def hostile() -> Iterator[tuple[str, str, bytes]]:
    """Name, whether it can be read, and contents of each file."""
    small = Image.fromarray(noise(40, 56))
    good = {kind: encoded(small, kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")}
    for kind, content in good.items():
        yield f"plain {kind}", RIGHT, content
        for part in (9, len(content) // 2, len(content) - 3):
            at_end = part == len(content) - 3 and kind in ("PNG", "JPEG", "GIF")  # whole pixels, without the file's end
            yield f"{kind} cut at {part}", EITHER if at_end else WRONG, content[:part]
    spoilt = bytearray(good["PNG"])
    spoilt[len(spoilt) // 2] ^= 255
    yield "PNG with a wrong checksum", WRONG, bytes(spoilt)
    spoilt = bytearray(good["JPEG"])
    spoilt[len(spoilt) // 2 : len(spoilt) // 2 + 40] = bytes(40)
    yield "JPEG with spoilt coefficients", EITHER, bytes(spoilt)
    # bombs
    yield "PNG of 60,000 x 60,000", WRONG, png(60000, 60000)
    yield "PNG of 2^31 - 1 squared", WRONG, png(2**31 - 1, 2**31 - 1)
    yield "PNG of 13,000 x 13,000", WRONG, png(13000, 13000)
    yield "PNG without pixels", WRONG, png(0, 0)
    yield "PNG of 4,800 squared in black", RIGHT, png(4800, 4800, rows=blank_rows(4800, 4800))
    yield "PNG whose rows end early", WRONG, png(4800, 4800, rows=b"\0" * 4800)
    yield "interlaced PNG of 4,800 squared without rows", WRONG, png(4800, 4800, interlaced=1)
    text = b"a\0\0" + zlib.compress(bytes(80 * 2**20), 9)
    yield "PNG with 80 MB of compressed text", EITHER, png(8, 8, rows=blank_rows(8, 8), more=chunk(b"zTXt", text))
    profile = b"p\0\0" + zlib.compress(bytes(80 * 2**20), 9)
    yield "PNG with 80 MB of colour profile", EITHER, png(8, 8, rows=blank_rows(8, 8), more=chunk(b"iCCP", profile))
    yield "GIF of 65,535 squared", WRONG, b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b";"
    yield (
        "WebP of 16,383 squared",
        WRONG,
        (b"RIFF\x1e\0\0\0WEBPVP8 \x12\0\0\0\x30\x01\0\x9d\x01\x2a" + struct.pack("<HH", 16383, 16383) + bytes(8)),
    )
    yield (
        "BMP of 65,535 squared",
        WRONG,
        (
            b"BM"
            + struct.pack("<IHHI", 0, 0, 0, 54)
            + struct.pack("<IiiHHIIiiII", 40, 65535, 65535, 1, 24, 0, 0, 0, 0, 0, 0)
        ),
    )
    big = bytearray(encoded(small, "JPEG"))
    at = big.index(b"\xff\xc0") + 5
    big[at : at + 4] = struct.pack(">HH", 65500, 65500)
    yield "JPEG of 65,500 squared", WRONG, bytes(big)
    yield "progressive JPEG of 4,000 squared", WRONG, encoded(Image.new("RGB", (4000, 4000)), "JPEG", progressive=True)
    # shapes
    yield "1 x 20,000", WRONG, encoded(noise(20000, 1))
    yield "20,000 x 1", WRONG, encoded(noise(1, 20000))
    yield "1 x 1", RIGHT, encoded(noise(1, 1))
    yield "2 x 400", RIGHT, encoded(noise(400, 2))
    # modes
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA"):
        yield f"PNG in mode {mode}", RIGHT, encoded(small.convert(mode))
    yield "PNG in 16 bits of grey", RIGHT, encoded(Image.fromarray(noise(9, 9, 2).view("<u2")[:, :, 0]))
    yield "PNG in 16 bits of colour", RIGHT, png(4, 4, depth=16, rows=blank_rows(4, 4, 6))
    yield "PNG with a transparent colour", RIGHT, encoded(small.convert("P"), transparency=3)
    yield "JPEG in CMYK", RIGHT, encoded(small.convert("CMYK"), "JPEG")
    yield "JPEG in grey", RIGHT, encoded(small.convert("L"), "JPEG")
    frames = [Image.fromarray(noise(16, 16 + n * 0) // (n + 1)) for n in range(4)]
    yield "animated GIF", RIGHT, encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    yield "animated PNG", RIGHT, encoded(frames[0], "PNG", save_all=True, append_images=frames[1:])
    yield "animated WebP", RIGHT, encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:])
    exif = Image.Exif()
    exif[0x0112] = 6
    yield "JPEG turned by EXIF", RIGHT, encoded(small, "JPEG", exif=exif)
    exif[0x0112] = 999
    yield "JPEG with a senseless orientation", RIGHT, encoded(small, "JPEG", exif=exif)
    tags = b"".join(struct.pack("<HHII", 1 + tag, 1, 60_000, 8) for tag in range(400))
    many = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 400) + tags + bytes(4)
    yield "JPEG with 400 EXIF tags of one place", RIGHT, encoded(small, "JPEG", exif=many)
    yield "JPEG with damaged EXIF", RIGHT, encoded(small, "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    # no pictures
    yield "nothing", WRONG, b""
    yield "SVG", WRONG, b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"><script>1</script></svg>'
    yield "SVG with entities", WRONG, b'<!DOCTYPE svg [<!ENTITY a "aaaa">]><svg>&a;</svg>'
    yield "a web page", WRONG, b"<!doctype html><html><body>404</body></html>"
    yield "TIFF", WRONG, encoded(small, "TIFF")
    yield "PDF", WRONG, encoded(small, "PDF")
    yield "EPS", WRONG, encoded(small, "EPS")
    yield "AVIF's beginning", WRONG, b"\0\0\0\x20ftypavif" + bytes(64)
    yield "a video's beginning", WRONG, b"\0\0\0\x20ftypisom" + bytes(64)
    yield "zip", WRONG, b"PK\3\4" + bytes(64)
    yield "random bytes", WRONG, noise(10, 100).tobytes()
    yield "more than the most bytes", WRONG, good["PNG"] + bytes(21 * 2**20)
    yield "a JPEG's mark alone", WRONG, b"\xff\xd8\xff"


def gif(width: int, height: int, frames: int, delay: int = 10) -> bytes:
    """An animation of one pixel a frame, on a canvas that may be huge."""
    head = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6)
    shown = b"\x21\xf9\x04" + struct.pack("<BHB", 4, delay, 0) + b"\0"
    return head + (shown + b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\0") * frames + b";"


def apng(width: int, height: int, frames: int, seconds: int = 1) -> bytes:
    """An animation that says it has so many frames, and has two in black."""
    frame = struct.pack(">IIIIHHBB", width, height, 0, 0, seconds, 1, 0, 0)
    rows = zlib.compress(blank_rows(width, height), 9)
    second = chunk(b"fcTL", struct.pack(">I", 1) + frame) + chunk(b"fdAT", struct.pack(">I", 2) + rows)
    more = chunk(b"acTL", struct.pack(">II", frames, 0)) + chunk(b"fcTL", bytes(4) + frame)
    return png(width, height, rows=blank_rows(width, height), more=more)[:-12] + second + chunk(b"IEND", b"")


def webp(width: int, height: int, frames: int, milliseconds: int = 100) -> bytes:
    """An animation of 16 x 16 pixels a frame, on a canvas that may be huge."""
    three = lambda number: struct.pack("<I", number)[:3]  # noqa: E731
    part = lambda name, body: name + struct.pack("<I", len(body)) + body + bytes(len(body) % 2)  # noqa: E731
    still = encoded(Image.new("RGB", (16, 16)), "WEBP", lossless=True)[12:]
    frame = part(b"ANMF", bytes(6) + three(15) * 2 + three(milliseconds) + b"\0" + still)
    head = part(b"VP8X", b"\2\0\0\0" + three(width - 1) + three(height - 1)) + part(b"ANIM", bytes(6))
    return part(b"RIFF", b"WEBP" + head + frame * frames)


def hostile_videos() -> Iterator[tuple[str | list[str], str]]:
    """List what is sent as a video, and what its refusal says: nothing for one that is read."""
    jpeg = data_url(encoded(noise(28, 56), "JPEG")).partition(",")[2]
    listed = "data:video/jpeg;base64,"
    for make, side in ((gif, 3548), (apng, 3026), (webp, 2682)):
        yield data_url(make(side, side, 2)), f"{side} x {side} pixels, at most"
        for delay in (0, 65535):
            yield data_url(make(64, 64, 2, delay)), ""
    yield data_url(gif(64, 64, 8193)), "more than the 8192 frames of 64 x 64 pixels"
    yield data_url(webp(64, 64, 8193)), "more than the 8192 frames"
    yield data_url(webp(2000, 2000, 135)), "more than the 134 frames of 2000 x 2000 pixels"
    yield data_url(apng(1000, 1000, 2**31 - 1)), "more than the 536 frames"
    yield data_url(apng(64, 64, 2)[:-70]), "damaged"
    yield data_url(gif(1, 20000, 2)), "at most 200 times"
    yield data_url(gif(64, 64, 1)), "has 1 frames"
    yield data_url(encoded(noise(9, 9), "JPEG")), "of a format that is not supported"
    yield listed, "has 1 frames"
    yield listed + "," * 5_000_000, "has 5000001 frames, at most 768"
    yield listed + ",".join([listed + jpeg] * 2), "base64"
    yield [listed + jpeg] * 2, "is a video"
    yield [data_url(encoded(noise(*size))) for size in ((28, 56), (56, 28))], "the first is 56 x 28"
    yield [data_url(bytes(2**20))] * 21, "more than 20971520 bytes together"
    yield [], "has 0 frames"


def broken(read: Callable[[bytes], object], error: type[Exception], expected: str, content: bytes) -> str | None:
    """Say how reading goes against what was expected; None: it doesn't."""
    try:
        read(content)
    except error as refusal:
        return None if expected != RIGHT else f"refused: {refusal}"
    return None if expected != WRONG else "was read"
