"""The second tier by itself: which pages are copied when, which go first, and when a reload is worth it. No device."""

import pytest

from jaxspec.scheduling.audit import audit
from jaxspec.scheduling.host_tier import HostTier
from jaxspec.scheduling.kept_blocks import Block, DiskTier
from jaxspec.scheduling.scheduler import Scheduler
from jaxspec.scheduling.sequence import SequenceState, Status

PAGE = 4


def made(capacity=100, num_pages=17, disk=None, **more):
    tier = HostTier(capacity, 1, disk=None if disk is None else DiskTier(disk))
    sizes = {"num_slots": 2, "num_pages": num_pages, "page_size": PAGE, "width": 1, "lookahead": 1}
    sizes |= {"chunk_tokens": 64, "block": 8, "score_tokens": 8, "context_length": 64}
    return Scheduler(**sizes | more, host=tier), tier


def copied(tier, room=100):
    """Carry out the copies that are due: their pages."""
    copies = tier.to_copy(room)
    for copy in copies:
        assert tier.make_room(tier.bytes_of(copy))
        tier.add(copy, f"data of {copy.at}", None)
    return [copy.at for copy in copies]


def serve(scheduler, tokens, copy=True):
    """Run a prompt to its end; its sequence, as it was admitted."""
    seq = SequenceState(list(tokens), len(tokens), len(tokens) + 1)
    scheduler.add(seq)
    for _ in range(3):
        scheduler.plan()
        if copy:
            copied(scheduler.host)
        if seq.status is Status.LOADING:
            scheduler.landed(seq)
    scheduler.append(seq, [1])
    scheduler.finish(seq)
    audit(scheduler)
    return seq


def test_pages_are_copied_after_the_plan_that_fills_them_and_before_they_are_filled_anew():
    scheduler, tier = made()
    seq = SequenceState(list(range(17)), 17, 18)
    scheduler.add(seq)
    scheduler.plan()
    assert not tier.to_copy(100) and tier.waits, "the program that fills them isn't dispatched yet"
    scheduler.plan()
    assert copied(tier, room=2) == seq.pages[:2] and copied(tier) == seq.pages[2:4] and not tier.waits


def test_a_page_that_leaves_before_its_turn_is_copied_in_the_plan_that_takes_it():
    scheduler, tier = made()
    serve(scheduler, range(33), copy=False)
    assert not len(tier)
    other = SequenceState([50 + i for i in range(61)], 61, 62)
    scheduler.add(other)
    scheduler.plan()
    taken = copied(tier)
    assert taken and set(taken) <= set(other.pages), "leaving pages first, while they still hold the old text"
    scheduler.finish(other)
    tier.to_copy(100)
    assert serve(scheduler, range(33)).from_host >= PAGE * len(taken) - PAGE > 0


def test_the_oldest_conversation_goes_first_and_its_last_page_before_the_others():
    scheduler, tier = made(capacity=16, num_pages=65)
    for name in range(2):
        serve(scheduler, [name * 100 + i for i in range(33)])
    assert tier.used == 16
    serve(scheduler, range(33))  # the first is the newest now
    serve(scheduler, [200 + i for i in range(17)])
    scheduler.trees[0].clear()
    found = [serve(scheduler, [name * 100 + i for i in range(33)], copy=False).cached for name in range(3)]
    assert found == [32, 16, 16] and tier.used == 16 == tier.capacity


def test_a_reload_is_made_if_it_is_faster_and_tried_again():
    scheduler, tier = made()
    serve(scheduler, range(33))
    scheduler.trees[0].clear()
    tier.took(100, 1.0, at_start=True)  # 8 pages in 80 ms, or 32 tokens in as long
    tier.token = 0.0026
    assert serve(scheduler, range(33)).from_host == 32
    scheduler.trees[0].clear()
    tier.token = 0.0024
    assert serve(scheduler, range(33)).from_host == 0 and tier.declined == 1
    for _ in range(60):
        tier.took(100, 10.0)
    assert tier.speed < 11
    tier.token = 0.003
    tries = 0
    scheduler.trees[0].clear()
    while not serve(scheduler, range(33)).from_host:
        scheduler.trees[0].clear()
        tries += 1
        assert tries < 100, "one slow moment would turn the tier off for good"


def test_what_a_load_waits_for_beside_the_link_counts_and_is_measured_again():
    scheduler, tier = made()
    serve(scheduler, range(33))
    tier.took(100, 1.0, at_start=True)
    tier.token = 0.01  # 32 tokens take 320 ms, their pages 80

    def loads(seconds):
        """Serve the prompt once more: whether it was reloaded, which takes so many seconds."""
        scheduler.trees[0].clear()
        seq = SequenceState(list(range(33)), 33, 34)
        scheduler.add(seq)
        scheduler.plan()
        if reloaded := seq.status is Status.LOADING:
            tier.lasted(seq.load, seconds)
            scheduler.landed(seq)
        scheduler.plan()
        scheduler.append(seq, [1])
        scheduler.finish(seq)
        return reloaded

    assert loads(0.5) and loads(0.5) and loads(0.1) and loads(0.5), "one of the last three was in time"
    assert loads(0.5) and loads(0.5)
    assert not any(loads(0.5) for _ in range(16)), "420 ms are waited beside the link, and 240 would be saved"
    assert loads(0.5) and not loads(0.5), "it is tried again"
    assert not any(loads(0.1) for _ in range(15)) and all(loads(0.1) for _ in range(9)), "and taken once it pays"
    assert tier.declined == 32


def test_what_a_load_reads_is_not_given_up():
    scheduler, tier = made(capacity=8)
    serve(scheduler, range(33))
    scheduler.trees[0].clear()
    seq = SequenceState(list(range(33)), 33, 34)
    scheduler.add(seq)
    scheduler.plan()
    assert seq.status is Status.LOADING and not tier.make_room(1)
    tier.clear()
    assert tier.used == 8, "a load still reads the memory"
    scheduler.not_landed(seq)
    assert tier.used == 0 and seq.status is Status.WAITING
    audit(scheduler)
    scheduler.plan()
    assert seq.status is Status.RUNNING and seq.cached == 0


def test_pages_of_old_weights_are_not_copied_when_they_leave():
    scheduler, tier = made()
    serve(scheduler, range(33))
    scheduler.change_version(7)
    assert not len(tier) and not tier.used
    serve(scheduler, [50 + i for i in range(61)])
    scheduler.trees[0].evict(100)
    assert not [copy for copy in tier.to_copy(100) if copy.key in tier._blocks]
    assert len(tier) == 15, "those of the new prompt alone"


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_hybrid_loses_no_page_to_a_drafter_that_reads_the_next_token(tier):
    """Elsewhere MTP costs a hybrid one unit of its alignment for each hit."""
    for length in range(2, 3 * PAGE + 2):
        for reach in (0, 1):
            scheduler, _ = made(reach=reach, snapshots=range(2, 9), snapshot_interval=64)
            serve(scheduler, range(length))
            if tier == "host":
                scheduler.trees[0].clear()
            again = serve(scheduler, range(length))
            assert again.cached == (length - 1) // PAGE * PAGE, (length, reach)
            assert again.from_host == (again.cached if tier == "host" else 0)


def written(tier, room=100):
    """Carry out the writes that are due: how many."""
    blocks = tier.to_write(room)
    tier.unpin(blocks)
    return len(blocks)


def read(tier):
    """Carry out the reads that are due: their blocks."""
    due, tier.to_read = tier.to_read, []
    for block in due:
        block.data = "read"
        tier.disk.backlog -= block.size
    tier.unpin(due)
    return due


def test_the_oldest_are_written_once_the_memory_is_half_full_and_read_for_who_wants_them():
    scheduler, tier = made(capacity=16, num_pages=65, disk=12)
    names = [[name * 100 + i for i in range(33)] for name in range(3)]
    serve(scheduler, names[0])
    assert not written(tier), "the memory is half full"
    serve(scheduler, names[1])
    assert written(tier, room=3) == 3 and written(tier) == 13 and tier.disk.used == 12 == tier.disk.capacity
    assert len(tier.disk.gone) == 4, "the oldest conversation's last pages"
    serve(scheduler, names[2])
    scheduler.trees[0].clear()
    seq = SequenceState(names[0], 33, 34)
    scheduler.add(seq)
    scheduler.plan()
    due = read(tier)
    assert seq.status is Status.LOADING and len(due) == 4 and tier.used == 16
    assert (seq.cached, seq.from_disk, seq.from_host) == (16, 16, 0)
    scheduler.landed(seq)
    scheduler.finish(seq)
    scheduler.trees[0].clear()
    assert serve(scheduler, names[0]).from_host == 16, "they are in the memory now"


def test_a_slow_disk_leaves_a_prompt_what_is_in_the_memory():
    scheduler, tier = made(capacity=12, num_pages=65, disk=100)
    serve(scheduler, range(33))
    assert written(tier) == 8
    assert tier.make_room(9), "which gives up the last five"
    scheduler.trees[0].clear()
    tier.token = 1.0
    tier.took(100, 1.0, at_start=True)
    for speed, found in ((0.01, 12), (10.0, 32)):
        tier.disk.took(100, 100 / speed, at_start=True)
        assert serve(scheduler, range(33), copy=False).cached == found
        scheduler.trees[0].clear()


def test_a_file_given_up_and_written_anew_is_not_deleted():
    """A step deletes files after it has queued its writes."""
    disk, (one, other) = DiskTier(1), (Block(key, b"", 1, False) for key in (b"one", b"other"))
    disk.found(one)
    assert disk.write(other) and disk.gone == [b"one"]
    assert disk.write(one) and disk.gone == [b"other"] and disk.get(b"one") is not None


def test_a_file_from_before_without_room_is_deleted():
    disk = DiskTier(0)
    disk.found(Block(b"one", b"", 1, False))
    assert disk.gone == [b"one"] and not len(disk)
