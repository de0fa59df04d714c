"""Tokenizers of each kind: byte-level BPE, SentencePiece, one token a byte."""

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxspec.text.tokenizer import Tokenizer
from tests.support.tiny import BYTE_VOCAB, tiny_checkpoint

TEXT = "Hello wörld, 你好世界! 👩‍👩‍👧 e\u0301 안녕 stop here… 😀😀 END\n"


def merged() -> Tokenizer:
    """Byte-level BPE with merges, so tokens begin and end in the middle of characters."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [TEXT, "世界你好世 好世 wörld 😀 stop"] * 3, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet)
    )
    backend.add_special_tokens(["<|im_end|>"])
    return Tokenizer.from_backend(backend, eos_token="<|im_end|>")


def sentencepiece() -> Tokenizer:
    """SentencePiece's shape: "▁" for spaces, byte fallback, the first space dropped."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁Hi": 256, "▁": 257, "there": 258, "<s>": 259}
    backend = Backend(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>"])
    return Tokenizer.from_backend(backend, bos_token="<s>")


MERGED, SENTENCEPIECE = merged(), sentencepiece()
BYTES = Tokenizer.from_folder(tiny_checkpoint(vocab=BYTE_VOCAB, tokenizer=True))  # one a byte, then 3 special ones
