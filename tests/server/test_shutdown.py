"""The server told to stop: what still runs has its time, and is then told why it ends."""

import threading

import httpx
import uvicorn

from server import __main__ as command
from server.app import create_app
from tests.server.fake import FakeLLM
from tests.server.live import wait_for


def test_requests_that_run_too_long_are_told(monkeypatch, caplog):
    monkeypatch.setattr(command, "GRACE_SECONDS", 0.3)
    llm, listener = FakeLLM(open=False), command._bind("127.0.0.1", 0)
    config = uvicorn.Config(create_app(llm), log_config=None, timeout_graceful_shutdown=60)
    server = command._Server(config, llm, "ready")
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"
    replies = {}

    def ask(stream):
        replies[stream] = httpx.post(url, json={"prompt": "a", "stream": stream}, timeout=60)

    threads = [threading.Thread(target=server.run, kwargs={"sockets": [listener]})]
    threads += [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
    threads[0].start()
    wait_for(lambda: server.started)
    for thread in threads[1:]:
        thread.start()
    wait_for(lambda: llm.running == 2)
    server.should_exit = True
    for thread in threads:
        thread.join()
    assert replies[False].status_code == 503
    assert "shutting down" in replies[False].json()["error"]["message"]
    error, done = replies[True].text.strip().split("\n\n")[-2:]
    assert "shutting down" in error and done == "data: [DONE]"
    assert not [record for record in caplog.records if record.exc_info], "no traceback"
