"""Requests divided among devices: where each goes, and in which pages it is."""

import pytest

from jaxspec.scheduling.audit import audit
from jaxspec.scheduling.device_pages import DevicePages, rows_for
from tests.support.miniature import make, sequence


def fill(scheduler, *texts, new=2):
    """Admit these, and compute their prompts: the device of each."""
    seqs = [sequence(scheduler, text, new) for text in texts]
    while scheduler.waiting or scheduler.prefilling:
        plan = scheduler.plan()
        for seq in plan.first:
            scheduler.append(seq, [1])
    audit(scheduler)
    return [scheduler.device.of(seq.slot) for seq in seqs], seqs


def test_requests_go_to_the_device_with_most_room():
    s = make(devices=2, num_slots=8, num_pages=66, rounds=1)
    devices, seqs = fill(s, range(30), range(100, 108), range(200, 208), range(300, 308))
    assert devices == [0, 1, 1, 1]
    assert {page // 33 for page in seqs[0].pages} == {0} and {page // 33 for page in seqs[1].pages} == {1}


def test_a_prompt_goes_where_its_prefix_is_unless_that_device_is_busier():
    s = make(devices=2, num_slots=8, num_pages=98, rounds=1)
    shared = list(range(12))
    (first,), seqs = fill(s, [*shared, 40, 41, 42])
    s.finish(seqs[0])
    devices, more = fill(s, [*shared, 50], [*shared, 60], [*shared, 70])
    assert devices == [first, first, 1 - first]  # two are more than a quarter of four slots beyond none
    assert [seq.cached for seq in more] == [12, 12, 0]
    devices, more = fill(s, [*shared, 80])
    assert more[0].cached == 12, "both devices have it now"


def test_a_device_without_pages_leaves_a_request_to_the_other():
    s = make(devices=2, num_slots=4, num_pages=34, context_length=40)
    devices, _ = fill(s, range(30), range(100, 130), range(200, 206), range(300, 306))
    assert devices[:2] == [0, 1] and set(devices[2:]) == {0, 1}
    assert s.check(30, 4) and s.pools[0].num_pages == 17  # a request has the pages of one device


@pytest.mark.parametrize("slots,rows", [([0], 1), ([0, 4], 2), ([0, 1], 4), ([0, 4, 8, 1], 4), ([], 0)])
def test_a_batch_has_room_for_the_requests_of_each_device(slots, rows):
    """Three devices have four slots each, and compute a third of the batch's rows, rounded up."""
    assert rows_for(slots, 4, 3) == rows
    assert all(sum(slot // 4 == device for slot in slots) <= -(-rows // 3) for device in range(3))


def test_what_cannot_be_divided_evenly_is_refused():
    with pytest.raises(ValueError, match="3 slots and 8 pages"):
        DevicePages(2, 3, 8, 4)
