"""Which drafters there are: the class of each method (`DRAFTERS`), and published drafters of known targets (`KNOWN`).

`--draft METHOD` alone takes the drafter that `KNOWN` has for the target. Its figures are those that the drafter's
authors, or the engine named, have published; a drafter without any isn't watched (`engine.acceptance_watch`). Names are
of repositories that others refer to: none was made up, and those of targets that no family here serves are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxspec.drafters import dflash_checkpoint
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.dflash2 import DFlash2
from jaxspec.drafters.dspark import DSpark
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
    "eagle": Eagle,
    "eagle3": Eagle3,
    "mtp": MtpModules,  # or Mtp, of a checkpoint with one
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
}

BLOCKS = frozenset(dflash_checkpoint.METHODS.values())  # methods whose checkpoints are told apart by their configs

WITHOUT_WEIGHTS = (Ngram, Suffix)
TAKE_TOKEN_MAPS = (DFlash, DFlash2, DSpark, Eagle, Eagle3, MtpModules)
HAVE_HEADS = (*TAKE_TOKEN_MAPS, Standalone)

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


def _paper(*figures: float) -> tuple[tuple[str, float], ...]:
    """A line of the DSpark paper's table 1: thinking off."""
    names = "GSM8K", "MATH", "AIME25", "MBPP", "HumanEval", "LiveCodeBench", "MT-Bench", "Alpaca", "Arena-Hard"
    return tuple(zip(names, figures, strict=True))


# Method -> {target's name in lower case: drafter}.
KNOWN: dict[str, dict[str, Known]] = {
    "dflash": {
        "meta-llama/llama-3.1-8b-instruct": Known("z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat", layout="z-lab"),
        "openai/gpt-oss-20b": Known("z-lab/gpt-oss-20b-DFlash", layout="z-lab"),
        "openai/gpt-oss-120b": Known("z-lab/gpt-oss-120b-DFlash", layout="z-lab"),
        "qwen/qwen3-4b": Known("z-lab/Qwen3-4B-DFlash-b16", 15, "z-lab"),
        "qwen/qwen3-8b": Known(
            "z-lab/Qwen3-8B-DFlash-b16", 15, "z-lab", "trained with thinking off", (("GSM8K, by SGLang", 6.47),)
        ),
        "qwen/qwen3-14b": Known(
            "deepseek-ai/dflash_qwen3_14b_block7", 7, "DeepSpec", "a DSpark drafter without its two heads"
        ),
        "qwen/qwen3-coder-30b-a3b-instruct": Known("z-lab/Qwen3-Coder-30B-A3B-DFlash", layout="z-lab"),
        "qwen/qwen3.5-4b": Known("z-lab/Qwen3.5-4B-DFlash", layout="z-lab"),
        "qwen/qwen3.6-27b": Known("z-lab/Qwen3.6-27B-DFlash", layout="z-lab"),
        "qwen/qwen3.6-35b-a3b": Known("z-lab/Qwen3.6-35B-A3B-DFlash", layout="z-lab"),
        "smollm2-135m-instruct": Known(
            str(SHIPPED / "smollm2-135m-instruct-dflash"), 7, "z-lab", "shipped", (("Spec-Bench and GSM8K", 3.04),)
        ),
    },
    "dflash2": {
        "qwen/qwen3-4b": Known("RedHatAI/Qwen3-4B-speculator.dflash2", layout="speculators"),
        "qwen/qwen3.8-27b": Known(
            "z-lab/Qwen3.8-27B-DFlash2",
            7,
            "z-lab",
            "at temperature 1, by llama.cpp",
            (("coding", 3.82), ("RAG", 4.07), ("QA", 3.15), ("mixed", 3.58)),
        ),
    },
    "dspark": {
        "qwen/qwen3-4b": Known("deepseek-ai/dspark_qwen3_4b_block7", 7, "DeepSpec"),
        "qwen/qwen3-8b": Known(
            "deepseek-ai/dspark_qwen3_8b_block7",
            7,
            "DeepSpec",
            "thinking off",
            _paper(6.17, 5.78, 5.01, 5.16, 5.52, 5.17, 3.72, 3.58, 3.21),
        ),
        "qwen/qwen3-14b": Known(
            "deepseek-ai/dspark_qwen3_14b_block7",
            7,
            "DeepSpec",
            "thinking off",
            _paper(6.21, 5.74, 4.94, 5.26, 5.43, 5.02, 3.70, 3.58, 3.13),
        ),
        "qwen/qwen3.6-35b-a3b": Known("RedHatAI/Qwen3.6-35B-A3B-speculator.dspark", layout="speculators"),
        "qwen/qwen3.8-27b": Known("RedHatAI/Qwen3.8-27B-speculator.dspark-preview", layout="speculators"),
        "smollm2-135m-instruct": Known(
            str(SHIPPED / "smollm2-135m-instruct-dspark"),
            7,
            "SpecForge",
            "shipped",
            (("Spec-Bench and GSM8K, 128 tokens", 2.53),),
        ),
    },
    "eagle": {},
    "eagle3": {
        "meta-llama/llama-3.1-8b-instruct": Known("lmsys/sglang-EAGLE3-LLaMA3.1-Instruct-8B", layout="SGLang"),
        "meta-llama/llama-3.3-70b-instruct": Known(
            "lmsys/SGLang-EAGLE3-Llama-3.3-70B-Instruct-SpecForge", 3, "SpecForge"
        ),
        "openai/gpt-oss-20b": Known("RedHatAI/gpt-oss-20b-speculator.eagle3", layout="speculators"),
        "openai/gpt-oss-120b": Known(
            "RedHatAI/gpt-oss-120b-speculator.eagle3", 3, "speculators", "2 or 3 drafts are best, by its authors"
        ),
        "qwen/qwen3-8b": Known("AngelSlim/Qwen3-8B_eagle3", layout="AngelSlim"),
        "qwen/qwen3-14b": Known("RedHatAI/Qwen3-14B-speculator.eagle3", layout="speculators"),
        "qwen/qwen3-32b": Known("RedHatAI/Qwen3-32B-speculator.eagle3", layout="speculators"),
        "qwen/qwen3-30b-a3b": Known("AngelSlim/Qwen3-a3B_eagle3", layout="AngelSlim"),
        "qwen/qwen3-30b-a3b-instruct-2507": Known(
            "lmsys/SGLang-EAGLE3-Qwen3-30B-A3B-Instruct-2507-SpecForge-Nex", layout="SpecForge"
        ),
        "qwen/qwen3-235b-a22b": Known("RedHatAI/Qwen3-235B-A22B-speculator.eagle3", layout="speculators"),
        "qwen/qwen3-235b-a22b-instruct-2507": Known(
            "lmsys/SGLang-EAGLE3-Qwen3-235B-A22B-Instruct-2507-SpecForge-Meituan", 3, "SpecForge"
        ),
        "qwen/qwen3-coder-30b-a3b-instruct": Known(
            "lmsys/SGLang-EAGLE3-Qwen3-Coder-30B-A3B-Instruct-SpecForge", 3, "SpecForge"
        ),
        "qwen/qwen3-next-80b-a3b-instruct": Known(
            "lmsys/SGLang-EAGLE3-Qwen3-Next-80B-A3B-Instruct-FP8-SpecForge-Meituan",
            layout="SpecForge",
            note="by its name, for the FP8 checkpoint",
        ),
        "smollm2-135m-instruct": Known(
            str(SHIPPED / "smollm2-135m-instruct-eagle3"), 3, "SafeAILab", "shipped", (("Spec-Bench and GSM8K", 2.67),)
        ),
    },
    "standalone": {
        "qwen/qwen3-4b": Known("Qwen/Qwen3-0.6B", layout="a model"),
        "qwen/qwen3-8b": Known("Qwen/Qwen3-0.6B", layout="a model"),
        "qwen/qwen3-14b": Known("Qwen/Qwen3-0.6B", layout="a model"),
        "qwen/qwen3-32b": Known("Qwen/Qwen3-1.7B", layout="a model"),
        "meta-llama/llama-3.1-8b-instruct": Known("meta-llama/Llama-3.2-1B-Instruct", layout="a model"),
        "meta-llama/llama-3.1-70b-instruct": Known("meta-llama/Llama-3.2-1B-Instruct", layout="a model"),
    },
}

# Further drafters, of a method that has another one in `KNOWN`. They are taken where they are named.
OTHERS: dict[str, tuple[tuple[str, Known], ...]] = {
    "dflash": (
        ("qwen/qwen3-4b", Known("deepseek-ai/dflash_qwen3_4b_block7", 7, "DeepSpec", "only where named")),
        (
            "qwen/qwen3-8b",
            Known(
                "deepseek-ai/dflash_qwen3_8b_block7",
                7,
                "DeepSpec",
                "thinking off; only where named",
                _paper(5.33, 4.91, 4.07, 4.36, 4.64, 4.39, 3.11, 2.98, 2.81),
            ),
        ),
    ),
}

# Modules of multi-token prediction in the targets' own checkpoints, of which somebody has published acceptance.
MODULES: dict[str, Known] = {
    "qwen/qwen3.5-397b-a17b": Known("", 3, "own checkpoint", "by SGLang", (("not named", 3.37),)),
    "qwen/qwen3.8-27b": Known("", 7, "own checkpoint", "at temperature 1, by llama.cpp", (("mixed", 2.81),)),
}


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
