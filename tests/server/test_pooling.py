"""Embeddings and scores: transformers' own values through the engine, and the routes of OpenAI, vLLM and Cohere."""

import asyncio
import base64
import json
import math
import shutil
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec import AsyncLLM, CheckpointError, EngineConfig
from jaxspec.checkpoint import Pooling
from jaxspec.checkpoint.pooling import read
from jaxspec.config.request import TokenLogprobs
from server.app import create_app
from server.replies.pooling import AnswerReply, EmbeddingReply, SimilarityReply, question
from tests.server import fake as rules
from tests.server.fake import FakeLLM
from tests.server.live import serving
from tests.support.engines import SMALL

HERE = Path(__file__).resolve().parents[1] / "golden"
FOLDER = HERE / "checkpoints" / "qwen3-untied"
LENGTHS, ANSWERS = (1, 7, 40), (11, 23)  # of make_pooling.py
GOLDEN = np.load(HERE / "pooling.npz")
JSON = {"Content-Type": "application/json"}  # whose text may spell what httpx would not encode
IDS = [GOLDEN[f"ids_{length}"].tolist() for length in LENGTHS]
golden = lambda name: [GOLDEN[f"{name}_{length}"] for length in LENGTHS]  # noqa: E731


@pytest.fixture(scope="module")
def llm():
    own = {"lora_modules": {"own": str(HERE / "adapters" / "qwen3")}}
    options = SMALL | {"max_running_requests": 3, "enable_return_hidden_states": True} | own
    llm = AsyncLLM(str(FOLDER), **options)
    yield llm
    llm.close()


def run(llm, reply):
    async def all_of_them():
        for number, job in enumerate(reply.jobs()):
            async for delta in llm.generate(job.prompt, job.params, job.id):
                reply.take(number, delta)

    asyncio.run(all_of_them())
    return reply


@pytest.mark.parametrize("kind,name", [("last", "embedding"), ("mean", "mean")])
def test_embeddings_are_transformers_own(llm, kind, name):
    reply = run(llm, EmbeddingReply(IDS, "e", "m", Pooling(kind)))
    np.testing.assert_allclose(reply.vectors(), golden(name), atol=2e-5)
    plain = run(llm, EmbeddingReply(IDS[-1:], "e", "m", Pooling(kind, normalized=False))).vectors()[0]
    assert abs(np.linalg.norm(plain) - 1) > 0.1


def test_scores_are_transformers_own(llm):
    np.testing.assert_allclose(run(llm, AnswerReply(IDS, ANSWERS, "s", "m")).scores(), golden("score"), atol=2e-5)


def test_a_cosine_is_at_most_one():
    vectors = np.random.default_rng(0).standard_normal((64, 1, 576), np.float32).repeat(2, axis=0)
    reply = SimilarityReply([[5]] * len(vectors), "s", "m", Pooling("last"))
    reply._rows[:] = vectors
    assert 1 - 1e-6 < min(reply.scores()) <= max(reply.scores()) <= 1


def test_the_routes_of_a_model_for_embeddings(llm):
    with serving(create_app(llm, "embedder", pools=Pooling("last"))) as url, httpx.Client(base_url=url) as http:
        post = lambda **body: http.post("/v1/embeddings", json={"model": "embedder", "input": IDS} | body)  # noqa: E731
        reply = post().json()
        assert [each["index"] for each in reply["data"]] == [0, 1, 2] and reply["object"] == "list"
        assert reply["usage"] == {"prompt_tokens": sum(LENGTHS), "total_tokens": sum(LENGTHS)}
        np.testing.assert_allclose([each["embedding"] for each in reply["data"]], golden("embedding"), atol=2e-5)
        assert reply["id"].startswith("embd-") and reply["created"]
        needless = {"embed_dtype": "float32", "endianness": "little", "use_activation": True}
        packed = post(encoding_format="base64", user="u", **needless).json()["data"][1]["embedding"]
        np.testing.assert_array_equal(np.frombuffer(base64.b64decode(packed), "<f4"), reply["data"][1]["embedding"])
        short = post(input=IDS[1], dimensions=5).json()["data"][0]["embedding"]
        first = np.array(reply["data"][1]["embedding"][:5])
        np.testing.assert_allclose(short, first / np.linalg.norm(first), atol=1e-6)
        for body, field in (
            ({"dimensions": 49}, "dimensions"),
            ({"dimensions": 0}, "dimensions"),
            ({"input": []}, "input"),
            ({"input": [[]]}, "input"),
            ({"input": [[999]]}, "input"),
            ({"input": [[5] * 400]}, "input"),
            ({"encoding_format": "int8"}, "encoding_format"),
            ({"inputs": "a"}, "inputs"),
            ({"embed_dtype": "float16"}, "embed_dtype"),
            ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
        ):
            refused = post(**body)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == field, (body, refused.text)
        assert post(model="other").status_code == 404
        for path, body in (
            ("/v1/completions", {"prompt": IDS[1]}),
            ("/generate", {"input_ids": IDS[1]}),
            ("/inference/v1/generate", {"token_ids": IDS[1], "sampling_params": {}}),
        ):
            refused = http.post(path, json=body | ({} if path == "/generate" else {"model": "embedder"}))
            assert refused.status_code == 400 and "/v1/embeddings" in refused.text, path


@pytest.fixture
def reranker(monkeypatch):
    """A fake reranker that says "n" or "y", whose log-probabilities are -1.0 and -0.5."""
    monkeypatch.setattr(rules, "CONTEXT", 4096)
    worth = {ord("n"): -1.0, ord("y"): -0.5}
    monkeypatch.setattr(rules, "entry", lambda token, wanted: TokenLogprobs(token, worth.get(token, -9.0), ()))
    fake = FakeLLM(config=EngineConfig(model="fake/model", context_length=4096))
    pools = Pooling("yes-no", answers=("n", "y"))
    with serving(create_app(fake, pools=pools)) as url, httpx.Client(base_url=url) as http:
        yield fake, http


def test_a_reranker_is_asked_in_its_own_words(reranker):
    fake, http = reranker
    expected = 1 / (1 + math.exp(-0.5))
    for path in ("/v1/score", "/score"):
        reply = http.post(path, json={"text_1": "a fruit?", "text_2": ["apple", "stone"], "instruction": "Judge."})
        assert [each["score"] for each in reply.json()["data"]] == pytest.approx([expected] * 2), reply.text
    decode = rules.byte_tokenizer().decode
    prompts = {decode(ids, skip_special_tokens=False) for ids, _ in fake.started}
    assert prompts == {question("a fruit?", text, "Judge.") + said for text in ("apple", "stone") for said in "ny"}
    assert "<Instruct>: Judge.\n<Query>: a fruit?\n<Document>: stone<|im_end|>" in "".join(prompts)
    for names in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        pairs = dict(zip(names, (["a", "b"], ["c", "d"]), strict=True))
        assert len(http.post("/v1/score", json=pairs).json()["data"]) == 2
    for body, says in (
        ({"text_1": "a"}, "send text_1 and text_2"),
        ({"text_1": "a", "documents": "b"}, "send text_1 and text_2"),
        ({"queries": ["a", "b"], "documents": ["c", "d", "e"]}, "2 texts can't be paired with 3"),
        ({"text_1": "a", "text_2": "b" * 5000}, "context_length_exceeded"),
        ({"text_1": ["a"] * 3000, "text_2": "b"}, "at most 1024"),
        ({"text_1": [], "text_2": []}, "text_1: must be a text, or a list of texts that isn't empty, got []"),
        ({"text_1": 5, "text_2": "a"}, "text_1: must be a text, or a list of texts that isn't empty, got 5"),
        ({"text_1": "a", "text_2": ["b", 5]}, '"param":"text_2[1]"'),
        ({"text_1": ["a", "\ud800"], "text_2": ["b", "c"]}, '"param":"text_1[1]"'),
        ({"data_1": "a", "data_2": "b" * 5000}, '"param":"data_2"'),
        ({"data_1": "a" * 5000, "data_2": ["b", "c"]}, '"param":"data_1"'),
        ({"data_1": "a", "data_2": ["b", "c" * 5000]}, '"param":"data_2[1]"'),
        ({"data_1": "a", "data_2": ["b", "c" * 3795]}, '"param":"data_2[1]"'),  # with its answer one too long
    ):
        refused = http.post("/v1/score", content=json.dumps(body), headers=JSON)
        assert refused.status_code == 400 and says in refused.text, (body, refused.text)
    embed = http.post("/v1/embeddings", json={"input": "a"})
    assert embed.status_code == 400 and "scores pairs of texts" in embed.text
    assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_documents_are_ranked(reranker, monkeypatch):
    _, http = reranker
    monkeypatch.setattr("server.replies.pooling.AnswerReply.scores", lambda self: [0.25, 0.75, 0.5])
    body = {"query": "q", "documents": ["a", "b", "c"], "top_n": 2}
    reply = http.post("/v1/rerank", json=body).json()
    assert [(each["index"], each["relevance_score"]) for each in reply["results"]] == [(1, 0.75), (2, 0.5)]
    assert reply["results"][0]["document"] == {"text": "b"}
    assert len(http.post("/v2/rerank", json=body | {"top_n": 0}).json()["results"]) == 3, "vLLM's default: all"
    bare = http.post("/rerank", json=body | {"return_documents": False}).json()
    assert all("document" not in each for each in bare["results"])


@pytest.mark.parametrize("path,body,param", [
    ("score", {"text_1": "", "text_2": "1"}, "text_1"),
    ("score", {"text_1": "1", "text_2": ""}, "text_2"),
    ("score", {"queries": ["1", ""], "documents": ["2", "3"]}, "queries[1]"),
    ("score", {"queries": ["1"], "items": ["2", ""]}, "items[1]"),
    ("score", {"data_1": "1", "data_2": ["2", "3" * 400]}, "data_2[1]"),
    ("rerank", {"query": "", "documents": ["1", "2"]}, "query"),
    ("rerank", {"query": "1", "documents": ["2", ""]}, "documents[1]"),
    ("rerank", {"query": "1", "documents": [""]}, "documents[0]"),
    ("embeddings", {"input": ["1", ""]}, "input[1]"),
    ("embeddings", {"input": [[5], [5, 999]]}, "input[1]"),
    ("embeddings", {"input": ["1", "2" * 400]}, "input[1]"),
    ("embeddings", {"input": ["1", "\ud800"]}, "input[1]"),
])  # fmt: skip
def test_an_error_names_the_text_at_fault(llm, monkeypatch, path, body, param):
    monkeypatch.setattr(llm, "tokenizer", rules.byte_tokenizer(), raising=False)
    with serving(create_app(llm, "embedder", pools=Pooling("last"))) as url:
        refused = httpx.post(f"{url}/v1/{path}", content=json.dumps(body), headers=JSON)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param, refused.text


@pytest.mark.parametrize("path,body", [
    ("embeddings", {"input": [1]}), ("score", {"text_1": "1", "text_2": "2"}),
    ("rerank", {"query": "1", "documents": ["2"]}),
])  # fmt: skip
def test_a_text_is_judged_by_the_adapter_that_a_request_names(llm, monkeypatch, path, body):
    monkeypatch.setattr(llm, "tokenizer", rules.byte_tokenizer(), raising=False)
    with serving(create_app(llm, "embedder", pools=Pooling("last"))) as url:
        base, own = (
            httpx.post(f"{url}/v1/{path}", json={**body, "model": name}).json() for name in ("embedder", "own")
        )
    assert own["model"] == "own" and own["usage"] == base["usage"], own
    results = "results" if path == "rerank" else "data"
    assert own[results] != base[results]


def test_a_model_that_generates_says_so(http):
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ):
        reply = http.post(path, json=body)
        assert reply.status_code == 400 and "generates text" in reply.text and "--pooling" in reply.text


def test_an_answer_of_several_tokens_is_refused(monkeypatch):
    monkeypatch.setattr(rules, "CONTEXT", 4096)
    fake = FakeLLM(config=EngineConfig(model="fake/model", context_length=4096))
    with serving(create_app(fake, pools=Pooling("yes-no"))) as url:
        reply = httpx.post(f"{url}/v1/score", json={"text_1": "a", "text_2": "b"})
    assert reply.status_code == 400 and "'no' isn't one token" in reply.text


NORMALIZE = [{"type": "sentence_transformers.models.Transformer"}, {"type": "sentence_transformers.models.Normalize"}]


@pytest.mark.parametrize("told,modules,hf,name,expected", [
    ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, NORMALIZE, {}, "x", Pooling("last")),
    ({"pooling_mode": "mean"}, NORMALIZE[:1], {}, "x", Pooling("mean", normalized=False)),
    (None, None, {"classifier_from_token": ["0", "1"]}, "x", Pooling("yes-no", answers=("0", "1"))),
    (None, None, {}, "Qwen/Qwen3-Reranker-0.6B", Pooling("yes-no")),
    (None, None, {}, "Qwen/Qwen3-8B", None),
    ({"pooling_mode_cls_token": True}, NORMALIZE, {}, "x", "pools by cls_token"),
    ({}, NORMALIZE, {}, "x", "pools by nothing"),
    ([], NORMALIZE, {}, "x", "must hold a JSON object"),
    (None, None, {"classifier_from_token": "yes"}, "x", "must be two tokens"),
])  # fmt: skip
def test_a_checkpoint_says_how_it_pools(tmp_path, told, modules, hf, name, expected):
    for file, content in (("1_Pooling/config.json", told), ("modules.json", modules)):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        if content is not None:
            (tmp_path / file).write_text(json.dumps(content))
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=expected):
            read(tmp_path, hf, name)
    else:
        assert read(tmp_path, hf, name) == expected


def test_a_model_published_without_its_head_and_prefix_is_read(tmp_path):
    """Tensors as Qwen3-Embedding-8B has them: those of the stack alone, untied by its config."""
    shutil.copy(FOLDER / "config.json", tmp_path)
    weights = load_file(FOLDER / "model.safetensors")
    bare = {name.removeprefix("model."): weights[name] for name in weights if name != "lm_head.weight"}
    save_file(bare, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        jaxspec.load_model(str(tmp_path))
    (tmp_path / "modules.json").write_text(json.dumps(NORMALIZE))
    model, whole = jaxspec.load_model(str(tmp_path)), jaxspec.load_model(str(FOLDER))
    assert model.config.decoder.tied and not whole.config.decoder.tied
    of = [jaxspec.hidden_states(each, [IDS[1]], (3,)) for each in (model, whole)]
    np.testing.assert_array_equal(*of)
