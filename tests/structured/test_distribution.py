"""Constrained text has the constrained distribution, whatever drafts it: by chi-square, as rounds/test_distribution.py.

The grammar is a table: which tokens may come first, and after each token, which may come next. Some leave one choice.
"""

import numpy as np
import pytest

import jaxspec
from jaxspec.rounds.programs import SAMPLED, TOKENS
from tests.rounds import test_distribution as plain
from tests.rounds.test_distribution import OUTPUT, PROMPT, SETTINGS, VOCAB, Lanes, model, p_values
from tests.support.exact import ALPHA, adjusted, distribution

SAMPLES = 3_000
_rng = np.random.default_rng(4)
FIRST = _rng.random(VOCAB) < 0.6
NEXT = _rng.random((VOCAB, VOCAB)) < 0.45
NEXT[np.arange(VOCAB), _rng.integers(0, VOCAB, VOCAB)] = True
FIRST[6] = NEXT[6, 7] = True  # a point mass's drafts
NEXT[::4] = np.eye(VOCAB, dtype=bool)[(np.arange(0, VOCAB, 4) + 5) % VOCAB]


def bits(allowed):
    """bool[..., v] as u32[..., w]."""
    padded = np.pad(allowed, [*[(0, 0)] * (allowed.ndim - 1), (0, -VOCAB % 32)])
    return np.packbits(padded, axis=-1, bitorder="little").view(np.uint32)


class Constrained(Lanes):
    """Lanes with three programs a round, and the table's masks."""

    def _first(self, packed, run):
        return self._round(np.broadcast_to(FIRST, (len(self.table), VOCAB)))

    def _second(self, packed, run, first):
        return self._round(NEXT[first[:, TOKENS]])

    def _round(self, allowed):
        n, drafts = len(self.table), self.state.forced.shape[1] - 1
        packed = np.column_stack([np.arange(n), np.zeros((n, 1 + drafts)), self.table]).astype(np.int32)
        self.state, proposal, told = self.programs.draft(self.state, packed, SAMPLED)
        self.state, *made = self.programs.forward(self.state, packed, proposal)
        rows = np.concatenate([allowed[:, None], NEXT[np.asarray(told)[:, 1 : 1 + drafts]]], axis=1)
        forced = np.zeros((n, 1 + drafts, 1 + drafts), np.int32)
        self.state, out = self.programs.conclude(self.state, packed, SAMPLED, proposal, *made, bits(rows), forced)
        return np.asarray(out)


def exact(params, first=FIRST, following=NEXT):
    """The joint distribution f64[v, v] of the next two tokens."""
    logits = np.asarray(jaxspec.logits(model(), [[*PROMPT, *OUTPUT, x] for x in range(VOCAB)]))

    def after(row, more, allowed):
        row = np.where(allowed, adjusted(row, PROMPT, [*OUTPUT, *more], params, params.stop_token_ids), -np.inf)
        return distribution(row, params)

    begins = after(logits[0, -2], [], first)
    return np.stack([begins[x] * after(logits[x, -1], [x], following[x]) for x in range(VOCAB)])


@pytest.mark.exhaustive  # rounds without grammars are in test_ragged_verification.py, masks in test_matcher.py
@pytest.mark.parametrize("name", plain.DRAFTERS)
def test_rounds_sample_what_the_grammar_leaves_of_the_target(name, monkeypatch):
    monkeypatch.setattr(plain, "SAMPLES", SAMPLES)
    lanes = Constrained(name)
    pairs = plain.check_fit(lanes, SAMPLES, exact)
    if name != "none":
        assert lanes.drafted / 50 < lanes.accepted < lanes.drafted
        assert lanes.whole_rounds > SAMPLES / 20
    other = NEXT.copy()
    other[np.argmax(FIRST)] = ~other[np.argmax(FIRST)]
    assert p_values(pairs["temperature"], exact(SETTINGS["temperature"], FIRST, other))[1] < ALPHA
