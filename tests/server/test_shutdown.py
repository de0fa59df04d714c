"""The server told to stop, or left by its engine: what still runs has its time, and is then told why it ends."""

import logging
import threading
from contextlib import contextmanager, suppress

import httpx
import pytest
import uvicorn

from jaxspec import EngineDead
from server import __main__ as command
from server.app import create_app
from tests.server.fake import FakeLLM
from tests.server.live import meanwhile, serving, wait_for


@contextmanager
def running(llm, drain_seconds):
    """A server that runs, its address, and the thread that it runs in."""
    with command._bind("127.0.0.1", 0) as listener:
        config = uvicorn.Config(create_app(llm), log_config=None, timeout_graceful_shutdown=60)
        server = command._Server(config, llm, "ready", drain_seconds)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        wait_for(lambda: server.started)
        try:
            yield server, f"http://127.0.0.1:{listener.getsockname()[1]}", thread
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def asking(url, llm):
    """Two requests that wait, one of them streamed; their replies are there after the block."""
    ask = lambda stream: httpx.post(f"{url}/v1/completions", json={"prompt": "a", "stream": stream}, timeout=60)  # noqa: E731
    with meanwhile(ask, False, True) as replies:
        wait_for(lambda: llm.running == 2)
        yield replies


def told(replies, words):
    assert replies[False].status_code == 503
    assert words in replies[False].json()["error"]["message"]
    error, done = replies[True].text.strip().split("\n\n")[-2:]
    assert words in error and done == "data: [DONE]"


def lines(caplog):
    """Messages that the server has logged since it was ready."""
    messages = [record.getMessage() for record in caplog.records if record.name == "jaxspec.server"]
    return messages[messages.index("ready") + 1 :]


def test_requests_that_finish_in_time_are_counted_as_soon_as_a_server_is_told_to_stop(caplog):
    caplog.set_level(logging.INFO, "jaxspec.server")
    llm = FakeLLM(open=False)
    with running(llm, 60) as (server, url, thread):
        with asking(url, llm) as replies:
            server.should_exit = True
            wait_for(lambda: "told to stop" in caplog.text)
            assert thread.is_alive() and not any(replies), "they run on"
            llm.open = True
        thread.join()
    assert {reply.status_code for reply in replies} == {200}
    assert lines(caplog) == ["told to stop; requests with 60 seconds to finish (--drain-seconds): 2"]


def test_a_server_at_rest_says_that_it_was_told_to_stop(caplog):
    caplog.set_level(logging.INFO, "jaxspec.server")
    with running(FakeLLM(), 60) as (server, _, thread):
        server.should_exit = True
        thread.join()
    assert lines(caplog) == ["told to stop; requests with 60 seconds to finish (--drain-seconds): 0"]


def ask_in_vain(url):
    with suppress(httpx.HTTPError):
        httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=60)


def test_requests_that_are_cut_off_by_a_second_signal_are_told(caplog):
    caplog.set_level(logging.INFO, "jaxspec.server")
    llm = FakeLLM(open=False)
    with running(llm, 60) as (server, url, thread), meanwhile(ask_in_vain, url):
        wait_for(lambda: llm.running == 1)
        server.should_exit = server.force_exit = True
        thread.join()
    assert lines(caplog)[1] == "told to stop once more; requests cut off: 1"


def test_requests_that_run_too_long_are_told(caplog):
    caplog.set_level(logging.INFO, "jaxspec.server")
    llm = FakeLLM(open=False)
    with running(llm, 0.3) as (server, url, thread):
        with asking(url, llm) as replies:
            server.should_exit = True
        thread.join()
    told(replies, "shutting down")
    assert not server.failed
    stop, cut = lines(caplog)[:2]
    assert stop == "told to stop; requests with 0.3 seconds to finish (--drain-seconds): 2"
    assert cut == "requests cut off, as they still ran after 0.3 seconds (--drain-seconds): 2"
    assert not [record for record in caplog.records if record.exc_info], "no traceback"


def test_a_server_whose_engine_ends_does_too():
    llm = FakeLLM(open=False)
    with running(llm, 60) as (server, url, thread):
        with asking(url, llm) as replies:
            llm.give_up(RuntimeError("a secret"))
        thread.join()
    told(replies, "the engine stopped on RuntimeError")
    assert server.failed, "a supervisor must see it"


def test_a_stuck_step_is_unhealthy_then_the_end(caplog):
    caplog.set_level(logging.CRITICAL)
    llm = FakeLLM(open=False)
    with running(llm, 0.5) as (server, url, thread):
        with asking(url, llm) as replies:
            llm.stuck, llm.step_seconds = True, 301.0
            wait_for(lambda: "--watchdog-timeout" in caplog.text)
            assert thread.is_alive(), "it may return yet"
        thread.join()
    told(replies, "the engine stopped on EngineDead")
    assert server.failed


def test_a_step_that_returns_late_changes_nothing(caplog):
    caplog.set_level(logging.CRITICAL)
    llm = FakeLLM()
    with running(llm, 0.5) as (server, url, thread):
        llm.stuck = True
        wait_for(lambda: "--watchdog-timeout" in caplog.text)
        llm.stuck = False
        thread.join(1)
        assert thread.is_alive() and not server.failed
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 200


def test_an_event_loop_that_hangs_does_not_keep_the_process(monkeypatch):
    """The last resort: a thread that ends the process."""
    left = threading.Event()
    monkeypatch.setattr(command, "_leave", left.set)
    monkeypatch.setattr(command, "LAST_SECONDS", command.CLOSE_SECONDS + 0.1)
    llm = FakeLLM()

    async def hang(self, sockets=None):
        left.wait(30)

    monkeypatch.setattr(uvicorn.Server, "shutdown", hang)
    with running(llm, 0.1) as (server, _, thread):
        server.should_exit = True
        thread.join(20)
    assert left.is_set()


@pytest.mark.parametrize(("ended", "failed", "status"), [(True, False, 0), (False, False, 1), (True, True, 1)])
def test_exit_status(monkeypatch, ended, failed, status):
    """Also of a server that was stopped by a signal, which uvicorn sends once more when it is done."""

    def stopped(self, sockets):
        self.failed = failed
        raise KeyboardInterrupt

    llm = FakeLLM(stuck=not ended)
    monkeypatch.setattr(command, "AsyncLLM", lambda **_: llm)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(command.logs, "set_up", lambda *_: None)
    monkeypatch.setattr(command._Server, "run", stopped)
    assert command.main(["--port", "0"]) == status


def test_whoever_waits_for_another_answer_is_told_too(monkeypatch):
    async def dead(self):
        raise EngineDead("the engine has stopped")

    monkeypatch.setattr(FakeLLM, "flush_cache", dead)
    with serving(create_app(FakeLLM(), rollout_routes=True)) as url:
        reply = httpx.post(f"{url}/flush_cache")
    assert reply.status_code == 503 and "shutting down" in reply.json()["error"]["message"]
