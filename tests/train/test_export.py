"""Params become a checkpoint's tensors and are read back as they were, whatever they were put together from."""

import jax
import numpy as np
import pytest

from jaxspec.checkpoint.params import assemble, dummy
from jaxspec.models.families import MODELS
from jaxspec.models.model_config import ModelConfig
from jaxspec.train.export import checkpoint_tensors, eagle3_layers
from tests.support.tiny import tiny_config


@pytest.mark.parametrize("family", sorted(MODELS))
def test_what_is_written_is_read_back(family):
    config = tiny_config("qwen3_5_moe" if family == "qwen3_next" else family)
    config = ModelConfig.from_hf({**config, "model_type": family})
    declared = MODELS[family].tensors(config.decoder)
    params = dummy(declared, "bfloat16", 3)
    tensors = checkpoint_tensors(declared, params)
    for param in jax.tree.leaves(declared):
        assert {name: tensors[name].shape for name in param.sources} == param.stored()
    read = assemble(declared, tensors, "bfloat16")
    jax.tree.map(np.testing.assert_array_equal, read, params)


@pytest.mark.parametrize("layers, read", [(1, (0, 0, 0)), (2, (1, 0, 0)), (8, (1, 3, 4)), (36, (1, 17, 32))])
def test_eagle3_reads_layers_that_there_are(layers, read):
    assert eagle3_layers(ModelConfig.from_hf(tiny_config(num_hidden_layers=layers))) == read
