"""A request whose logits are NaN or infinite ends with an error that says so, and others go on."""

import math
import re

import pytest

from jaxspec.config.request import LogitsError
from tests.support.engines import SELF, engine, idle, params, tokens
from tests.support.faults import damaged
from tests.support.sample import rare


def served(llm, asked):
    """The tokens and the error of each of these requests (prompt, params), all at once."""
    core = llm.engine
    requests = [core.prepare(*each) for each in asked]
    for request in requests:
        core.add(request)
    found, errors = {request.id: [] for request in requests}, {}
    while core.busy:
        for delta in core.step():
            found[delta.request_id] += delta.token_ids
            errors[delta.request_id] = delta.error
    return [(found[request.id], errors[request.id]) for request in requests]


def alone(text, others):
    """A token of `text` that none of the others has."""
    return next(token for token in text if not any(token in other for other in others))


GREEDY, SEEDED = params(max_tokens=24), params(max_tokens=24, temperature=1.0, seed=7)
SHOWN = params(max_tokens=24, logprobs=2)


@pytest.mark.parametrize("draft, settings", [
    ("ngram", [GREEDY, SHOWN]), rare(SELF, [SEEDED]), rare("ngram", [SEEDED]), rare(SELF, [GREEDY]),
    rare("none", [GREEDY, SEEDED, SHOWN]),
])  # fmt: skip
def test_a_request_without_logits_ends_with_an_error_and_others_go_on(draft, settings):
    llm = engine(draft)
    for each in settings:
        asked = [(tokens(33, 1), each), (tokens(21, 2), each), (tokens(40, 3), each)]
        plain = [text for text, _ in served(llm, asked)]
        late = alone(plain[0], [*plain[1:], *(prompt for prompt, _ in asked)])
        early = alone(asked[1][0], [*plain, asked[0][0], asked[2][0]])
        before = llm.engine.stats()["nonfinite_total"]
        llm.engine.flush_cache()
        with damaged(llm, late, math.inf):
            first, *others = served(llm, asked)
        assert [text for text, _ in others] == plain[1:] and [error for _, error in others] == [None, None]
        until = 33 + plain[0].index(late) + 1
        after = int(re.search(r"logits after (\d+) tokens", str(first[1]))[1])
        # Rows before a draft read its keys and values, at weight zero: so it may end up to 3 tokens earlier.
        assert isinstance(first[1], LogitsError) and until - 3 * (draft != "none") <= after <= until
        assert first[0] == plain[0][: len(first[0])] and len(first[0]) <= after - 33
        llm.engine.flush_cache()
        with damaged(llm, early):  # in a prompt: there is no first token
            found = served(llm, asked)
        assert found[1][0] == [] and "after 21 tokens" in str(found[1][1])
        assert [found[0][0], found[2][0]] == [plain[0], plain[2]]
        assert llm.engine.stats()["nonfinite_total"] == before + 2
        assert [text for text, _ in served(llm, asked)] == plain, "nothing of it is in the prefix tree"
    idle(llm.engine)


def test_a_prompt_that_cannot_be_scored_ends_with_an_error():
    llm = engine("ngram")
    prompt, other = tokens(70, 5), tokens(20, 6)
    token = next(t for t in prompt[:30] if t not in other)
    with damaged(llm, token):
        found = served(llm, [(prompt, params(max_tokens=2, prompt_logprobs=1)), (other, GREEDY)])
    assert isinstance(found[0][1], LogitsError) and found[1][1] is None and len(found[1][0]) == 24
    idle(llm.engine)
