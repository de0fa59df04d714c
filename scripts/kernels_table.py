"""Write the index of kernels into docs/kernels.md: `python -m scripts.kernels_table`.

Read from imports: a kernel is a module of jaxspec/pallas that launches one; those who choose it import it; its tests
and the cases of `bench kernels` import it, or the operation that chooses it.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "kernels.md"
BEFORE, AFTER = "<!-- python -m scripts.kernels_table -->\n", "\n<!-- end -->"
REFERENCE = re.compile(r"^def \w*(reference|plain|sequential)\w*\(", re.MULTILINE)
LAUNCHES = "pallas_call", "plgpu.kernel"


@functools.cache
def index() -> str:
    """The index in markdown, a line a kernel."""
    lines = ["| kernel | chosen in | reference | tests | `bench kernels` |", "|---|---|---|---|---|"]
    for kernel in _files("jaxspec/pallas"):
        if not any(word in (ROOT / kernel).read_text() for word in LAUNCHES):
            continue
        package = Path(kernel).parent
        mine = {_module(kernel)} | ({_module(package.as_posix())} if len(package.parts) > 3 else set())
        inside = {kernel} if len(mine) == 1 else {file for file in _files("jaxspec") if package in Path(file).parents}
        users = [f for f in _files("jaxspec") if f not in inside and _imports(f) & mine and "/bench/" not in f]
        operation = {_module(user) for user in users}
        tests = [f for room in ("tests/gpu", "tests/pallas") for f in _files(room) if _imports(f) & mine]
        cases = [file for file in _files("jaxspec/bench/cases") if _imports(file) & (mine | operation)]
        references = [file for file in (kernel, *users) if REFERENCE.search((ROOT / file).read_text())]
        cells = [[kernel], users, references, [t for t in tests if Path(t).name.startswith("test_")], cases]
        lines.append("| " + " | ".join(map(_listed, cells)) + " |")
    return "\n".join(lines)


@functools.cache
def _files(folder: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py"))


def _module(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@functools.cache
def _imports(file: str) -> frozenset[str]:
    """Names that a file imports, as `package.module` and `package.module.name`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def _listed(files: Iterable[str]) -> str:
    short = [file.removeprefix("jaxspec/").removeprefix("tests/").removeprefix("bench/cases/") for file in files]
    return ", ".join(f"`{file}`" for file in short) or "-"


def main() -> None:
    text = DOCS.read_text()
    begin, end = text.index(BEFORE) + len(BEFORE), text.index(AFTER)
    DOCS.write_text(text[:begin] + index() + text[end:])


if __name__ == "__main__":
    main()
