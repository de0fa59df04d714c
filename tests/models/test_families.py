"""Families in the engine, their rope scaled: each drafter leaves the text as it is, cached or cold.

What the families compute is held to transformers in test_models.py. Here every token must be the argmax of a forward
over the whole text, which knows no cache, no page and no draft; and the text must come out again from cached prefixes.
"""

import functools

import numpy as np
import pytest

from jaxspec import LLM, SamplingParams
from tests.drafters.test_dflash import drafter_folder
from tests.support import heads
from tests.support.engines import SMALL, check_greedy
from tests.support.tiny import GEMMA4_ALL, shaken, tiny_checkpoint

VOCAB, LONGEST, NEW = 24, 150, 24
PROMPTS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (1, 7, 33, LONGEST)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
MIXTURES = ("bailing_moe", "dots1", "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "mixtral", "olmoe")
MIXTURES += ("ernie4_5_moe", "exaone_moe", "qwen2_moe", "solar_open")
GROWING = {**YARN, "rope_theta": 1e4, "llama_4_scaling_beta": 0.3}
FAMILIES = {
    "llama": {"rope_scaling": YARN, "attention_bias": True},
    "mistral": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "qwen2": {"rope_scaling": YARN},
    "qwen3": {"rope_scaling": {**YARN, "attention_factor": 0.8}},
    "gpt_oss": {"rope_scaling": YARN | {"truncate": False}},  # the first layer has a window
    # In two layers of what these have: one that doesn't rotate, or sees a window, and one that does, or sees all.
    **{family: {"num_hidden_layers": 2} for family in ("cohere2", "exaone4", "smollm3")},
    "gemma2": {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},  # below caps
    "olmo3": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    # A window; other heads, of another width; then both kinds again, over the first ones' keys and values.
    "gemma4": GEMMA4_ALL | {"num_key_value_heads": 4, "vocab_size_per_layer_input": VOCAB},
    "kimi_linear": {"num_hidden_layers": 2},  # a state, and latents
    "qwen4_exp": {"num_hidden_layers": 2},  # a state behind n-grams, and blocks that an indexer selects
    "llama4": {"num_hidden_layers": 2},  # chunks, rotated; all of the text, not rotated
    "mimo_v2_flash": {"num_hidden_layers": 2},  # all of the text; a window, with sinks and other heads
    "granitemoehybrid": {"num_hidden_layers": 2},  # a state, and attention
    **{family: {} for family in ("ernie4_5", "granite", "hunyuan_v1_dense", "olmo2", "seed_oss")},
    **{family: {} for family in MIXTURES},
    "ministral3": {"rope_parameters": GROWING},
    "mistral4": {"rope_parameters": GROWING, "first_k_dense_replace": 0},
    "arcee": {},
    "minicpm": {},
}
DRAFTS = {
    "ngram": lambda target: "ngram",
    "standalone": lambda target: f"standalone:{noisy(target, NOISE.get(target.name.split('-')[0], 0.04))}",
    "eagle3": lambda target: f"eagle3:{heads.random_eagle3(target, tuple(range(0, VOCAB, 2)), (0, 0, 0))}",
    "dflash": lambda target: f"dflash:{drafter_folder(target)}",
}
OPTIONS = SMALL | {"dtype": "float32", "max_running_requests": 4, "num_draft_tokens": 3}


# Of a standalone drafter's weights: most of its drafts are right.
NOISE = dict.fromkeys((*MIXTURES, "mistral4"), 0.01) | dict.fromkeys(("granitemoe", "granitemoeshared"), 0.02)
NOISE |= {"granite": 0.1, "olmo3": 0.03, "exaone4": 0.02, "llama4": 0.01, "mimo_v2_flash": 0.01}
noisy = functools.cache(shaken)
OFTEN = (
    ("olmo3", "ngram"),
    ("granite", "standalone"),
    ("llama4", "eagle3"),
    ("qwen4_exp", "ngram"),
    ("gemma2", "standalone"),
)
HEADLESS = {"arcee", "ernie4_5", "granite", "granitemoehybrid", "minicpm", "olmo2", "seed_oss"}
HEADLESS |= {*MIXTURES, "gemma2", "ministral3", "mistral4"}  # of these, random heads accept nothing, by chance


def cases():
    """Every family with every drafter; `make test` has a few, those that other files have least of."""
    for family in FAMILIES:
        for draft in ("ngram", "standalone") if family in HEADLESS else DRAFTS:
            # llama is test_lossless.py's, YaRN test_models.py's, gpt_oss test_mxfp4.py's, EAGLE-3 test_eagle.py's,
            # gemma4 test_assistant.py's
            # A state can't take a draft of its own back; of that random head, too, nothing is accepted.
            stateful = family in ("granitemoehybrid", "kimi_linear", "qwen4_exp")
            if (draft == "standalone" and stateful) or (family, draft) == ("olmo3", "dflash"):
                continue
            often = (family, draft) in OFTEN
            yield pytest.param(family, draft, marks=() if often else pytest.mark.exhaustive)


@pytest.mark.parametrize("family,draft", list(cases()))
def test_greedy_texts_are_the_models_own_cached_or_cold(family, draft):
    target = tiny_checkpoint(family, VOCAB, 2, **{"num_hidden_layers": 1, **FAMILIES[family]})
    llm = LLM(str(target), DRAFTS[draft](target), **OPTIONS)
    cached = check_greedy(llm, PROMPTS, GREEDY)
    assert cached[-1].metrics.cached_tokens >= LONGEST - 1 - OPTIONS["page_size"]
    stats = llm.engine.stats()
    drafted, accepted = sum(stats["drafted_per_position"]), sum(stats["accepted_per_position"])
    assert accepted < drafted, "no draft was refused"
    assert accepted > (drafted / 4 if draft == "standalone" else 0), "hardly a draft was accepted"
