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


OBJECTS = ("config", "engine", "sampling")  # rooms of which code has values under the same name
ROOMS = sorted({path.parent.name for path in (ROOT / "jaxspec").glob("*/__init__.py")} - {*OBJECTS})
MODULE = re.compile(rf"`((?:{'|'.join(ROOMS)})(?:\.\w+)+)`")  # in a room, as `pallas.dense.few_rows`


def test_modules_that_prose_names_are_there():
    lost, count = [], 0
    for path in sorted((ROOT / "jaxspec").rglob("*.py")):
        for named in MODULE.findall(path.read_text(encoding="utf-8")):
            at, parts, count = ROOT / "jaxspec", named.split("."), count + 1
            while parts and ((at / parts[0]).is_dir() or (at / f"{parts[0]}.py").exists()):
                at, *parts = at / parts[0], *parts[1:]
            module = (at / "__init__.py" if at.is_dir() else at.with_suffix(".py")).read_text(encoding="utf-8")
            if parts and not re.search(rf"\b{parts[0]}\b", module):
                lost.append(f"{path.relative_to(ROOT)}: {named}")
    assert count, "no docstring names a module"
    assert not lost, "\n".join(["these lead nowhere:", *lost])
