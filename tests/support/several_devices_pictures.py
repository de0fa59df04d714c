"""Pictures over virtual CPU devices: each has the whole tower, and texts are one device's."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxspec import LLM
from jaxspec.checkpoint import load_model
from jaxspec.engine.pictures import PictureReader
from jaxspec.parallel import sharding
from tests.engine.test_pictures import DRAFTERS, GREEDY, OPTIONS, greedy, texts
from tests.support.picture_prompts import DEEP, GOLDEN, PROMPTS, expected, prompt
from tests.support.sample import rare


def test_each_device_reads_a_picture_as_one_does():
    model, mesh = load_model(str(GOLDEN / "qwen3_5"), progress=False), sharding.mesh_of(2)
    rows, pictures = [], [prompt("one").images[0].picture]
    for params, where in ((model.tower, None), (sharding.everywhere(model.tower, mesh), mesh)):
        held = jax.numpy.zeros((20, model.config.tower.out))
        held = held if where is None else sharding.everywhere(held, mesh)
        held, (own,) = PictureReader(model.config.tower, params, 20, where).read(held, pictures, set())
        rows.append([np.asarray(shard.data)[own] for shard in held.addressable_shards])
    assert len(rows[1]) == 2
    for shard in rows[1]:
        np.testing.assert_allclose(shard, rows[0][0], atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("draft", ["mtp", "ngram", *DRAFTERS])
def test_texts_with_pictures_are_transformers_with_each_drafter(draft, tmp_path):
    draft = DRAFTERS[draft](tmp_path) if draft in DRAFTERS else draft
    llm = LLM(str(GOLDEN / "qwen3_5"), draft, num_draft_tokens=3, tp_size=2, **OPTIONS)
    assert texts(llm, PROMPTS) == greedy(PROMPTS)
    assert llm.engine.runner.pictures.encoded == 3


@pytest.mark.parametrize("family,new", [rare("gemma3", 8), *(rare(family, 8) for family in DEEP)])
def test_texts_of_other_families_are_transformers(family, new):
    llm, names = LLM(str(GOLDEN / family), tp_size=2, **OPTIONS), ("two", "one")
    outs = llm.generate([prompt(name, family) for name in names], dataclasses.replace(GREEDY, max_tokens=new))
    assert [out.token_ids for out in outs] == [expected(family)[f"{name}_greedy"].tolist()[:new] for name in names]


@pytest.mark.exhaustive
def test_deterministic_texts_with_pictures_depend_on_nothing_beside_them():
    options = OPTIONS | {"deterministic": True, "dtype": "bfloat16", "max_total_tokens": 208}
    llm = LLM(str(GOLDEN / "qwen3_5"), "mtp", num_draft_tokens=3, tp_size=2, **options)
    alone = [texts(llm, [name])[0] for name in PROMPTS]
    assert texts(llm, PROMPTS) == alone
    assert texts(llm, PROMPTS, speculative=False) == alone
