"""Reading texts and packing them: what is taken, and what is said of others."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.train.data import Text, TrainError, count, holds_texts, read_texts, split
from jaxspec.train.packing import pack


def write(path, *records):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def test_texts_come_back_as_written(tmp_path):
    texts = [Text(np.arange(5), ((2, 5),), "a"), Text(np.array([7, 7]), ((1, 1),))]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(t.line() for t in texts))
    assert holds_texts(path) and not holds_texts(write(tmp_path / "p.jsonl", {"prompt": "x"}))
    for name in ("t.jsonl", "p.jsonl"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    assert holds_texts(tmp_path / "t.jsonl.gz") and not holds_texts(tmp_path / "p.jsonl.gz")
    assert [t.line() for t in read_texts(tmp_path / "t.jsonl.gz", 8)] == [t.line() for t in texts]
    (tmp_path / "cut.jsonl").write_bytes((tmp_path / "t.jsonl.gz").read_bytes()[:20])
    with pytest.raises(TrainError, match=r"--data .*cut\.jsonl: Compressed file ended"):
        holds_texts(tmp_path / "cut.jsonl")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # a byte order mark is no text
    back = read_texts(path, 8)
    assert [(t.tokens.tolist(), t.answers, t.category) for t in back] == [
        ([0, 1, 2, 3, 4], ((2, 5),), "a"), ([7, 7], ((1, 1),), "other"),
    ]  # fmt: skip
    assert count(back, 8).tolist() == [0, 0, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("line,says", [
    ({"tokens": [1, 9], "answers": [[1, 2]]}, "line 1: tokens must be ids from 0 to 7: .* another model"),
    ({"tokens": [[1]], "answers": [[1, 2]]}, "line 1"),
    ({"tokens": [1, 2], "answers": [[1, 3]]}, r"line 1: answers has \[1, 3\]"),
    ({"tokens": [1, 2], "answers": [[0, 2]]}, r"line 1: answers has \[0, 2\]"),
    ({"tokens": [1, 2]}, 'line 1 must have "tokens"'),
    ({"tokens": [1, 2], "answers": []}, "no answer tokens"),
])  # fmt: skip
def test_a_wrong_text_is_named_by_its_line(tmp_path, line, says):
    with pytest.raises(TrainError, match=says):
        read_texts(write(tmp_path / "t.jsonl", line), 8)


def test_held_out_texts_are_trained_on_by_nobody():
    texts = [Text(np.array([i, 1]), ((1, 2),)) for i in range(120)]
    train, held = split(texts)
    assert [t.tokens[0] for t in held] == [0, 50, 100] and len(train) == 117
    assert not {t.tokens[0] for t in train} & {t.tokens[0] for t in held}
    with pytest.raises(TrainError, match=r"too few texts \(1\)"):
        split(texts[:1])


@given(st.lists(st.integers(2, 30), min_size=1, max_size=40), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_every_text_is_in_an_epoch_once_and_apart_from_others(lengths, seed):
    texts = [Text(np.full(n, i + 1), ((1, n),)) for i, n in enumerate(lengths)]
    packed = pack(texts, 20, 1, seed)
    seen = []
    for step in range(packed.steps):
        batch = packed.batch(step)
        assert batch.tokens.shape == (1, 20)
        for first in np.unique(batch.first[0]):
            mine = batch.first[0] == first
            (token,) = np.unique(batch.tokens[0, mine])
            if token:
                seen.append(token)
                assert mine.sum() == min(lengths[token - 1], 20)
                assert batch.answer[0, mine].tolist() == [False] + [True] * (mine.sum() - 1)
            else:
                assert not batch.answer[0, mine].any()
    assert sorted(seen) == list(range(1, len(lengths) + 1))


def test_batches_follow_from_the_step_alone_and_differ_by_epoch():
    texts = [Text(np.full(10, i), ((1, 10),)) for i in range(12)]
    packed, again = (pack(texts, 20, 2, 0) for _ in range(2))
    assert all((packed.batch(s).tokens == again.batch(s).tokens).all() for s in (4, 0, 7))
    epochs = [np.concatenate([packed.batch(e * 3 + s).tokens for s in range(3)]).tolist() for e in (0, 1)]
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1])
    with pytest.raises(TrainError, match="fills 6 rows of 20 tokens, and a batch takes 8"):
        pack(texts, 20, 8, 0)
