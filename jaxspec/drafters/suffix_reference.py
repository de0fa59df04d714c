"""Suffix decoding in plain Python: what the drafts of `jaxspec.drafters.suffix` are held to.

Written after the paper (Oliaro et al., https://arxiv.org/abs/2411.04975) and the observable behaviour of its published
implementation, ArcticInference's `SuffixDecodingCache`, whose methods it has. Drafts, scores and matches are equal to
that one's, ties included: siblings that occur equally often stand in an order which depends on how they got there.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class SuffixDraft:
    """A chain of drafts: token i follows token `parents[i]` = i - 1. `probs[i]` estimates that tokens 0 to i all come;
    `score` is their sum, the number of drafts that are expected to stand. `match_len` tokens of the context matched."""

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    score: float = 0.0
    match_len: int = 0


class _Node:
    """A token string that occurs in the tree's texts, `count` times. `children` by falling count, one token longer."""

    __slots__ = ("children", "count", "token")

    def __init__(self, token: int):
        self.token, self.count, self.children = token, 0, []

    def child(self, token: int) -> int | None:
        return next((i for i, child in enumerate(self.children) if child.token == token), None)

    def add(self, token: int) -> _Node:
        """Count one more of a child. Among children with its new count it goes last, but first if it was first among
        those with its old one."""
        i = self.child(token)
        if i is None:
            self.children.append(_Node(token))
            i = len(self.children) - 1
        child, rest = self.children[i], self.children
        if child.count and i and rest[i - 1].count <= child.count + 1:
            first = next(j for j, other in enumerate(rest) if other.count == rest[i - 1].count)
            rest.insert(first, rest.pop(i))
        child.count += 1
        return child

    def drop(self, token: int) -> _Node:
        """Count one less of a child. Among children with its new count it goes first; with none left, it goes away."""
        child = self.children.pop(self.child(token))
        at = next((j for j, other in enumerate(self.children) if other.count < child.count), len(self.children))
        child.count -= 1
        if child.count:
            self.children.insert(at, child)
        return child


class _Tree:
    """All strings of up to `depth` tokens in some texts, each as often as it occurs."""

    def __init__(self, depth: int):
        self.depth, self.root, self.texts = depth, _Node(-1), {}
        self._open: dict[int, list[_Node]] = {}  # of each text, the nodes of its last strings, the longest first

    def extend(self, text: int, tokens: Sequence[int]) -> None:
        known, nodes = self.texts.setdefault(text, []), self._open.get(text, [])
        for token in map(int, tokens):
            known.append(token)
            nodes = [node.add(token) for node in [*nodes, self.root][-self.depth :]]
        self._open[text] = nodes

    def remove(self, text: int) -> None:
        self._open.pop(text, None)
        known = self.texts.pop(text, [])
        for start in range(len(known)):
            node = self.root
            for token in known[start : start + self.depth]:
                node = node.drop(token)

    def find(self, tokens: Sequence[int]) -> _Node | None:
        node = self.root
        for token in tokens:
            i = node.child(int(token))
            if i is None:
                return None
            node = node.children[i]
        return node

    def speculate(self, context: Sequence[int], limit: int, factor: float, offset: float, least: float) -> SuffixDraft:
        """The best draft among those after each match of the context's last tokens; the longest match, of equals."""
        best = SuffixDraft()
        for match_len in range(1, len(context)):
            node = self.find(context[len(context) - match_len :])
            if node is None:
                break
            most = int(float(np.float32(match_len) * np.float32(factor) + np.float32(offset)) + 1e-6)
            draft = self._path(node, max(min(limit, most), 0), np.float32(least))
            if draft.score >= best.score:
                best, best.match_len = draft, match_len
        return best

    def _path(self, node: _Node, limit: int, least: np.float32) -> SuffixDraft:
        """The most frequent child, and of that again, while the product of their shares is at least `least`."""
        draft, prob, score = SuffixDraft(), np.float32(1), np.float32(0)
        while len(draft.token_ids) < limit and node.children:
            child = node.children[0]
            prob = prob * (np.float32(child.count) / np.float32(node.count))
            if prob < least:
                break
            score, node = score + prob, child
            draft.parents.append(len(draft.token_ids) - 1)
            draft.token_ids.append(child.token)
            draft.probs.append(float(prob))
        draft.score = float(score)
        return draft


class Reference:
    """A tree of each running request's own text, and one of the responses of running and recent requests.

    Strings have up to `max_tree_depth` tokens. Responses of the latest `max_cached_requests` requests are kept; 0 keeps
    none, and a negative number all of them.
    """

    def __init__(self, max_tree_depth: int = 64, max_cached_requests: int = -1):
        self.max_tree_depth, self.max_cached_requests = max_tree_depth, max_cached_requests
        self._own: dict[Hashable, _Tree] = {}
        self._shared = _Tree(max_tree_depth)
        self._cached: dict[Hashable, int] = {}  # the text of each request in `_shared`, the oldest first
        self._next = 0

    def start_request(self, req_id: Hashable, prompt_token_ids: Sequence[int]) -> None:
        """Begin a request. **Raises:** `ValueError` if it has begun already."""
        if req_id in self._own:
            raise ValueError(f"request {req_id!r} is active already; stop it first")
        self._own[req_id] = _Tree(self.max_tree_depth)
        self._own[req_id].extend(0, prompt_token_ids)
        if self.max_cached_requests == 0:
            return
        if req_id in self._cached:
            self.evict_cached_response(req_id)
        self._cached[req_id] = self._next
        self._next += 1
        while 0 < self.max_cached_requests < len(self._cached):
            self.evict_cached_response(next(iter(self._cached)))

    def add_active_response(self, req_id: Hashable, token_ids: Sequence[int]) -> None:
        """Append to an active request's response. **Raises:** `ValueError` if it isn't active."""
        self._active(req_id).extend(0, token_ids)
        if req_id in self._cached:
            self._shared.extend(self._cached[req_id], token_ids)

    def stop_request(self, req_id: Hashable) -> None:
        """End a request; its response stays cached. **Raises:** `ValueError` if it isn't active."""
        self._active(req_id)
        del self._own[req_id]

    def evict_cached_response(self, req_id: Hashable) -> None:
        """Forget a request's response. **Raises:** `ValueError` if it isn't cached."""
        if req_id not in self._cached:
            raise ValueError(f"the response of request {req_id!r} isn't cached")
        self._shared.remove(self._cached.pop(req_id))

    def speculate(
        self,
        req_id: Hashable,
        context: Sequence[int],
        max_spec_tokens: int | None = None,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
        use_tree_spec: bool = False,
    ) -> SuffixDraft:
        """Draft what follows `context`, of which the last `max_tree_depth` tokens count.

        At most `max_spec_tokens`, and at most `max_spec_factor` times the match's length plus `max_spec_offset`. A
        draft ends where its probability falls below `min_token_prob`. Of equal scores the request's own text wins.

        **Raises:** `ValueError` if the request isn't active, or for `use_tree_spec`: drafts are chains.
        """
        own = self._active(req_id)
        if use_tree_spec:
            raise ValueError("use_tree_spec must be False: suffix drafts are chains here")
        limit = self.max_tree_depth if max_spec_tokens is None else max_spec_tokens
        context = list(context)[-self.max_tree_depth :]
        how = context, limit, max_spec_factor, max_spec_offset, min_token_prob
        mine, shared = own.speculate(*how), self._shared.speculate(*how)
        return mine if mine.score >= shared.score else shared

    def _active(self, req_id: Hashable) -> _Tree:
        if req_id not in self._own:
            raise ValueError(f"request {req_id!r} is not active; start it first")
        return self._own[req_id]
