from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from jaxspec.config.request import RequestError
from jaxspec.images.reading import MAX_FILE, read_picture
from tests.support.pictures import encoded, noise, png

ROOT = Path(__file__).resolve().parents[2]
MEASURE = """
import sys
from jaxspec.config.request import RequestError
from jaxspec.images.processors import read_processor
from jaxspec.images.reading import read_picture
from tests.support.pictures import broken, hostile

processor = read_processor({"model_type": "qwen2_vl", "vision_config": {}}, {})

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024

for name, expected, content in hostile():
    open("/proc/self/clear_refs", "w").write("5")
    before = peak()
    problem = broken(lambda content: processor(read_picture(content)), RequestError, expected, content)
    print(f"{name}|{peak() - before:.0f}|{problem or ''}")
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures by Linux's /proc")
def test_hostile_files_are_right_or_refused_within_200_mb():
    """In a process of its own, whose peak memory each file may raise."""
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and not done.stderr, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines()]
    assert len(rows) >= 60
    assert not [row for row in rows if row[2]]
    assert not [row for row in rows if int(row[1]) > 200]


def test_bytes_paths_arrays_and_pil_images_are_the_same_picture(tmp_path):
    pixels = noise(12, 20)
    path = tmp_path / "a.png"
    path.write_bytes(encoded(pixels))
    for source in (pixels, Image.fromarray(pixels), path.read_bytes(), path, str(path)):
        assert np.array_equal(read_picture(source), pixels)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_a_picture_as_pillow_does(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(noise(6, 10), exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))))
    assert np.array_equal(read_picture(content), expected)


def test_what_is_transparent_shows_white():
    pixels = noise(5, 7, 4)
    pixels[:, :3, 3], pixels[:, 3:, 3] = 0, 255
    read = read_picture(encoded(pixels))
    assert (read[:, :3] == 255).all() and np.array_equal(read[:, 3:], pixels[:, 3:, :3])
    assert np.array_equal(read_picture(pixels), read)
    palette = Image.fromarray(np.arange(4, dtype=np.uint8)[None], "P")
    palette.putpalette([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    assert read_picture(encoded(palette, transparency=1))[0].tolist() == [[1, 2, 3], [255] * 3, [7, 8, 9], [10, 11, 12]]


def test_sixteen_bits_become_eight():
    grey = np.array([[0, 128, 257, 32896, 65535]], np.uint16)
    assert read_picture(encoded(Image.fromarray(grey)))[0, :, 0].tolist() == [0, 0, 1, 128, 255]


def test_a_large_picture_is_converted_in_strips_as_in_one_piece():
    pixels = noise(700, 900, 4)
    image = Image.fromarray(pixels)
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    assert np.array_equal(read_picture(image), np.asarray(Image.alpha_composite(white, image).convert("RGB")))


@pytest.mark.parametrize("source,says", [
    (png(60000, 60000), "60000 x 60000|more than"),
    (b"<svg/>", "SVG"),
    (b"", "empty"),
    (encoded(noise(4, 4), "TIFF"), "TIFF"),
    (bytes(MAX_FILE + 1), "at most 20971520"),
    ("/no/such/picture.png", "/no/such/picture.png"),
    (7, "int"),
    (np.zeros((4, 4, 2), np.uint8), r"uint8 \[4, 4, 2\]"),
    (np.zeros((4, 4, 3), np.float32), "float32"),
    (np.zeros((0, 4, 3), np.uint8), "at least one"),
    (encoded(noise(40, 56))[:600], "damaged"),
])  # fmt: skip
def test_errors_say_what_was_given(source, says):
    with pytest.raises(RequestError, match=says):
        read_picture(source)
