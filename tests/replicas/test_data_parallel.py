"""Several engines behind one server (`--dp-size`): which gets a request, and what is left when one is gone."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from jaxspec import AsyncLLM, CheckpointError, ConfigError, RequestError, SamplingParams
from jaxspec.config.engine_config import EngineConfig
from jaxspec.engine.async_llm import EngineDead
from jaxspec.engine.stats import together
from jaxspec.images.picture import PlacedPicture, Prompt
from jaxspec.parallel.channel import Channel, ChannelError
from jaxspec.replicas.data_parallel import DataParallelLLM
from jaxspec.replicas.engine_process import EngineProcess, check_devices, devices_of_each
from jaxspec.replicas.prefix_affinity import Prefixes, pages, told_apart
from server.app import create_app
from tests.server.fake import FakeLLM
from tests.server.live import ENGINE, as_here, meanwhile, serving, up, wait_for
from tests.support.picture_prompts import prompt
from tests.support.tiny import BYTE_VOCAB, tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]
LONG = {"prompt": "abcabcabcabc", "max_tokens": 1000, "temperature": 0, "ignore_eos": True}


@functools.cache
def checkpoint() -> str:
    """The model of server/test_drills.py, whose programs these are."""
    return str(tiny_checkpoint(vocab=BYTE_VOCAB, tokenizer=True, max_position_embeddings=4096, num_hidden_layers=1))


@pytest.fixture(scope="module")
def llm():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in as_here().items():
            patch.setenv(name, value)
        llm = DataParallelLLM(checkpoint(), "ngram", dp_size=2, max_queued_requests=64, **ENGINE)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def url(llm):
    with serving(create_app(llm, served_name="tiny", rollout_routes=True)) as url:
        yield url


def ask(url: str, **body) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={"temperature": 0, **body}, timeout=60)


def counts(llm: DataParallelLLM, key: str) -> list:
    return [each[key] for each in llm.stats()["engines"]]


def test_a_prompts_pages_are_known_from_the_first_on():
    chain = pages(range(20), 8)
    assert len(chain) == 2 and pages(range(16), 8) == chain and pages(range(1, 17), 8)[1] != chain[1]
    assert pages([1, "x"], 1) == pages([2**40], 1) == []  # an engine refuses them
    given = Prefixes(3)
    given.note(pages(range(24), 8))
    assert given.matched(pages([*range(16), *range(99, 199)], 8)) == 2
    given.note(pages(range(50, 58), 8))
    assert given.matched(pages(range(24), 8)) == 2, "the last page of the older prompt makes room"


def test_a_prompts_pages_know_its_pictures():
    """Pictures 0 and 2 have one size."""
    one, placed = prompt("one"), prompt("one").images[0]
    other = Prompt(one.tokens, (PlacedPicture(prompt("other").images[0].picture, placed.start),))
    assert told_apart(one) == told_apart(prompt("one")) and told_apart("text") == [] and told_apart([1]) == [1]
    changed = [
        place for place, each in enumerate(zip(told_apart(one), told_apart(other), strict=True)) if len({*each}) > 1
    ]
    assert changed == [*range(placed.start, placed.start + placed.picture.tokens)]
    assert len(pages(told_apart(one), 4)) == len(one.tokens) // 4


def test_a_channel_notices_what_is_lost_or_damaged():
    def ends():
        a, b = socket.socketpair()
        return a, Channel(a), Channel(b)

    _, one, other = ends()
    for body in (b"", b"x" * 10**5):
        threading.Thread(target=one.send, args=(body,)).start()
        assert other.receive() == body
    one.close()
    with pytest.raises(EOFError):
        other.receive()
    raw, one, other = ends()
    one._sent = 1
    one.send(b"late")
    with pytest.raises(ChannelError, match="message 1 came where 0 was due"):
        other.receive()
    raw, one, other = ends()
    raw.sendall(b"\0" * 7 + b"\1" + b"\0" * 8 + b"?")
    with pytest.raises(ChannelError, match="message 0 was damaged"):
        other.receive()


def test_each_engine_has_gpus_of_its_own(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    shown = lambda *sizes: [env["CUDA_VISIBLE_DEVICES"] for env in devices_of_each(*sizes)]  # noqa: E731
    assert shown(2, 2) == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, 3,5")
    assert shown(3, 1) == ["GPU-a", "3", "5"]
    with pytest.raises(ConfigError, match=r"--dp-size 2 with --tp-size 2 takes 4 GPUs; .*GPU-a, 3,5 has 3"):
        devices_of_each(2, 2)
    check_devices([("cpu", ["cpu:0"])] * 2, EngineConfig(dp_size=2))
    check_devices([("gpu", ["gpu:0", "gpu:1"])] * 2, EngineConfig(dp_size=2, tp_size=2))
    for found in ([("gpu", ["gpu:0"]), ("cpu", ["cpu:0"])], [("gpu", ["gpu:0"])] * 2):
        with pytest.raises(ConfigError, match=r"takes 4 GPUs; the engines found [12]"):
            check_devices(found, EngineConfig(dp_size=2, tp_size=2))


def test_figures_add_up():
    figures = FakeLLM().stats() | {"kernels": {"a": 1}, "programs_pending": ["x"], "compiles_since_start": 1}
    figures |= {"state_snapshots": 1, "rounds_total": 4}
    several = [figures | {"adapters": {"places": 4, "running": [name], "waiting": []}} for name in "ab"]
    assert together(several, [False, False])["adapters"] == {"places": 4, "running": ["a", "b"], "waiting": []}
    total = together([figures, figures | {"drafts": 1}], [False, True])
    assert (total["generation_tokens_total"], total["verify_rounds_total"]) == (18, 8)
    assert (total["total_pages"], total["free_pages"], total["drafts"]) == (10, 7, 2), "a lost engine has none"
    assert total["requests_total"] == {"stop": 6, "abort": 2} and total["avg_spec_accept_length"] == 2.25
    assert total["step_tokens"] == {"bounds": [1, 8], "counts": [0, 4, 2], "sum": 50}
    assert total["drafted_per_position"] == [8, 6]


def test_one_engine_alone_says_who_runs_several():
    with pytest.raises(ConfigError, match=r"--dp-size 2: this is one engine.*DataParallelLLM"):
        AsyncLLM(checkpoint(), dp_size=2)


@pytest.mark.exhaustive
def test_a_model_that_cannot_be_loaded_is_named():
    with pytest.raises(CheckpointError, match="no/such/folder"):
        DataParallelLLM("./no/such/folder", dp_size=2)


def test_requests_spread_and_follow_their_prefix(llm, url):
    before, cached = counts(llm, "generation_tokens_total"), counts(llm, "cached_tokens_total")
    prompts = [chr(97 + i) * 40 for i in range(4)]
    texts = [ask(url, prompt=prompt, max_tokens=6).json()["choices"][0]["text"] for prompt in prompts]
    gained = [b - a for a, b in zip(before, counts(llm, "generation_tokens_total"), strict=True)]
    assert gained == [12, 12], "idle engines take turns"
    again = [ask(url, prompt=prompt, max_tokens=6).json()["choices"][0]["text"] for prompt in reversed(prompts)]
    assert again[::-1] == texts
    hits = [b - a for a, b in zip(cached, counts(llm, "cached_tokens_total"), strict=True)]
    assert hits == [64, 64], "each prompt's first four pages were found where it had been"
    assert httpx.post(f"{url}/flush_cache").json() == {"flushed": True}
    assert not any(counts(llm, "cached_pages"))


def test_an_engine_with_the_prefix_that_is_far_busier_is_passed_over(llm, url):
    ask(url, prompt="busy" * 10, max_tokens=1)
    home = next(member for member in llm._members if member.prefixes.matched(pages(list(b"busy" * 10), 8)))
    home.held += llm._lead + 1
    try:
        before = counts(llm, "generation_tokens_total")
        ask(url, prompt="busy" * 10, max_tokens=3)
        after = counts(llm, "generation_tokens_total")
        assert [b - a for a, b in zip(before, after, strict=True)][home.index] == 0
    finally:
        home.held -= llm._lead + 1


@pytest.mark.exhaustive
def test_logprobs_and_structured_output_pass_through(llm, url):
    prompt = "hello" * 4  # of whole pages, so that one engine has all of them, and compiles what they need
    choice = ask(url, prompt=prompt, max_tokens=3, logprobs=2).json()["choices"][0]
    assert len(choice["logprobs"]["top_logprobs"]) == 3
    structured = {"structured_outputs": {"regex": "(yes|no), [0-9]{3}"}}
    text = ask(url, prompt=prompt, max_tokens=12, **structured).json()["choices"][0]["text"]
    assert text.partition(", ")[0] in ("yes", "no")


def test_refusals_pass_through(llm, url):
    assert len(ask(url, prompt=["a", "b", "c"], max_tokens=2, n=2).json()["choices"]) == 6
    reply = ask(url, prompt=["a", "b"], max_tokens=2, logit_bias={"5000": 1.0})
    assert reply.status_code == 400 and "outside the vocabulary" in reply.json()["error"]["message"]
    reply = ask(url, prompt="hello", priority=1)
    assert reply.status_code == 400 and "--schedule-policy priority" in reply.json()["error"]["message"]
    reply = ask(url, prompt="hello", structured_outputs={"regex": "("})
    assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error"


def test_the_server_lists_its_engines(llm, url):
    info = httpx.get(f"{url}/server_info").json()
    assert info["engine"]["dp_size"] == 2 and [each.split(":")[0] for each in info["devices"]] == [
        "engine 0",
        "engine 1",
    ]
    stats = info["stats"]
    assert stats["total_pages"] == sum(each["total_pages"] for each in stats["engines"])
    assert stats["memory_plan"] and "memory_plan" not in stats["engines"][0]
    assert 'jaxspec_engine_ready{engine="1"} 1.0' in httpx.get(f"{url}/metrics").text


async def test_a_caller_that_leaves_or_aborts_frees_its_engine(llm):
    endless = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)
    async for delta in llm.generate([1, 2, 3], endless):
        assert delta.token_ids
        break
    last = None
    async for delta in llm.generate([1, 2, 3], endless, "mine"):
        with pytest.raises(RequestError, match="'mine' is in use"):
            await anext(llm.generate([1], endless, "mine"))
        llm.abort("mine")
        last = delta
    assert last.finish_reason == "abort"
    again = llm.generate([4], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), "mine")
    assert [d.finish_reason async for d in again][-1] == "length"
    await asyncio.to_thread(wait_for, lambda: not any(counts(llm, "num_running")))
    assert llm._admitted.held == 0 and not llm._ids and not llm._streams and counts(llm, "held") == [0, 0]


def test_a_lost_engine_takes_its_requests_and_no_others(llm, url):
    """The last: engines aren't started again."""
    one = lambda i: ask(url, **LONG | {"prompt": chr(97 + i) * 9, "stream": i > 1})  # noqa: E731
    with meanwhile(one, *range(4)) as replies:
        wait_for(lambda: counts(llm, "num_running") == [2, 2])
        os.kill(llm._members[1].process.pid, signal.SIGKILL)
    failed = [i for i, reply in enumerate(replies) if "engine 1 stopped during this request" in reply.text]
    assert len(failed) == 2
    for i, reply in enumerate(replies):
        assert reply.status_code == (500 if i in failed and i < 2 else 200)
        assert i in failed or json.loads(replies[i].text.split("data: ")[-2] if i > 1 else reply.text)["choices"]
    assert [ask(url, prompt="z" * i, max_tokens=2).status_code for i in range(1, 5)] == [200] * 4
    health = httpx.get(f"{url}/health")
    assert health.status_code == 200 and health.json()["status"] == "degraded" and [*health.json()["lost"]] == ["1"]
    assert counts(llm, "ready") == [True, False] and "SIGKILL ended its process" in counts(llm, "error")[1]
    assert llm.stats()["total_pages"] == counts(llm, "total_pages")[0]
    os.kill(llm._members[0].process.pid, signal.SIGKILL)
    wait_for(lambda: llm.error is not None)
    assert ask(url, prompt="z").status_code == httpx.get(f"{url}/health").status_code == 503


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["drain", "kill"])
def test_a_process_with_two_engines_ends_with_them(how):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    flags = ["--dp", "1", "--dp-size", "2", "--draft", "ngram", "--port", str(port), "--few-programs", "--skip-warmup"]
    command = [sys.executable, "-m", "server", checkpoint(), *flags, "--drain-seconds", "30"]
    server = subprocess.Popen(command, cwd=ROOT)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: up(f"{url}/health"), 120)
        children = {int(pid) for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()}
        replies = []

        def one() -> None:
            with contextlib.suppress(httpx.TransportError):
                replies.append(ask(url, **LONG | {"max_tokens": 200}))

        thread = threading.Thread(target=one)
        thread.start()
        wait_for(lambda: httpx.get(f"{url}/load").json()["server_load"] == 1)
        if how == "drain":
            server.terminate()
            thread.join()
            assert len(replies) == 1 and replies[0].status_code == 200
            assert server.wait(15) == 0
        else:
            server.kill()
            server.wait(15)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), 10)
    finally:
        server.kill()
        server.wait()


def test_an_engine_killed_as_it_starts_is_no_mistake_of_the_options():
    member = EngineProcess(0, {}, lambda _: None, lambda _: None)
    member.process.kill()
    with pytest.raises(EngineDead, match=r"engine 0 of --dp-size didn't start: SIGKILL .*, perhaps for lack of memory"):
        member.started("devices")
