"""What `python -m server` does around serving, without a process of its own."""

import gc
import socket
import sys

import pytest

from server import __main__ as main
from server.cli.options import parse
from tests.server.fake import FakeLLM


@pytest.fixture
def serve(monkeypatch):
    """A function that serves for as long as `during` runs, in place of the event loop."""
    interval = sys.getswitchinterval()

    def call(during):
        monkeypatch.setattr(main._Server, "run", lambda *_, **__: during())
        with socket.create_server(("127.0.0.1", 0)) as listener:
            return main._serve(FakeLLM(), parse(["--model", "fake/model"]), listener)

    yield call
    sys.setswitchinterval(interval)


def test_garbage_is_looked_for_among_what_requests_leave_alone(serve):
    seen, before = {}, gc.get_threshold()

    def during():
        loaded = [each for each in gc.get_objects() if each is sys.modules]
        seen.update(loaded=len(loaded), threshold=gc.get_threshold()[0], frozen=gc.get_freeze_count())
        seen["young"] = len(gc.get_objects())

    assert serve(during) == 0
    assert seen["loaded"] == 0 and seen["young"] < seen["frozen"] / 10
    assert seen["threshold"] == main.YOUNG_OBJECTS
    assert gc.get_threshold() == before
    assert any(each is sys.modules for each in gc.get_objects()), "the interpreter's end finds everything"


def test_the_heap_is_released_when_serving_fails(serve):
    def during():
        raise OSError("no")

    before = gc.get_threshold()
    with pytest.raises(OSError):
        serve(during)
    assert gc.get_threshold() == before and any(each is sys.modules for each in gc.get_objects())
