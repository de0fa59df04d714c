"""Products of `--dtype float32`: a GPU's tensor cores would round what they multiply to ten bits."""

import re

import jax
import pytest

from jaxspec import load_model
from jaxspec.engine.functional import plain_logits
from tests.support import tiny

DOTS = re.compile(r"stablehlo\.(?:dot_general|convolution).*")


def products(family: str, dtype: str, asked: str | None = None) -> list[str]:
    """The products of a whole text's logits, as they are lowered where jax is asked for such a precision."""
    model = load_model(str(tiny.tiny_checkpoint(family)), dtype=dtype)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model.params)
    with jax.default_matmul_precision(asked):  # these tests' own is "highest"
        return DOTS.findall(plain_logits.lower(model.config, params, jax.ShapeDtypeStruct((1, 7), "int32")).as_text())


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_moe", "gpt_oss", "deepseek_v3", "gemma4", "kimi_linear"])
def test_products_of_float32_ask_for_all_bits(family):
    found = products(family, "float32")
    assert found
    assert [dot for dot in found if "precision = [HIGHEST, HIGHEST]" not in dot] == []


def test_products_of_bfloat16_are_left_to_tensor_cores():
    assert [dot for dot in products("qwen3", "bfloat16") if "HIGHEST" in dot] == []


def test_a_users_own_choice_stands():
    assert [dot for dot in products("qwen3", "float32", "tensorfloat32") if "HIGHEST" in dot] == []
