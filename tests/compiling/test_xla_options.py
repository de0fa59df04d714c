"""Options of all programs, and the memory that they save."""

import jax
import jax.numpy as jnp
import pytest

from jaxspec.compiling import xla_options
from jaxspec.models.weights import Fp8, Int4, Nvfp4, Weight, matmul

WIDTH = 256


@pytest.mark.parametrize("format", [Int4(32), Fp8(128), Fp8(128, True), Nvfp4()], ids=str)
def test_a_cpu_converts_one_layers_quantised_weight_at_a_time(format):
    def weight():
        values, scales, *factors = format.quantise(jnp.zeros((WIDTH, WIDTH)))
        return Weight(values, format, scales=scales, factors=factors[0] if factors else None)

    def program(x, weights):
        for each in weights:
            x = x + matmul(x, each)
        return x

    def taken(layers):
        of = jax.ShapeDtypeStruct((4, WIDTH), "float32"), [jax.eval_shape(weight)] * layers
        return jax.jit(program).lower(*of).compile(xla_options.OPTIONS).memory_analysis().temp_size_in_bytes

    assert taken(8) - taken(2) < WIDTH**2, "a quarter of one weight's bytes in float32"
