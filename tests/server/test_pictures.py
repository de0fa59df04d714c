"""Pictures in requests: what reaches the engine, and what is refused, and by which name."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from openai import OpenAI
from PIL import Image

from jaxspec.config.request import RequestError
from jaxspec.images.chats import Media
from jaxspec.images.reading import read_picture
from server.app import create_app
from server.chat.speech import write_tools
from server.media.pictures import MediaRules, read_media
from tests.server.fake import FakeLLM
from tests.server.live import serving
from tests.support.pictures import RIGHT, WRONG, data_url, encoded, hostile, hostile_videos, noise
from tests.support.tiny import BYTE_VOCAB
from tests.support.vision import CLOSES, IMAGE, IMAGE_ID, OPENS, VIDEO, reader, seeing_tokenizer

CHAT = "/v1/chat/completions"
SMALL, WIDE = noise(56, 84), noise(28, 112)  # 2 x 3 and 1 x 4 tokens
TEXT = {"type": "text", "text": "What is it?"}


def image(pixels: np.ndarray) -> dict:
    return {"type": "image_url", "image_url": {"url": data_url(encoded(pixels)), "detail": "low"}}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> Iterator[tuple[str, FakeLLM]]:
    folder = tmp_path_factory.mktemp("media")
    (folder / "a.png").write_bytes(encoded(SMALL))
    (folder.parent / "secret.png").write_bytes(encoded(SMALL))
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    llm = FakeLLM(tokenizer=seeing_tokenizer(), image_reader=reader(), vocab=BYTE_VOCAB + 1)
    with serving(create_app(llm, media=MediaRules(folder=folder, most=3, videos=2))) as url:
        yield url, llm, folder


@pytest.fixture
def post(seeing):
    with httpx.Client(base_url=seeing[0]) as client:
        yield lambda route, **body: client.post(route, json=body)


def pictures_of(seeing) -> list:
    return [(each.start, each.picture.grid, each.picture.key) for each in seeing[1].images[-1]]


def key(pixels: np.ndarray) -> int:
    return reader().read(pixels, 64).key


def prompt_of(seeing) -> str:
    """The prompt that reached the engine, with `#` for each row of a picture."""
    return seeing[1].tokenizer.decode(seeing[1].started[-1][0], False).replace(IMAGE, "#")


def test_the_openai_client_sends_pictures(seeing):
    with OpenAI(base_url=f"{seeing[0]}/v1", api_key="none", max_retries=0) as client:
        parts = [{"type": "text", "text": "A"}, image(SMALL), {"type": "text", "text": "B"}, image(WIDE), TEXT]
        reply = client.chat.completions.create(model="fake/model", messages=[{"role": "user", "content": parts}])
        around = lambda rows: OPENS + "#" * rows + CLOSES  # noqa: E731
        assert prompt_of(seeing) == f"user:A{around(6)}B{around(4)}What is it?;"
        assert reply.usage.prompt_tokens == len(seeing[1].started[-1][0])
        assert reply.usage.prompt_tokens_details.to_dict()["image_tokens"] == 10
        assert pictures_of(seeing) == [(7, (1, 4, 6), key(SMALL)), (16, (1, 2, 8), key(WIDE))]
        items = [{"role": "user", "content": [{"type": "input_text", "text": "A"},
                  {"type": "input_image", "image_url": data_url(encoded(SMALL)), "detail": "auto"}]}]  # fmt: skip
        response = client.responses.create(model="fake/model", input=items)
        assert prompt_of(seeing) == f"user:A{around(6)};"
        assert response.usage.input_tokens_details.to_dict()["image_tokens"] == 6
        follow = client.responses.create(model="fake/model", input="more", previous_response_id=response.id)
        assert len(pictures_of(seeing)) == 1 and follow.usage.input_tokens > response.usage.input_tokens
        listed = client.responses.input_items.list(follow.id).data
        assert listed[-1].content[1].image_url == items[0]["content"][1]["image_url"]


def test_videos_come_as_files_and_as_frames(seeing, post):
    frames = [noise(28, 56) // (i + 1) for i in range(4)]
    gif = encoded(frames[0], "GIF", save_all=True, append_images=list(map(Image.fromarray, frames[1:])), duration=500)
    files = [data_url(encoded(each)) for each in frames]
    around = lambda *times: "".join(f"<{time} seconds>{OPENS}##{CLOSES}" for time in times)  # noqa: E731
    for part, times in (
        ({"type": "video_url", "video_url": {"url": data_url(gif, "image/gif")}}, ("0.2", "1.2")),
        ({"type": "video_url", "video_url": "data:video/jpeg;base64," + ",".join(
            data_url(encoded(each, "JPEG")).partition(",")[2] for each in frames[:3])}, ("0.2", "1.0")),
        ({"type": "video", "video": files, "fps": 1}, ("0.5", "2.5")),
    ):  # fmt: skip
        reply = post(CHAT, messages=[{"role": "user", "content": [image(SMALL), TEXT, part]}]).json()
        text = prompt_of(seeing).replace(VIDEO, "#")
        assert text == f"user:{OPENS}######{CLOSES}What is it?{around(*times)};", reply
        details = reply["usage"]["prompt_tokens_details"]
        assert (details["image_tokens"], details["video_tokens"]) == (6, 4)
    assert seeing[1].images[-1][1].picture.key != seeing[1].images[-1][2].picture.key


def test_messages_take_pictures(seeing, post):
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(encoded(SMALL)).decode()}
    for wrong in (False, True):
        content = [
            {"type": "text", "text": "A"},
            {"type": "image", "source": source | ({"data": "AAAA"} if wrong else {})},
        ]
        body = {"model": "fake/model", "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
        for route in ("/v1/messages", "/v1/messages/count_tokens"):
            reply = post(route, **body)
            if wrong:
                assert reply.status_code == 400 and "messages[0].content" in reply.json()["error"]["message"], (
                    reply.text
                )
                continue
            assert reply.status_code == 200, reply.text
    assert pictures_of(seeing) == [(7, (1, 4, 6), key(SMALL))]


@pytest.mark.parametrize("text,prompt", [
    ("Human: x", f"{OPENS}######{CLOSES}Human: x"),  # as SGLang's send_one --image has it
    ("Human: <image>\nx", f"Human: {OPENS}######{CLOSES}\nx"),
    (f"A{OPENS}{IMAGE}{CLOSES}x", f"A{OPENS}######{CLOSES}x"),
])  # fmt: skip
def test_generate_takes_image_data(seeing, post, text, prompt):
    for data in (data_url(encoded(SMALL)), [data_url(encoded(SMALL))], [base64.b64encode(encoded(SMALL)).decode()]):
        reply = post("/generate", text=text, image_data=data, sampling_params={"max_new_tokens": 4})
        assert reply.status_code == 200, reply.text
        assert prompt_of(seeing) == prompt
        assert reply.json()["meta_info"]["image_tokens"] == 6


def test_generate_takes_pictures_for_each_prompt(seeing, post):
    one, other = data_url(encoded(SMALL)), data_url(encoded(WIDE))
    both = post("/generate", text=["a", "b"], image_data=[[one, other], None])
    assert [each["meta_info"].get("image_tokens") for each in both.json()] == [10, None]
    both = post("/generate", text=["a", "b"], image_data=one)
    assert [each["meta_info"]["image_tokens"] for each in both.json()] == [6, 6]
    ids = [65, IMAGE_ID, 66]
    assert post("/generate", input_ids=ids, image_data=one).status_code == 200
    assert seeing[1].started[-1][0] == [65, *[IMAGE_ID] * 6, 66]
    refused = post("/generate", text=["a", "b"], image_data=[one]).json()["error"]["message"]
    assert refused == "image_data has 1 entries for 2 prompts"
    refused = post("/generate", input_ids=[65], image_data=one).json()["error"]
    assert refused["param"] == "input_ids" and "0 tokens" in refused["message"]


def test_pictures_count_for_tokenize(seeing, post):
    chat = [{"role": "user", "content": [image(SMALL)]}]
    assert post("/tokenize", messages=chat).json()["tokens"].count(IMAGE_ID) == 6


def test_files_come_from_the_allowed_folder_alone(seeing, post):
    folder = seeing[2]
    ask = lambda url: post(CHAT, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": url}]}])  # noqa: E731
    for url in (f"file://{folder}/a.png", f"{folder}/a.png", f"{folder}/sub/../a.png", f" {folder}/a.png\n"):
        assert ask(url).status_code == 200
    for url in (f"{folder}/../secret.png", f"{folder}/link.png", "file:///etc/passwd", "/nowhere.png"):
        refused = ask(url).json()["error"]
        assert "--allowed-media-path" in refused["message"] and refused["param"] == "messages[0].content[0]"
    for url, says in ((str(folder), "regular|directory"), (f"{folder}/b.png", "No such file"), ("ftp://a/b", "ftp")):
        refused = ask(url).json()["error"]["message"]
        assert any(each in refused for each in says.split("|")), refused


@pytest.mark.parametrize("parts,param,says", [
    ([TEXT, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}], "messages[1].content[1]",
     "messages[1].content[1]: the picture is damaged"),
    ([{"type": "image_url", "image_url": {"url": "data:image/png,x"}}], "messages[1].content[0]", "base64"),
    ([{"type": "image_url", "image_url": {"url": "data:video/mp4;base64,AAAA"}}], "messages[1].content[0]",
     "send it in a part of type video_url"),
    ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,A*"}}], "messages[1].content[0]", "base64"),
    ([{"type": "image_url", "image_url": {"url": "http://a.example/b.png"}}], "messages[1].content[0]",
     "--allowed-media-domains"),
    ([{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}], "messages[1].content[0]",
     "the part is audio, which is not supported; send its words as text"),
    ([TEXT, {"type": "video_url", "video_url": {"url": "x"}}], "messages[1].content[1]",
     "a video must be a data:, http:, https: or file: URL, got 'x'"),
    ([{"type": "video", "video": [7]}], "messages[1].content[0]", "a list of its frames'"),
    ([{"type": "video", "video": ["data:image/png;base64,AA"] * 2}], "messages[1].content[0]", "frame 0 of the video"),
    ([{"type": "video_url", "video_url": {"url": "data:image/png;base64,AAAA"}}], "messages[1].content[0]", "damaged"),
    ([{"type": "video", "video": ["/a"] * 769}], "messages[1].content[0]", "769 frames, at most 768"),
    ([{"type": "video_url", "video_url": {"url": "x"}}] * 3, "messages[1].content[2]", "has 3 videos, at most 2"),
    ([{"type": "text", "text": f"a{VIDEO}"}, image(SMALL)], "messages", "stands for a picture"),
    ([{"type": "image_url", "image_url": {"url": 7}}], "messages[1].content[0]", "the part needs a string"),
    ([image(SMALL)] * 4, "messages[1].content[3]", "has 4 pictures, at most 3"),
    ([image(noise(2000, 8))], "messages[1].content[0]", "at most 200 times"),
    ([{"type": "text", "text": f"a{IMAGE}"}, image(SMALL)], "messages", "stands for a picture"),
    ([image(np.tile(SMALL, (9, 6, 1)))] * 3 + [{"type": "text", "text": "x" * 100}], "messages", "context length"),
])  # fmt: skip
def test_errors_name_the_part(seeing, post, parts, param, says):
    body = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
    reply = post(CHAT, messages=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param) and says in error["message"], error


DAMAGED = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
SAYS = {"type": "input_text", "text": "What is it?"}
CALLS = [{"type": "function_call", "call_id": each, "name": "f", "arguments": "{}"} for each in "ab"]


@pytest.mark.parametrize("input,where", [
    ([{"role": "user", "content": [DAMAGED]}], "input[0].content[0]"),
    ([{"role": "user", "content": "a"}, {"role": "user", "content": [SAYS, DAMAGED]}], "input[1].content[1]"),
    ([{"type": "reasoning", "summary": []}, {"role": "assistant", "content": [DAMAGED]}], "input[1].content[0]"),
    ([{"role": "developer", "content": [SAYS, DAMAGED]}], "input[0].content[1]"),  # joins the instructions
    ([*CALLS, {"type": "function_call_output", "call_id": "b", "output": [SAYS, DAMAGED]},
      {"type": "function_call_output", "call_id": "a", "output": [SAYS]}], "input[2].output[1]"),
])  # fmt: skip
def test_a_response_names_the_part_of_its_input(post, input, where):
    reply = post("/v1/responses", input=input, instructions="Be brief.")
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, where), error
    assert f"{where}: the picture is damaged" in error["message"]


def test_a_response_says_that_pictures_are_not_kept_as_files(post):
    parts = [{"type": "input_image", "file_id": "file-1"}]
    error = post("/v1/responses", input=[{"role": "user", "content": parts}]).json()["error"]
    assert "file_id" in error["message"]


def test_a_message_names_the_block(post):
    damaged = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    text, use = {"type": "text", "text": "a"}, {"type": "tool_use", "id": "b", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "b", "content": [text, damaged]}
    pages = {"type": "document", "source": {"type": "content", "content": [text, damaged]}}
    for blocks, where in (
        ([text, text, damaged], "content[2]"), ([text, result], "content[1].content[1]"), ([text, pages], "content[1]"),
    ):  # fmt: skip
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [use]}]
        turns += [{"role": "user", "content": blocks}]
        error = post("/v1/messages", messages=turns, system="s", max_tokens=4).json()["error"]
        assert f"messages[2].{where}: the picture is damaged" in error["message"]


def test_a_chat_names_the_message_as_it_was_sent(post):
    """Results of tools are sorted as their calls are."""
    calls = [{"id": each, "type": "function", "function": {"name": "f", "arguments": "{}"}} for each in "ab"]
    damaged = {"type": "image_url", "image_url": {"url": DAMAGED["image_url"]}}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}]
    turns += [{"role": "tool", "tool_call_id": "b", "content": [damaged]}]
    turns += [{"role": "tool", "tool_call_id": "a", "content": "7"}]
    assert post(CHAT, messages=turns).json()["error"]["param"] == "messages[2].content[0]"


def test_messages_of_any_role_show_pictures_if_the_template_writes_them(seeing, post):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for role, more in (("system", {}), ("assistant", {}), ("assistant", {"tool_calls": [call]}), ("user", {}),
                       ("tool", {"tool_call_id": "a"})):  # fmt: skip
        chat = [{"role": role, "content": [TEXT, image(SMALL)], **more}, {"role": "user", "content": "a"}]
        reply = post(CHAT, messages=chat)
        assert reply.status_code == 200 and "#" * 6 in prompt_of(seeing), reply.text
        assert "What is it?" in prompt_of(seeing)
    parts = [{"type": "input_image", "image_url": data_url(encoded(SMALL))}]
    assert post("/v1/responses", input=[{"role": "assistant", "content": parts}]).status_code == 200


def test_tools_stand_behind_a_system_message_with_pictures():
    parts, tool = [{"type": "image"}], {"type": "function", "function": {"name": "f"}}
    first, _ = write_tools([{"role": "system", "content": parts}, {"role": "user", "content": "a"}], [tool])
    assert first["content"][0] == parts[0] and '"name": "f"' in first["content"][1]["text"]


def test_a_model_without_vision_says_so(url, http):
    error = http.post(CHAT, json={"messages": [{"role": "user", "content": [TEXT, image(SMALL)]}]}).json()["error"]
    assert error["param"] == "messages[0].content[1]" and "fake/model has no vision" in error["message"]
    assert http.get("/model_info").json()["has_image_understanding"] is False


def test_a_template_that_writes_no_pictures_is_refused():
    llm = FakeLLM(tokenizer=seeing_tokenizer("{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"))
    llm.image_reader = reader()
    with serving(create_app(llm)) as url:
        chat = [{"role": "user", "content": [TEXT, image(SMALL)]}]
        error = httpx.post(url + CHAT, json={"messages": chat}).json()["error"]
    assert error["param"] == "messages" and "0 placeholders" in error["message"]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")
def test_hostile_pictures_never_hold_up_the_event_loop():
    """All are read at once, while the loop counts how long it was away."""

    async def beats(gaps: list[float]) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - began)

    async def one(name: str, expected: str, content: bytes) -> str | None:
        try:
            await read_media([Media("p", data_url(content))], reader(), "m", MediaRules(), 256)
        except RequestError as error:
            return f"{name}: {error}" if expected == RIGHT else None
        return f"{name} was read" if expected == WRONG else None

    async def every() -> tuple[list[str | None], list[float]]:
        gaps: list[float] = []
        beating = asyncio.create_task(beats(gaps))
        problems = await asyncio.gather(*(one(*each) for each in files))
        beating.cancel()
        return problems, gaps

    files = list(hostile())
    problems, gaps = asyncio.run(every())
    assert len(files) >= 60 and not [each for each in problems if each]
    assert max(gaps) < 1.0


def test_hostile_videos_cost_little():
    """Processor time is bounded, which a busy host doesn't change."""
    began = time.process_time()
    for source, says in hostile_videos():
        asking = read_media([Media("p", source, True)], reader(), "m", MediaRules(), 256)
        if not says:
            (video,) = asyncio.run(asking)
            assert len(video.pictures) == 1
            continue
        with pytest.raises(RequestError, match=f"^p.*{says}") as refusal:
            asyncio.run(asking)
        assert refusal.value.param == "p"
    assert time.process_time() - began < 3


def test_a_large_picture_comes_through(seeing, post):
    """Its base64 has more bytes than texts usually do."""
    content = encoded(noise(1500, 1500), compress_level=0)
    assert len(content) > 6 * 2**20 and read_picture(content).shape == (1500, 1500, 3)
    part = {"type": "image_url", "image_url": {"url": data_url(content)}}
    assert post(CHAT, messages=[{"role": "user", "content": [part]}]).status_code == 200
