"""Work of `python -m server` around serving, without a process of its own."""

import errno
import gc
import re
import socket
import sys
import threading

import pytest

from server import __main__ as main
from server.cli.options import parse
from tests.server.fake import FakeLLM
from tests.support.tiny import tiny_checkpoint


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


@pytest.mark.parametrize("name", ["jaxspec-programs", "jaxspec-engine", "jaxspec-weights", "other"])
def test_programs_that_are_being_compiled_do_not_hold_up_the_end(monkeypatch, name):
    """Workers of an executor are joined at the interpreter's end, daemons or not."""
    ends = []
    monkeypatch.setattr(main, "main", lambda: 0)
    monkeypatch.setattr(main.logging, "shutdown", lambda: None)
    monkeypatch.setattr(main.os, "_exit", lambda status: ends.append(("left", status)))
    monkeypatch.setattr(main.sys, "exit", lambda status: ends.append(("ended", status)))
    monkeypatch.setattr(main.threading, "enumerate", lambda: [threading.main_thread(), thread])
    thread = threading.Thread(name=name, daemon=True)
    main.run()
    assert ends[0] == ("ended" if name == "other" else "left", 0)


@pytest.fixture
def quiet(monkeypatch):
    """Starting a server changes nothing of this process."""
    monkeypatch.setattr(main.signal, "signal", lambda *_: None)
    monkeypatch.setattr(main.faulthandler, "enable", lambda *_: None)
    monkeypatch.setattr(main._watcher, "start", lambda *_: None)
    monkeypatch.setattr(main.logs, "set_up", lambda *_: None)


def test_options_that_do_not_fit_the_machine_end_with_status_2_and_a_line(quiet, capfd):
    """Before weights are on their way, whose progress bar would stand on the same line."""
    given = ["--model", str(tiny_checkpoint()), "--port", "0", "--max-total-tokens", "99999999999"]
    assert main.main(given) == 2
    said = capfd.readouterr().err
    assert re.search(r"^python -m server: --max-total-tokens 99999999999 does not fit: .* or less", said, re.M)


def starts_with(error, monkeypatch):
    def start(args):
        raise error

    monkeypatch.setattr(main, "_start", start)


def test_an_error_of_code_of_ones_own_is_a_line(monkeypatch, quiet, capsys):
    starts_with(OSError("no such store"), monkeypatch)
    monkeypatch.setattr(main, "blame", lambda error: f"--draft mine:Own fails: {error}")
    assert main.main(["--port", "0"]) == 2
    assert capsys.readouterr().err.endswith(": --draft mine:Own fails: no such store\n")


@pytest.mark.parametrize("error", [
    MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory"), RuntimeError("can't start new thread"),
    ValueError("another"),
])  # fmt: skip
def test_a_start_that_gets_no_memory_ends_with_status_2_and_a_line(monkeypatch, quiet, capsys, error):
    starts_with(error, monkeypatch)
    monkeypatch.setattr(main.resource, "getrlimit", lambda _: (3 * 2**30, 3 * 2**30))
    if isinstance(error, ValueError):
        with pytest.raises(ValueError):
            main.main(["--port", "0"])
        return
    assert main.main(["--port", "0"]) == 2
    said = capsys.readouterr().err
    assert "no more memory; RLIMIT_AS (`ulimit -v`) allows 3072 MiB" in said and len(said.splitlines()) == 1


def test_the_heap_is_released_when_serving_fails(serve):
    def during():
        raise OSError("no")

    before = gc.get_threshold()
    with pytest.raises(OSError):
        serve(during)
    assert gc.get_threshold() == before and any(each is sys.modules for each in gc.get_objects())
