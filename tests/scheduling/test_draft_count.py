"""The choice of how many tokens to draft, simulated: times of rounds as measured on one H200, acceptance as imposed."""

from collections import Counter

import numpy as np
import pytest

from jaxspec.scheduling import draft_count
from jaxspec.scheduling.draft_count import LEAST, MIN_SAMPLES, SKIP_DRAFTER, Chooser, Times, rungs
from tests.support.sample import one_in, rare

# ms of a round by requests and drafts, from docs/measurements/decoding.md; others lie on the lines between
TIMES = {
    "EAGLE-3": {
        1: {0: 4.67, 1: 4.69, 3: 5.05},
        8: {0: 4.76, 1: 5.16, 3: 5.55},
        64: {0: 7.40, 1: 8.50, 3: 11.4},
        128: {0: 10.73, 1: 13.67, 3: 20.0},
        256: {0: 18.05, 1: 24.4, 3: 40.0},
    },
    "n-grams": {1: {0: 4.20, 3: 4.18}, 32: {0: 5.73, 3: 6.47}, 128: {0: 10.28, 3: 17.75}},
    "DFlash": {
        1: {0: 4.20, 1: 5.00, 15: 5.47},
        8: {0: 4.34, 1: 5.30, 15: 7.47},
        32: {0: 5.73, 1: 7.00, 15: 17.9},
        128: {0: 10.28, 1: 14.5, 15: 67.5},
    },
    "MTP of a mixture": {1: {0: 2.85, 3: 4.88}, 8: {0: 5.77, 3: 13.9}, 128: {0: 24.2, 3: 31.5}},
}
NOISE, START = 0.03, 0.01  # of the times of rounds, and of those from the start, the least of several


def seconds(name, requests):
    """By number of drafts."""
    known = TIMES[name][requests]
    numbers = (*rungs(max(known)), max(known))
    return {n: float(np.interp(n, list(known), list(known.values()))) / 1e3 for n in numbers}


def rates(length, drafts):
    """Equal acceptance at each position, so that a round of so many drafts yields `length` tokens."""
    every = np.linspace(0, 1, 10_001)
    lengths = sum(every**j for j in range(drafts + 1))
    return np.full(drafts, every[np.searchsorted(lengths, length)])


def expected(acceptance, drafts):
    """Tokens that a round yields a request; of several kinds of requests, equally many each, a row of `acceptance`."""
    return 1 + np.cumprod(np.atleast_2d(acceptance)[:, :drafts], axis=1).sum(axis=1).mean()


class Load:
    """Rounds with the times of a table, whose results are read one round late.

    `held_up`: the share of results that the host reads up to 10 ms later still, since it was busy.
    """

    def __init__(self, name, seed=0, held_up=0.0):
        self.rng, self.name = np.random.default_rng(seed), name
        self.times = {requests: seconds(name, requests) for requests in TIMES[name]}
        numbers = self.times[1]
        blurred = {("round", n): {k: self.blur(s, START) for k, s in each.items()} for n, each in self.times.items()}
        self.chooser = Chooser({n: n for n in numbers}, blurred)
        self.unread, self.held_up, self.delay = None, held_up, 0.0

    def blur(self, value, noise=NOISE):
        return value * self.rng.uniform(1 - noise, 1 + noise)

    def run(self, requests, acceptance, rounds, more=0.0):
        """Tokens a second a request, each round `more` seconds longer than in the table."""
        group, time, tokens, chosen = ("round", requests), 0.0, 0, Counter()
        for _ in range(rounds):
            drafts = self.chooser.choose(group, 1.0)
            yielded, kinds = Counter(), np.atleast_2d(acceptance)
            for rates_of in kinds:
                left = requests // len(kinds)
                for j in range(drafts):
                    stay = int(self.rng.binomial(left, rates_of[j]))
                    yielded[j + 1] += left - stay
                    left = stay
                yielded[drafts + 1] += left
            took = self.times[requests][drafts] + more
            time, tokens = time + took, tokens + expected(acceptance, drafts)  # which these draws are a sample of
            if self.unread is not None:
                of, n, s, rows = self.unread
                self.chooser.accepted(n, rows)
                self.chooser.took(of, n, s)
            before, self.delay = self.delay, self.rng.uniform(0, 10e-3) * (self.rng.random() < self.held_up)
            self.unread = group, drafts, max(self.blur(took) + self.delay - before, 1e-4), yielded
            chosen[drafts] += 1
        return tokens / time, chosen

    def fixed(self, requests, acceptance, more=0.0):
        """Tokens a second a request, with each number of drafts."""
        return {n: expected(acceptance, n) / (s + more) for n, s in self.times[requests].items()}


def cases():
    """Every drafter, with the fewest requests and the most, of which one length in two; `make exhaustive` has all."""
    lengths = (1.2, 1.6, 2.0, 2.7, 3.3, 4.0)
    for i, (name, table) in enumerate(TIMES.items()):
        for requests in table:
            often = requests in (min(table), max(table))
            first = (i + (requests == min(table))) % 2
            for own, rest in ((lengths[first::2], False), (lengths[1 - first :: 2], True)):
                yield rare(name, requests, own) if rest or not often else (name, requests, own)


@pytest.mark.parametrize("name,requests,lengths", list(cases()))
def test_it_is_as_fast_as_the_best_number_and_never_slower_than_none(name, requests, lengths):
    for length in lengths:
        load = Load(name)
        most = max(load.times[1])
        if length >= most + 1:
            continue
        acceptance = rates(length, most)
        load.run(requests, acceptance, 1500 if requests == 1 else 150)  # at first it knows nothing
        speed, chosen = load.run(requests, acceptance, 4000 if requests == 1 else 1000)  # one text is a small sample
        fixed = load.fixed(requests, acceptance)
        assert speed >= 0.97 * max(fixed.values()), (length, chosen)
        assert speed >= 0.99 * fixed[0], (length, chosen)


@pytest.mark.parametrize("length,requests", one_in(2, (1.2, 1.9, 3.0), (1, 8, 64, 128)))
def test_results_that_are_read_late_mislead_nobody(requests, length):
    """Such a round seems to have taken longer, and the next less."""
    load, acceptance = Load("EAGLE-3", held_up=0.05), rates(length, 3)
    load.run(requests, acceptance, 300)
    speed, chosen = load.run(requests, acceptance, 3000)
    assert speed >= 0.975 * max(load.fixed(requests, acceptance).values()), chosen


def test_it_learns_in_a_few_rounds():
    """Take a drafter that is never right, and one that always is."""
    for acceptance, best in ((0.0, 0), (1.0, 3)):
        load = Load("EAGLE-3")
        load.run(128, np.full(3, acceptance), 20)
        assert load.chooser.chosen == best


def test_it_follows_a_load_that_rises_and_falls():
    load, acceptance, ratios = Load("EAGLE-3"), rates(2.0, 3), []
    for requests in (1, 8, 64, 128, 256, 128, 64, 8, 1):
        speed, chosen = load.run(requests, acceptance, 150)
        fixed = load.fixed(requests, acceptance)
        best = max(fixed, key=fixed.get)
        assert chosen[best] > 130 or fixed[load.chooser.chosen] > 0.98 * fixed[best]
        ratios.append(speed / fixed[best])
    assert min(ratios) > 0.97, ratios


@pytest.mark.parametrize("name", ["EAGLE-3", "DFlash"])
@pytest.mark.parametrize("lengths", [(1.2, 3.8), (1.2, 2.0), (2.0, 3.8)])
def test_requests_that_accept_much_and_little_share_the_number_best_for_both(name, lengths):
    for requests in TIMES[name]:
        if requests == 1:
            continue
        load = Load(name)
        acceptance = np.stack([rates(length, max(load.times[1])) for length in lengths])
        load.run(requests, acceptance, 150)
        speed, chosen = load.run(requests, acceptance, 1000)
        fixed = load.fixed(requests, acceptance)
        assert speed >= 0.97 * max(fixed.values()), (requests, chosen)
        assert speed >= 0.99 * fixed[0], (requests, chosen)


def test_a_load_that_rises_and_falls_is_never_slower_than_plain():
    """Requests come and go between any two rounds, and texts change from what is drafted well to what isn't."""
    load, rng = Load("EAGLE-3", seed=1), np.random.default_rng(1)
    spent, plain, best = 0.0, 0.0, 0.0
    for i in range(400):
        requests = int(rng.choice(list(TIMES["EAGLE-3"]), p=np.roll([0.6, 0.2, 0.1, 0.05, 0.05], i // 40 % 5)))
        acceptance = rates((3.2, 1.3, 2.1)[i // 60 % 3], 3)
        speed, _ = load.run(requests, acceptance, 10)
        fixed = load.fixed(requests, acceptance)
        spent, plain, best = spent + 1 / speed, plain + 1 / fixed[0], best + 1 / max(fixed.values())
    assert spent <= 1.01 * plain
    assert spent <= 1.05 * best  # of whoever knows beforehand what will be accepted


def test_it_finds_out_when_drafts_get_better():
    load = Load("EAGLE-3")
    _, chosen = load.run(64, np.full(3, 0.05), 600)
    assert chosen[0] > 550
    load.run(64, np.full(3, 0.8), 300)
    assert load.chooser.chosen == 3


def test_trying_costs_no_more_than_its_budget():
    """Rounds with drafts, of which none is accepted, as a share of the time of all others."""
    for name, requests in (("EAGLE-3", 8), ("EAGLE-3", 256), ("DFlash", 128)):
        load = Load(name)
        load.run(requests, np.zeros(max(load.times[1])), 100)
        speed, chosen = load.run(requests, np.zeros(max(load.times[1])), 8000)
        assert len(chosen) > 1, "none was tried"
        assert speed >= (1 - 1.5 * draft_count.BUDGET) / load.times[requests][0]


def test_a_try_without_drafts_costs_what_keeping_the_drafters_state_does():
    """Plain decoding seems nearly as fast as the draft that is made, but a try isn't a rest."""
    took = {SKIP_DRAFTER: 1.0, 0: 1.3, 1: 1.59}
    chooser, chosen, each = Chooser({0: 0, 1: 1}, {("round", 1): took}), Counter(), took[1] / (1 + draft_count.FIRST)
    for _ in range(4000):
        drafts = chooser.choose(("round", 1), 1.0)
        chooser.took(("round", 1), drafts, took[drafts])
        chosen[drafts] += 1
    assert chosen.keys() == {0, 1}
    assert 0.8 < chosen[0] * (took[0] - each) / (draft_count.BUDGET * chosen[1] * took[1]) < 1.2


def test_longer_contexts_make_wider_rounds_cheaper():
    """Longer contexts add time to all rounds. It is seen in those that run, and holds for those that don't."""
    load, acceptance = Load("EAGLE-3"), rates(2.0, 3)
    load.run(256, acceptance, 300)
    before = load.chooser.chosen
    load.run(256, acceptance, 100, more=0.1)
    speed, _ = load.run(256, acceptance, 600, more=0.1)
    assert load.chooser.chosen > before
    assert speed > 0.97 * max(load.fixed(256, acceptance, more=0.1).values())


def test_where_nobody_has_drafts_there_are_none_and_none_is_tried():
    load = Load("EAGLE-3")
    assert {load.chooser.choose(("round", 1), 0.0) for _ in range(1000)} == {0}


def test_half_of_a_batch_with_drafts_gains_half():
    chooser = Load("EAGLE-3").chooser
    whole, half = chooser.expected(1.0), chooser.expected(0.5)
    assert all(half[n] == pytest.approx(1 + (whole[n] - 1) / 2) for n in whole)


def test_acceptance_counts_only_rows_that_got_so_far():
    chooser = Chooser({0: 0, 1: 1, 3: 3}, {})
    for _ in range(100):  # of ten rows three have no draft accepted, five have one, two have all three
        chooser.accepted(3, Counter({1: 3, 2: 5, 4: 2}))
    rounds = chooser.expected()
    assert rounds[1] == pytest.approx(1.7, abs=0.01) and rounds[3] == pytest.approx(1 + 0.7 + 0.2 + 0.2, abs=0.02)
    for _ in range(500):  # which says nothing of later positions
        chooser.accepted(1, Counter({1: 10}))
    assert chooser.expected()[1] == pytest.approx(1.0, abs=0.03)
    for _ in range(500):
        chooser.accepted(1, Counter({2: 10}))
    assert chooser.expected()[3] == pytest.approx(1 + 1 + 2 / 7 + 2 / 7, abs=0.05)


def test_a_group_has_numbers_of_its_own():
    """Rounds with log-probabilities have all drafts or none."""
    few, many = {0: 1.0, 3: 1.5}, {0: 1.0, 1: 1.1, 3: 1.5}
    chooser = Chooser({0: 0, 1: 1, 3: 3}, {("few", 1): few, ("many", 1): many})
    chooser.accepted(3, Counter({2: 1000}))  # the first draft always, the second never
    for _ in range(3):
        assert chooser.choose(("many", 1), 1.0) == 1
        assert chooser.choose(("few", 1), 1.0) == 3


def test_a_tree_is_chosen_whole_or_not_at_all():
    chooser = Chooser({0: 0, 16: 5}, {("round", 1): {0: 1.0, 16: 1.1}})
    chooser.accepted(16, Counter({6: 100}))
    assert chooser.choose(("round", 1), 1.0) == 16 and chooser.expected()[16] > 5.3
    chooser.accepted(16, Counter({1: 5000}))
    assert chooser.choose(("round", 1), 1.0) == 0


def test_a_rest_takes_time_however_fast_rounds_are():
    times = Times({SKIP_DRAFTER: 0.5, 0: 1.0, 1: 1.1})
    for _ in range(60):
        times.see(0, 0.01)
    assert times.of(SKIP_DRAFTER) == 0.5 * LEAST


def test_few_tries_tell_a_number_whose_measurement_at_start_was_held_up():
    """Once its time counts as known, no round rests because it is taken to be slow."""
    times = Times({0: 1.0, 1: 2.0})
    for drafts in (0, *[1] * MIN_SAMPLES):
        times.see(drafts, 1.3 if drafts else 1.0)
    assert times.sure(1) and times.of(1) == pytest.approx(1.3)


def test_a_round_that_was_held_up_counts_little():
    times = Times({0: 1.0, 3: 2.0})
    times.see(0, 60.0)
    assert times.of(0) <= 1.5 and times.of(3) < 2.5
    for i in range(200):
        times.see(0 if i % 20 else 3, 1.0 if i % 20 else 2.0)
    assert times.of(0) == pytest.approx(1.0, rel=0.02) and times.of(3) == pytest.approx(2.0, rel=0.03)


def test_a_rest_is_taken_to_save_what_it_did_at_start():
    """It isn't timed while drafts are made, though what delays them is added to it. As seen of the demo, in ms."""
    # The rest was held up at start: it takes no longer than no drafts.
    times = Times({SKIP_DRAFTER: 12.0, 0: 9.0, 1: 10.0})
    assert times.of(SKIP_DRAFTER) == times.of(0) == 9.0
    times = Times({SKIP_DRAFTER: 6.6, 0: 15.0, 1: 8.2})  # and here the round without drafts was
    assert times.of(0) == 8.2
    for i in range(400):
        times.see(0 if i % 20 == 0 else 1, 9.3 if i % 20 == 0 else 11.9)
    assert times.of(0) == pytest.approx(9.3, rel=0.02) and times.of(SKIP_DRAFTER) == pytest.approx(9.3 - 1.6, rel=0.02)


@pytest.mark.parametrize("wrong", [{0: 15.0, 3: 11.0}, {0: 7.0, 3: 25.0}, {0: 15.0, 3: 25.0}])
def test_times_that_were_measured_wrong_are_put_right(wrong):
    """Start with wrong times, as beside another process. Drafts pay, or don't."""
    for acceptance in (0.1, 0.9):
        load = Load("EAGLE-3")
        load.chooser._times["round", 64] = Times({1: 9e-3} | {n: ms / 1e3 for n, ms in wrong.items()})
        load.run(64, np.full(3, acceptance), 1000)
        speed, chosen = load.run(64, np.full(3, acceptance), 400)
        fixed = load.fixed(64, np.full(3, acceptance))
        assert speed >= 0.97 * max(fixed.values()), (acceptance, chosen)


@pytest.mark.parametrize(
    "drafts,expected", [(1, (0,)), (3, (0, 1)), (4, (0, 1, 2)), (7, (0, 1, 3)), (15, (0, 1, 3, 7))]
)
def test_the_ladder_halves(drafts, expected):
    assert rungs(drafts) == expected
