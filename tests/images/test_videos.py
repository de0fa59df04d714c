"""Videos: frames, sizes, times and pixel values as published; which sources are read, and which refused."""

from __future__ import annotations

import builtins
import dataclasses
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxspec.config.options import ConfigError
from jaxspec.config.request import RequestError
from jaxspec.images import video
from jaxspec.images.chats import Media, local_media
from jaxspec.images.picture import Picture, Video
from jaxspec.images.processors import read_processor
from jaxspec.images.video import Clip, open_clip
from jaxspec.images.video_processor import VideoProcessor, read_video_processor
from jaxspec.text.errors import TokenizerError
from jaxspec.text.placeholders import Placeholder
from tests.golden.make_videos import CASES, STRIDE, drawn
from tests.support.pictures import data_url, encoded, noise

GOLDEN = Path(__file__).resolve().parents[1] / "golden/videos.npz"
QWEN = {"model_type": "qwen3_vl", "vision_config": {}}
PAD = Placeholder("[#]", "[#]", "[#]", "#", 9)
ROOM = 10**6


@cache
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN))


def processor(settings: dict, name: str = "video_preprocessor_config.json") -> VideoProcessor:
    return read_video_processor(read_processor(QWEN, {}), {name: settings})


def clip(frames: int, rate: float | None, height: int, width: int) -> Clip:
    made = drawn(frames, height, width)
    return Clip(frames, rate, lambda numbers: (made[number] for number in numbers))


@pytest.mark.parametrize("name", CASES)
def test_videos_become_as_the_published_processor_has_them(name):
    """Resized pixels may be one step of 255 away, since it resizes with torchvision."""
    settings, frames, rate, height, width = CASES[name]
    process, own = processor(settings), clip(frames, rate, height, width)
    made = process(own, ROOM)
    assert process.sampled(own)[0] == golden()[f"{name}.chosen"].tolist()
    (t, rows, columns), each = golden()[f"{name}.grid"].tolist(), made.pictures
    assert [picture.grid for picture in each] == [(1, rows, columns)] * t
    assert made.tokens == t * rows * columns // 4 and all(picture.video for picture in each)
    pixels = np.concatenate([picture.pixels for picture in each]).ravel()[::STRIDE]
    assert pixels.dtype == np.float32 and np.abs(pixels - golden()[f"{name}.pixels"]).max() < 1.01 * 2 / 255
    text = PAD.settle_videos("a[#]b", [made.times])
    assert text.replace("#", "#" * each[0].tokens) == f"a{golden()[f'{name}.text']}b"


def animation(kind: str, frames: int = 6, milliseconds: int = 250) -> bytes:
    """Frames of one colour each, which no format changes."""
    drawn = [Image.new("RGB", (48, 40), (40 * i, 0, 0)) for i in range(frames)]
    more = {"lossless": True} if kind == "WEBP" else {}
    return encoded(drawn[0], kind, save_all=True, append_images=drawn[1:], duration=milliseconds, **more)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animations_are_videos(kind, tmp_path):
    (tmp_path / "a").write_bytes(content := animation(kind))
    for source in (content, tmp_path / "a"):
        own = open_clip(source)
        assert (own.count, own.rate) == (6, 4.0)
        frames = list(own.decode([1, 2, 5]))
        assert [frame.shape for frame in frames] == [(40, 48, 3)] * 3
        assert [frame[9, 9, 0] for frame in frames] == pytest.approx([40, 80, 200], abs=2)
    assert [*processor({}).sampled(open_clip(content))[0]] == [0, 2, 3, 5]  # at least four frames
    assert open_clip(animation(kind, milliseconds=0)).rate in (10.0, 1000.0)


def test_lists_of_frames_are_taken_whole():
    arrays = [noise(40, 48) for _ in range(3)]
    files = [encoded(each) for each in arrays]
    listed = "data:video/jpeg;base64," + ",".join(data_url(each).partition(",")[2] for each in files)
    media = Media("m", listed, True)
    for source in (arrays, np.stack(arrays), files, local_media(media), list(map(Image.fromarray, arrays))):
        own = open_clip(source)
        assert own.rate is None and np.array_equal(list(own.decode(range(3))), arrays)
        assert processor({})(own, ROOM).times == (0.25, 1.0)  # two a second


class Gone(Exception):
    pass


def leave() -> None:
    raise Gone


@pytest.mark.parametrize("source,says", [
    ([noise(40, 48), noise(48, 40)], "frame 1 of the video is 40 x 48 pixels, the first is 48 x 40"),
    ([noise(40, 48), b"no"], "frame 1 of the video: the picture is damaged"),
    ([noise(40, 48)], "has 1 frames, at least 2 are needed"),
    ([noise(8, 8)] * 9, "has 9 frames, at most 8 are allowed"),
    ([noise(2, 8000)] * 2, "at most 200 times"),
    ([noise(640, 640)] * 8, r"takes 256 tokens, 8 frames of 256 x 256 pixels, and the context has room for 200"),
    (encoded(noise(40, 48)), "has 1 frames"),
    (animation("GIF")[:150], "damaged|has 1 frames"),
    (b"", "the video is empty; send MP4"),
    (b"<svg", "SVG"),
    (encoded(noise(9, 9), "JPEG"), "damaged or of a format"),
    (b"#EXTM3U\nfile:///etc/passwd", "damaged or of a format"),
    (bytes(21 * 2**20), "at most 20971520"),
    (7, "a list of frames or an array, got int"),
    ("/nowhere.gif", "the video /nowhere.gif can't be read"),
])  # fmt: skip
def test_no_videos_and_too_large_ones_are_refused(source, says):
    process = processor({"max_frames": 8, "size": {"shortest_edge": 4096, "longest_edge": 8 * 256**2}})
    with pytest.raises(RequestError, match=says):
        process(open_clip(source), 200)


def test_decoding_ends_when_its_time_is_over_or_the_client_is_gone(monkeypatch):
    with pytest.raises(Gone):
        open_clip(animation("GIF"), leave)
    monkeypatch.setattr(video, "MAX_SECONDS", -1.0)
    for source in (animation("GIF"), [noise(9, 9)] * 2):
        with pytest.raises(RequestError, match="longer to decode than"):
            list(open_clip(source).decode([0, 1]))


@pytest.mark.parametrize("start", [b"\0\0\0\x20ftypisom", b"\x1a\x45\xdf\xa3", b"RIFF\0\0\0\0AVI "])
def test_without_a_decoder_containers_are_refused_by_name(start, monkeypatch):
    found = builtins.__import__

    def without(name, *more):
        if name == "av":
            raise ImportError(name)
        return found(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RequestError, match=r"no decoder is installed; run `pip install 'jaxspec\[video\]'`"):
        open_clip(start + bytes(64))


@pytest.mark.parametrize("kind,codec", [("mp4", "mpeg4"), ("matroska", "mpeg4"), ("avi", "mpeg4")])
def test_containers_are_read_with_pyav(kind, codec, tmp_path):
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "a"), "w", format=kind) as made:
        stream = made.add_stream(codec, rate=12)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for i in range(24):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 10 * i, np.uint8), format="rgb24")
            made.mux(stream.encode(frame))
        made.mux(stream.encode())
    content = (tmp_path / "a").read_bytes()
    own = open_clip(content)
    assert (own.count, own.rate) == (24, 12.0)
    assert [frame.mean() for frame in own.decode([0, 5, 23])] == pytest.approx([0, 50, 230], abs=6)
    for damaged in (content[:200], content[: len(content) // 2] + bytes(len(content) // 2), content[:40] + bytes(4000)):
        with pytest.raises(RequestError, match=r"damaged|fewer than|no video|has [01] frames"):
            processor({})(open_clip(damaged), ROOM)


def test_settings_come_from_the_first_file_that_has_them():
    assert (processor({}).rate, processor({}).fewest, processor({}).many) == (2.0, 4, 768)
    assert processor({"video_processor": {"fps": 3}, "fps": 9}, "processor_config.json").rate == 3
    assert processor({"max_frames": 7}, "preprocessor_config.json").many == 7


def test_frames_are_no_larger_than_a_program_takes():
    process = processor({"size": {"shortest_edge": 4096, "longest_edge": 2**30}})
    assert process.size(4, 4000, 4000) == (4000, 4000)
    assert dataclasses.replace(process, limit=256).size(4, 4000, 4000) == (512, 512)


@pytest.mark.parametrize("settings,says", [
    ({"do_sample_frames": False}, "do_sample_frames"), ({"patch_size": 14}, "patch_size 14 differs"),
    ({"size": {"shortest_edge": 9, "longest_edge": 5}}, "fit together"), ({"fps": 0}, "fps"),
    ({"min_frames": 900}, "900 to 768 frames"), ({"size": 4}, "objects"), ({"resample": 0}, "resample"),
])  # fmt: skip
def test_senseless_files_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        processor(settings)


def test_a_prompt_has_a_placeholder_for_each_video():
    with pytest.raises(TokenizerError, match=r"0 placeholders '\[#\]' for 1 videos"):
        PAD.settle_videos("a#", [[0.5]])
    two = PAD.settle_videos("[#]-[#]", [[0.5, 1.5], [61.25]])
    assert two == "<0.5 seconds>[#]<1.5 seconds>[#]-<61.2 seconds>[#]"
    part = Picture(np.zeros((4, 1)), (1, 2, 2), 1, 0, True)
    assert Video((part, part), (0.5, 1.5)).tokens == 2
