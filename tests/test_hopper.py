"""Which devices the kernels are for, and that the choice is counted."""

from types import SimpleNamespace

import jax
import pytest

from jaxspec.pallas import target


@pytest.fixture
def on(monkeypatch):
    def pretend(**device):
        monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind="a card", **device)])
        monkeypatch.setattr(target, "KERNELS", target.Counter())

    return pretend


def test_other_devices_say_why_not(on):
    on(platform="cpu")
    assert "CPU" in target.kernels_here()
    on(platform="gpu", compute_capability="8.0")
    assert "8.0, not 9.0" in target.kernels_here()
    assert not target.chosen("op", None)
    assert target.KERNELS == {}


def test_a_choice_is_counted(on):
    on(platform="gpu", compute_capability="9.0", core_count=132)
    assert target.kernels_here() is None
    assert target.chosen("op", None) and target.chosen("op", None, processors=132)
    assert not target.chosen("op", "its shapes")
    assert target.KERNELS == {"op": 2}


def test_a_kernel_whose_blocks_wait_for_one_another_needs_room_for_all(on):
    """On a card with fewer multiprocessors it would never end."""
    on(platform="gpu", compute_capability="9.0", core_count=114)
    assert target.chosen("op", None)
    assert not target.chosen("op", None, processors=132)


def test_a_slow_path_on_a_fast_card_is_told_once(on, caplog):
    target.tell.cache_clear()
    on(platform="gpu", compute_capability="9.0")
    for _ in range(2):
        target.tell("op", "pages of 8 tokens")
    assert [record.getMessage() for record in caplog.records] == [
        "op runs in plain jax.numpy, which is slow: pages of 8 tokens"
    ]
    target.tell.cache_clear()
