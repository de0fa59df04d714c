"""Progress bars: on a terminal alone."""

import io
import re

import pytest

from jaxspec.config import progress
from jaxspec.config.progress import bytes_bar, progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Terminal, True), (io.StringIO, False)])
def test_a_redirected_log_has_no_bars(monkeypatch, stream, shown):
    written = stream()
    monkeypatch.setattr("sys.stderr", written)
    with progress_bar(10, "loading", "B") as bar:
        bar.update(10)
    assert ("loading" in written.getvalue()) == shown


def test_a_redirected_log_has_lines_with_gigabytes_a_second(monkeypatch, caplog):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    clock = iter([0, 1, 5, 7, 8]).__next__
    monkeypatch.setattr(progress.time, "monotonic", clock)
    with caplog.at_level("INFO", "jaxspec"), bytes_bar(8 * 10**9, "loading m") as read:
        for _ in range(3):
            read(2 * 10**9)
        between = caplog.messages.copy()
    assert between == ["loading m: 4.0 of 8.0 GB, 0.80 GB/s, 5 s left"]
    assert caplog.messages[1:] == ["loading m: 8.00 GB in 8.0 s, 1.00 GB/s"]


def test_a_bar_has_gigabytes_a_second_and_the_time_left(monkeypatch, caplog):
    written = Terminal()
    monkeypatch.setattr("sys.stderr", written)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    with caplog.at_level("INFO", "jaxspec"), bytes_bar(4 * 10**9, "loading m") as read:
        read(10**9)
        read(10**9)
        assert not caplog.messages
    assert re.search(r"loading m: +\d+%.*G/4.00G \[\d\d:\d\d<.*B/s\]", written.getvalue())
