"""The kernel of rows' heads, on the device."""

from __future__ import annotations

import pytest

from tests.pallas.attention import test_write_heads as cpu

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rows,heads,kv_heads", [(2048, 32, 8), (1000, 32, 4), (640, 40, 40), (8192, 64, 8)])
def test_matches_the_plain_form(rows, heads, kv_heads, normed):
    cpu.check(rows, heads, kv_heads, normed, page_size=64, fp8=kv_heads == 8)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("rows,parts", [(10, 4), (32, 1), (128, 4), (512, 1)])
def test_rows_of_rounds(rows, parts, fp8):
    cpu.check(rows, 32, 8, True, page_size=64, parts=parts, fp8=fp8)


@pytest.mark.parametrize("rows,heads,kv_heads", [(16, 16, 2), (128, 8, 1), (40, 2, 1), (600, 14, 2)])
def test_heads_of_one_of_several_devices(rows, heads, kv_heads):
    cpu.check(rows, heads, kv_heads, True, page_size=64, parts=4 if rows < 200 else 1, fp8=rows == 40)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_layers_are_those_of_the_model(monkeypatch, family):
    cpu.check_mix(monkeypatch, family, blocks=32, t=64, num_attention_heads=32, num_key_value_heads=8)
