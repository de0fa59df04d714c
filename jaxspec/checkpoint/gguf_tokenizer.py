"""A tokenizer out of a GGUF file's metadata: byte-level BPE, rebuilt with the `tokenizers` package alone.

GGUF names the pre-tokenizer instead of holding it, so the table here says what each name means. An unknown name is an
error: guessing would split text differently from the model's training, and nobody would notice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE

from jaxspec.checkpoint.shards import unreadable_tokenizer
from jaxspec.config.json_values import shown
from jaxspec.text.errors import TokenizerError
from jaxspec.text.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # tokenizer.ggml.token_type

# The two families' patterns differ in how many digits make a word.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS.format(digits=digits)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


# tokenizer.ggml.pre -> (normalizer, pre-tokenizer, whether whole words in the vocabulary skip merging, BOS by default)
_PRE = {
    "gpt-2": (None, lambda: pre_tokenizers.ByteLevel(add_prefix_space=False), False, False),
    "smollm": (None, _single_digits, False, False),
    "llama-bpe": (None, lambda: _split(r"\p{N}{1,3}"), True, True),
    "glm4": (None, lambda: _split(r"\p{N}{1,3}"), False, False),
    "qwen2": (normalizers.NFC, lambda: _split(r"\p{N}"), False, False),
}


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
    if model != "gpt2":
        raise TokenizerError(
            f"{where}: tokenizer.ggml.model is {shown(model)}; supported: 'gpt2' (byte-level BPE). "
            "Use the model's safetensors folder instead, with its tokenizer.json"
        )
    if not isinstance(pre := key("pre"), str) or pre not in _PRE:
        raise TokenizerError(f"{where}: tokenizer.ggml.pre is {shown(pre)}; supported: {', '.join(sorted(_PRE))}")
    if missing := [f"tokenizer.ggml.{name}" for name in ("tokens", "merges") if key(name) is None]:
        raise TokenizerError(f"{where}: the tokenizer lacks {' and '.join(missing)}")
    normalizer, pre_tokenizer, ignore_merges, default_bos = _PRE[pre]
    tokens = key("tokens")
    for name in ("tokens", "merges"):
        if not isinstance(key(name), list) or not all(isinstance(text, str) for text in key(name)):
            raise TokenizerError(f"{where}: tokenizer.ggml.{name} must be a list of strings, got {shown(key(name))}")
    if bad := next((merge for merge in key("merges") if " " not in merge), None):
        raise TokenizerError(f"{where}: tokenizer.ggml.merges must be pairs with a space between, got {shown(bad)}")
    types = key("token_type", [1] * len(tokens))
    vocabulary = {text: i for i, (text, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    merges = [tuple(merge.split(" ", 1)) for merge in key("merges")]
    backend = Backend(BPE(vocabulary, merges, ignore_merges=ignore_merges))
    if normalizer is not None:
        backend.normalizer = normalizer()
    backend.pre_tokenizer = pre_tokenizer()
    backend.decoder = ByteLevelDecoder()
    backend.add_tokens(
        [
            AddedToken(text, special=kind == _CONTROL, normalized=False)
            for text, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    ends = {f"{end}_token": tokens[i] for end in ("bos", "eos") if (i := key(f"{end}_token_id")) is not None}
    wanted = [("bos", key("add_bos_token", default_bos)), ("eos", key("add_eos_token", False))]
    if any(on for _, on in wanted):
        backend.post_processor = _post_processor({end: on for end, on in wanted}, ends, backend, where)
    return Tokenizer.from_backend(backend, metadata.get("tokenizer.chat_template"), **ends)


def _post_processor(wanted: dict[str, bool], ends: dict[str, str], backend: Backend, where: str):
    """Put BOS before and EOS after every text, as the file asks."""
    for end, on in wanted.items():
        if on and f"{end}_token" not in ends:
            raise TokenizerError(f"{where}: add_{end}_token is set, but there is no tokenizer.ggml.{end}_token_id")
    before = [ends["bos_token"]] if wanted["bos"] else []
    after = [ends["eos_token"]] if wanted["eos"] else []
    used = [(text, backend.token_to_id(text)) for text in dict.fromkeys(before + after)]
    return processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=used)
