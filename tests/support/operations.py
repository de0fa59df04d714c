"""Tables of implementations as tests need them."""

from dataclasses import replace

from jaxspec.pallas.operation import ANY, PORTABLE, Table, nothing


def only(table: Table, name: str) -> Table:
    """The table with this implementation alone, which runs anywhere and takes any call."""
    (one,) = (each for each in table if each.name == name)
    return (replace(one, device=ANY, refuses=nothing, requested=False),)


def anywhere(table: Table) -> Table:
    """The table on any device as it is on a Hopper GPU."""
    return tuple(replace(each, device=ANY) for each in table if each.device != PORTABLE)
