"""Adapters over HTTP: how a request names one, what is listed, and who may load them."""

import dataclasses

import httpx
import pytest

from jaxspec import ConfigError, RequestError
from jaxspec.engine.adapters import UNKNOWN
from server.app import create_app
from tests.server.fake import FakeLLM
from tests.server.live import serving

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served():
    llm = FakeLLM(adapters={"sql": "/a/sql", "org/poet:2": "/a/poet"})
    with serving(create_app(llm, served_name=["tiny", "org/tiny"])) as url, httpx.Client(base_url=url) as http:
        yield llm, http


@pytest.mark.parametrize("body,adapter", [
    ({"model": "tiny"}, None), ({}, None), ({"model": "sql"}, "sql"), ({"model": "tiny:sql"}, "sql"),
    ({"model": "org/poet:2"}, "org/poet:2"), ({"model": "org/tiny:org/poet:2"}, "org/poet:2"),
    ({"lora_path": "sql"}, "sql"), ({"model": "tiny", "lora_path": "sql"}, "sql"),
    ({"model": "sql", "lora_path": "sql"}, "sql"), ({"lora_path": None}, None),
])  # fmt: skip
def test_requests_name_an_adapter(served, body, adapter):
    llm, http = served
    llm.loras.clear()
    for path, more in (("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": "a"})):
        reply = http.post(f"/v1/{path}", json={**more, **body}).json()
        assert reply["model"] == (adapter or "tiny"), reply
    reply = http.post("/v1/messages", json={"messages": MESSAGES, "max_tokens": 4, "model": "tiny", **body}).json()
    assert reply["model"] == (adapter or "tiny"), reply
    assert http.post("/v1/responses", json={"input": "hi", **body}).json()["model"] == (adapter or "tiny")
    if "lora_path" not in body:
        http.post("/inference/v1/generate", json={"token_ids": [1], "sampling_params": {}, **body})
    assert set(llm.loras) == {adapter}


def test_generate_takes_one_for_each_prompt(served):
    llm, http = served
    llm.loras.clear()
    reply = http.post("/generate", json={"text": ["a", "b", "c"], "lora_path": ["sql", None, "org/poet:2"]})
    assert reply.status_code == 200 and llm.loras == ["sql", None, "org/poet:2"]
    http.post("/generate", json={"text": ["a", "b"], "lora_path": "sql"})
    assert llm.loras[3:] == ["sql", "sql"]


@pytest.mark.parametrize("path,body,status,says", [
    ("/v1/completions", {"prompt": "a", "model": "nope"}, 404, "this server serves 'tiny', 'org/tiny', 'sql'"),
    ("/v1/completions", {"prompt": "a", "model": "tiny:nope"}, 404, "does not exist"),
    ("/v1/completions", {"prompt": "a", "lora_path": "nope"}, 404, "lora_path 'nope' isn't loaded; loaded: 'sql'"),
    ("/v1/completions", {"prompt": "a", "model": "sql", "lora_path": "org/poet:2"}, 404, "and model asks for 'sql'"),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4, "lora_path": "nope"}, 404, "'nope' isn't loaded"),
    ("/v1/responses", {"input": "a", "lora_path": "nope"}, 404, "lora_path 'nope' isn't loaded"),
    ("/v1/completions", {"prompt": "a", "lora_path": 3}, 400, "string"),
    ("/generate", {"text": "a", "lora_path": "nope"}, 404, "isn't loaded"),
    ("/generate", {"text": ["a", "b"], "lora_path": ["sql"]}, 400, "has 1 entries for 2 prompts"),
    ("/generate", {"text": "a", "lora_path": {"a": 1}}, 400, "must be an adapter's name"),
    ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/etc"}, 403, "start it with --lora-root DIR"),
    ("/load_lora_adapter", {"lora_name": "x", "lora_path": "/etc"}, 403, "--lora-root"),
    ("/v1/unload_lora_adapter", {"lora_name": "sql"}, 403, "--lora-root"),
    ("/v1/load_lora_adapter", {"lora_name": "a b", "lora_path": "x"}, 400, "lora_name"),
    ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "y", "is_3d_lora_weight": True}, 400, "is not supported"),
])  # fmt: skip
def test_what_cant_be_served_is_refused_in_words(served, path, body, status, says):
    reply = served[1].post(path, json=body)
    assert reply.status_code == status and says in reply.json()["error"]["message"], reply.text


def test_an_adapter_unloaded_since_the_check_is_not_found():
    class Unloading(FakeLLM):
        def prepare(self, prompt, params):
            raise RequestError("the adapter 'sql' isn't loaded; loaded: none", "lora", UNKNOWN)

    with serving(create_app(Unloading(adapters={"sql": "/a/sql"}))) as url:
        reply = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "model": "sql"})
    assert reply.status_code == 404 and reply.json()["error"]["param"] == "model", reply.text


def test_adapters_are_listed_with_their_parent(served):
    _, http = served
    cards = http.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [
        ("tiny", None), ("org/tiny", None), ("sql", "tiny"), ("org/poet:2", "tiny")
    ]  # fmt: skip
    assert http.get("/v1/models/org/poet:2").json()["root"] == "/a/poet"


def test_an_adapter_may_not_have_the_models_name():
    with pytest.raises(ConfigError, match="--lora-modules: tiny is the model's own name"):
        create_app(FakeLLM(adapters={"tiny": "x"}), served_name="tiny")


def test_adapters_are_loaded_from_the_root_alone(tmp_path):
    (tmp_path / "root" / "sql").mkdir(parents=True)
    asked = []

    class Loading(FakeLLM):
        async def control(self, action, **given):
            asked.append((action, given))
            if action == "load_adapter":
                self.adapters[given["name"]] = given["path"]
            else:
                del self.adapters[given["name"]]

    llm = Loading()
    llm.config = dataclasses.replace(llm.config, lora_root=str(tmp_path / "root"))
    with serving(create_app(llm, served_name="tiny")) as url, httpx.Client(base_url=url) as http:
        post = lambda path, **body: http.post(path, json=body)  # noqa: E731
        done = post("/v1/load_lora_adapter", lora_name="sql", lora_path="sql", load_inplace=True)
        assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
        folder = str((tmp_path / "root" / "sql").resolve())
        assert asked == [("load_adapter", {"name": "sql", "path": folder, "replace": True})]
        outside = post("/v1/load_lora_adapter", lora_name="x", lora_path="../..")
        assert outside.status_code == 400 and "leaves the folder" in outside.text and len(asked) == 1
        assert post("/v1/load_lora_adapter", lora_name="tiny", lora_path="sql").status_code == 400
        done = post("/load_lora_adapter", lora_name="b", lora_path="sql", pinned=False).json()
        assert done == {"success": True, "error_message": "", "loaded_adapters": {"sql": folder, "b": folder}}
        refused = post("/load_lora_adapter", lora_name="c", lora_path="..")
        assert (
            refused.status_code == 400 and not refused.json()["success"] and "leaves" in refused.json()["error_message"]
        )
        done = post("/v1/unload_lora_adapter", lora_name="sql", lora_int_id=None)
        assert done.text == "Success: LoRA adapter 'sql' removed successfully." and list(llm.adapters) == ["b"]
        assert post("/v1/unload_lora_adapter", lora_name="sql").status_code == 404
        assert post("/unload_lora_adapter", lora_name="b").json()["loaded_adapters"] == {}
