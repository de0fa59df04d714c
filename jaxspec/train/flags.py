"""The command line of `python -m jaxspec.train`, flag by flag. What they mean together is in docs/training.md."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from jaxspec.bench.matched import budget, listed
from jaxspec.bench.results import counts
from jaxspec.cli import called
from jaxspec.config.flags import (
    CommandParser,
    above_zero,
    add_engine_flags,
    add_value,
    checked,
    from_zero,
    natural,
    positive,
)
from jaxspec.drafters.blocks.dspark import HEADS
from jaxspec.train.losses import KINDS

TOOLS = "data", "features", "token-map", "compare", "evaluate"  # subcommands that train no drafter
_FORMAT = argparse.RawDescriptionHelpFormatter
TEXTS_HELP = "self: the model writes prompts, too; JSON: chats, or prompts; any other text: a prompt a line"

_temperatures = checked(
    lambda text: tuple(map(float, text.split(","))),
    "must be temperatures from 0 to 100, with commas between",
    lambda values: all(0 <= value <= 100 for value in values),
)


_loss = checked(
    str, f"must be {', '.join(KINDS)} or module:function", lambda text: text in KINDS or text.count(":") == 1
)


def _layers(text: str) -> tuple[int, ...]:
    return tuple(map(natural, text.split(",")))


def parser() -> argparse.ArgumentParser:
    """Subcommands; `args.command` says which."""
    top = CommandParser(prog=called("train", "jaxspec.train"), description="Train a drafter for a model.")
    commands = top.add_subparsers(dest="command", required=True)
    add = lambda name, text: commands.add_parser(  # noqa: E731
        name, help=text, description=text, formatter_class=_FORMAT, allow_abbrev=False
    )
    data = add("data", "have the model write training texts, to train several drafters on")
    features = add("features", "write a model's hidden states of texts, to train drafters on, here or elsewhere")
    token_map = add("token-map", "list the tokens that the model writes most often, for --draft-token-map")
    for command in (data, features, token_map):
        _add_common(command)
        _add_writing(command)
    layers = "layers whose outputs are kept, from 0 (those that an EAGLE-3 drafter reads); the last's norm always is"
    add_value(features, "--target-layers", _layers, None, "I,I,...", layers)
    add_value(features, "--batch-size", positive, 16, "TEXTS", "texts that the model reads at once")
    add_value(features, "--texts-per-file", positive, 128, "N", "texts in each file")
    add_value(token_map, "--size", positive, 32768, "N", "tokens to keep")
    _add_eagle3(add("eagle3", "train an EAGLE-3 drafter"))
    _add_dflash(add("dflash", "train a DFlash drafter"))
    dspark = add("dspark", "train a DSpark drafter")
    _add_dflash(dspark)
    _add_dspark(dspark)
    others = ("lilicorr", "LiLiCorr", _add_lilicorr), ("domino", "Domino", _add_domino)
    for method, title, more in (*others, ("dflash2", "DFlash 2", _add_dflash2)):
        command = add(method, f"train a {title} drafter")
        _add_dflash(command)
        more(partial(add_value, command.add_argument_group(title)))
    _add_compare(add("compare", "train drafters of several methods alike, and print one table of them"))
    _add_evaluate(add("evaluate", "measure a drafter: tokens a round by category of prompts"))
    return top


def commands(parser: argparse.ArgumentParser) -> list[str]:
    """The subcommands' names."""
    return [name for each in parser._actions if isinstance(each, argparse._SubParsersAction) for name in each.choices]


def _add_common(parser: argparse.ArgumentParser) -> None:
    add, value = parser.add_argument, partial(add_value, parser)
    add("--model", required=True, metavar="M", help="the target: hub id, folder or .gguf file")
    add(
        "--data",
        required=True,
        metavar="D",
        help=TEXTS_HELP + "; or a file of texts, as `data` writes them; or a folder, as `features` does",
    )
    add("--output", required=True, type=Path, metavar="O", help="folder; a run that is there already is resumed")
    dtypes = "dtype of the target and of activations (bfloat16; float32 on a CPU)"
    add("--dtype", choices=("float32", "bfloat16"), help=dtypes)
    value("--tp-size", positive, 1, "N", "devices that the target is divided among")
    value("--row-length", positive, 1024, "TOKENS", "tokens of a row, so of the longest text")
    value("--seed", natural, 0, "N", "seed of all random draws")


def _add_writing(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("texts that the model writes (not needed for a file of texts)")
    value = partial(add_value, group)
    value("--num-samples", positive, None, "N", "texts to write (of a file: all its prompts)")
    value("--temperature", _temperatures, "0,0,0.7,1", "T,T,...", "temperatures of answers, in turn; 0 is greedy")
    value("--max-answer-tokens", positive, 512, "TOKENS", "most of an answer")
    value("--max-prompt-tokens", positive, 384, "TOKENS", "most of a prompt it writes")
    value("--concurrency", positive, None, "N", "texts written at once (256; 8 on a CPU)")


def _add_training(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    group = parser.add_argument_group("training")
    add, value = group.add_argument, partial(add_value, group)
    budget = group.add_mutually_exclusive_group(required=True)
    add_value(budget, "--steps", positive, None, "N", "batches to train on")
    add_value(budget, "--minutes", above_zero, None, "M", "time to train; the first 30 steps set their number")
    value("--batch-size", positive, 16, "ROWS", "rows of a step, over all GPUs")
    value("--learning-rate", above_zero, 1e-3, "RATE", "its highest value")
    value("--warm-up", natural, 100, "STEPS", "steps of rising learning rate")
    optimizers = "Muon for matrices, or AdamW alone (%(default)s)"
    add("--optimizer", choices=("muon", "adamw"), default="muon", help=optimizers)
    value("--weight-decay", from_zero, 0.01, "X", "weight decay")
    value("--clip", above_zero, 1.0, "NORM", "largest norm of the gradient")
    losses = "; ".join(f"{name}: {text}" for name, text in KINDS.items())
    said = f"%(default)s by default. {losses}; module:function: your own"
    add("--loss", type=_loss, default="soft", metavar="LOSS", help=said)
    own = "your own subclass of the method's objective"
    add("--objective", metavar="module:Class", help=own)
    value("--save-every", from_zero, 60.0, "SECONDS", "time between checkpoints")
    value("--log-every", positive, 10, "STEPS", "steps between log lines")
    group = parser.add_argument_group("the drafter's size")
    value = partial(add_value, group)
    start = "fine-tune this drafter, a folder or hub id, and keep its size; for dspark it may be a DFlash drafter, "
    group.add_argument("--init", metavar="D", help=start + "which gets a Markov head (default: a new drafter)")
    value("--num-layers", positive, None, "N", "decoder layers (1; of a block drafter 3)")
    value("--mlp-size", positive, None, "N", "width of the MLP (the target's)")
    value("--num-heads", positive, None, "N", "query heads (the target's)")
    value("--num-kv-heads", positive, None, "N", "KV heads (the target's)")
    layers = "layers whose outputs it reads, from 0 (the method's default)"
    value("--target-layers", _layers, None, "I,I,...", layers)
    _add_writing(parser)
    group = parser.add_argument_group("evaluation, at the end")
    add, value = group.add_argument, partial(add_value, group)
    value("--num-draft-tokens", positive, None, "N", "drafts a round (3; of a block drafter: all of a block)")
    value("--max-new-tokens", positive, 256, "N", "most of an answer")
    add("--no-evaluation", action="store_true", help="train and save only")
    add("--no-plots", action="store_true", help="no loss.png and acceptance.png, which need matplotlib")


def _add_eagle3(parser: argparse.ArgumentParser) -> None:
    _add_training(parser)
    value = partial(add_value, parser.add_argument_group("EAGLE-3"))
    text = "draft only the N most frequent tokens, with a head of its own; 0: all tokens, with the target's head"
    value("--draft-vocab-size", natural, None, "N", f"{text} (0)")
    value("--unroll", positive, 7, "STEPS", "drafts in a row to train on")
    value("--decay", above_zero, 0.8, "X", "loss weight of each step over the one before")


def _add_dspark(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("DSpark")
    add_value(group, "--markov-rank", positive, None, "N", "rank of the Markov head (256)")
    group.add_argument("--markov-head", choices=HEADS, help="kind of the Markov head (vanilla)")
    text = "weigh each block by how often a round would begin there, as the confidence head estimates"
    group.add_argument("--weigh-rounds", action="store_true", help=text)
    text = "with --init: train the Markov and confidence heads alone; the block stays as it is"
    group.add_argument("--heads-only", action="store_true", help=text)


def _add_lilicorr(value: Callable[..., None]) -> None:
    value("--candidates", positive, None, "N", "likeliest tokens of a row to choose among (16)")
    value("--network-size", positive, None, "N", "width of the network over them (the drafter's)")
    value("--network-layers", positive, None, "N", "its layers (2)")
    value("--network-heads", positive, None, "N", "its attention heads (the drafter's)")
    value("--factor-size", positive, None, "N", "numbers of the vectors whose products are scores (128)")
    value("--choice-weight", from_zero, 0.25, "X", "weight of the cross-entropy of candidates' scores")
    value("--lead-weight", from_zero, 0.0, "X", "weight of what the right candidate lacks of a lead")
    value("--lead", above_zero, 2.0, "X", "the lead that it should have")
    text = "weight of how much less the target thinks of the candidates that would be drafted"
    value("--penalty-weight", from_zero, 0.25, "X", text)


def _add_dflash2(value: Callable[..., None]) -> None:
    value("--candidates", positive, None, "N", "likeliest tokens of a row to choose among (16)")
    value("--selector-rank", positive, None, "N", "numbers of the vectors whose products the selector adds (256)")
    value("--taps", positive, None, "N", "rows that a convolution reads (2)")
    value("--conv-group", positive, None, "N", "columns that share a convolution's kernel; they divide the width (16)")


def _add_domino(value: Callable[..., None]) -> None:
    value("--gru-size", positive, None, "N", "numbers of the GRU's state (1024)")
    value("--correction-rank", positive, None, "N", "rank of what is added to logits (256)")
    value("--uncorrected", natural, None, "N", "first drafts of a block to which nothing is added (1)")
    share = checked(float, "must be a number from 0 to 1", lambda value: 0 <= value <= 1)
    value("--base-weight", share, 1.0, "X", "share of the loss without corrections at first; it falls to 0")
    value("--base-share", above_zero, 0.5, "X", "share of the run after which it is 0")


def _add_dflash(parser: argparse.ArgumentParser) -> None:
    _add_training(parser)
    value = partial(add_value, parser.add_argument_group("blocks"))
    value("--block-size", positive, None, "TOKENS", "the known token and its drafts (8)")
    value("--anchors", positive, None, "N", "blocks in each row (row length / block size)")
    value("--gamma", above_zero, None, "X", "drafts after which a draft's weight has fallen by e (block size / 2)")
    value("--mask-token-id", natural, None, "ID", "id of the mask token (the highest id that no text has)")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    _add_common(parser)
    group = parser.add_argument_group("what is compared")
    add, value = group.add_argument, partial(add_value, group)
    said = "methods; of one's own flags some, as in dspark?markov-rank=64&weigh-rounds; --until served takes none, too"
    add("--drafters", required=True, type=listed, metavar="D,D,...", help=said)
    budgets = checked(budget, "must be minutes, such as 8m, or steps, such as 4000")
    add("--budget", required=True, type=budgets, metavar="B", help="of each drafter: minutes, 8m, or steps, 4000")
    add("--benchmark", required=True, action="append", metavar="[NAME=]FILE", help="questions to measure with")
    said = "end when these drafters are trained, or served: processes may share the drafters of one --output"
    add("--until", choices=("trained", "served"), help=said)
    value("--requests", counts("1,8,32"), "1,8,32", "N,N,...", "requests at once, one measurement each")
    value("--num-draft-tokens", positive, 7, "N", "drafts a round, of all drafters")
    value("--num-prompts", positive, None, "N", "questions of each file (all)")
    value("--max-new-tokens", positive, 256, "N", "most of an answer")
    value("--batch-size", positive, 16, "ROWS", "rows of a step, over all GPUs")
    value("--learning-rate", above_zero, 1e-3, "RATE", "its highest value")
    value("--warm-up", natural, 100, "STEPS", "steps of rising learning rate")
    add("--no-plots", action="store_true", help="no charts, which need matplotlib")
    _add_writing(parser)


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    add, value = parser.add_argument, partial(add_value, parser)
    add("--data", required=True, nargs="+", type=Path, metavar="FILE", help="prompts: Spec-Bench's, GSM8K's, any chats")
    value("--prompts", positive, None, "N", "most of each category (all)")
    value("--max-new-tokens", positive, 256, "N", "most of an answer")
    value("--output", Path, None, "O", "folder for acceptance.json and acceptance.png")
    add("--no-plots", action="store_true", help="no acceptance.png, which needs matplotlib")
    add_engine_flags(parser, {"draft_policy": "fixed"})  # acceptance of each position is wanted
