"""`Together`: who waits while a call runs shares the next one, and nobody's error is another's."""

import asyncio
import threading

import pytest

from server.workers import Together


class Doubling:
    """Work that doubles numbers, records its calls, and holds each until `gate` is open. 13 is an error."""

    def __init__(self):
        self.calls, self.gate = [], threading.Event()

    def __call__(self, pieces):
        self.calls.append(pieces)
        assert self.gate.wait(10)
        if 13 in pieces:
            raise ValueError("13")
        return [2 * piece for piece in pieces]


async def begun(work, count):
    while len(work.calls) < count:
        await asyncio.sleep(0.001)


async def test_a_burst_shares_a_call():
    work = Doubling()
    together = Together(work, 4, "test-together")
    tasks = [asyncio.create_task(together.run(0))]
    await begun(work, 1)
    tasks += [asyncio.create_task(together.run(i)) for i in range(1, 7)]
    await asyncio.sleep(0)
    work.gate.set()
    assert await asyncio.gather(*tasks) == [0, 2, 4, 6, 8, 10, 12]
    assert work.calls == [[0], [1, 2, 3, 4], [5, 6]], "of four at most"


def test_a_piece_fails_alone_and_nothing_is_done_for_those_who_left():
    work = Doubling()
    together = Together(work, 8, "test-together")

    async def main():
        first = asyncio.create_task(together.run(0))
        await begun(work, 1)
        tasks = [asyncio.create_task(together.run(i)) for i in (1, 13, 2, 3)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        await asyncio.sleep(0)
        work.gate.set()
        return await asyncio.gather(first, *tasks, return_exceptions=True)

    zero, one, error, two, left = asyncio.run(main())
    assert (zero, one, two) == (0, 2, 4)
    assert isinstance(error, ValueError) and isinstance(left, asyncio.CancelledError)
    assert work.calls == [[0], [1, 13, 2], [1], [13], [2]]
    assert asyncio.run(together.run(7)) == 14, "other event loops are served after it"


def test_an_event_loop_that_was_closed_holds_up_no_other():
    work = Doubling()
    together = Together(work, 8, "test-together")

    async def leave():
        task = asyncio.create_task(together.run(1))
        await begun(work, 1)
        task.cancel()

    asyncio.run(leave())
    work.gate.set()
    assert asyncio.run(together.run(2)) == 4


@pytest.mark.parametrize("pieces", [1, 5])
async def test_errors_reach_every_caller(pieces):
    def work(_):
        raise KeyError("all of them")

    together = Together(work, 8, "test-together")
    errors = await asyncio.gather(*(together.run(i) for i in range(pieces)), return_exceptions=True)
    assert all(isinstance(error, KeyError) for error in errors)
