"""A family with both: running means of two shapes and attention of two shapes, all matrices in fixed point."""

from __future__ import annotations

import dataclasses

import jax

from jaxspec.models import reading
from jaxspec.models.declaring import decoder_tensors
from jaxspec.models.description import Attention, Layer
from jaxspec.models.rope_scaling import Rope
from jaxspec.models.weights import is_param
from tests.proof import running_mean
from tests.proof.fixed_point import FixedPoint
from tests.proof.running_mean import RunningMean

MIXINGS = RunningMean(4, 8), Attention(4, 2, 16, Rope(1e4)), RunningMean(2, 16), Attention(4, 4, 8, Rope(1e4))


def read(hf):
    norm, feed = reading.norm(hf), reading.mlps(hf)[0]
    return reading.decoder(hf, [Layer(mixing, feed, norm) for mixing in MIXINGS], norm)


def tensors(decoder):
    declared = decoder_tensors(decoder, mixings={RunningMean: running_mean.tensors})
    in_bytes = lambda param: dataclasses.replace(param, format=FixedPoint()) if param.of_matmul else param  # noqa: E731
    return declared | {"layers": jax.tree.map(in_bytes, declared["layers"], is_leaf=is_param)}
