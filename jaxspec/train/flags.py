"""The command line of `python -m jaxspec.train`, flag by flag. What they mean together is in docs/training.md."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from jaxspec.cli import called
from jaxspec.config.flags import add_engine_flags, natural, positive
from jaxspec.drafters.dspark import HEADS
from jaxspec.train.losses import KINDS

_FORMAT = argparse.RawDescriptionHelpFormatter
TEXTS_HELP = "self: the model writes prompts, too; .jsonl or .json: chats or prompts; any other file: a prompt a line"


def parser() -> argparse.ArgumentParser:
    """Subcommands `data`, `token-map`, `eagle3`, `dflash`, `dspark`, `evaluate`; `args.command` says which."""
    top = argparse.ArgumentParser(prog=called("train", "jaxspec.train"), description="Train a drafter for a model.")
    commands = top.add_subparsers(dest="command", required=True)
    add = lambda name, text: commands.add_parser(  # noqa: E731
        name, help=text, description=text, formatter_class=_FORMAT, allow_abbrev=False
    )
    data = add("data", "have the model write training texts, to train several drafters on")
    _add_common(data)
    _add_writing(data)
    token_map = add("token-map", "list the tokens that the model writes most often, for --draft-token-map")
    _add_common(token_map)
    _add_writing(token_map)
    token_map.add_argument("--size", type=positive, default=32768, metavar="N", help="tokens to keep (%(default)s)")
    eagle3 = add("eagle3", "train an EAGLE-3 drafter")
    _add_training(eagle3)
    _add_eagle3(eagle3)
    dflash = add("dflash", "train a DFlash drafter")
    _add_training(dflash)
    _add_dflash(dflash)
    dspark = add("dspark", "train a DSpark drafter")
    _add_training(dspark)
    _add_dflash(dspark)
    _add_dspark(dspark)
    _add_evaluate(add("evaluate", "measure a drafter: tokens a round by category of prompts"))
    return top


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, metavar="M", help="the target: hub id, folder or .gguf file")
    add("--data", required=True, metavar="D", help=TEXTS_HELP + "; or a file of texts, as `data` writes them")
    add("--output", required=True, type=Path, metavar="O", help="folder; a run that is there already is resumed")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="dtype of the target and of activations (bfloat16; float32 on a CPU)",
    )
    add(
        "--row-length",
        type=positive,
        default=1024,
        metavar="TOKENS",
        help="tokens of a row, so of the longest text (%(default)s)",
    )
    add("--seed", type=natural, default=0, metavar="N", help="seed of all random draws (%(default)s)")


def _add_writing(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("texts that the model writes (not needed for a file of texts)")
    add = group.add_argument
    add("--num-samples", type=positive, metavar="N", help="texts to write (of a file: all its prompts)")
    add(
        "--temperature",
        type=_temperatures,
        default=(0.0, 0.0, 0.7, 1.0),
        metavar="T,T,...",
        help="temperatures of answers, in turn; 0 is greedy (0,0,0.7,1)",
    )
    add("--max-answer-tokens", type=positive, default=512, metavar="TOKENS", help="most of an answer (%(default)s)")
    add(
        "--max-prompt-tokens",
        type=positive,
        default=384,
        metavar="TOKENS",
        help="most of a prompt it writes (%(default)s)",
    )
    add("--concurrency", type=positive, metavar="N", help="texts written at once (256; 8 on a CPU)")


def _add_training(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    group = parser.add_argument_group("training")
    add = group.add_argument
    budget = group.add_mutually_exclusive_group(required=True)
    budget.add_argument("--steps", type=positive, metavar="N", help="batches to train on")
    budget.add_argument(
        "--minutes", type=_above_zero, metavar="M", help="time to train; the first 30 steps set their number"
    )
    add("--batch-size", type=positive, default=16, metavar="ROWS", help="rows of a step, over all GPUs (%(default)s)")
    add("--learning-rate", type=_above_zero, default=1e-3, metavar="RATE", help="its highest value (%(default)s)")
    add("--warm-up", type=natural, default=100, metavar="STEPS", help="steps of rising learning rate (%(default)s)")
    add(
        "--optimizer", choices=("muon", "adamw"), default="muon", help="Muon for matrices, or AdamW alone (%(default)s)"
    )
    add("--weight-decay", type=_from_zero, default=0.01, metavar="X", help="weight decay (%(default)s)")
    add("--clip", type=_above_zero, default=1.0, metavar="NORM", help="largest norm of the gradient (%(default)s)")
    losses = "; ".join(f"{name}: {text}" for name, text in KINDS.items())
    add("--loss", choices=tuple(KINDS), default="soft", help=f"%(default)s by default. {losses}")
    add("--save-every", type=_from_zero, default=60.0, metavar="SECONDS", help="time between checkpoints (%(default)s)")
    add("--log-every", type=positive, default=10, metavar="STEPS", help="steps between log lines (%(default)s)")
    group = parser.add_argument_group("the drafter's size")
    add = group.add_argument
    add(
        "--init",
        metavar="D",
        help="fine-tune this drafter, a folder or hub id, and keep its size; for dspark it may be a DFlash drafter, "
        "which gets a Markov head (default: a new drafter)",
    )
    add("--num-layers", type=positive, default=None, metavar="N", help="decoder layers (1; DFlash and DSpark 3)")
    add("--mlp-size", type=positive, metavar="N", help="width of the MLP (the target's)")
    add("--num-heads", type=positive, metavar="N", help="query heads (the target's)")
    add("--num-kv-heads", type=positive, metavar="N", help="KV heads (the target's)")
    add(
        "--target-layers",
        type=_layers,
        metavar="I,I,...",
        help="layers whose outputs it reads, from 0 (the method's default)",
    )
    _add_writing(parser)
    group = parser.add_argument_group("evaluation, at the end")
    add = group.add_argument
    add("--num-draft-tokens", type=positive, metavar="N", help="drafts a round (3; DFlash and DSpark: all of a block)")
    add("--max-new-tokens", type=positive, default=256, metavar="N", help="most of an answer (%(default)s)")
    add("--no-evaluation", action="store_true", help="train and save only")
    add("--no-plots", action="store_true", help="no loss.png and acceptance.png, which need matplotlib")


def _add_eagle3(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("EAGLE-3").add_argument
    text = "draft only the N most frequent tokens, with a head of its own; 0: all tokens, with the target's head"
    add("--draft-vocab-size", type=natural, metavar="N", help=f"{text} (0)")
    add("--unroll", type=positive, default=7, metavar="STEPS", help="drafts in a row to train on (%(default)s)")
    add(
        "--decay",
        type=_above_zero,
        default=0.8,
        metavar="X",
        help="loss weight of each step over the one before (%(default)s)",
    )


def _add_dspark(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("DSpark").add_argument
    add("--markov-rank", type=positive, metavar="N", help="rank of the Markov head (256)")
    add("--markov-head", choices=HEADS, help="kind of the Markov head (vanilla)")
    add(
        "--weigh-rounds",
        action="store_true",
        help="weigh each block by how often a round would begin there, as the confidence head estimates",
    )
    add(
        "--heads-only",
        action="store_true",
        help="with --init: train the Markov and confidence heads alone; the block stays as it is",
    )


def _add_dflash(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("blocks").add_argument
    add("--block-size", type=positive, metavar="TOKENS", help="the known token and its drafts (8)")
    add("--anchors", type=positive, metavar="N", help="blocks in each row (row length / block size)")
    add(
        "--gamma",
        type=_above_zero,
        metavar="X",
        help="drafts after which a draft's weight has fallen by e (block size / 2)",
    )
    add("--mask-token-id", type=natural, metavar="ID", help="id of the mask token (the highest id that no text has)")


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", required=True, nargs="+", type=Path, metavar="FILE", help="prompts: Spec-Bench's, GSM8K's, any chats")
    add("--prompts", type=positive, metavar="N", help="most of each category (all)")
    add("--max-new-tokens", type=positive, default=256, metavar="N", help="most of an answer (%(default)s)")
    add("--output", type=Path, metavar="O", help="folder for acceptance.json and acceptance.png")
    add("--no-plots", action="store_true", help="no acceptance.png, which needs matplotlib")
    add_engine_flags(parser, {"draft_policy": "fixed"})  # acceptance of each position is wanted


def _layers(text: str) -> tuple[int, ...]:
    return tuple(natural(part) for part in text.split(","))


def _above_zero(text: str) -> float:
    if (value := _number(text)) <= 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def _from_zero(text: str) -> float:
    if (value := _number(text)) < 0:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return value


def _number(text: str) -> float:
    """-1 for what is no finite number."""
    try:
        value = float(text)
    except ValueError:
        return -1.0
    return value if math.isfinite(value) else -1.0


def _temperatures(text: str) -> Sequence[float]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = (-1.0,)
    if not all(0 <= value <= 100 and math.isfinite(value) for value in values):
        raise argparse.ArgumentTypeError(f"must be temperatures from 0 to 100, with commas between, got {text!r}")
    return values
