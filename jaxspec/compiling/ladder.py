"""Which programs an engine has, as kinds and sizes: all of them, the few that serve requests, and who stands in.

A kind is what a program does, in which mode, and for rounds of fewer drafts than the drafter's how many: "prefill",
"first_sampled", "round_greedy", "rounds_greedy_1". Its size is how many requests or blocks it is for.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from jaxspec.rounds.packing import Shapes, admission_size, fit
from jaxspec.rounds.programs import GREEDY, LOGPROBS, MODES, SAMPLED

One = tuple[str, int]  # a program
ADAPTED = "adapted_"  # before the kind of a program for requests of which some have adapters
WITH_LAYERS = ("prefill", "score", "round", "rounds", "forward")  # which alone differ for adapters


def adapted(programs: Iterable[One], shapes: Shapes) -> list[One]:
    """The programs that take these ones' places where requests have adapters."""
    differ = [one for one in programs if one[0].partition("_")[0] in WITH_LAYERS]
    return [(ADAPTED + kind, size) for kind, size in differ] if shapes.adapters else []


def serving(programs: Iterable[One], shapes: Shapes) -> list[One]:
    """These programs, or in their places the adapted ones that serve all requests."""
    instead = {one: one for one in programs}
    if shapes.always_adapted:
        instead |= {(kind.removeprefix(ADAPTED), size): (kind, size) for kind, size in adapted(instead, shapes)}
    return list(instead.values())


def kind_of(name: str, mode: str, drafts: int | None = None) -> str:
    """`drafts`: of a round that has fewer than the drafter's."""
    return f"{name}_{mode}" if drafts is None else f"{name}_{mode}_{drafts}"


def of_rounds(rounds: int) -> str:
    """The name of programs of so many rounds."""
    return "round" if rounds == 1 else "rounds"


def drafting(mode: str) -> str:
    """How drafts are made for a batch in this mode."""
    return GREEDY if mode == GREEDY else SAMPLED


def sizes_of(shapes: Shapes, name: str, mode: str, drafts: int | None = None) -> tuple[int, ...]:
    """The sizes of a name's programs in this mode.

    `name`: "prefill", "first", "masked_first", "round", "rounds" or "structured". `drafts`: of a round, one of
    `Shapes.narrower`; None: the drafter's.
    """
    if name == "prefill":
        return shapes.prefills
    if name in ("first", "masked_first"):
        return shapes.firsts
    wide = shapes.batches if drafts is None else dict(shapes.narrower)[drafts]
    sizes = shapes.seldom if name == "structured" or mode == LOGPROBS else wide
    return shapes.several(sizes) if name == "rounds" else sizes


def narrower(shapes: Shapes, mode: str) -> Sequence[tuple[int, tuple[int, ...]]]:
    """Entries of `Shapes.narrower` that this mode has: log-probabilities, rarely requested, have only no drafts."""
    if mode == LOGPROBS:
        return [(0, shapes.seldom) for drafts, _ in shapes.narrower if not drafts]
    return shapes.narrower


def ladder_of(shapes: Shapes) -> list[One]:
    """All programs. Those that take XLA longest come first, so that little is left to do once all are lowered. One
    mode comes after the other, since later modes share its kernels and XLA's choices."""
    of_mode = {}
    for mode in MODES:
        widths = (None, *(drafts for drafts, _ in reversed(narrower(shapes, mode))))
        rounds = [
            (kind_of(name, mode, drafts), size)
            for name in ("round", "rounds")
            for drafts in widths
            for size in reversed(sizes_of(shapes, name, mode, drafts))
        ]
        of_mode[mode] = [*rounds, *((f"first_{mode}", n) for n in reversed(shapes.firsts))]
    prompts = [("score", shapes.score), *(("prefill", blocks) for blocks in reversed(shapes.prefills))]
    admit = "admit", admission_size(shapes.capacity)
    masked = []
    if shapes.structured:
        kinds = "forward", *(f"conclude_{mode}" for mode in MODES), f"draft_{SAMPLED}", f"draft_{GREEDY}"
        masked = [(kind, n) for kind in kinds for n in reversed(shapes.seldom)]
        masked += [("masked_first", n) for n in shapes.firsts]
    programs = serving([*of_mode[LOGPROBS], *prompts, *of_mode[SAMPLED], *of_mode[GREEDY], admit, *masked], shapes)
    return programs + adapted(programs, shapes)


def essential(shapes: Shapes) -> set[One]:
    """Programs that serve nearly any request, if slowly: each kind's largest size, in the mode that serves all."""
    alone = {("admit", admission_size(shapes.capacity)), ("prefill", shapes.prefills[-1])}
    rounds = {(f"round_{LOGPROBS}", shapes.seldom[-1])}
    rounds |= {(f"rounds_{LOGPROBS}", size) for size in shapes.several(shapes.seldom[-1:])}
    return set(serving(alone | rounds | {(f"first_{LOGPROBS}", shapes.firsts[-1])}, shapes))


def special(shapes: Shapes, scores: bool = True, grammars: bool = True, adapters: bool = True) -> set[One]:
    """Programs that few requests need beside those: of prompts' log-probabilities, of grammars, and of adapters."""
    few = {("score", shapes.score)} if scores else set()
    if grammars and shapes.structured:
        few |= {(kind, shapes.seldom[-1]) for kind in _kinds_of("structured", LOGPROBS)}
        few.add(("masked_first", shapes.firsts[-1]))
    few = set(serving(few, shapes))
    return few | set(adapted(few | essential(shapes), shapes)) if adapters else few


def use(one: One) -> tuple[int, int]:
    """A key that sorts programs by how soon they are missed: log-probabilities and grammars late, small sizes first.
    Rounds of fewer drafts run once all programs are there, so they come last."""
    kind, size = one
    if kind.startswith(ADAPTED):
        return 5, size
    name, _, rest = kind.partition("_")
    if kind in ("prefill", f"first_{SAMPLED}", f"first_{GREEDY}"):
        return 0, size
    if name in ("round", "rounds") and rest not in MODES:
        return 4, size
    if name in ("round", "rounds") and rest != LOGPROBS:
        return 1, size
    return 2 + (rest == LOGPROBS), size


def stand_in(
    have: Container[One], shapes: Shapes, name: str, modes: Sequence[str], requests: int, adapters: bool = False
) -> tuple[str, int]:
    """The first of `modes` and its smallest size that hold `requests` whose programs there are.

    A later mode and a larger size serve the same requests, more slowly. Where there is none, what would be best.
    """
    able = (
        (mode, size)
        for mode in modes
        for size in sizes_of(shapes, name, mode)
        if size >= requests and all((kind, size) in have for kind in _kinds_of(name, mode, adapters))
    )
    return next(able, (modes[0], fit(requests, sizes_of(shapes, name, modes[0]))))


def _kinds_of(name: str, mode: str, adapters: bool = False) -> tuple[str, ...]:
    """The programs that `name` consists of, which run at one size."""
    before = ADAPTED if adapters else ""
    if name == "structured":
        return f"draft_{drafting(mode)}", f"{before}forward", f"conclude_{mode}"
    return (before + (f"{name}_{mode}" if mode else name),)
