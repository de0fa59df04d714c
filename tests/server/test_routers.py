"""Requests as sglang-router and vllm-router make them are answered, and llm-d's endpoint picker finds its metrics.

The bodies are those that sglang-router 0.3.2 and vllm-router 0.1.17 sent for requests of a prompt and a limit.
"""

import pytest

MESSAGES = [{"role": "user", "content": "hi"}]
ADDED = {"stream": False, "no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True}
ADDED |= {"return_hidden_states": False}
CHAT = ADDED | {"logprobs": False, "continue_final_message": False}
CHAT |= {"separate_reasoning": True, "stream_reasoning": True}
RESPONSES = {"store": True, "stream": None, "temperature": 1.0, "top_p": 1.0, "priority": 0, "top_k": -1, "min_p": 0.0}
GENERATE = {"model": None, "return_text_in_logprobs": False, "stream": False, "log_metrics": True, "no_logs": False}
GENERATE |= dict.fromkeys(("return_hidden_states", "background", "return_bytes", "return_entropy"), False)
SENT = {
    "sglang chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 4} | CHAT),
    "vllm chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, "include_reasoning": True} | CHAT),
    "completions": ("/v1/completions", {"prompt": "hi", "max_tokens": 4, "echo": False} | ADDED),
    "responses": ("/v1/responses", {"input": "hi", "max_output_tokens": 4, "repetition_penalty": 1.0} | RESPONSES),
    "generate": ("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 4}} | GENERATE),
}


@pytest.mark.parametrize("path,body", SENT.values(), ids=SENT)
def test_what_a_router_adds_is_taken(http, path, body):
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("path,name,value", [
    ("/v1/chat/completions", "return_hidden_states", True),
    ("/v1/chat/completions", "no_stop_trim", True),
    ("/v1/chat/completions", "separate_reasoning", False),
    ("/v1/chat/completions", "stream_reasoning", False),
    ("/v1/chat/completions", "include_reasoning", False),
    ("/v1/completions", "return_hidden_states", True),
    ("/generate", "return_bytes", True),
])  # fmt: skip
def test_what_would_change_the_answer_is_refused_by_name(http, fake, path, name, value):
    body = next(body for where, body in SENT.values() if where == path)
    reply = http.post(path, json=body | {name: value})
    assert reply.status_code == 400 and f"{name} is not supported by this server" in reply.text
    assert fake.started == []


@pytest.mark.parametrize("path,body", [*SENT.values(), ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4})])
def test_a_priority_reaches_the_engine(http, fake, path, body):
    assert http.post(path, json=body | {"priority": -3}).status_code == 200
    assert http.post(path, json={**body, "priority": None}).status_code == 200
    assert fake.priorities == [-3, 0]


def test_a_router_learns_the_model(http):
    for path in ("/model_info", "/get_model_info"):
        told = http.get(path).json()
        assert told["model_path"] == told["served_model_name"] == "fake/model" and told["is_generation"] is True


def test_llm_ds_endpoint_picker_finds_its_metrics(http):
    lines = http.get("/metrics").text.splitlines()
    for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
        assert any(line.startswith(f'{name}{{engine="0",model_name="fake/model"}} ') for line in lines), name
    (info,) = (line for line in lines if line.startswith("vllm:cache_config_info{"))
    assert 'block_size="' in info and 'num_gpu_blocks="' in info
