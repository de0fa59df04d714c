"""A tokenizer out of a GGUF file's metadata, rebuilt with the `tokenizers` package alone: byte-level BPE ("gpt2"),
SentencePiece's BPE ("llama"), and Gemma 4's, which has the merges of the one and the pieces of the other.

Of byte-level BPE, GGUF names the pre-tokenizer instead of holding it, so the table here says what each name means. An
unknown name is an error: guessing would split text differently from the model's training, and nobody would notice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE

from jaxspec.checkpoint.shards import unreadable_tokenizer
from jaxspec.config.json_values import shown
from jaxspec.models.model_config import is_token
from jaxspec.text.errors import TokenizerError
from jaxspec.text.tokenizer import Tokenizer

log = logging.getLogger("jaxspec")

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # tokenizer.ggml.token_type
_SPACE = "\u2581"  # what pieces have for a space

_CONTRACTIONS, _REST = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


def _words(digits: str, marks: str = r"[^\s\p{L}\p{N}]+[\r\n]*") -> str:
    """A pattern of words. Models differ in how many digits make one, and in which marks."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?{marks}|{_REST}"


def _tekken() -> str:
    letter, upper, lower = r"[^\r\n\p{L}\p{N}]?", r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
    words = f"{letter}[{upper}]*[{lower}]+|{letter}[{upper}]+[{lower}]*"
    return words + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _REST


@dataclass(frozen=True)
class _Pre:
    """Patterns by which text is cut, one after the other, each into its matches and what is between them.

    `whole`: a piece that the vocabulary has isn't made by merges. `bos`: texts begin with BOS, unless the file says.
    """

    patterns: tuple[str, ...]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    whole: bool = False
    bos: bool = False


_LLAMA3 = _words("{1,3}")
_DEFAULT = "default"
# By tokenizer.ggml.pre, as llama.cpp's llama-vocab.cpp has them for the architectures that are read. Qwen normalises.
_PRE = {
    _DEFAULT: _Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "olmo", "mpt", "jais", "trillion"),
                    _Pre((_GPT2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
                    _Pre((r"\p{N}", _GPT2))),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
                    _Pre((_LLAMA3,), whole=True, bos=True)),
    **dict.fromkeys(("glm4", "chatglm-bpe", "smaug-bpe", "dbrx"), _Pre((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2"), _Pre((_words(""),), normalizers.NFC)),
    **dict.fromkeys(("megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"), _Pre((_words(""),))),
    "seed-coder": _Pre((_words("", r"[^\s\p{L}\p{N}\r\n]+"),)),
    "tekken": _Pre((_tekken(),), whole=True, bos=True),
    "deepseek-coder": _Pre(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _Pre((
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"""| ?[\p{P}\p{S}]+[\r\n]*|""" + _REST,
    ))),
}  # fmt: skip


def build(metadata: Mapping[str, Any], where: str) -> Tokenizer | None:
    """The tokenizer that `metadata` (GGUF keys to values) describes, or None if it has none.

    **Raises:** `TokenizerError` naming the file and the key for a tokenizer model or pre-tokenizer that isn't known.
    """
    key = lambda name, default=None: metadata.get(f"tokenizer.ggml.{name}", default)  # noqa: E731
    if (model := key("model")) is None:
        return None
    with unreadable_tokenizer(where):
        return _build(metadata, model, where)


def _build(metadata: Mapping[str, Any], model: Any, where: str) -> Tokenizer:
    key = lambda name, default=None: metadata.get(f"tokenizer.ggml.{name}", default)  # noqa: E731
    if model not in ("gpt2", "llama", "gemma4"):
        raise TokenizerError(
            f"{where}: tokenizer.ggml.model is {shown(model)}; supported: 'gpt2' (byte-level BPE), 'llama' "
            "(SentencePiece's BPE), 'gemma4'. Use the model's safetensors folder instead, with its tokenizer.json"
        )
    lists = ("tokens", "scores" if model == "llama" else "merges")
    if missing := [f"tokenizer.ggml.{name}" for name in lists if key(name) is None]:
        raise TokenizerError(f"{where}: the tokenizer lacks {' and '.join(missing)}")
    tokens = key("tokens")
    for name in ("tokens", "merges") if model != "llama" else ("tokens",):
        if not isinstance(key(name), list) or not all(isinstance(text, str) for text in key(name)):
            raise TokenizerError(f"{where}: tokenizer.ggml.{name} must be a list of strings, got {shown(key(name))}")
    types = key("token_type", [_NORMAL] * len(tokens))
    if model == "gpt2":
        backend, bos = _by_bytes(key, tokens, types, where)
    else:
        backend, bos = _of_pieces(key, tokens, types, model, where), True
    backend.add_tokens(
        [
            AddedToken(text, special=kind == _CONTROL, normalized=False)
            for text, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    ids = {end: key(f"{end}_token_id") for end in ("bos", "eos")}
    ends = {f"{end}_token": tokens[i] for end, i in ids.items() if is_token(i) and i < len(tokens)}
    wanted = [("bos", key("add_bos_token", bos)), ("eos", key("add_eos_token", False))]
    if any(on for _, on in wanted):
        backend.post_processor = _post_processor({end: on for end, on in wanted}, ends, backend, where)
    return Tokenizer.from_backend(backend, metadata.get("tokenizer.chat_template"), **ends)


def _merges(key: Callable[..., Any], where: str) -> list[tuple[str, str]]:
    if bad := next((merge for merge in key("merges") if " " not in merge), None):
        raise TokenizerError(f"{where}: tokenizer.ggml.merges must be pairs with a space between, got {shown(bad)}")
    return [tuple(merge.split(" ", 1)) for merge in key("merges")]


def _by_bytes(key: Callable[..., Any], tokens: list[str], types: list[int], where: str) -> tuple[Backend, bool]:
    """Byte-level BPE, and whether texts begin with BOS, unless the file says."""
    if not isinstance(pre := key("pre"), str) or pre not in _PRE:
        raise TokenizerError(f"{where}: tokenizer.ggml.pre is {shown(pre)}; supported: {', '.join(sorted(_PRE))}")
    if pre == _DEFAULT:
        log.warning(
            "%s: tokenizer.ggml.pre is default, so nothing says how the model's own tokenizer cuts words; texts are "
            "cut as llama.cpp does then. If answers are poor, use a newer file",
            where,
        )
    cut = _PRE[pre]
    vocabulary = {text: i for i, (text, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    backend = Backend(BPE(vocabulary, _merges(key, where), ignore_merges=cut.whole))
    if cut.normalizer is not None:
        backend.normalizer = cut.normalizer()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cut.patterns]
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, by_bytes])
    backend.decoder = ByteLevelDecoder()
    return backend, cut.bos


def _of_pieces(key: Callable[..., Any], tokens: list[str], types: list[int], model: str, where: str) -> Backend:
    """BPE over characters, of which the vocabulary's pieces have a mark for a space. Others are made of bytes.

    SentencePiece's file has no merges: of all neighbours, those are merged that make the piece of the highest score.
    """
    vocabulary = {text: i for i, (text, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    merges = _by_score(key("scores"), tokens, types, where) if model == "llama" else _merges(key, where)
    unknown = key("unknown_token_id", 0)
    if not is_token(unknown) or unknown >= len(tokens):
        raise TokenizerError(f"{where}: tokenizer.ggml.unknown_token_id must be a token's, got {shown(unknown)}")
    backend = Backend(BPE(vocabulary, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True))
    prefix = bool(key("add_space_prefix", model == "llama"))
    marks = [normalizers.Replace(" ", _SPACE)]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE)] * prefix + marks)
    if model == "gemma4":  # runs of newlines are cut out
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    strip = [decoders.Strip(" ", 1, 0)] * prefix
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _by_score(scores: Any, tokens: list[str], types: list[int], where: str) -> list[tuple[str, str]]:
    """The merges that make pieces, those of the highest score first."""
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise TokenizerError(f"{where}: tokenizer.ggml.scores must be {len(tokens)} numbers, got {shown(scores)}")
    pieces = {text: score for text, score, kind in zip(tokens, scores, types, strict=True) if kind == _NORMAL}
    splits = [
        (piece[:i], piece[i:])
        for piece in sorted(pieces, key=lambda piece: -pieces[piece])
        for i in range(1, len(piece))
    ]
    return [pair for pair in splits if pair[0] in pieces and pair[1] in pieces]


def _post_processor(wanted: dict[str, bool], ends: dict[str, str], backend: Backend, where: str):
    """Put BOS before and EOS after every text, as the file asks."""
    for end, on in wanted.items():
        if on and f"{end}_token" not in ends:
            raise TokenizerError(
                f"{where}: add_{end}_token is set, but there is no tokenizer.ggml.{end}_token_id within the vocabulary"
            )
    before = [ends["bos_token"]] if wanted["bos"] else []
    after = [ends["eos_token"]] if wanted["eos"] else []
    used = [(text, backend.token_to_id(text)) for text in dict.fromkeys(before + after)]
    return processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=used)
