"""Pictures from the API to the tokens: every way in gives the text of token ids with pictures, whatever drafts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil

import httpx
import numpy as np
import pytest
from openai import OpenAI

from jaxspec import LLM, AsyncLLM, RequestError, SamplingParams
from jaxspec.images.picture import PlacedPicture, Prompt
from jaxspec.replicas.data_parallel import DataParallelLLM
from server.app import create_app
from tests.server.live import serving
from tests.support.pictures import data_url, encoded, noise
from tests.support.seeing import CLOSES, IMAGE, OPENS, seeing_checkpoint

OPTIONS = {
    "context_length": 512, "page_size": 8, "chunked_prefill_size": 32, "max_running_requests": 2, "dtype": "float32",
    "skip_warmup": True, "few_programs": True, "draft_policy": "fixed",
}  # fmt: skip
LONG = 24
PIXELS, OTHER = noise(24, 32), noise(32, 24)  # 48 tokens each, 6 x 8 and 8 x 6
# MTP reads pictures in tests/engine/test_pictures.py.
DRAFTS = ["ngram", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("mtp", "suffix", "none"))]
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["left", "right"]}}, "required": ["a"]}
SCHEMA |= {"additionalProperties": False}


def image(pixels: np.ndarray) -> dict:
    return {"type": "image_url", "image_url": {"url": data_url(encoded(pixels))}}


@pytest.fixture(scope="module", params=DRAFTS)
def seeing(request, plain):
    """A server that reads pictures, and its engine."""
    drafts = {} if request.param == "none" else {"num_draft_tokens": 3}
    llm = AsyncLLM(str(seeing_checkpoint()), request.param, **OPTIONS, **drafts)
    if request.param == "ngram":
        llm.engine.runner.programs = plain.llm.engine.runner.programs  # the same, compiled
    with contextlib.closing(llm), serving(create_app(llm, "seeing")) as url:
        yield url, llm


def chat(*pixels: np.ndarray) -> list[dict]:
    texts = [{"type": "text", "text": text} for text in ("Look: ", " and ", "?")]
    parts = [each for text, own in zip(texts, pixels, strict=False) for each in (text, image(own))]
    return [{"role": "user", "content": [*parts, texts[-1]]}]


def written(*pictures: str) -> str:
    """`chat` as the template has it, with these in place of the pictures."""
    between = "".join(text + own for text, own in zip(("Look: ", " and "), pictures, strict=False))
    return f"<|im_start|>user\n{between}?<|im_end|>\n<|im_start|>assistant\n"


def offline(llm: LLM, *pixels: np.ndarray) -> Prompt:
    """`chat` as token ids with pictures."""
    model = llm.engine.runner.model
    ids = model.tokenizer.encode(written(*[f"{OPENS}{IMAGE}{CLOSES}" for _ in pixels]))
    return Prompt(*model.image_reader.place(ids, [model.image_reader.read(each, 64) for each in pixels]))


@pytest.fixture(scope="module")
def plain():
    """Texts of plain decoding offline, from token ids with pictures."""
    llm = LLM(str(seeing_checkpoint()), "ngram", num_draft_tokens=3, **OPTIONS)

    def text(*pixels: np.ndarray) -> str:
        params = SamplingParams(temperature=0, max_tokens=LONG, speculative=False)
        return llm.generate([offline(llm, *pixels)], params)[0].text

    text.llm = llm
    return text


@pytest.mark.exhaustive  # its placeholder is in tests/images/test_chats.py, its pictures in tests/engine
def test_a_chat_with_gemmas_pictures_gives_the_text_of_their_tokens():
    llm = LLM(str(seeing_checkpoint("gemma3")), "ngram", num_draft_tokens=3, **OPTIONS)
    model, params = llm.engine.runner.model, SamplingParams(temperature=0, max_tokens=LONG, logprobs=0)
    ids = model.tokenizer.encode(written(*[f"\n\n{OPENS}{IMAGE * 16}{CLOSES}\n\n"] * 2))
    pictures = [model.image_reader.read(each, 64) for each in (PIXELS, OTHER)]
    starts = [i for i, token in enumerate(ids) if token == model.tokenizer.encode(IMAGE)[0]][::16]
    prompt = Prompt(ids, tuple(map(PlacedPicture, pictures, starts)))
    wanted = llm.generate([prompt], params)[0]
    one, other = (llm.chat([chat(*pixels)], params)[0] for pixels in ((PIXELS, OTHER), (OTHER, PIXELS)))
    assert one.text == wanted.text and other.logprobs != wanted.logprobs


def test_every_way_in_gives_one_text(seeing, plain):
    url, llm = seeing
    wanted = plain(PIXELS, OTHER)
    assert wanted != plain(OTHER, PIXELS)
    ask = {"model": "seeing", "temperature": 0}
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        reply = client.chat.completions.create(messages=chat(PIXELS, OTHER), max_tokens=LONG, **ask)
        assert reply.choices[0].message.content == wanted
        assert reply.usage.prompt_tokens_details.to_dict()["image_tokens"] == 96
        encoded_once = llm.engine.runner.pictures.encoded
        again = client.chat.completions.create(messages=chat(PIXELS, OTHER), max_tokens=LONG, stream=True, **ask)
        assert "".join(each.choices[0].delta.content or "" for each in again if each.choices) == wanted
        parts = chat(PIXELS, OTHER)[0]["content"]
        kinds = [
            {"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"}
            if part["type"] == "image_url"
            else part | {"type": "input_text"}
            for part in parts
        ]
        items = [{"role": "user", "content": kinds}]
        response = client.responses.create(input=items, max_output_tokens=LONG, **ask)
        assert response.output_text == wanted
        assert response.usage.input_tokens_details.cached_tokens >= 104  # both pictures' pages
        assert response.usage.input_tokens_details.to_dict()["image_tokens"] == 96
    params = {"temperature": 0, "max_new_tokens": LONG}
    data = {"text": written("<image>", "<image>"), "image_data": [data_url(encoded(each)) for each in (PIXELS, OTHER)]}
    made = httpx.post(f"{url}/generate", json=data | {"sampling_params": params})
    assert made.json()["text"] == wanted and made.json()["meta_info"]["image_tokens"] == 96
    ids = llm.tokenizer.encode(written(*[f"{OPENS}{IMAGE}{CLOSES}"] * 2))
    data, sampling = {"image_data": data["image_data"]}, {"temperature": 0, "max_tokens": LONG}
    for tokens in (ids, offline(plain.llm, PIXELS, OTHER).tokens):  # a token for each picture, or for each row
        asked = data | {"token_ids": tokens, "sampling_params": sampling}
        told = httpx.post(f"{url}/inference/v1/generate", json=asked).json()
        assert told["choices"][0]["token_ids"] == made.json()["output_ids"], told
        assert told["usage"]["prompt_tokens_details"]["image_tokens"] == 96
    assert llm.engine.runner.pictures.encoded == encoded_once == 2
    parts = [{"type": "image", "image": own} for own in (PIXELS, encoded(OTHER))]
    mixed = [{"type": "text", "text": "Look: "}, parts[0], {"type": "text", "text": " and "}, parts[1]]
    chats = [{"role": "user", "content": [*mixed, {"type": "text", "text": "?"}]}]
    (own,) = plain.llm.chat(chats, SamplingParams(temperature=0, max_tokens=LONG))
    assert own.text == wanted
    assert httpx.get(f"{url}/model_info").json()["has_image_understanding"]
    figures = dict(line.rsplit(" ", 1) for line in httpx.get(f"{url}/metrics").text.splitlines() if line[0] != "#")
    names = ("images", "image_tokens", "encoded_images")
    assert [float(figures[f"jaxspec_{name}_total"]) for name in names] == [12, 6 * 96, 2]


@pytest.mark.exhaustive
def test_structured_output_and_sampling_after_a_picture(seeing):
    url, _ = seeing
    named = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
    with httpx.Client(base_url=url, timeout=120) as client:
        for stream in (False, True):
            for temperature in (0, 1):
                body = {"messages": chat(PIXELS), "response_format": named, "temperature": temperature}
                reply = client.post("/v1/chat/completions", json=body | {"stream": stream, "max_tokens": 64})
                assert reply.status_code == 200, reply.text
                if not stream:
                    assert json.loads(reply.json()["choices"][0]["message"]["content"])["a"] in ("left", "right")
                    continue
                lines = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
                text = "".join(each["choices"][0]["delta"].get("content") or "" for each in lines if each["choices"])
                assert json.loads(text)["a"] in ("left", "right")


@pytest.mark.exhaustive
def test_several_engines_behind_one_port_read_pictures(plain):
    llm = DataParallelLLM(str(seeing_checkpoint()), "mtp", dp_size=2, num_draft_tokens=3, **OPTIONS)
    with contextlib.closing(llm), serving(create_app(llm, "seeing")) as url:
        assert httpx.get(f"{url}/model_info").json()["has_image_understanding"]
        wanted, hits = plain(PIXELS, OTHER), []
        for _ in range(2):
            body = {"messages": chat(PIXELS, OTHER), "temperature": 0, "max_tokens": LONG}
            reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()
            assert reply["choices"][0]["message"]["content"] == wanted
            hits.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert hits[0] == 0 and hits[1] >= 104  # by the engine that has the pictures


def test_an_engine_that_reads_no_pictures_says_why(tmp_path):
    """Without a compiled program: an engine is made, and refuses."""
    folder = shutil.copytree(seeing_checkpoint("gemma3"), tmp_path / "model")
    hf = json.loads((folder / "config.json").read_text()) | {"mm_tokens_per_image": 64}
    (folder / "config.json").write_text(json.dumps(hf))
    llm = LLM(str(folder), **OPTIONS | {"draft_policy": "auto"})
    assert llm.engine.image_reader is None
    with pytest.raises(RequestError, match=r"content\[1\] is a picture or video, and a picture's 64 tokens don't"):
        llm.chat([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "image": PIXELS}]}])


def test_larger_pictures_are_resized_to_what_the_tower_takes(plain):
    """None is refused for its size: a processor with a smaller `max_pixels` does so, too."""
    reader = plain.llm.engine.image_reader
    assert reader.processor.tokens(8000, 6000) <= 4096
    small = dataclasses.replace(reader, processor=reader.processor.within(40))
    picture = small.read(PIXELS, 64)
    assert 30 <= picture.tokens <= 40 and reader.read(PIXELS, 64).tokens == 48
    assert picture.key != reader.read(PIXELS, 64).key
