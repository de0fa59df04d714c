"""Gates and steps of kernels against float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.recurrence import gates_and_norm


@pytest.mark.parametrize("x", [-80, -30, -17, -15, -10, -5, -3.5, -3.4, -1, 0, 1, 17, 80])
def test_decays_and_steps_have_the_softplus_of_float64(x):
    """At a rate by which the decay is about 1/e, so that its rounding hides nothing."""
    exact = np.logaddexp(np.float64(np.float32(x)), 0)
    log_rate, number, none = jnp.float32([-np.log(exact)]), jnp.float32([[0, x]]), jnp.zeros(1)
    rate = np.exp(np.float64(log_rate[0]))
    decay, _ = gates_and_norm.gates(number, log_rate, none, 0, 0)
    assert -np.log(np.float64(decay)) / rate == pytest.approx(exact, rel=2e-5, abs=0)
    decay, step = gates_and_norm.steps(number, log_rate, none, 0, 0, (0.0, np.inf))
    assert float(step) == pytest.approx(exact, rel=3e-6, abs=0)
    assert -np.log(np.float64(decay)) / rate == pytest.approx(exact, rel=2e-5, abs=0)
