"""Text to token ids and back.

Decoding and streaming (`detokenizer`) rest on one table, token id -> the bytes it stands for. So streamed text is the
decoded text by construction: bytes joined, read as UTF-8, invalid ones replaced by U+FFFD. That costs under a
microsecond a token, and unlike decoding a sliding window of tokens again and again it has no bad case when bytes never
form a character.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxspec.config.lazy_transformers import imported
from jaxspec.text.chat_template import write_chat
from jaxspec.text.errors import TokenizerError, TooLong
from jaxspec.text.length_bounds import PIECE, UNCUT, Measure

# Texts of special tokens that end a turn, of models whose chat template writes them. Harmony ends each message of a
# turn with <|end|>, and the turn with <|return|>.
ENDS_OF_TURN = (
    *("<|im_end|>", "<|eot_id|>", "<|eot|>", "<end_of_turn>", "<turn|>", "<|end_of_turn|>", "<|endofturn|>"),
    *("<|end|>", "<|return|>", "</s>", "<|endoftext|>", "<|end_of_text|>", "<|END_OF_TURN_TOKEN|>", "<EOT>", "[EOT]"),
    *("[|endofturn|]", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "[e~["),
)


class Tokenizer:
    """A fast tokenizer and its chat template.

    **Attributes:**

    - `vocab_size`: one more than the largest token id. A model may have more rows (padding); those decode to nothing.
    - `eos_token_ids`: the tokenizer's own end token, if it has one, and special tokens with which its chat template
      ends turns. The model's config may name more.
    - `added_tokens`: by their text, the ids of tokens that text is cut at before anything else, such as `<think>`; some
      are special.
    - `chat_template`: the Jinja source of the default template, or None.
    - `drops_space`: whether a text's first space is dropped, as SentencePiece does.
    """

    def __init__(self, fast: Any):
        """Wrap a transformers fast tokenizer.

        **Raises:** `TokenizerError` if it has no Rust backend, or decodes in a way that isn't byte-level BPE's or
        SentencePiece's.
        """
        backend = getattr(fast, "backend_tokenizer", None)
        if backend is None:
            raise TokenizerError(
                f"{type(fast).__name__} is a slow tokenizer; jaxspec needs a fast one (tokenizer.json)"
            )
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = fast.split_special_tokens
        self._fast, self._backend = fast, backend
        self._around: tuple[list[int], list[int]] | None = None
        self._bytes, specials, self.drops_space = _byte_table(backend)
        self._plain_bytes = {token: raw for token, raw in self._bytes.items() if token not in specials}
        self._specials = {token: self._bytes[token] for token in specials}
        self.added_tokens = {token.content: index for index, token in backend.get_added_tokens_decoder().items()}
        self._shown = {(): self._plain_bytes}  # by the special tokens kept
        self.vocab_size: int = max(self._bytes, default=-1) + 1
        self.measure = Measure(backend, self._bytes.values())
        template = fast.chat_template
        self.chat_template: str | None = template.get("default") if isinstance(template, dict) else template
        own = () if fast.eos_token_id is None else (fast.eos_token_id,)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys((*own, *self._ends_of_turn())))

    def _ends_of_turn(self) -> list[int]:
        written = self.chat_template or ""
        texts = {self._specials[token].decode(): token for token in self._specials}
        found = [text for text in ENDS_OF_TURN if text in texts and text in written]
        return [texts[text] for text in found if text != "<|end|>" or "<|return|>" not in found]

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read the tokenizer files of a Hugging Face model folder.

        **Raises:** `TokenizerError` with the cause, if they are missing, unreadable or need custom code.
        """
        try:
            with imported() as transformers:
                fast = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # whatever a broken tokenizer file sets off in transformers or tokenizers
            raise TokenizerError(f"{folder}: can't read the tokenizer: {error}") from error
        return cls(fast)

    @classmethod
    def from_backend(cls, backend: Any, chat_template: str | None = None, **special_tokens: str) -> Tokenizer:
        """Wrap a `tokenizers.Tokenizer`. `special_tokens` are `bos_token="<s>"`, `eos_token="</s>"`."""
        named = {"chat_template": chat_template, "clean_up_tokenization_spaces": False} | special_tokens
        with imported() as transformers:
            return cls(transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **named))

    def save(self, folder: str | Path) -> None:
        """Write the files that `from_folder` reads, and transformers from version 4 on."""
        self._fast.save_pretrained(str(folder))
        config = Path(folder) / "tokenizer_config.json"
        named = json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}  # in both versions
        config.write_text(json.dumps(named, indent=2) + "\n")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in it are recognised. Any number of threads may call it.

        **Raises:** `TokenizerError` for text that isn't valid Unicode (lone surrogates).
        """
        return self.encode_all([text], add_special_tokens)[0]

    def encode_all(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of each text, in parallel.

        The backend is asked itself: transformers changes its settings with every call, which two threads can't do. It
        is asked for a batch, even of one text: its `encode` would hold the interpreter's lock all the while.

        **Raises:** `TokenizerError` as `encode`, if any text is such.
        """
        try:
            found = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except (TypeError, ValueError) as error:
            raise TokenizerError("can't encode the text: it must be a string without lone surrogates") from error
        return [each.ids for each in found]

    def encode_within(
        self,
        text: str,
        limit: int,
        add_special_tokens: bool = True,
        check: Callable[[], None] = lambda: None,
    ) -> list[int]:
        """The ids that `encode` gives, unless a long text has more than `limit`. It is encoded piece by piece, with a
        call of `check` before each: what that raises ends it.

        **Raises:** `TooLong`, as early as that is known; `TokenizerError` as `encode`, and for a piece of more than
        `UNCUT` characters, whose encoding nothing could end.
        """
        if len(text) <= PIECE:
            return self.encode(text, add_special_tokens)
        if (least := self.measure.least_tokens(text)) > limit:
            raise TooLong(least, limit)
        check()
        pieces = self.measure.pieces(text)
        if (longest := max(map(len, pieces))) > UNCUT:
            raise TokenizerError(
                f"the text has {longest} characters that can only be encoded as one piece, at most {UNCUT} are "
                "allowed; send token ids, or shorten the text"
            )
        before, after = self._special_tokens() if add_special_tokens and len(pieces) > 1 else ([], [])
        ids = list(before)
        for piece in pieces:
            check()
            ids += self.encode(piece, add_special_tokens and len(pieces) == 1)
            if len(ids) > limit:
                raise TooLong(len(ids), limit)
        return ids + after

    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """Special tokens that `encode` puts before and after the ids of any text."""
        if self._around is None:
            bare, full = self.encode("a", False), self.encode("a", True)
            start = next(n for n in range(len(full)) if full[n : n + len(bare)] == bare)
            self._around = full[:start], full[start + len(bare) :]
        return self._around

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Ids outside the vocabulary are skipped; bytes that aren't UTF-8 become U+FFFD."""
        text = self._join(ids, skip_special_tokens).decode("utf-8", "replace")
        return text[1:] if self.drops_space and text.startswith(" ") else text

    def _join(self, ids: Iterable[int], skip_special_tokens: bool) -> bytes:
        get = self.shown_bytes(skip_special_tokens).get
        return b"".join([get(token, b"") for token in ids])

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of a chat: `encode` of what `write_chat` returns, which takes the same arguments."""
        return self.encode(self.write_chat(messages, **options), add_special_tokens=False)

    def write_chat(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """A chat's text, special tokens included. Arguments and errors are those of `chat_template.write_chat`."""
        return write_chat(self._fast, messages, **options)

    def to_json(self) -> str:
        """The tokenizer as a tokenizer.json, added tokens included, for libraries that read one."""
        return self._backend.to_str()

    def shown_bytes(self, skip_special_tokens: bool, kept: tuple[str, ...] = ()) -> dict[int, bytes]:
        """The bytes of the tokens that a text shows: all, or if special ones are skipped the others and those in
        `kept`."""
        if not skip_special_tokens:
            return self._bytes
        if kept not in self._shown:
            added = {token: raw for token, raw in self._specials.items() if raw.decode() in kept}
            self._shown[kept] = self._plain_bytes | added if added else self._plain_bytes
        return self._shown[kept]

    def pieces(self, ids: list[int]) -> list[str]:
        """The vocabulary's own spelling of tokens, such as "Ġthe". Empty for an id outside it."""
        return [piece or "" for piece in self._fast.convert_ids_to_tokens(ids)]

    def settings(self) -> dict[str, Any]:
        """Contents of tokenizer_config.json: its class, chat template, special tokens, and plain settings."""
        fast = self._fast
        plain = {key: value for key, value in fast.init_kwargs.items() if isinstance(value, str | int | float | bool)}
        hidden = ("name_or_path", "vocab_file", "tokenizer_file", "merges_file", "chat_template")
        return {
            "tokenizer_class": type(fast).__name__,
            **{key: value for key, value in plain.items() if key not in hidden},
            **fast.special_tokens_map,
            "chat_template": self.chat_template,
        }

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token adds to the text; for a special token, its name. Empty outside the vocabulary."""
        return self._bytes.get(token_id, b"")

    def token_text(self, token_id: int) -> str:
        """The token alone, as logprobs report it; a part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


def _byte_table(backend: Any) -> tuple[dict[int, bytes], set[int], bool]:
    """The bytes of every token, the ids of special tokens, and whether a text's first space is dropped."""
    steps = _decoder_steps(backend)
    kinds = {step["type"] for step in steps}
    added = backend.get_added_tokens_decoder()
    table = {token: content.content.encode() for token, content in added.items()}
    specials = {token for token, content in added.items() if content.special}
    vocabulary = backend.get_vocab(with_added_tokens=False).items()
    if kinds == {"ByteLevel"}:
        alphabet = byte_alphabet()
        convert = lambda text: _spelt_bytes(text, alphabet)  # noqa: E731
    elif kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        fallback = "ByteFallback" in kinds
        convert = lambda text: _piece_bytes(text, fallback)  # noqa: E731
    else:
        raise TokenizerError(
            f"the tokenizer's decoder is {', '.join(sorted(kinds)) or 'none'}; "
            "supported: ByteLevel (byte-level BPE), or SentencePiece's Replace, ByteFallback, Fuse, Strip and Metaspace"
        )
    table.update((token, convert(text)) for text, token in vocabulary if token not in added)
    drops = any(s["type"] == "Strip" and s["start"] for s in steps)
    drops |= any(s["type"] == "Metaspace" and s.get("prepend_scheme", "always") != "never" for s in steps)
    return table, specials, drops


def _decoder_steps(backend: Any) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def byte_alphabet() -> dict[int, int]:
    """Byte-level BPE's spelling undone: code point of the printable stand-in -> byte.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for the code points from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(printable))
    return {byte: byte for byte in printable} | {256 + n: byte for n, byte in enumerate(hidden)}


def _spelt_bytes(text: str, alphabet: dict[int, int]) -> bytes:
    """A byte-level token's. One not spelt in the alphabet is text as it stands, as the tokenizers package has it."""
    try:
        return text.translate(alphabet).encode("latin-1")
    except UnicodeEncodeError:
        return text.encode()


def _piece_bytes(piece: str, fallback: bool) -> bytes:
    """A SentencePiece piece: "▁" is a space, and `<0xE4>` is that byte."""
    if fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    return piece.replace("▁", " ").encode()
