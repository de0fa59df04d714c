"""Traffic, both ways: no more at once than requested, none before its time."""

import asyncio
import time

import pytest

from jaxspec.bench import traffic
from jaxspec.bench.client import Reply
from jaxspec.bench.datasets import Prompt
from jaxspec.bench.traffic import Load
from jaxspec.config.request import SamplingParams
from tests.bench.fake_engine import Clock, FakeEngine

PARAMS = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


def load(concurrency, starts):
    return Load([Prompt((i, i, i)) for i in range(len(starts))], starts, concurrency, PARAMS)


class FakeClient:
    """Takes 20 ms for each stream."""

    def __init__(self):
        self.now = self.most = 0
        self.bodies = []

    async def stream(self, path, body):
        self.now += 1
        self.most = max(self.most, self.now)
        self.bodies.append((path, body))
        reply = Reply(time.perf_counter(), output_tokens=body["prompt"][0])
        await asyncio.sleep(0.02)
        self.now -= 1
        reply.ended = time.perf_counter()
        return reply


def test_over_http():
    client, began = FakeClient(), time.perf_counter()
    replies = asyncio.run(traffic.send(client, load(3, [0.0] * 6 + [0.2]), "m"))
    assert client.most == 3
    assert [reply.output_tokens for reply in replies] == list(range(7))  # in the prompts' order
    assert replies[5].ended - began < 0.19 < 0.2 <= replies[6].sent - began
    path, body = client.bodies[1]
    assert path == "/v1/completions"
    wanted = {"model": "m", "prompt": [1, 1, 1], "max_tokens": 10, "temperature": 0.0, "ignore_eos": True}
    assert body == wanted


def test_through_an_engine(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(traffic, "time", clock)
    engine = FakeEngine(clock, gain=2)
    replies = traffic.serve(engine, load(2, [0.0, 0.0, 0.0, 500.0]))
    assert engine.most == 2
    assert [reply.output_tokens for reply in replies] == [10] * 4
    assert replies[3].sent == pytest.approx(600.0)
    first = replies[0]
    assert (first.sent, first.prompt_tokens) == (100.0, 3)
    # prompts 0 and 1 are prefilled in the first two steps; five rounds of two tokens, one each, bring the other nine
    assert len(first.arrivals) == 6 and first.arrivals[0] == pytest.approx(100.5)
    assert first.ended == first.arrivals[-1] < replies[2].ended
