"""A client that goes away frees its requests at once: seen from the engine's side."""

import asyncio

import httpx
import pytest
from openai import OpenAI

from server.generate import ClientGone, UnlessGone
from tests.server.live import meanwhile, wait_for

BODY = {"prompt": ["a", "b"], "n": 2, "max_tokens": 9}


@pytest.mark.parametrize("body", [BODY, {"prompt": "a"}])
def test_leaving_a_stream(url, fake, body):
    fake.open = False
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as reply:
        lines = reply.iter_lines()  # httpx hangs up when this iterator is dropped
        next(lines)
        assert fake.running == len(body["prompt"])
    wait_for(lambda: fake.running == 0, 2)
    assert fake.aborted == len(body["prompt"])


def test_leaving_a_stream_through_the_client(client: OpenAI, fake):
    fake.open = False
    stream = client.chat.completions.create(
        model="fake/model", messages=[{"role": "user", "content": "a"}], stream=True
    )
    next(iter(stream))
    stream.close()
    wait_for(lambda: fake.running == 0, 2)
    assert fake.aborted == 1


@pytest.mark.parametrize("body", [BODY, {"prompt": "a"}])
def test_leaving_while_the_whole_is_awaited(url, fake, body):
    fake.open = False
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json=body, timeout=httpx.Timeout(5, read=0.2))
    wait_for(lambda: fake.running == 0, 2)
    assert fake.aborted == len(body["prompt"])


def test_others_go_on(url, fake):
    fake.open = False
    with meanwhile(lambda prompt: httpx.post(f"{url}/v1/completions", json={"prompt": prompt}), "good") as replies:
        wait_for(lambda: fake.running == 1)
        for _ in range(3):
            with httpx.stream("POST", f"{url}/v1/completions", json={**BODY, "stream": True}):
                pass
            assert httpx.post(f"{url}/v1/completions", json={"prompt": [9999]}).status_code == 400
        wait_for(lambda: fake.running == 1, 2)
        fake.open = True
    assert replies[0].status_code == 200 and fake.aborted == 6


async def test_unless_gone_lets_the_work_clean_up():
    cleaned = []

    async def work():
        try:
            await asyncio.sleep(10)
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(True)

    async def receive():
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGone), UnlessGone(receive):
        await work()
    assert cleaned == [True] and not asyncio.current_task().cancelling()


async def test_unless_gone_lets_other_cancellations_through():
    async def never():
        await asyncio.sleep(10)

    async def work():
        with UnlessGone(never):
            await asyncio.sleep(10)

    before = len(asyncio.all_tasks())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await work()
    with UnlessGone(never):
        await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) > before
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == before, "who watches ends with what is watched"
