"""Reference for sampling: numpy in float64, one token at a time, sorting everything; and a chi-square to judge by.

Written from vLLM's definitions and sharing nothing with `jaxspec.sampling`, so that the two can only agree by both
being right.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from scipy import special

from jaxspec.config.request import SamplingParams
from jaxspec.rounds.packing import Slots, admit, empty_slots, pack_admission

ALPHA = 1e-4  # a test that judges fifty samples fails by chance once in two hundred choices of its (fixed) seeds


def adjusted(
    logits: np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    stop_ids: Sequence[int] = (),
) -> np.ndarray:
    """Logits f64[v] of the token after `prompt` and `output`, before temperature and truncation."""
    row = np.array(logits, np.float64)
    if len(output) < params.min_tokens:
        row[list(stop_ids)] = -np.inf
    for token, bias in params.logit_bias.items():
        row[token] += bias
    counts = np.bincount(np.asarray(output, int), minlength=len(row))
    seen = counts > 0
    seen[list(prompt)] = True
    repetition = params.repetition_penalty
    row = np.where(seen, np.where(row > 0, row / repetition, row * repetition), row)
    return row - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities f64[v] after temperature, min-p, top-k and top-p; tokens that are cut have exactly zero."""
    if params.temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    x = np.array(logits, np.float64) / params.temperature
    p = _softmax(x)
    x[p < params.min_p * p.max()] = -np.inf
    if 0 < params.top_k < len(x):
        x[x < np.sort(x)[-params.top_k]] = -np.inf
    if params.top_p < 1:
        order = np.argsort(x)
        kept = np.cumsum(_softmax(x)[order]) > 1 - params.top_p
        kept[-1] = True
        x[x < x[order][kept][0]] = -np.inf
    return _softmax(x)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def fit_p_value(samples: np.ndarray, expected: np.ndarray) -> float:
    """How likely a sample at least this far from `expected` is, were it drawn from it: Pearson's chi-square.

    `samples` are indices into `expected`, probabilities that sum to one (each dimension of `expected` takes one column
    of `samples`). A sample where the probability is zero gives 0. Cells expected fewer than ten times are put together.
    """
    columns = np.atleast_2d(samples.T)
    cells = np.ravel_multi_index(tuple(columns), expected.shape)
    observed, wanted = np.bincount(cells, minlength=expected.size), expected.ravel() * len(cells)
    if observed[wanted == 0].any():
        return 0.0
    rare = wanted < 10
    observed = np.append(observed[~rare], observed[rare].sum())
    wanted = np.append(wanted[~rare], wanted[rare].sum())
    if wanted[-1] < 10:  # too rare even together: they join the least likely of the others
        least = np.argmin(wanted[:-1])
        observed[least], wanted[least] = observed[least] + observed[-1], wanted[least] + wanted[-1]
        observed, wanted = observed[:-1], wanted[:-1]
    if len(wanted) == 1:
        return 1.0
    return float(special.chdtrc(len(wanted) - 1, ((observed - wanted) ** 2 / wanted).sum()))


def slots_for(
    params: Sequence[SamplingParams],
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    *,
    capacity: int,
    new_tokens: int = 1,
    drafts: int = 0,
    stop_ids: Sequence[Sequence[int]] | None = None,
) -> Slots:
    """Slots with these requests in them, admitted like ones preempted after `outputs`. Seeds are 0, 1, ..."""
    slots, stop_ids = empty_slots(len(params), capacity), stop_ids or [()] * len(params)
    for i, (setting, prompt, output) in enumerate(zip(params, prompts, outputs, strict=True)):
        tokens = [*prompt, *output]
        packed = pack_admission(
            i, tokens, len(prompt), len(tokens) + new_tokens, drafts, i, list(stop_ids[i]), setting, capacity
        )
        slots = _admit(slots, packed)
    return slots


_admit = jax.jit(admit)
