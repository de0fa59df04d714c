"""Make tests/golden/spm.json: a small SentencePiece BPE vocabulary, and what the sentencepiece library makes of texts.

    python3.12 -m venv ../spm-venv && ../spm-venv/bin/pip install sentencepiece protobuf
    ../spm-venv/bin/python tests/golden/make_spm.py

`pieces` are [text, score, type], types numbered as in GGUF files; `texts` are [text, ids with a space put before it,
ids without].
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import sentencepiece as spm
from sentencepiece import sentencepiece_model_pb2 as proto

HERE = Path(__file__).resolve().parent
TEXTS = [
    "Hello, world!", " two  spaces and   three", "tabs\tand\nlines\n\n", "naïve façade 漢字 🦙", "", " ", "x",
    "▁ literal", "the the the", "  lead", "trail  ", "1234567 89", "don't", "a\x01b", "café\u0301", "\n", "\r\n x",
    "speculative decoding verifies drafts", "A round is one step of decoding.", "<0x41> and < s >",
]  # fmt: skip


def model(prefix: bool) -> bytes:
    corpus = (HERE.parents[1] / "docs" / "design.md").read_text().splitlines()
    made = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus), model_writer=made, model_type="bpe", vocab_size=600, byte_fallback=True,
        character_coverage=0.99, normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=prefix, split_digits=True, allow_whitespace_only_pieces=True, minloglevel=2,
    )  # fmt: skip
    return made.getvalue()


def main() -> None:
    with_prefix = spm.SentencePieceProcessor(model_proto=model(True))
    parsed = proto.ModelProto.FromString(with_prefix.serialized_model_proto())
    parsed.normalizer_spec.add_dummy_prefix = False
    without = spm.SentencePieceProcessor(model_proto=parsed.SerializeToString())
    pieces = [[p.piece, p.score, p.type] for p in parsed.pieces]
    texts = [[text, with_prefix.encode(text), without.encode(text)] for text in TEXTS]
    (HERE / "spm.json").write_text(json.dumps({"pieces": pieces, "texts": texts}) + "\n")


if __name__ == "__main__":
    main()
