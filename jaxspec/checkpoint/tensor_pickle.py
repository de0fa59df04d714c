"""The pickle inside a `pytorch_model.bin`, read by an interpreter that knows tensors, numbers and nothing else.

No class is looked up and nothing is called: a global is a name, and the few names that a file of tensors needs have a
meaning here. Any other global is refused by its name, any other opcode by its. What comes out are descriptions of
tensors, whose bytes lie elsewhere; `bin_file` reads them.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxspec.checkpoint.check import CheckpointError
from jaxspec.config.json_values import shown

# Storage types, by the names that safetensors has for their dtypes.
STORAGES = {
    "torch.FloatStorage": "F32",
    "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16",
    "torch.DoubleStorage": "F64",
    "torch.LongStorage": "I64",
    "torch.IntStorage": "I32",
    "torch.ShortStorage": "I16",
    "torch.CharStorage": "I8",
    "torch.ByteStorage": "U8",
    "torch.BoolStorage": "BOOL",
}
_MOST = 2**62  # of a size, a stride or an offset: beyond it, sums no longer fit an address


@dataclass(frozen=True)
class Global:
    """A name in the pickle, such as `torch.FloatStorage`: never looked up."""

    name: str


@dataclass(frozen=True)
class Storage:
    """A run of `elements` of one dtype, in the archive's entry `data/KEY`."""

    dtype: str
    key: str
    elements: int


@dataclass(frozen=True)
class View:
    """A tensor in its storage; `offset` and `strides` in elements. It stays inside, and has no more elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def views(pickled: bytes, where: str) -> dict[str, View]:
    """The tensors that a pickle describes, by name. `where` begins each error message.

    **Raises:** `CheckpointError` for a pickle that is damaged, or that holds anything but tensors.
    """
    found = _Interpreter(where, SAVE_AGAIN).run(pickled)
    if not isinstance(found, dict):
        raise CheckpointError(f"{where} holds {_kind(found)}, not tensors by name. {SAVE_AGAIN}")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, View):
            raise CheckpointError(
                f"{where} holds {_kind(value)} under {shown(name)}; a checkpoint holds tensors by name and nothing "
                f"else. {SAVE_AGAIN}"
            )
    return found


def ids(pickled: bytes, where: str) -> View | list[int]:
    """A pickle's only tensor, or its only list of whole numbers. `where` begins each error message.

    **Raises:** `CheckpointError` for a pickle that is damaged, or that holds anything else.
    """
    found = _Interpreter(where, WRITE_JSON).run(pickled)
    if isinstance(found, View) or (isinstance(found, list) and all(type(i) is int for i in found)):
        return found
    odd = next((f" with {_kind(i)} in it" for i in found if type(i) is not int), "") if isinstance(found, list) else ""
    raise CheckpointError(f"{where} holds {_kind(found)}{odd}, not one tensor or one list of token ids. {WRITE_JSON}")


WRITE_JSON = (
    "Where you trust the file, write its ids as JSON: json.dump([int(i) for i in torch.load(FILE, weights_only=True)], "
    "open('map.json', 'w'))"
)
SAVE_AGAIN = (
    "Where you trust the file, save its tensors again with torch: save_file(torch.load(FILE, weights_only=True), "
    "'model.safetensors'), with save_file of safetensors.torch"
)


class _Interpreter:
    """A stack machine for the opcodes that `torch.save` writes for tensors."""

    def __init__(self, where: str, advice: str):
        """`advice`: what to do with a file that is refused, the end of such messages."""
        self.where, self.advice = where, advice
        self.stack: list[Any] = []  # what came since the last mark
        self.marked: list[list[Any]] = []  # what came before each mark that is open
        self.memo: dict[int, Any] = {}

    def run(self, pickled: bytes) -> Any:
        try:
            for opcode, argument, _ in pickletools.genops(pickled):
                if opcode.name == "STOP":
                    return self.stack.pop()
                if (step := _STEPS.get(opcode.name)) is None:
                    raise CheckpointError(
                        f"{self.where}: opcode {opcode.name} has no place in a file of tensors. {self.advice}"
                    )
                step(self, argument)
        except CheckpointError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._damaged(shown(error)) from error
        raise self._damaged("it has no end")

    def _damaged(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.where} is damaged: {problem}. Download it again")

    def pop_to_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marked.pop()
        return items

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self, _: None) -> None:
        self.marked.append(self.stack)
        self.stack = []

    def tuple_of(self, count: int) -> None:
        self.push(tuple(reversed([self.stack.pop() for _ in range(count)])))

    def marked_tuple(self, _: None) -> None:
        self.push(tuple(self.pop_to_mark()))

    def put(self, at: int) -> None:
        self.memo[at] = self.stack[-1]

    def memoize(self, _: None) -> None:
        self.put(len(self.memo))

    def get(self, at: int) -> None:
        self.push(self.memo[at])

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise self._damaged(f"items are set on {_kind(target)}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int):
                raise self._damaged(f"a key is {_kind(key)}")
            target[key] = value

    def append(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise self._damaged(f"items are appended to {_kind(self.stack[-1])}")
        self.stack[-1].extend(items)

    def build(self, _: None) -> None:
        """Attributes of a dict, as `state_dict` gives it `_metadata`: not tensors, so left out."""
        self.stack.pop()
        if not isinstance(self.stack[-1], dict):
            raise self._damaged(f"attributes are set on {_kind(self.stack[-1])}")

    def stack_global(self, _: None) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise self._damaged("a global's name isn't text")
        self.name(f"{module} {name}")

    def name(self, names: str) -> None:
        name = names.replace(" ", ".", 1)
        if name not in _CALLS and name not in STORAGES:
            raise CheckpointError(
                f"{self.where} asks for {shown(name)}, which a file of tensors has no use for, and which could run "
                f"code. Nothing was run. {self.advice}"
            )
        self.push(Global(name))

    def reduce(self, _: None) -> None:
        arguments, called = self.stack.pop(), self.stack.pop()
        if not isinstance(called, Global) or called.name not in _CALLS or not isinstance(arguments, tuple):
            raise self._damaged(f"{_kind(called)} is called with {_kind(arguments)}")
        self.push(_CALLS[called.name](self, arguments))

    def persistent(self, _: None) -> None:
        """A storage, as `("storage", type, key, device, elements)`."""
        match self.stack.pop():
            case ("storage", Global(name), str(key), str(), int(elements)) if name in STORAGES and _size(elements):
                self.push(Storage(STORAGES[name], key, elements))
            case other:
                raise self._damaged(f"{_kind(other)} is no reference to a storage")

    def tensor(self, arguments: tuple[Any, ...]) -> View:
        """`_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, backward_hooks[, metadata])`."""
        match arguments:
            case (Storage() as storage, offset, tuple(shape), tuple(strides), *rest) if len(rest) in (2, 3):
                pass
            case _:
                raise self._damaged("a tensor isn't made of a storage, an offset, sizes and strides")
        if len(shape) != len(strides) or not all(map(_size, (offset, *shape, *strides))):
            raise self._damaged("a tensor's sizes, strides and offset must be numbers of 0 or more, as many of each")
        count = math.prod(shape)
        end = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
        if count and (end > storage.elements or count > storage.elements):
            raise self._damaged(
                f"a tensor of shape {shown(shape)} with strides {shown(strides)} from {offset} doesn't fit its storage "
                f"of {storage.elements:,} elements"
            )
        return View(storage, offset, shape, strides)

    def parameter(self, arguments: tuple[Any, ...]) -> View:
        """`_rebuild_parameter(tensor, requires_grad, backward_hooks)`."""
        match arguments:
            case (View() as view, _, _):
                return view
        raise self._damaged("a parameter isn't made of a tensor")

    def ordered(self, arguments: tuple[Any, ...]) -> dict[Any, Any]:
        if arguments:
            raise self._damaged("an OrderedDict is made from something")
        return {}


def _size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST


def _kind(value: Any) -> str:
    """Name a value's kind for a message; never the value, which may be long or hold itself."""
    return shown(value.name) if isinstance(value, Global) else f"a {type(value).__name__.lower()}"


_CALLS: dict[str, Callable[[_Interpreter, tuple[Any, ...]], Any]] = {
    "collections.OrderedDict": _Interpreter.ordered,
    "torch._utils._rebuild_parameter": _Interpreter.parameter,
    "torch._utils._rebuild_tensor_v2": _Interpreter.tensor,
}
_STEPS: dict[str, Callable[[_Interpreter, Any], None]] = {
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "MARK": _Interpreter.mark,
    "NONE": _Interpreter.push,
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), _Interpreter.push),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE"), _Interpreter.push),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "TUPLE": _Interpreter.marked_tuple,
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "APPEND": lambda machine, _: machine.append([machine.stack.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.pop_to_mark()),
    "SETITEM": lambda machine, _: machine.set_items([machine.stack.pop(), machine.stack.pop()][::-1]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_to_mark()),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Interpreter.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Interpreter.get),
    "MEMOIZE": _Interpreter.memoize,
    "GLOBAL": _Interpreter.name,
    "STACK_GLOBAL": _Interpreter.stack_global,
    "REDUCE": _Interpreter.reduce,
    "BINPERSID": _Interpreter.persistent,
    "BUILD": _Interpreter.build,
}
