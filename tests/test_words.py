"""Prose of the sources: docstrings open with a verb, or with the noun that the thing is."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("jaxspec", "server", "scripts", "examples", "clients", "tests")
NO_OPENING = re.compile(r"(What|Of|As|That|Those|The same)\b")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_open_with_a_verb_or_a_noun(folder):
    found, count = [], 0
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            count += text is not None
            if text and NO_OPENING.match(text):
                found.append(f"{path.relative_to(ROOT)}:{node.body[0].lineno}: {text.splitlines()[0]}")
    assert count, f"{folder} has no docstrings"
    assert not found, "\n".join(["open these with a verb or a noun:", *found])
