"""Two private functions of jax replaced, for the lowering of kernels: a faster search for layouts, and no numbers.

The search for the layouts of a kernel's arrays is most of the time that jax takes to lower it. jax goes through all
constraints of a kernel again whenever one array's layout becomes known, and rebuilds each. Here a constraint is left
alone until one of the arrays that it is about has a layout, and what is asked of a tiling is computed once. The result
is the same: the kernel's text is equal to the byte (tests/pallas/hopper/test_export.py).

jax numbers the kernels that a process lowers, for names of dumped files. Without that number equal kernels have equal
modules, whichever process lowers them, and XLA compiles them once. XLA numbers those that it dumps itself.

The functions are those of the jax that the lock names; another version keeps its own.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable

import jax

log = logging.getLogger(__name__)
KNOWN_JAX = "0.11.2"
NUMBERED = "mosaic_gpu.dump_basename"


@functools.cache
def install() -> Callable | None:
    """Replace jax's functions, once. Gives a pass of the search as it was, None with another version of jax."""
    if jax.__version__ != KNOWN_JAX:
        log.info("jax %s lowers kernels with its own search for layouts; ours is for %s", jax.__version__, KNOWN_JAX)
        return None
    from jax.experimental.mosaic.gpu import constraints, core, fragmented_array, layout_inference

    original = constraints._reduce_system_once
    core._run_serde_pass = _unnumbered(core._run_serde_pass)
    constraints.Variable.__hash__ = _hash
    constraints._reduce_system_once = functools.partial(_reduce_once, constraints)
    layout_inference.ValueSite.__str__ = _name
    layout_inference.find_assignments_for = _looked_up(layout_inference.find_assignments_for)
    for kind, name in ((fragmented_array.Tiling, "tile_shape"), (fragmented_array.TiledLayout, "canonicalize")):
        setattr(kind, name, _remembered(getattr(kind, name)))
    return original


def _unnumbered(serialise: Callable) -> Callable:
    """jax's writing of a kernel's module, without the kernel's number."""

    def write(module, **options):
        if NUMBERED in module.operation.attributes:
            del module.operation.attributes[NUMBERED]
        return serialise(module, **options)

    return write


def _remembered(method: Callable) -> Callable:
    """A method of frozen objects, of which a kernel has few kinds, computed once for each."""
    cached = functools.lru_cache(maxsize=65536)(method)
    return functools.wraps(method)(lambda *given: cached(*given))  # a function, which binds as methods do


def _looked_up(find: Callable) -> Callable:
    """Give jax's search its unknown variables as a dict's keys, since it looks each variable up in them."""
    return functools.wraps(find)(lambda unknowns, *given, **named: find(dict.fromkeys(unknowns), *given, **named))


def _hash(variable) -> int:
    """A variable's hash, computed once: its key is an operation, which jax hashes through MLIR."""
    try:
        return variable._hash
    except AttributeError:
        object.__setattr__(variable, "_hash", hash(variable.key))
        return variable._hash


def _name(site) -> str:
    """A value's name for debugging. jax prints the operation for it, with all that is inside of a loop."""
    return f"{site.operation.name}:{site.type.name.lower()}-{site.index}"


def _reduce_once(cs, system):
    """Make one pass over a system's constraints as jax does, but skip those without a variable that has a layout.

    Returns a new system, None if nothing changed, or Unsatisfiable.
    """
    known, left, changed = system.assignments, [], False
    hashes = set(map(hash, known))  # ints are compared without a call of Python's
    for constraint in system.constraints:
        free = constraint.__dict__.get("_free")
        if free is not None and hashes.isdisjoint(free):
            left.append(constraint)
            continue
        reduced = cs.reduce_constraint(constraint, known)
        if isinstance(reduced, cs.Unsatisfiable):
            return reduced
        if (assigned := _assignment(cs, reduced)) is not None:
            variable, layout = assigned
            if known.get(variable, layout) != layout or not cs.is_valid_assignment(variable, layout):
                return cs.Unsatisfiable()
            known[variable] = layout
            hashes.add(hash(variable))
            changed = True
            continue
        holds = reduced.holds()
        if holds is None:
            if reduced == constraint:
                reduced = constraint
            else:
                changed = True
            if free is None or reduced is not constraint:
                object.__setattr__(reduced, "_free", tuple(map(hash, _variables(cs, reduced))))
            left.append(reduced)
        elif holds:
            changed = True
        else:
            return cs.Unsatisfiable()
    kinds = set(map(type, left))  # jax looks at each constraint by patterns, which are slow
    merged = cs._merge_all_divides_constraints(left) if cs.Divides in kinds else left
    if {cs.NotOfType, cs.Relayout} <= kinds:
        pairs = [each for each in merged if type(each) in (cs.NotOfType, cs.Relayout)]
        if cs._has_relayout_of_non_splat_to_splat(pairs):
            return cs.Unsatisfiable()
    return cs.ConstraintSystem(dict(known), merged) if changed or len(merged) != len(left) else None


def _assignment(cs, constraint):
    """The variable that a constraint equates with a layout, and the layout; or None."""
    if isinstance(constraint, cs.Equals):
        for variable, layout in ((constraint.lhs, constraint.rhs), (constraint.rhs, constraint.lhs)):
            if isinstance(variable, cs.Variable) and isinstance(layout, cs.Constant):
                return variable, layout
    return None


def _variables(cs, x) -> tuple:
    """All variables in a constraint or an expression."""
    if isinstance(x, cs.Variable):
        return (x,)
    if isinstance(x, (type, cs.Constant)) or not dataclasses.is_dataclass(x):
        return ()
    return tuple(found for field in dataclasses.fields(x) for found in _variables(cs, getattr(x, field.name)))
