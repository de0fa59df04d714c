"""Tables of implementations: which one computes a call, and that all of a table compute the same."""

import logging

import pytest

from jaxspec.pallas import hopper, operation, portable
from jaxspec.pallas.operation import ANY, HOPPER, PORTABLE, Implementation, choose, nothing

TABLE = (
    Implementation("fast", HOPPER, lambda x: "odd" if x % 2 else None, lambda x: x),
    Implementation("unseen", PORTABLE, nothing, lambda x: x, requested=True),
    Implementation("portable", PORTABLE, lambda x: "large" if x > 9 else None, lambda x: x),
    Implementation("exact", ANY, lambda x: None if x == 3 else "not three", lambda x: x),
    Implementation("reference", ANY, nothing, lambda x: x, slow=True),
)


@pytest.fixture
def on(monkeypatch):
    def device(kernels: str | None):
        monkeypatch.setattr(hopper, "kernels_here", lambda: None if kernels == HOPPER else "no Hopper")
        monkeypatch.setattr(portable, "kernels_here", lambda: None if kernels == PORTABLE else "no Triton")

    operation.warn.cache_clear()
    yield device
    operation.warn.cache_clear()


@pytest.mark.parametrize("device,asked,call,name", [
    (HOPPER, "auto", 2, "fast"),
    (HOPPER, "auto", 1, "reference"),
    (HOPPER, "auto", 3, "exact"),
    (PORTABLE, "auto", 2, "portable"),
    (PORTABLE, "portable", 2, "unseen"),
    (PORTABLE, "auto", 10, "reference"),
    (None, "auto", 2, "reference"),
])  # fmt: skip
def test_the_first_that_runs_here_and_takes_the_call(device, asked, call, name, on):
    on(device)
    with hopper.use_kernels(asked):
        assert choose("counting", TABLE, call).name == name
        assert next(each for each in TABLE if each.takes(call)).name == name


def test_a_device_with_kernels_warns_once_that_none_takes_a_call(on, caplog):
    on(HOPPER)
    for call in (1, 5, 1, 2, 3):
        choose("counting", TABLE, call)
    assert [record.getMessage() for record in caplog.records] == [
        "counting runs in plain jax.numpy, which is slow (fast: odd)"
    ]
    on(PORTABLE)
    choose("counting", TABLE, 10)
    assert caplog.records.pop().getMessage().endswith("(portable: large)")
    on(None)
    choose("counting", TABLE, 12)
    assert len(caplog.records) == 1 and caplog.records[0].levelno == logging.WARNING


def test_a_call_that_nothing_takes_is_an_error(on):
    on(HOPPER)
    with pytest.raises(NotImplementedError, match="nothing here computes counting; fast: odd"):
        choose("counting", TABLE[:-1], 1)
