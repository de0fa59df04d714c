"""Modules of the user's that the command line names, and one line for an error in them.

They hold a drafter (`--draft module:Class`), an objective (`--objective module:Class`) or a loss (`--loss
module:function`).
"""

from __future__ import annotations

import logging
import re
import traceback
from importlib import import_module
from types import ModuleType

from jaxspec.config.options import ConfigError

log = logging.getLogger("jaxspec")

_NAMED: dict[str, str] = {}  # a flag and its value: the file of the module that they name
_FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)')  # of a traceback


def import_own(said: str, name: str) -> ModuleType:
    """Import a module that `said`, a flag and its value, names.

    **Raises:** `ImportError` if it isn't there; `ConfigError` for any other error in it.
    """
    try:
        module = import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"{said}: importing {name} fails: {_told(error)}") from error
    _NAMED[said] = str(module.__file__)
    logging.getLogger("jax._src.callback").addFilter(_shows_traceback)
    return module


def blame(error: BaseException | None) -> str | None:
    """Say in one line where code of the user's failed; None for an error elsewhere. A call that its signature doesn't
    allow counts as its own. An error in a callback of a program is text, within the program's error."""
    while error is not None:
        for file, line, function in reversed(_FRAME.findall(str(error))):
            if said := _naming(file):
                told = str(error).strip().splitlines()[-1]
                return f"{said} fails: {told} ({file}, line {line}, in {function})"
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if said := _naming(frame.filename):
                return f"{said} fails: {_told(error)} ({frame.filename}, line {frame.lineno}, in {frame.name})"
        if isinstance(error, TypeError):  # "Own.loss() takes 2 ...", "... class Own without ..."
            words = str(error).replace(".", " ").replace("(", " ").replace("'", " ").split()
            for said in _NAMED:
                if said.split("?")[0].split(":")[1] in words:
                    return f"{said} fails: {_told(error)}"
        error = error.__cause__
    return None


def _shows_traceback(record: logging.LogRecord) -> bool:
    """Whether jax's own report of a callback that failed is logged: of code of the user's, which is blamed in one line,
    at the level debug alone."""
    error = record.exc_info[1] if record.exc_info else None
    return blame(error) is None or log.isEnabledFor(logging.DEBUG)


def _naming(path: str) -> str:
    """The flags that name a module of this file, with their values."""
    return " or ".join(said for said, file in _NAMED.items() if file == path)


def _told(error: BaseException) -> str:
    """An error's kind and first line."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
