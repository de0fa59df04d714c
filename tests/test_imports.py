"""Who imports whom, read from the sources: no circle, and no arrow back up through the layers.

What only annotations need (`if TYPE_CHECKING`) isn't imported at run time and doesn't count. What a function imports
when it is called does.
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# From the bottom up. A line's modules may import those of their own line and of the lines above it here.
LAYERS = (
    "adaptive affinity audit channel compiling fp8 mxfp4 weights options values elsewhere measure pace pages progress "
    "sequence slices without_torch",
    "streams interrupts",
    "request pallas",
    "stats",
    "decoder sharding peers collectives",
    "config",
    "models tokenizer",
    "checkpoint cache sampling flags",
    "batch draft mixers room verify scheduler executables",
    "rest ragged",
    "drafters round hosts deterministic",
    "outline",
    "structured ladder divided lowering lowering_process programs functional",
    "timing flight",
    "defaults runner",
    "intake",
    "engine gathered timeline",
    "async_llm llm",
    "data_parallel engine_process engine_worker follower",
    "ahead bench train cli __main__",
)


def run_time(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and getattr(child.test, "id", None) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        yield from run_time(child)


@functools.cache
def imports() -> dict[str, set[str]]:
    """By module of ours, all that it imports, as `package.module`."""
    files = [path for folder in ("jaxspec", "server") for path in (ROOT / folder).rglob("*.py")]
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files}
    ours, found = set(names.values()), defaultdict(set)
    for path, name in names.items():
        found[name] = set()
        for node in run_time(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names}
                continue
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found[name] |= (inner & ours) or {node.module}
    return dict(found)


def place(module: str) -> int | None:
    """Which layer a module of jaxspec is of; None: it isn't jaxspec's, or is jaxspec itself."""
    package, _, rest = module.partition(".")
    if package != "jaxspec" or not rest:
        return None
    layers = [i for i, layer in enumerate(LAYERS) if rest.split(".")[0] in layer.split()]
    assert layers, f"{module} is in none of LAYERS: say where it belongs"
    return layers[0]


def test_no_module_imports_itself_by_way_of_others():
    graph, done = imports(), set()

    def visit(module: str, path: tuple[str, ...]):
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module in done or module not in graph:
            return
        for other in graph[module]:
            visit(other, (*path, module))
        done.add(module)

    for module in graph:
        visit(module, ())
    assert len(done) == len(graph) > 100


def test_no_arrow_goes_back_up():
    back = [
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in others
        if None not in (place(module), place(other)) and place(other) > place(module)
    ]
    assert not back


def test_jaxspec_knows_nothing_of_the_server():
    assert not [
        module
        for module, others in imports().items()
        if module.startswith("jaxspec") and any(other.split(".")[0] == "server" for other in others)
    ]


@pytest.mark.parametrize("modules,never", [
    ("drafters", "jaxspec.pallas"),  # what is fast is the decoder's to choose
    ("models", "jaxspec.pallas"),
    ("config", "jaxspec.models"),
    ("adaptive", "jax"),  # the host's side has no arrays
    ("pages", "jax"),
    ("sequence", "jax"),
    ("scheduler", "jax"),
    ("request", "jax"),
    ("decoder.spec", "jax"),
])  # fmt: skip
def test_modules_that_must_not_know_others(modules, never):
    inside = lambda module, name: module == name or module.startswith(name + ".")  # noqa: E731
    mine = {module: others for module, others in imports().items() if inside(module, f"jaxspec.{modules}")}
    assert mine and not [module for module, others in mine.items() if any(inside(other, never) for other in others)]
