"""Pictures in chats and prompts: taken out, put in place, and offline."""

from __future__ import annotations

import dataclasses
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from jaxspec.config.options import ConfigError
from jaxspec.config.request import RequestError
from jaxspec.engine.llm import LLM
from jaxspec.images.chats import Media, data_of, local_source, separate
from jaxspec.images.image_reader import image_reader
from jaxspec.text.errors import TokenizerError
from jaxspec.text.placeholders import Placeholder, expand
from tests.support.pictures import data_url, encoded, noise
from tests.support.tokenizers import BYTES
from tests.support.vision import CLOSES, CONFIG, FILES, IMAGE, IMAGE_ID, OPENS, SEEING, VIDEO, reader, seeing_tokenizer

QWEN = Placeholder("<p>", "<p>", "<s><p><e>", "<p>", 9)
GEMMA = Placeholder("<b>", "\n\n<b><p><e>\n\n", "<b>", "<p>", 9)
SMALL = noise(56, 84)


def expanded(ids, counts):
    return expand(ids, [(QWEN, count) for count in counts])


def test_ids_are_expanded_where_each_picture_stands():
    assert expanded([1, 9, 2, 9], [3, 1]) == ([1, 9, 9, 9, 2, 9], [1, 5])
    assert expanded([1], []) == ([1], [])
    assert expanded([1, 9, 9, 9, 2, 9], [3, 1]) == ([1, 9, 9, 9, 2, 9], [1, 5])  # as an earlier reply has them
    assert expanded([9, 9, 9, 1, 9], [3, 2]) == ([9, 9, 9, 1, 9, 9], [0, 4])
    assert expanded([9, 9], [2, 1]) == ([9, 9, 9], [0, 2])
    for wrong in ([9, 9], [9, 9, 9, 9], [9, 9, 9, 1, 9]):
        with pytest.raises(TokenizerError, match=f"has {wrong.count(9)} tokens .* one for each of their 3 rows"):
            expanded(wrong, [3])
    with pytest.raises(TokenizerError, match="1 tokens '<p>' for 2 pictures"):
        expanded([9], [1, 1])


def test_ids_have_pictures_and_videos_in_their_order():
    video = dataclasses.replace(QWEN, token="<v>", token_id=8)
    mixed = [(QWEN, 2), (video, 1), (video, 1), (QWEN, 1)]
    assert expand([9, 1, 8, 2, 8, 9], mixed) == ([9, 9, 1, 8, 2, 8, 9], [0, 3, 5, 6])
    for wrong in ([8, 1, 9, 2, 8, 9], [9, 8, 8], [9, 8, 8, 9, 9]):
        with pytest.raises(TokenizerError, match=f"has {len(wrong) - wrong.count(1) - wrong.count(2)} tokens '<p>' or"):
            expand(wrong, mixed)


def test_texts_become_as_the_published_processor_writes_them():
    assert GEMMA.settle("a<b>c", 1) == "a\n\n<b><p><e>\n\nc"
    assert QWEN.stand("a", 2) == "<s><p><e><s><p><e>a"
    assert QWEN.stand("a<image>b", 1) == "a<s><p><e>b" and QWEN.stand("a<p>b", 1) == "a<p>b"
    with pytest.raises(TokenizerError, match="2 placeholders '<p>' for 1 pictures"):
        QWEN.settle("<p><p>", 1)
    for text in ("x<b>", "<p>"):
        with pytest.raises(TokenizerError, match="stands for a picture"):
            GEMMA.check(text)


def test_gemmas_placeholder_is_read_from_its_config():
    hf = {"model_type": "gemma3", "vision_config": {}, "image_token_index": IMAGE_ID,
          "boi_token_index": BYTES.added_tokens[OPENS], "eoi_token_index": BYTES.added_tokens[CLOSES]}  # fmt: skip
    assert image_reader(hf, {}, BYTES).placeholder.becomes == f"\n\n{OPENS}{IMAGE}{CLOSES}\n\n"
    hf = {name.replace("_index", "_id"): value for name, value in hf.items()} | {"model_type": "gemma4"}
    placeholder = image_reader(hf, {}, BYTES).placeholder
    assert (placeholder.written, placeholder.becomes) == (IMAGE, OPENS + IMAGE + CLOSES)
    with pytest.raises(ConfigError, match="image_token_id 999 is no token"):
        image_reader(CONFIG | {"image_token_id": 999}, FILES, SEEING)
    assert image_reader(CONFIG, FILES, None) is None


def test_a_picture_beyond_the_room_is_refused_before_it_is_preprocessed():
    with pytest.raises(RequestError, match="takes 6 tokens, and the context has room for 5"):
        reader().read(SMALL, 5)


def test_separate_keeps_order_and_names_places():
    chat = [{"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "image": SMALL},
                                         {"type": "image_url", "image_url": {"url": "u"}}]}]  # fmt: skip
    messages, pictures = separate(chat)
    assert [part["type"] for part in messages[1]["content"]] == ["text", "image", "image"]
    assert pictures == [Media("messages[1].content[1]", SMALL), Media("messages[1].content[2]", "u")]
    assert separate(chat[:1]) == (chat[:1], [])


@pytest.mark.parametrize("part,says", [
    ({"type": "input_audio"}, "is audio"),
    ({"type": "image"}, "has no picture"),
    ({"type": "picture"}, "'picture', which is not supported"),
    ({"type": "video"}, "has no video"),
    ({"type": "input_video"}, "send it as video_url"),
    ({"type": "video_url", "video_url": "u", "fps": 0}, "fps must be a number above 0"),
])  # fmt: skip
def test_parts_that_are_neither_are_refused(part, says):
    with pytest.raises(RequestError, match=rf"messages\[0\].content\[1\].*{says}"):
        separate([{"role": "user", "content": [{"type": "image", "image": SMALL}, part]}])


def test_data_urls():
    assert data_of("data:image/png;base64,AQID", "p") == data_of("DATA:;name=a;base64, AQ\nID", "p") == bytes((1, 2, 3))
    assert data_of("data:image/png;base64,%41QI", "p") == data_of("data:image/png;base64,AQI=", "p") == bytes((1, 2))
    assert data_of("data:image/png;base64,-_8", "p") == bytes((251, 255))
    for bad in (
        "data:image/png;base64,é",
        "data:image/png,AQID",
        "data:image/png;base64",
        "data:image/png;base64,A",
        "data:image/png;base64,A!",
    ):
        with pytest.raises(RequestError, match="base64"):
            data_of(bad, "p")


@pytest.mark.parametrize("body", ["AA ", "%41"])
def test_a_data_url_takes_little_more_memory_than_its_text(body):
    url = "data:image/png;base64," + body * 2**17
    tracemalloc.start()
    assert len(data_of(url, "p")) in (2**17 * 3 // 4, 2**17 * 3 // 2)
    assert tracemalloc.get_traced_memory()[1] < 4 * len(url) + 2**21
    tracemalloc.stop()


class Offline(LLM):
    """`LLM` without an engine; `generate` gives what it was given."""

    def __init__(self, seeing: bool):
        config = SimpleNamespace(model="m", context_length=100)
        self.engine = SimpleNamespace(
            config=config, tokenizer=seeing_tokenizer(), image_reader=reader() if seeing else None,
            no_pictures=None if seeing else "m has no vision",
        )  # fmt: skip

    def generate(self, prompts, params=None, priority=0, lora=None):
        return prompts


def test_chat_takes_pictures_of_any_source(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(encoded(SMALL))
    sources = SMALL, Image.fromarray(SMALL), path, str(path), f"file://{path}", path.read_bytes()
    for source in (*sources, data_url(path.read_bytes())):
        chat = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "image": source}]}]
        prompt, plain = Offline(True).chat([chat, [{"role": "user", "content": "b"}]])
        (image,) = prompt.images
        assert image.start == 7 and prompt.tokens[7:13] == [IMAGE_ID] * 6
        assert image.picture.key == reader().read(SMALL, 9).key and bytes(plain) == b"user:b;"


def test_chat_takes_videos_as_frames_and_files(tmp_path):
    path = tmp_path / "a.gif"
    frames = [noise(32, 64), noise(32, 64) // 2, noise(32, 64) // 3]
    path.write_bytes(encoded(frames[0], "GIF", save_all=True, append_images=list(map(Image.fromarray, frames[1:])),
                             duration=500))  # fmt: skip
    around = lambda times: "user:a" + "".join(f"<{time} seconds>{OPENS}##{CLOSES}" for time in times) + "b;"  # noqa: E731
    for source, more, times in (
        (frames, {}, (0.2, 1.0)), (np.stack(frames), {"fps": 4}, (0.1, 0.5)), ([*map(encoded, frames)], {}, (0.2, 1.0)),
        (path, {}, (0.2, 1.0)), (data_url(path.read_bytes(), "image/gif"), {"fps": 8}, (0.2, 1.0)),
    ):  # fmt: skip
        parts = [
            {"type": "text", "text": "a"},
            {"type": "video", "video": source, **more},
            {"type": "text", "text": "b"},
        ]
        (prompt,) = Offline(True).chat([{"role": "user", "content": parts}])
        text = seeing_tokenizer().decode(prompt.tokens, False).replace(VIDEO, "#")
        assert text == around(times) and [each.picture.video for each in prompt.images] == [True, True]


def test_chat_without_pictures_is_as_before():
    assert Offline(True).chat([{"role": "user", "content": "b"}]) == [[*b"user:b;"]]
    assert Offline(True).chat([]) == []


@pytest.mark.parametrize("source,seeing,says", [
    (SMALL, False, r"messages\[0\].content\[0\] is a picture or video, and m has no vision"),
    ("http://a.example/b.png", True, "fetched by the server alone"),
    ("nowhere.png", True, r"messages\[0\].content\[0\]: .*nowhere.png"),
    (7, True, "got int"),
    (np.tile(SMALL, (5, 5, 1)), True, "has room for 46"),
])  # fmt: skip
def test_chat_names_a_picture_that_it_cant_take(source, seeing, says):
    chat = [{"role": "user", "content": [{"type": "image", "image": source}]}]
    if "room" in says:
        chat[0]["content"].insert(0, {"type": "image", "image": np.tile(SMALL, (5, 5, 1))})
    with pytest.raises(RequestError, match=says):
        Offline(seeing).chat(chat)


def test_local_sources_stay_on_this_host():
    with pytest.raises(RequestError, match=r"other\.example"):
        local_source("file://other.example/a.png", "p")
