"""Check who imports whom, read from the sources: no circle, and no arrow up through the rooms.

What only annotations need counts too, and so does what a function imports when it is called.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

import pytest

from jaxspec.decoder.mixings import MIXINGS
from jaxspec.models import weights

ROOT = Path(__file__).resolve().parent.parent
# From the bottom up: a room's modules import from their own room and from those before it here.
ORDER = """
    config models text images scheduling pallas parallel decoder cache checkpoint sampling drafters rounds structured
    compiling engine replicas cli bench train __main__
"""
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
FILES = ("__main__", "cli")  # that are no rooms
ROOMS = ORDER.split()


@functools.cache
def sources() -> dict[str, list[ast.AST]]:
    """By file of ours, the parts of its text that tests here look at."""
    files = [path for folder in ("jaxspec", "server") for path in (ROOT / folder).rglob("*.py")]
    kinds = ast.Import, ast.ImportFrom, ast.Call, ast.MatchClass, *FUNCTIONS
    parts = lambda path: [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]  # noqa: E731
    return {path.relative_to(ROOT).as_posix(): parts(path) for path in files}


@functools.cache
def imports() -> dict[str, set[str]]:
    """By module of ours, all that it imports, as `package.module`."""
    names = {path: path.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for path in sources()}
    ours, found = set(names.values()), defaultdict(set)
    for path, name in names.items():
        found[name] = set()
        for node in sources()[path]:
            if isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names}
            if not isinstance(node, ast.ImportFrom):
                continue
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found[name] |= (inner & ours) or {node.module}
    return dict(found)


def room(module: str) -> int | None:
    """The number of a module's room; None: it isn't jaxspec's, or is jaxspec itself."""
    package, _, rest = module.partition(".")
    if package != "jaxspec" or not rest:
        return None
    name = rest.split(".")[0]
    assert name in ROOMS, f"{module} is in none of ROOMS: say where it belongs"
    return ROOMS.index(name)


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


def test_no_arrow_goes_up():
    up = [
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in others
        if None not in (room(module), room(other)) and room(other) > room(module)
    ]
    assert not up


def test_rooms_are_few_and_small():
    files = defaultdict(list)
    for path in sources():
        folder, _, name = path.rpartition("/")
        files[folder].append(name)
    assert sorted(files["jaxspec"]) == sorted(["__init__.py", *(f"{name}.py" for name in FILES)])
    rooms = {folder.split("/")[1] for folder in files if folder.startswith("jaxspec/")}
    assert rooms == set(ROOMS) - {*FILES} and len(rooms) <= 19
    sizes = {folder: len(set(names) - {"__init__.py", "__main__.py"}) for folder, names in files.items()}
    grow = {"jaxspec/bench", "jaxspec/models/families"}  # a file a benchmark, a file a family
    assert not {folder: size for folder, size in sizes.items() if size > 20 and folder not in grow}


def test_files_and_functions_are_short():
    long = {path for path in sources() if (ROOT / path).read_text().count("\n") > 600}
    assert not long, "split these"
    functions = [(path, node) for path, nodes in sources().items() for node in nodes if isinstance(node, FUNCTIONS)]
    long = {f"{path}:{node.lineno}" for path, node in functions if node.end_lineno - node.lineno >= 80}
    assert len(functions) > 1000 and not long, "of more than 80 lines"


def test_each_room_says_its_sentence():
    for name in set(ROOMS) - {*FILES}:
        assert ast.get_docstring(ast.parse((ROOT / "jaxspec" / name / "__init__.py").read_text())), name


def test_jaxspec_knows_nothing_of_the_server():
    assert not [
        module
        for module, others in imports().items()
        if module.startswith("jaxspec") and any(other.split(".")[0] == "server" for other in others)
    ]


def test_nobody_asks_for_a_kind_of_mixing():
    """A kind says of itself all that others need: so a new one touches its own two files."""
    kinds, asked = {kind.__name__ for kind in MIXINGS}, set()
    for name, nodes in sources().items():
        for node in nodes:
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("isinstance", "issubclass"):
                asked |= {name for each in ast.walk(node.args[1]) if getattr(each, "id", None) in kinds}
            if isinstance(node, ast.MatchClass) and getattr(node.cls, "id", None) in kinds:
                asked.add(name)
    assert not {name for name in asked if not name.startswith("jaxspec/decoder/mixings/")}


def test_few_files_name_a_weight_format():
    """Beside the two whose tables refuse some: kernels of four bits, steps of few rows, a drafter's copy of a head, and
    benchmarks' weights."""
    formats = {name for name, each in vars(weights).items() if weights.Format in getattr(each, "__mro__", ())}
    naming = {
        name
        for name, nodes in sources().items()
        if not name.startswith(("jaxspec/models/", "jaxspec/checkpoint/"))
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module == "jaxspec.models.weights"
        if (formats - {"Format"}) & {alias.name for alias in node.names}
    }
    assert len(naming - {"jaxspec/decoder/matmul.py", "jaxspec/pallas/experts/experts_mlp.py"}) <= 8, naming


@pytest.mark.parametrize("modules,never", [
    ("drafters", "jaxspec.pallas"),  # what is fast is the decoder's to choose
    ("models", "jaxspec.pallas"),
    ("config", "jaxspec.models"),
    ("scheduling", "jax"),  # the host's side has no arrays
    ("config", "jax"),
    ("models.description", "jax"),
])  # fmt: skip
def test_modules_that_must_not_know_others(modules, never):
    inside = lambda module, name: module == name or module.startswith(name + ".")  # noqa: E731
    mine = {module: others for module, others in imports().items() if inside(module, f"jaxspec.{modules}")}
    assert mine and not [module for module, others in mine.items() if any(inside(other, never) for other in others)]


def test_the_picture_of_the_house_has_every_room_below_those_that_import_it():
    """All but those that the table puts above all others."""
    house = (ROOT / "docs" / "architecture.md").read_text().split("\n## The house\n")[1]
    picture = house.split("```")[1].splitlines()
    floor = {room: number for number, line in enumerate(picture) for room in re.findall(r"(\w+)/", line)}
    rooms = set(ROOMS) - {*FILES, "bench", "train"}
    assert floor.keys() == rooms | {"server"}
    for module, found in imports().items():
        own, *imported = [name.partition("jaxspec.")[2].split(".")[0] for name in (module, *found)]
        above = [other for other in rooms.intersection(imported) if own in rooms and floor[other] < floor[own]]
        assert not above, f"{module} imports from {above}, which the picture has above it"
