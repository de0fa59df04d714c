"""Which drafters there are: the class of each method (`DRAFTERS`), and published drafters of known targets (`KNOWN`).

`--draft METHOD` alone takes the drafter that `KNOWN` has for the target. Its figures are those that the drafter's
authors, or the engine named, have published; a drafter without any isn't watched (`engine.acceptance_watch`). Names are
of repositories that others refer to: none was made up, and those of targets that no family here serves are left out.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.drafters import dflash_checkpoint
from jaxspec.drafters.assistant import Assistant
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.blocks.dflash2 import DFlash2
from jaxspec.drafters.blocks.domino import Domino
from jaxspec.drafters.blocks.dspark import DSpark
from jaxspec.drafters.blocks.lilicorr import LiLiCorr
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.eagle import Eagle, Eagle3
from jaxspec.drafters.mtp_modules import MtpModules
from jaxspec.drafters.ngram import Ngram
from jaxspec.drafters.standalone import Standalone
from jaxspec.drafters.suffix import Suffix

DRAFTERS: dict[str, type[Drafter]] = {
    "ngram": Ngram,
    "suffix": Suffix,
    "standalone": Standalone,
    "dflash": DFlash,
    "dflash2": DFlash2,
    "dspark": DSpark,
    "lilicorr": LiLiCorr,
    "domino": Domino,
    "eagle": Eagle,
    "eagle3": Eagle3,
    "mtp": MtpModules,  # or Mtp, of a checkpoint with one
    "assistant": Assistant,
}

# The method of a checkpoint, by its config's `architectures`. A model that could be a target drafts by itself.
ARCHITECTURES = {
    **dflash_checkpoint.METHODS,
    "Eagle3DraftModel": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "Eagle3Speculator": "eagle3",
    "EagleLlamaForCausalLM": "eagle",
    "LlamaForCausalLMEagle": "eagle",
    "LlamaForCausalLMEagle3": "eagle3",
    **dict.fromkeys(("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"), "assistant"),
}

BLOCKS = frozenset(dflash_checkpoint.METHODS.values())  # methods whose checkpoints are told apart by their configs

WITHOUT_WEIGHTS = (Ngram, Suffix)
TAKE_TOKEN_MAPS = (DFlash, DFlash2, DSpark, Domino, Eagle, Eagle3, MtpModules)
OUTLINED = (*WITHOUT_WEIGHTS, *TAKE_TOKEN_MAPS, LiLiCorr)  # whose shapes follow from a config alone
HAVE_HEADS = (*TAKE_TOKEN_MAPS, LiLiCorr, Standalone)  # an assistant's is narrow

SHIPPED = Path(__file__).parent / "shipped"  # drafters of the demo model, made by scripts/gpu/train.sh


@dataclass(frozen=True)
class Known:
    """A drafter for one target.

    - `source`: a hub id or a folder; empty for a module of the target's own checkpoint.
    - `drafts`: of a round, for which `accept` was measured; None if nobody says.
    - `layout`: whose checkpoint format it is.
    - `accept`: tokens a round, the bonus included, by data set.
    """

    source: str
    drafts: int | None = None
    layout: str = ""
    note: str = ""
    accept: tuple[tuple[str, float], ...] = ()

    @property
    def least(self) -> tuple[str, float] | None:
        """The data set with the fewest tokens a round, and how many."""
        return min(self.accept, key=lambda figure: figure[1], default=None)


def _drafters(table: dict[str, Any]) -> dict[str, Known]:
    """The drafters of a table of `known.toml`, by their targets."""
    found = {}
    for target, entry in table.items():
        source, accept = entry.get("source", ""), tuple(entry.get("accept", {}).items())
        source = str(SHIPPED / source) if entry.get("note") == "shipped" else source
        found[target] = Known(**entry | {"source": source, "accept": accept})
    return found


_TABLES = tomllib.loads((Path(__file__).parent / "known.toml").read_text(encoding="utf-8"))
MODULES, _OTHERS = _drafters(_TABLES.pop("modules")), _TABLES.pop("others")
# Method -> {target's name in lower case: drafter}.
KNOWN = {method: _drafters(table) for method, table in _TABLES.items()}
# Further drafters, of a method that has another one in `KNOWN`. They are taken where they are named.
OTHERS = {method: tuple(_drafters(table).items()) for method, table in _OTHERS.items()}


def find(method: str, target: str) -> Known | None:
    """The drafter that the table has for a target of this name. An FP8 checkpoint is served by its original's."""
    table = KNOWN.get(method, {})
    name = target.lower()
    return table.get(name) or table.get(name.removesuffix("-fp8"))


def card(method: str, source: str | None, target: str) -> Known | None:
    """Table entry of this very drafter, whether it was named or found; None for one that the table hasn't."""
    name = target.lower().removesuffix("-fp8")
    if method == "mtp":
        return MODULES.get(name)
    served = (known for _, each, known in entries() if each == name)
    return next((known for known in served if source and known.source.lower() == source.lower()), None)


def entries() -> list[tuple[str, str, Known]]:
    """Method, target and drafter, of all that have weights of their own; those of `KNOWN` first."""
    chosen = [(method, target, known) for method, table in KNOWN.items() for target, known in table.items()]
    return chosen + [(method, target, known) for method, others in OTHERS.items() for target, known in others]


def table() -> str:
    """All of it as a Markdown table, for docs/known-drafters.md; the shipped ones by their folders' names."""
    rows = [
        "| target | `--draft` | drafter | drafts | layout | tokens a round | note |",
        "|---|---|---|---|---|---|---|",
    ]
    listed = [*entries(), *(("mtp", target, known) for target, known in MODULES.items())]
    for method, target, known in sorted(listed, key=lambda entry: (entry[1], entry[0])):
        name = known.source if known.note != "shipped" else Path(known.source).name
        accept = ", ".join(f"{tokens:.2f} {data}" for data, tokens in known.accept)
        cells = target, f"`{method}`", f"`{name}`" if name else "", known.drafts or "", known.layout, accept, known.note
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)
