"""An engine's programs over several devices: which of their arguments and results each device has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxspec.drafters.base import Proposal
from jaxspec.parallel import peers
from jaxspec.parallel.sharding import BY_REQUEST, EVERYWHERE, LOGITS, Division, specs_of, spread
from jaxspec.structured import programs as structured


def divided(f: Callable, run: Callable, division: Division) -> Callable:
    """The program `run`, which is `f` of some statics, over several devices."""
    all_same, state = EVERYWHERE, division.state
    proposal = Proposal(**{field.name: all_same for field in dataclasses.fields(Proposal)} | {"probs": BY_REQUEST})
    handed, result = (), (all_same,)
    if f is structured.draft:
        result = proposal, all_same
    elif f is structured.forward:
        handed, result = (proposal,), (LOGITS, all_same)
    elif f is structured.conclude:
        handed = proposal, LOGITS, all_same, all_same, all_same
    elif f is structured.first:
        handed = all_same, all_same
    params = None if f in (structured.draft, structured.conclude) else division.params
    draft_params = division.draft_params, specs_of(division.peers)

    def with_peers(params, draft_params, *rest):
        draft_params, given = draft_params
        with peers.known(given):
            return run(params, draft_params, *rest)

    given = params, draft_params, state, all_same, *handed
    return spread(with_peers, division.mesh, given, (state, *result))
