"""Progress bars: on a terminal alone."""

import io

import pytest

from jaxspec.config.progress import progress_bar


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
