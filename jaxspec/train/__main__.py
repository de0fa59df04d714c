"""`python -m jaxspec.train`: have a model write texts, train a drafter on them, evaluate it.

    python -m jaxspec.train eagle3 --model M --data self --num-samples 50000 --minutes 8 --output O

leaves in O: `data.jsonl`, the texts; `drafter/`, to be served with `--draft eagle3:O/drafter`; `metrics.jsonl`,
`loss.png`, `acceptance.json`, `acceptance.png`. The same command again resumes.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from jaxspec.bench import matched
from jaxspec.bench.__main__ import main as bench
from jaxspec.bench.results import BenchError
from jaxspec.cache.memory_plan import claim_device
from jaxspec.checkpoint import CheckpointError, Model, load_model, locate, resolve
from jaxspec.cli import without_traceback
from jaxspec.compiling.executable_store import enable_compilation_cache
from jaxspec.config.flags import engine_options, parse
from jaxspec.config.options import ConfigError
from jaxspec.config.own_code import blame
from jaxspec.config.request import RequestError
from jaxspec.engine.llm import LLM
from jaxspec.models.model_config import ModelConfig
from jaxspec.text import prompts
from jaxspec.text.errors import TokenizerError
from jaxspec.train import evaluate, export, features, flags, loop, plots, synthesise
from jaxspec.train.blocks.dflash import CorrectedObjective, DFlashObjective
from jaxspec.train.blocks.dflash2 import DFlash2Objective
from jaxspec.train.blocks.domino import DominoObjective
from jaxspec.train.blocks.dspark import DSparkObjective
from jaxspec.train.blocks.lilicorr import LiLiCorrObjective, Terms
from jaxspec.train.continued import check_init, continued, heads_alone
from jaxspec.train.data import Text, TrainError, count, holds_texts, read_texts, split
from jaxspec.train.eagle3 import Eagle3Objective
from jaxspec.train.folder import agree, as_stored, fingerprint, held, make, read, write
from jaxspec.train.interrupted import terminable
from jaxspec.train.losses import KINDS, check_loss
from jaxspec.train.objective import Objective, own, reader, without_layers
from jaxspec.train.packing import pack
from jaxspec.train.promoted import is_dflash, promote

# What a new drafter is to be like; one that is trained on is as it is.
_SHAPE = (
    "num_layers", "mlp_size", "num_heads", "num_kv_heads", "target_layers", "draft_vocab_size", "block_size",
    "mask_token_id", "markov_rank", "markov_head", "candidates", "network_size", "network_layers", "network_heads",
    "factor_size", "selector_rank", "taps", "conv_group", "gru_size", "correction_rank", "uncorrected",
)  # fmt: skip
_PROMOTED = "markov_rank", "markov_head", "mlp_size"  # of those, what a DFlash drafter may get to become a DSpark one
# Flags that change neither what is trained nor how its steps are counted: a run may be resumed with others.
_FREE = {
    "command", "output", "save_every", "log_every", "concurrency", "num_draft_tokens", "max_new_tokens",
    "no_evaluation", "no_plots", "tp_size",
}  # fmt: skip
_RECIPE = (
    "model", "data", "num_samples", "temperature", "max_answer_tokens", "max_prompt_tokens", "row_length", "seed",
)  # fmt: skip
OBJECTIVES = {
    "eagle3": Eagle3Objective,
    "dflash": DFlashObjective,
    "dflash2": DFlash2Objective,
    "dspark": DSparkObjective,
    "domino": DominoObjective,
    "lilicorr": LiLiCorrObjective,
}
ERRORS = BenchError, CheckpointError, ConfigError, RequestError, TokenizerError, prompts.DataError, TrainError
_OF_TEXTS = "texts", "data_sha256"  # facts that are known once the texts are written


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    parser = flags.parser()
    args = parse(parser, sys.argv[1:] if argv is None else argv)
    claim_device()
    try:
        with terminable():
            commands = {"data": _data, "features": _features, "token-map": _token_map, "evaluate": _evaluate}
            commands |= {"compare": partial(_compare, parser)}
            commands.get(args.command, _train)(args)
    except KeyboardInterrupt as error:
        print(str(error) or "interrupted", file=sys.stderr)
        return 130
    except ERRORS as error:
        parser.exit(2, f"{parser.prog} {args.command}: {error}\n")
    except Exception as error:
        if (said := blame(error)) is None:
            raise
        parser.exit(2, f"{parser.prog} {args.command}: {said}\n")
    return 0


def _data(args: argparse.Namespace) -> None:
    with held(args.output):
        print(f"texts: {_texts_file(args)}")


def _features(args: argparse.Namespace) -> None:
    _check_layers(args, config := resolve(args.model).config)
    layers = args.target_layers or export.eagle3_layers(config)
    with held(args.output):
        path = _texts_file(args)
        target = load_model(args.model, _dtype(args), tp_size=args.tp_size)
        texts = read_texts(path, target.config.vocab_size)
        sizes = {name: getattr(args, name) for name in ("row_length", "batch_size", "texts_per_file")}
        facts = {"model": args.model, "data_sha256": fingerprint(path)}
        features.extract(args.output, target, texts, layers, facts, **sizes)
    print(f"features: {args.output / features.INDEX}")


def _token_map(args: argparse.Namespace) -> None:
    config = resolve(args.model).config
    _check_size(args.size, config.vocab_size, "--size")
    with held(args.output):
        ids = _most_frequent(read_texts(_texts_file(args), config.vocab_size), config.vocab_size, args.size)
        path = args.output / "token_map.json"
        path.write_text(json.dumps(ids.tolist(), separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"token map: {path}")


def _check_size(size: int, vocab_size: int, flag: str) -> None:
    if size > vocab_size:
        raise TrainError(f"{flag} {size} is more than the target's {vocab_size} tokens")


def _most_frequent(texts: list[Text], vocab_size: int, size: int) -> Int[np.ndarray, " n"]:
    """The ids of the `size` tokens that the texts' answers have most often, ascending."""
    counts = count(texts, vocab_size)
    ids = np.sort(np.argsort(-counts, kind="stable")[:size])
    print(f"draft vocabulary: {size} tokens, {counts[ids].sum() / counts.sum():.2%} of the answers' tokens")
    return ids


def _train(args: argparse.Namespace) -> None:
    if not args.no_plots:
        plots.check()
    settings = loop.Settings(**{each.name: getattr(args, each.name) for each in dataclasses.fields(loop.Settings)})
    config = resolve(args.model).config
    _check(args, config)
    facts = {name: value for name, value in vars(args).items() if name not in _FREE} | {"method": args.command}
    with held(args.output):
        steps = loop.check_run(args.output, facts, _OF_TEXTS)
        if args.no_evaluation and loop.finished(args.output, steps):
            if (texts := _texts_path(args)) is not None:  # they may be gone, but not others
                loop.check_run(args.output, facts | {"data_sha256": fingerprint(texts)}, ("texts",))
            print(f"drafter: {args.output / 'drafter'} is trained already")
            return
        _check_shape(args, config)
        _train_on(_texts_file(args), args, settings, facts)


def _compare(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    methods = [name for name in flags.commands(parser) if name not in flags.TOOLS]
    found = matched.contenders(args, partial(parse, parser), methods)
    files = [Path(each.rpartition("=")[2]) for each in args.benchmark]
    titles = [prompts.read(file, flag="--benchmark")[0] for file in files]  # errors come before training
    names = [each.rpartition("=")[0] or title for each, title in zip(args.benchmark, titles, strict=True)]
    if len({*names}) < len(names):
        raise BenchError(f"two --benchmark files are called {max(names, key=names.count)}. Name them by NAME=FILE")
    if not args.no_plots:
        plots.check()
    drafters, texts, config = [each for each in found if not each.plain], args.data, resolve(args.model).config
    for each in drafters:  # all of them before hours of the first
        _check(each.args, config)
        try:
            most = _check_shape(each.args, config)
        except (CheckpointError, ConfigError, TrainError) as error:
            raise TrainError(f"--drafters {each.name}: {error}") from error
        if most is not None and args.num_draft_tokens > most:
            other = "" if each.args.init else ", or give a larger block-size there"
            raise TrainError(
                f"--drafters {each.name}: its blocks have {most} drafts, and --num-draft-tokens is "
                f"{args.num_draft_tokens} for all. Lower it{other}"
            )
    if drafters and (texts == "self" or Path(texts).exists()):  # drafters that are trained need them no more
        with held(args.output, wait=True):  # whoever shares the drafters needs the same texts
            texts = str(_texts_file(args))
    for each in drafters:
        print(f"\n{each.name}", flush=True)
        each.args.data = texts
        _train(each.args)
        gc.collect()
    if args.until == "trained":
        return
    if args.until is None:
        found = [matched.Contender.of_plain(args), *drafters]
    documents = [_served(args, each, files) for each in found]
    if args.until is None:
        text = matched.report(args, documents, drafters)
        print(f"\n{text}")


def _served(args: argparse.Namespace, each: matched.Contender, files: Sequence[Path]) -> dict[str, Any]:
    """A contender's measurement by `bench accept`, kept in its folder and made once."""
    argv = matched.command(args, each)
    weights = [] if each.plain else [each.weights]
    made_of = {"command": argv, "sha256": [fingerprint(file) for file in (*files, *weights)]}
    with held(each.args.output):
        file = each.args.output / "served.json"
        if not file.exists() or (document := read(file)).get("made_of") != made_of:
            bench([*argv, "--json", str(file)])
            write(file, document := read(file) | {"made_of": made_of})
    return document


def _objective(args: argparse.Namespace) -> type[Objective]:
    """The method's objective, or the user's in its place."""
    kind = OBJECTIVES[args.command]
    return own(args.objective, kind) if args.objective else kind


def _check(args: argparse.Namespace, config: ModelConfig) -> None:
    """Refuse what can't be trained, before texts are written."""
    kind = _objective(args)
    if args.loss not in KINDS:
        width = locate(args.init).hf.get("draft_vocab_size") if args.init else getattr(args, "draft_vocab_size", None)
        guesses = args.unroll if args.command == "eagle3" else 1 + issubclass(kind, CorrectedObjective)
        check_loss(args.loss, guesses, width or config.vocab_size)
    loop.check_batch(args.batch_size)
    promoted = args.command == "dspark" and args.init and is_dflash(args.init)
    free = _PROMOTED if promoted else ()
    if given := [name for name in _SHAPE if args.init and name not in free and getattr(args, name, None) is not None]:
        raise TrainError(f"--{given[0].replace('_', '-')} is for new drafters, and --init {args.init} is one already")
    if getattr(args, "heads_only", False) and not args.init:
        raise TrainError("--heads-only needs --init D, the drafter whose block stays as it is")


def _check_layers(args: argparse.Namespace, config: ModelConfig) -> None:
    last = config.num_layers - 1
    if bad := [layer for layer in args.target_layers or () if layer > last]:
        raise TrainError(f"--target-layers {bad[0]} doesn't exist; {args.model} has layers 0 to {last}")


def _check_shape(args: argparse.Namespace, config: ModelConfig) -> int | None:
    """Refuse a shape that can't be trained, before texts are written. Returns how many drafts a block has; None: any
    number."""
    if args.init:
        return check_init(args.command, args.init, config)
    _check_layers(args, config)
    if args.command == "eagle3":
        _check_size(args.draft_vocab_size or 0, config.vocab_size, "--draft-vocab-size")
        export.check_eagle3(config, _shape(args, 1), args.draft_vocab_size or None)
        return None
    return export.check_block(config, _shape(args, 3), _block_of(args, config, args.mask_token_id or 0))


def _train_on(path: Path, args: argparse.Namespace, settings: loop.Settings, facts: dict[str, Any]) -> None:
    enable_compilation_cache()  # a run that resumes doesn't compile again
    target, read = load_model(args.model, _dtype(args), tp_size=args.tp_size), None  # read: a divided target's forward
    source = path
    if features.holds_features(path):
        source, texts = path / features.INDEX, features.read_features(path, target, args.row_length)
        target = dataclasses.replace(target, params={k: v for k, v in target.params.items() if k != "layers"})
    else:
        texts = read_texts(path, target.config.vocab_size)
    training, held_out = split(texts)
    most = args.row_length
    answers = sum(min(end, most) - min(begin, most) for text in training for begin, end in text.answers)
    if not answers:
        raise TrainError(f"every answer begins beyond the first {most} tokens of its text. Give a longer --row-length")
    whole, target = target, without_layers(target) if target.tp_size > 1 else target
    alone = target.config.recurrent  # a state would pass from one text of a row to the next
    data = pack(training, args.row_length, args.batch_size, args.seed, alone)
    run = loop.Run(args.output, facts | dict(zip(_OF_TEXTS, (len(texts), fingerprint(source)), strict=True)))
    fresh, objective = (_eagle3 if args.command == "eagle3" else _block)(args, target, training)
    layers = objective.drafter.feature_layers
    data = dataclasses.replace(data, feature_layers=layers)
    if "layers" in whole.params and whole.tp_size > 1:
        read = reader(whole, layers)
    print(
        f"{len(training)} texts, {answers:,} answer tokens in {len(data.rows)} rows ({data.steps} steps an epoch); "
        f"drafter of {loop.parameter_bytes(fresh.trained) / 1e6:.2f} MB"
    )
    trained = loop.train(run, objective, fresh.trained, fresh.frozen, target.params, data, settings, read)
    weights = fresh.save(trained)
    print(f"drafter: {fresh.folder} ({weights.stat().st_size / 1e6:.2f} MB)")
    if not args.no_plots:
        plots.draw_loss(run.history(), args.output / "loss.png")
    if not args.no_evaluation:
        drafter = f"{args.command}:{fresh.folder}"
        del whole, target, read, fresh, objective, trained
        gc.collect()  # the engine takes what memory is free
        _serve_held_out(args, drafter, held_out)


def _eagle3(args: argparse.Namespace, target: Model, texts: list[Text]) -> tuple[export.Fresh, Objective]:
    size, known, folder = args.draft_vocab_size, target.config.vocab_size, args.output / "drafter"
    if args.init:
        fresh = continued(folder, "eagle3", args.init, target)
    else:
        vocabulary = _most_frequent(texts, known, size) if size else None
        fresh = export.fresh_eagle3(folder, target, _shape(args, 1), vocabulary, args.seed)
    dtype = target.dtype
    return fresh, _objective(args)(fresh.drafter, target.config, dtype, args.loss, args.unroll, args.decay)


def _block(args: argparse.Namespace, target: Model, texts: list[Text]) -> tuple[export.Fresh, Objective]:
    source = args.init
    if source and args.command == "dspark" and is_dflash(source):
        heads = args.markov_rank, args.markov_head, args.mlp_size, args.seed
        source = str(promote(args.output / "start", source, *heads))
    if source:
        fresh = continued(args.output / "drafter", args.command, source, target)
        if getattr(args, "heads_only", False):
            fresh = heads_alone(fresh, DSparkObjective.heads, target.dtype)
    else:
        fresh = _fresh_block(args, target, texts)
    size = fresh.drafter.block_size
    anchors, gamma = args.anchors or max(args.row_length // size, 1), args.gamma or size / 2
    given = fresh.drafter, target.config, target.dtype, args.loss, anchors, gamma
    match args.command:
        case "dspark":
            given += (args.weigh_rounds,)
        case "domino":
            given += args.base_weight, args.base_share
        case "lilicorr":
            given += (Terms(args.choice_weight, args.lead_weight, args.penalty_weight, args.lead),)
    return fresh, _objective(args)(*given)


def _fresh_block(args: argparse.Namespace, target: Model, texts: list[Text]) -> export.Fresh:
    mask = args.mask_token_id
    if mask is None:
        seen = np.zeros(target.config.vocab_size, bool)
        for text in texts:
            seen[text.tokens] = True
        if seen.all():
            raise TrainError("every token of the vocabulary is in the texts: name one for the masks by --mask-token-id")
        mask = int(np.flatnonzero(~seen)[-1])
    block = _block_of(args, target.config, mask)
    return export.fresh_block(args.output / "drafter", target, _shape(args, 3), block, args.seed)


def _block_of(args: argparse.Namespace, config: ModelConfig, mask: int) -> export.Block:
    heads, settings = args.num_heads or config.num_heads, {}
    match args.command:
        case "dspark":
            of = heads, args.num_kv_heads or config.num_kv_heads, args.markov_rank or 256, args.markov_head or "vanilla"
            settings = export.dspark_settings(*of)
        case "dflash2":
            top, rank = args.candidates or 16, args.selector_rank or 256
            settings = export.dflash2_settings(rank, top, args.taps or 2, args.conv_group or 16)
        case "domino":
            spared = 1 if args.uncorrected is None else args.uncorrected
            settings = export.domino_settings(args.gru_size or 1024, args.correction_rank or 256, spared)
        case "lilicorr":
            network = args.network_size or 0, args.network_layers or 2, args.network_heads or heads
            settings = export.lilicorr_settings(args.candidates or 16, *network, args.factor_size or 128)
    return export.Block(args.block_size or 8, mask, args.command, settings)


def _shape(args: argparse.Namespace, num_layers: int) -> export.Shape:
    sizes = args.mlp_size, args.num_heads, args.num_kv_heads
    return export.Shape(args.num_layers or num_layers, *sizes, args.target_layers)


def _texts_path(args: argparse.Namespace) -> Path | None:
    """The texts that there are to train on: the file itself, or that of the features."""
    given, written = Path(args.data), args.output / "data.jsonl"
    if features.holds_features(given):
        return given / features.INDEX
    there = given if args.data != "self" and given.exists() and holds_texts(given) else written
    return there if there.exists() else None


def _texts_file(args: argparse.Namespace) -> Path:
    """The texts to train on: those named, or those that the model has written, or does now, into the output folder."""
    given = Path(args.data)
    if args.data != "self" and (features.holds_features(given) or holds_texts(given)):
        return given
    path = args.output / "data.jsonl"
    if args.data != "self":
        prompts.read(given)  # errors come before an engine
    _settle_recipe(args, path)
    if not path.exists():
        recipe = synthesise.Recipe(
            args.temperature, args.max_answer_tokens, args.max_prompt_tokens, args.row_length, args.seed
        )
        llm = _engine(args, "none", args.row_length, concurrency=args.concurrency)
        synthesise.synthesise(llm, args.data, path, args.num_samples, recipe)
        del llm
        gc.collect()
    return path


def _settle_recipe(args: argparse.Namespace, path: Path) -> None:
    """Record how the texts are made. **Raises:** `TrainError` if the folder has some that were made otherwise."""
    facts = {name: getattr(args, name) for name in _RECIPE} | {"dtype": _dtype(args)}
    facts["data_sha256"] = None if args.data == "self" else fingerprint(Path(args.data))
    file, part = args.output / "recipe.json", path.with_name(path.name + ".part")
    if not path.exists() and not (part.exists() and part.stat().st_size):
        write(file, as_stored(facts))
    elif file.exists():
        agree(args.output, "other texts", read(file), as_stored(facts))
    else:
        print(f"texts: those in {args.output} are kept, and nothing says how they were made")


def _engine(args: argparse.Namespace, draft: str, context: int, **options: Any) -> LLM:
    on_cpu = jax.default_backend() == "cpu"
    concurrency = options.pop("concurrency", None) or (8 if on_cpu else 256)
    return LLM(
        args.model,
        draft,
        dtype=_dtype(args),
        tp_size=args.tp_size,
        context_length=context,
        max_running_requests=concurrency,
        decode_log_interval=0,
        skip_warmup=on_cpu,  # there, programs take long, and a load like this meets few of them
        few_programs=True,
        **options,
    )


def _serve_held_out(args: argparse.Namespace, drafter: str, held_out: list[Text]) -> None:
    context = args.row_length + args.max_new_tokens
    llm = _engine(args, drafter, context, concurrency=args.concurrency, num_draft_tokens=args.num_draft_tokens)
    figures = evaluate.evaluate(llm, evaluate.held_out_prompts(held_out), args.max_new_tokens)
    _show(figures, args.output, {"model": args.model, "draft": drafter, "data": "held out"}, not args.no_plots)


def _evaluate(args: argparse.Namespace) -> None:
    if args.output and not args.no_plots:
        plots.check()
    if args.output:
        make(args.output)
    asked = [prompt for path in args.data for prompt in prompts.read(path)[1]]
    llm = LLM(**engine_options(args))
    figures = evaluate.evaluate(llm, evaluate.chat_prompts(llm, asked, args.prompts), args.max_new_tokens)
    facts = {"model": args.model, "draft": args.draft, "data": [path.name for path in args.data]}
    _show(figures, args.output, facts, not args.no_plots)


def _show(figures: list[evaluate.Figures], folder: Path | None, facts: dict[str, Any], charts: bool) -> None:
    print(evaluate.table(figures))
    if folder is not None:
        evaluate.save(figures, folder / "acceptance.json", facts)
        if charts:
            plots.draw_acceptance(figures, folder / "acceptance.png")


def _dtype(args: argparse.Namespace) -> str:
    return args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")


if __name__ == "__main__":
    sys.exit(without_traceback(main))
