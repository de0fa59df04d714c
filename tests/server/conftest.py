"""A server over the fake engine, and the official client against it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import httpx
import pytest
from openai import OpenAI

from server.app import create_app
from tests.server.fake import FakeLLM
from tests.server.live import serving

# A busy machine may take longer than httpx's five seconds, which no test is about.
_waits = inspect.signature(httpx.get).parameters["timeout"].default
_waits.connect = _waits.read = _waits.write = _waits.pool = 60.0


@pytest.fixture(scope="session")
def _shared() -> Iterator[tuple[str, FakeLLM]]:
    llm = FakeLLM()
    with serving(create_app(llm, rollout_routes=True)) as url:
        yield url, llm


@pytest.fixture
def fake(_shared: tuple[str, FakeLLM]) -> Iterator[FakeLLM]:
    """The engine behind `url`, as new."""
    llm = _shared[1]
    llm.__init__()
    yield llm
    llm.open = True


@pytest.fixture
def url(_shared: tuple[str, FakeLLM], fake: FakeLLM) -> str:
    return _shared[0]


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url) as client:
        yield client
