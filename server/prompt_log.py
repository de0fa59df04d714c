"""`--log-prompts FILE`: finished texts as token ids, one JSON object a line, as `jaxspec.train` reads them.

Invariant: a text is written only if its request allowed it (`"store": false` doesn't) and it ended by itself. Lines are
written by a thread, so a slow disk costs texts, counted and logged, but never time of a request.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxspec.config.request import Delta
from jaxspec.train.data import Text
from server.cli.options import UsageError
from server.replies import Job

log = logging.getLogger("jaxspec.server")

MOST_WAITING = 1000  # texts; further ones are dropped until the disk has caught up
LEAST_TOKENS = 2  # of an answer: from one alone no draft can be learnt


class PromptLog:
    """An open file, readable by its owner alone, and the thread that appends to it."""

    def __init__(self, path: Path):
        """**Raises:** `UsageError` if the file can't be opened."""
        try:
            self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "w", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--log-prompts {path}: {error.strerror}; name a file that can be written") from error
        self._path, self._dropped = path, 0
        self._waiting: queue.Queue[Text | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="jaxspec-prompt-log", daemon=True)
        self._thread.start()
        log.warning("prompts and replies are written to %s; tell those who send them", path)

    def watch(self, jobs: Sequence[Job], category: str) -> Watch:
        return Watch(self, jobs, category)

    def put(self, text: Text) -> None:
        try:
            self._waiting.put_nowait(text)
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                log.warning("--log-prompts %s: the disk is too slow, so texts are dropped", self._path)

    def close(self, timeout: float = 5.0) -> None:
        """Write what waits, for so many seconds at most."""
        try:
            self._waiting.put(None, timeout=timeout)
        except queue.Full:
            return
        self._thread.join(timeout)
        if self._dropped:
            log.warning("--log-prompts %s: %d texts were dropped", self._path, self._dropped)

    def _run(self) -> None:
        try:
            with self._file:
                while (text := self._waiting.get()) is not None:
                    self._file.write(text.line())
                    if self._waiting.empty():
                        self._file.flush()
        except OSError as error:
            log.error("--log-prompts %s: %s; no further text is written", self._path, error.strerror)


class Watch:
    """Gathers the tokens of one request's completions."""

    def __init__(self, to: PromptLog, jobs: Sequence[Job], category: str):
        self._to, self._jobs, self._category = to, jobs, category
        self._tokens: dict[tuple[int, int], list[int]] = {}

    def see(self, number: int, delta: Delta) -> None:
        """Take a delta of the prompt of this number; write the text if it ends it."""
        tokens = self._tokens.setdefault((number, delta.index), [])
        tokens += delta.token_ids
        if delta.finish_reason in ("stop", "length") and len(tokens) >= LEAST_TOKENS:
            prompt = self._jobs[number].ids
            ids = np.array([*prompt, *tokens], np.int32)
            self._to.put(Text(ids, ((len(prompt), len(ids)),), self._category))
