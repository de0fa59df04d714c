"""Suffix drafts on the device equal the plain definition's, whoever wrote into the pool and in whatever order."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafters.base import DraftBatch, Verified
from jaxspec.drafters.suffix import Reference, Suffix
from jaxspec.rounds.packing import empty_slots
from tests.support.sample import rare

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "suffix.json"
CAPACITY, SLOTS, WIDTH = 96, 3, 4


class Device:
    """The drafter as an engine drives it: requests in slots, one batch of all slots a round."""

    def __init__(self, drafter):
        self.drafter = drafter
        self.state = drafter.init_state(None, SLOTS + 1)
        self.history = np.zeros((SLOTS, CAPACITY), np.int32)
        self.length = np.ones(SLOTS, np.int32)
        self.sampling = jax.tree.map(lambda x: x[:SLOTS], empty_slots(SLOTS, CAPACITY).sampling)
        self._propose = jax.jit(lambda state, batch: drafter.propose({}, state, batch)[0])
        self._commit = jax.jit(lambda state, batch, verified: drafter.commit({}, state, batch, verified))

    def batch(self, live):
        return DraftBatch(
            jnp.arange(SLOTS), jnp.asarray(self.length), jnp.asarray(self.history), jnp.zeros((SLOTS, 1), jnp.int32),
            jnp.asarray(live), self.sampling, True,
        )  # fmt: skip

    def admit(self, slot, prompt):
        self.history[slot, : len(prompt)] = prompt
        self.length[slot] = len(prompt)

    def commit(self, outputs, q):
        """A round of q rows. `outputs` are each slot's new tokens, None for a slot that isn't in the batch."""
        tokens = np.zeros((SLOTS, q), np.int32)
        for row, new in zip(tokens, outputs, strict=True):
            row[: len(new or ())] = new or []
        accepted = jnp.array([len(new or ()) for new in outputs])
        verified = Verified(jnp.asarray(tokens), jnp.asarray(tokens), accepted, ())
        self.state = self._commit(self.state, self.batch([new is not None for new in outputs]), verified)
        for slot, new in enumerate(outputs):
            self.history[slot, self.length[slot] :][: len(new or ())] = new or []
            self.length[slot] += len(new or ())

    def drafts(self, live=(True,) * SLOTS):
        proposal = self._propose(self.state, self.batch(live))
        return [row[:n] for row, n in zip(proposal.tokens.tolist(), proposal.count.tolist(), strict=True)]


class Stream:
    """Requests that come and go over the slots, in texts that repeat each other, on the device and in `Reference`."""

    def __init__(self, device, seed, cached=-1):
        drafter = device.drafter
        device.state = drafter.init_state(None, SLOTS + 1)
        self.device, self.rng = device, np.random.default_rng(seed)
        self.vocab = int(self.rng.choice([3, 6, 20]))
        self.source = self.rng.integers(0, self.vocab, 60)
        if self.rng.random() < 0.3:
            self.source = np.resize(self.source[: self.rng.integers(2, 9)], 60)  # a period, and many lengths of match
        self.reference, self.names, self.texts, self.made = Reference(drafter.max_depth, cached), [None] * SLOTS, {}, 0

    def some(self, least, most):
        at, n = self.rng.integers(0, 40), int(self.rng.integers(least, most + 1))
        return (self.source[at : at + n] if self.rng.random() < 0.8 else self.rng.integers(0, self.vocab, n)).tolist()

    def round(self):
        """Some requests end and others start, each with its first token; then all yield some more."""
        firsts = [None] * SLOTS
        for slot, name in enumerate(self.names):
            if name is None or self.rng.random() < 0.6 or len(self.texts[slot]) > CAPACITY - 10:
                if name is not None:
                    self.reference.stop_request(name)
                self.names[slot], self.made = self.made, self.made + 1
                self.texts[slot], firsts[slot] = self.some(1, 20), self.some(1, 1)
                self.reference.start_request(self.names[slot], self.texts[slot])
                self.device.admit(slot, self.texts[slot])
        for new, q in ((firsts, 1), ([self.some(1, WIDTH) for _ in range(SLOTS)], WIDTH)):
            self.device.commit(new, q)
            for slot, tokens in enumerate(new):
                self.reference.add_active_response(self.names[slot], tokens or [])
                self.texts[slot] = self.texts[slot] + (tokens or [])

    def expected(self):
        drafter = self.device.drafter
        how = drafter.num_draft_tokens, drafter.max_factor, 0.0, drafter.min_prob
        return [
            self.reference.speculate(name, self.texts[slot], *how).token_ids for slot, name in enumerate(self.names)
        ]


def check(device, runs, cached=-1):
    """How many requests there were, and how many drafts of each length."""
    requests, lengths = 0, np.zeros(device.drafter.num_draft_tokens + 1, int)
    for seed in runs:
        stream = Stream(device, seed, cached)
        for _ in range(8):
            stream.round()
            expected = stream.expected()
            assert device.drafts() == expected, f"stream {seed}"
            np.add.at(lengths, [len(tokens) for tokens in expected], 1)
        requests += stream.made
    return requests, lengths


SIZES = {"max_depth": 10, "max_requests": 32, "max_response": 64, "max_matches": 40}


@pytest.fixture(scope="module")
def device():
    return Device(Suffix(4, **SIZES))


def test_drafts_are_the_references(device):
    requests, lengths = check(device, range(3))
    assert requests > 30 and lengths[1:].min() > 5


@pytest.mark.exhaustive
def test_drafts_of_many_streams_are_the_references(device):
    check(device, range(3, 200))


@pytest.mark.parametrize("options,streams", [
    pytest.param({"max_requests": 0}, 1, id="own text"),
    rare({"max_requests": 0}, 3),
    pytest.param({"max_factor": 2.0, "min_prob": 0.3}, 1, id="factor and least", marks=pytest.mark.exhaustive),
    rare({"max_factor": 2.0, "min_prob": 0.3}, 3),
])  # fmt: skip
def test_options_mean_what_the_references_do(options, streams):
    check(Device(Suffix(4, **SIZES | options)), range(streams), 0 if options.get("max_requests") == 0 else -1)


def test_the_reference_is_arctic_inferences():
    """Drafts, probabilities and matches, ties and evictions included (tests/golden/make_suffix.py)."""
    drafts = 0
    for stream in json.loads(GOLDEN.read_text()):
        reference, texts = Reference(stream["depth"], stream["cached"]), {}
        for name, request, *arguments in stream["calls"]:
            if name != "speculate":
                getattr(reference, name)(request, *arguments)
                texts[request] = texts.get(request, []) + (arguments[0] if arguments else [])
                continue
            most, factor, least, (tokens, probs, match_len) = arguments
            draft = reference.speculate(request, texts[request], most, factor, 0.0, least)
            assert (draft.token_ids, draft.match_len) == (tokens, match_len)
            np.testing.assert_allclose(draft.probs, probs, atol=1e-6)
            assert draft.score == pytest.approx(sum(draft.probs)) and draft.parents == list(range(-1, len(tokens) - 1))
            drafts += len(tokens) > 1
    assert drafts > 200


# -- by hand -----------------------------------------------------------------------------------------------------------


def finished(device, *responses):
    """A device whose pool has these responses of one token and more, all of slot 0."""
    device.state = device.drafter.init_state(None, SLOTS + 1)
    for response in responses:
        device.admit(0, [99])
        device.commit([response[:1], None, None], 1)
        for at in range(1, len(response), WIDTH):
            device.commit([response[at : at + WIDTH], None, None], WIDTH)


def drafted(device, text):
    device.admit(1, text)
    return device.drafts((False, True, False))[1]


def test_another_requests_response_is_drafted_from_while_it_runs_and_afterwards(device):
    finished(device, [1, 2, 3, 4, 5, 6, 7])
    assert drafted(device, [8, 2, 3, 4]) == [5, 6, 7]
    finished(device, [1, 2, 3, 4, 5, 6, 7], [9])
    assert drafted(device, [8, 2, 3, 4]) == [5, 6, 7]
    finished(device)
    assert drafted(device, [8, 2, 3, 4]) == []


def test_prompts_are_not_shared(device):
    finished(device)
    device.admit(0, [1, 2, 3, 4, 5])
    device.commit([[6], None, None], 1)
    assert drafted(device, [8, 2, 3, 4]) == []


def test_a_draft_is_no_longer_than_its_match(device):
    finished(device, [1, 2, 3, 4, 5, 6, 7])
    assert drafted(device, [8, 8, 4]) == [5]
    assert drafted(device, [8, 3, 4]) == [5, 6]


def test_a_draft_ends_where_the_text_is_divided(device):
    branches = [[1, 2, 3, token, token] for token in range(10, 22)]
    finished(device, [1, 2, 3, 10], *branches)
    assert drafted(device, [0, 1, 2, 3]) == [10]  # twice in 13 times, 0.15; and then once in 13
    finished(device, *branches)
    assert drafted(device, [0, 1, 2, 3]) == []  # one in 12 each


@pytest.fixture(scope="module")
def small():
    """A device with room for four responses of six tokens."""
    return Device(Suffix(4, max_depth=10, max_requests=4, max_response=6, max_matches=8))


def test_the_oldest_response_makes_room(small):
    responses = [[10 * i + k for k in range(1, 8)] for i in range(1, 7)]
    finished(small, *responses)
    kept = [drafted(small, [0, *response[:3]]) == response[3:6] for response in responses]
    assert kept == [False, False, True, True, True, True]


def test_a_response_is_kept_up_to_its_limit(small):
    finished(small, list(range(1, 30)))
    assert drafted(small, [0, 3, 4, 5]) == [6]
    assert drafted(small, [0, 4, 5, 6]) == []


def test_a_request_that_returns_to_another_length_starts_a_row_of_its_own(device):
    """Return like a preempted request: it's in a slot whose last request ended elsewhere, and has no first token."""
    finished(device, [1, 2, 3])
    device.admit(0, [7, 7, 7, 7, 7, 7, 7, 7])
    device.commit([[4, 5, 6], None, None], WIDTH)
    assert drafted(device, [0, 1, 2, 3]) == []  # not 4
    assert drafted(device, [0, 0, 4]) == [5]


def test_padding_neither_drafts_nor_writes(device):
    finished(device, [1, 2, 3, 4])
    before = device.state
    device.commit([None] * SLOTS, WIDTH)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(device.state), strict=True):
        np.testing.assert_array_equal(old, new)
    device.admit(1, [8, 2, 3])
    assert device.drafts((False, False, False)) == [[], [], []]


def test_time_goes_on_when_its_clock_wraps_around(device):
    """Stamps are compared by age: a seed's drafts are the same a few tokens before 2**31."""
    stream = Stream(device, 3)
    device.state = device.state.replace(clock=jnp.int32(2**31 - 30))
    for _ in range(8):
        stream.round()
        assert device.drafts() == stream.expected()
    assert int(device.state.clock) < 0


def test_the_reference_refuses_what_it_does_not_know():
    reference = Reference(8)
    reference.start_request("a", [1, 2])
    with pytest.raises(ValueError, match="'a' is active already"):
        reference.start_request("a", [1])
    for call in (reference.stop_request, lambda name: reference.add_active_response(name, [1])):
        with pytest.raises(ValueError, match="'b' is not active"):
            call("b")
    with pytest.raises(ValueError, match="'b' isn't cached"):
        reference.evict_cached_response("b")
    with pytest.raises(ValueError, match="use_tree_spec must be False"):
        reference.speculate("a", [1, 2], use_tree_spec=True)
