"""Which devices the kernels are for, and that calls of them are counted."""

from types import SimpleNamespace

import jax
import pytest

from jaxspec.pallas import hopper
from jaxspec.pallas.experts import expert_rows


@pytest.fixture
def on(monkeypatch):
    def pretend(**device):
        monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind="a card", **device)])
        monkeypatch.setattr(hopper, "KERNELS", hopper.Counter())

    return pretend


def test_other_devices_say_why_not(on):
    on(platform="cpu")
    assert "CPU" in hopper.kernels_here()
    on(platform="gpu", compute_capability="8.0")
    assert "8.0, not 9.0" in hopper.kernels_here()
    assert hopper.multiprocessors() == 0


def test_hopper_runs_them(on):
    on(platform="gpu", compute_capability="9.0", core_count=132)
    assert hopper.kernels_here() is None
    assert hopper.multiprocessors() == 132


def test_each_call_in_a_trace_is_counted_by_the_kernels_name(monkeypatch):
    monkeypatch.setattr(hopper, "KERNELS", hopper.Counter())
    x, token = jax.ShapeDtypeStruct((600, 256), "bfloat16"), jax.ShapeDtypeStruct((640,), "int32")
    with hopper.counting() as traced:
        jax.eval_shape(lambda x, token: expert_rows.take_rows(x, token) + expert_rows.take_rows(x, token), x, token)
    assert traced == hopper.KERNELS == {"take_rows": 2}


def test_a_kernel_whose_blocks_wait_for_one_another_needs_room_for_all(on):
    """On a card with fewer multiprocessors it would never end."""
    on(platform="gpu", compute_capability="9.0", core_count=114)
    assert hopper.too_few_processors(114) is None
    assert hopper.too_few_processors(132) == "114 multiprocessors; 132 are needed"
