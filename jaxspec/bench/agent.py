"""Questions like a coding agent's, made from the Python sources on this machine: answers that quote and repeat.

In turn: write a file again with one name changed; the same file with another change, as an agent does that works on it;
and repeat what a tool has printed. Nothing is fetched, and the same Python gives the same questions.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

LINES = 30  # of a source file in a question
MODULES = ("bisect", "colorsys", "heapq", "textwrap", "shlex", "fnmatch", "calendar", "stat", "quopri", "cmd", "glob")


def questions() -> Iterator[str]:
    """Each module's questions, one module after the other."""
    return (question for question, _ in answered())


def answered() -> Iterator[tuple[str, str]]:
    """The questions, each with the answer that is asked for."""
    folder = Path(sysconfig.get_path("stdlib"))
    for module in MODULES:
        path = folder / f"{module}.py"
        if path.exists():
            yield from _about(module, path.read_text())


def _about(module: str, source: str) -> Iterator[tuple[str, str]]:
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    first = min(functions, key=lambda node: node.lineno)
    begin = first.lineno - 1
    excerpt = "\n".join(source.splitlines()[begin : begin + LINES])
    argument = first.args.args[0].arg if first.args.args else "x"
    for old, new in ((first.name, f"{first.name}_again"), (argument, "value")):
        question = f"Rename `{old}` to `{new}`. Answer with the whole file and nothing else."
        renamed = re.sub(rf"\b{old}\b", new, excerpt)
        yield f"Here is {module}.py:\n\n```python\n{excerpt}\n```\n\n{question}", f"```python\n{renamed}\n```"
    printed = "\n".join(f"{module}.py:{node.lineno}: def {node.name}" for node in functions[:12])
    question = "Repeat its output word for word, then say how many functions there are."
    yield (
        f"The tool `grep -n def {module}.py` printed:\n\n```\n{printed}\n```\n\n{question}",
        f"```\n{printed}\n```\n\nThere are {len(functions[:12])} functions.",
    )
