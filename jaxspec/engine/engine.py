"""The loop: admit requests, plan, dispatch, and read the results of all but the rounds just dispatched.

`Engine` is single-threaded and owns scheduler and runner; `llm` and `async_llm` drive it. Overlap is
nothing but dispatching round n+1 before reading round n. With `disable_overlap` each round is read as
soon as it is dispatched.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import jax
import numpy as np

from jaxspec.compiling.ladder import of_rounds, sizes_of
from jaxspec.compiling.programs import settle
from jaxspec.compiling.round_timing import group
from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.request import REPORTS, Delta, LogitsError, RequestError, RequestMetrics, sources_of
from jaxspec.engine.acceptance_watch import Watch
from jaxspec.engine.adapters import Adapters, present, salt_of
from jaxspec.engine.admission import Choice, Intake, Request
from jaxspec.engine.defaults import here
from jaxspec.engine.pictures import bounded
from jaxspec.engine.rollout import Rollout
from jaxspec.engine.runner import Runner
from jaxspec.engine.stats import Counts, DecodeLog, figures
from jaxspec.engine.tiers import host_cache
from jaxspec.engine.tiers.host_cache import HostCache
from jaxspec.rounds.packing import fit, unpack_logprobs
from jaxspec.rounds.programs import (
    ACCEPTED,
    DONE,
    DRAFTED,
    EMITTED,
    GREEDY,
    LOGPROB_WIDTH,
    LOGPROBS,
    MODES,
    NOT_FINITE,
    TOKENS,
)
from jaxspec.scheduling import skipped_drafts
from jaxspec.scheduling.audit import audit
from jaxspec.scheduling.draft_count import SKIP_DRAFTER, Chooser, Group
from jaxspec.scheduling.prefill_budget import Dispatched, PrefillBudget
from jaxspec.scheduling.scheduler import Scheduler
from jaxspec.scheduling.sequence import Chunk, SequenceState, Status
from jaxspec.structured.grammar import first_masks, round_masks
from jaxspec.text.detokenizer import Detokenizer

log = logging.getLogger("jaxspec")


@dataclass(slots=True)
class InFlight:
    """A dispatched program whose result hasn't been read, and how to read it: `read(program, result, deltas)`."""

    read: Callable[[InFlight, np.ndarray, list[Delta]], None]
    result: jax.Array
    rows: list[tuple[SequenceState, int]]  # with the epoch at dispatch: a later one means the row is nobody's
    mode: str = GREEDY
    chunk: Chunk | None = None  # the part of a prompt that was scored
    drafts: int = 0  # of a round
    group: Group | None = None  # of a round whose drafts were chosen, and may tell how to choose
    dispatched: Dispatched | None = None  # of a round: what was dispatched since the one before it
    started: float = field(default_factory=time.monotonic)  # seconds


class Engine:
    """Serves requests one `step` at a time. Not thread-safe, except `check`, `compiled`, `prepare` and `stats`.

    **Raises:** `ConfigError` or `CheckpointError` when made, for options or files that can't work.
    """

    def __init__(self, options: EngineConfig, model=None, draft=None, staged_start: bool = False, hosts=None):
        self.runner = Runner(options, model, draft, staged_start, hosts)
        self.config = self.runner.config
        self.model_config = self.runner.model.config
        self.tokenizer, self.sampling = self.runner.model.tokenizer, self.runner.model.sampling
        model, reader = self.runner.model, self.runner.model.image_reader
        # Why pictures of requests aren't read, if they aren't, and what reads them.
        self.no_pictures = self.runner.no_pictures or (None if reader else f"{model.name} has no tokenizer")
        self.image_reader = None if self.no_pictures else bounded(reader, model.config.tower)
        shapes, snapshots = self.runner.shapes, self.runner.snapshots
        caches = self.config.host_kv_gb and not self.config.disable_prefix_cache and snapshots != ()
        self.host_cache = HostCache(self.runner, int(self.config.host_kv_gb * 2**30)) if caches else None
        self.scheduler = Scheduler(
            num_slots=shapes.num_slots,
            num_pages=self.runner.plan.num_pages,
            page_size=self.config.page_size,
            width=self.runner.yields,
            lookahead=self.runner.draft.drafter.lookahead,
            chunk_tokens=shapes.chunk,
            block=shapes.block,
            prefills=shapes.prefills,
            score_tokens=shapes.score * shapes.block,
            context_length=self.config.context_length,
            prefix_cache=not self.config.disable_prefix_cache and snapshots != (),
            reach=self.runner.draft.drafter.reach,
            recent=self.runner.draft.drafter.recent,
            replays=self.config.deterministic,
            rounds=self.runner.programs.most_rounds,
            rounds_for=shapes.rounds_for,
            held_tokens=here().held_tokens,
            snapshots=snapshots,
            snapshot_interval=self.config.state_snapshot_interval,
            host=self.host_cache and self.host_cache.tier,
            by_priority=self.config.schedule_policy != "fcfs",
            adapters=self.runner.adapters and self.runner.adapters.places,
            devices=self.runner.by_request,
        )
        if self.host_cache is not None:
            self.host_cache.serves(self.scheduler)
        self.grammars = self.runner.grammars
        intake = Intake(self.runner, self.scheduler)
        self.check, self.compiled, self.prepare = intake.check, intake.compiled, intake.prepare
        self.requests: dict[str, Request] = {}
        self.counts = Counts(self.runner.yields, self.runner.drafts)
        self.chooser = self._chooser()
        self.limit_between(self.config.max_itl_ms)
        self.timeline = None  # the `timeline.Timeline` that records, if one does
        self._read_at = 0.0  # when the last result was read
        self._in_flight: deque[InFlight] = deque()
        self._due = 0  # of them, those to read before anything else is dispatched
        self._damaged: set[int] = set()  # pages that may hold NaN
        self.rollout = Rollout(self)
        self._watch = Watch(self.runner.draft.name, self.runner.model.name, self.runner.draft.card)
        self._decode_log = DecodeLog(self.config.decode_log_interval)
        self.counts.compiles_at_start = self.runner.compiles["compiles"]
        weakref.finalize(self, settle, self.runner)

    def limit_between(self, ms: float | None) -> None:
        """Limit the time between two rounds from now on; None: there is no limit."""
        self.prefill_budget = PrefillBudget(ms and ms / 1e3, self.runner.shapes.block, self.runner.shapes.prefills)
        self.scheduler.unread = self.runner.unread if ms else lambda _: False

    def _chooser(self) -> Chooser | None:
        runner = self.runner
        longest = {drafts: runner.yields_of(drafts) - 1 for drafts in runner.drafts}
        return Chooser(longest, runner.round_times, dict(runner.shapes.ragged)) if runner.round_times else None

    def complete_start(self) -> None:
        """End a start in stages, if all programs are there. Without a request if rounds are still to be timed."""
        used = self.requests or self._in_flight or self.rollout.stopped
        if self.runner.starting and self.runner.complete_start(None if used else self.scheduler.flush):
            self.chooser, self.scheduler.rounds = self._chooser(), self.runner.programs.most_rounds
            self.counts.compiles_at_start = self.runner.compiles["compiles"]

    @property
    def busy(self) -> bool:
        """Whether a step has something to do."""
        copies = self.host_cache is not None and self.host_cache.busy
        return bool(self._in_flight or (not self.rollout.stopped and (self.requests or self.rollout.due or copies)))

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Token ids of the vocabulary that end a text, by the model's config and its tokenizer."""
        return self.runner.model.eos_ids

    def add(self, request: Request) -> None:
        """Queue a prepared request.

        **Raises:** `RequestError` if its id is in use.
        """
        if request.id in self.requests:
            raise RequestError(f"request id {request.id!r} is in use", "request_id")
        params = request.params
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None] * len(request.tokens)
        high_first = self.config.schedule_policy == "priority-high-first"
        for index in range(params.n):  # all of them are made before the scheduler sees one
            seq = SequenceState(list(request.tokens), len(request.tokens), request.limit, client=request.client)
            seq.priority = -request.priority if high_first else request.priority
            seq.score = request.prompt_logprobs is not None and index == 0
            if request.pictures is not None:
                seq.pictures, seq.overridden = request.pictures, request.pictures.keys
                seq.whole = request.pictures.spans if self.runner.model.config.tower.mutual else ()
            seq.adapter, seq.salt = request.adapter, salt_of(request.adapter, params.cache_salt)
            seq.stepwise, seq.fixed_drafts = request.matchers is not None, request.fixed_drafts
            how = {"min_tokens": params.min_tokens, "prompt_ids": request.tokens, "kept": params.kept_special_tokens}
            how |= {"skip_special_tokens": params.skip_special_tokens, "keep_stop": params.include_stop_str_in_output}
            detokenizer = Detokenizer(self.tokenizer, params.stop, **how) if self.tokenizer else None
            metrics = RequestMetrics(prompt_tokens=len(request.tokens), acceptance_histogram=[0] * self.runner.yields)
            choice = Choice(request, index, seq, detokenizer, metrics)
            if request.matchers is not None:
                choice.matcher = request.matchers[index]
            seq.owner = choice
            request.choices.append(choice)
        self.requests[request.id] = request
        self.rollout.enter(request)
        totals, pictures = self.counts.totals, request.pictures
        totals["prompt_tokens"] += len(request.tokens) * params.n
        if pictures is not None:
            totals["images"] += len(pictures.pictures) * params.n
            totals["image_tokens"] += len(pictures.keys) * params.n

    def abort(self, request_id: str) -> list[Delta]:
        """End a request at once; its slots and pages are free. Unknown ids are ignored."""
        request = self.requests.get(request_id)
        return [] if request is None else [self._finish(c, "abort") for c in self._leaving(request)]

    def _leaving(self, request: Request) -> list[Choice]:
        """The unfinished completions of a request, which doesn't stand in line any more."""
        unfinished = request.unfinished
        self.rollout.leave(request)
        return unfinished

    def step(self) -> list[Delta]:
        """Read what is due, or plan and dispatch one step before; return what the requests gained.

        The results of one dispatch are due at the next. They come one after the other, so that a round's tokens, say,
        aren't held back by the prompts behind it: a step waits for the first alone, and the next one goes on there.

        One that raises leaves no program running.
        """
        deltas, began, waited = [], time.monotonic(), False
        try:
            prompts = 0 if self._due else self._dispatch(deltas, began)
            while self._due and not (waited and not self._in_flight[0].result.is_ready()):
                self._due, waited = self._due - 1, True
                self._read(deltas, keep=len(self._in_flight) - 1)
        except Exception:
            settle(self.runner)
            raise
        if moved := prompts + sum(len(delta.token_ids) for delta in deltas):
            self.counts.step_tokens.observe(moved)
        if self.timeline is not None:
            self.timeline.step(began, prompts, deltas)
        return deltas

    def _dispatch(self, deltas: list[Delta], began: float) -> int:
        """Plan and dispatch one step: how many prompt tokens it has. All but its last result is due, or that too."""
        if not self.rollout.move():
            self._due = len(self._in_flight)
            return 0
        if self._damaged:
            self._clear_damaged()
        if self.host_cache is not None:
            self._move_cache()
        self.scheduler.between = self.prefill_budget.tokens()
        read_all = lambda: self._read(deltas, keep=0)  # noqa: E731
        skipped_drafts.renew(self.chooser, self.scheduler, self.prefill_budget.token, read_all)
        while (plan := self.scheduler.plan()).drain:
            self._read(deltas, keep=0)
        if self.host_cache is not None:
            self.host_cache.store(plan.admit)
        table = self.scheduler.table
        prompts = sum(chunk.count for chunk in plan.prefill)
        if plan.reads is not None:
            self.runner.read_pictures(plan.reads)
        if plan.prefill:  # first, so that the device is at work while slots are set up
            self.prefill_budget.prompts(sum(len(chunk.blocks(self.scheduler.block)) for chunk in plan.prefill), began)
            scored = self.runner.prefill(plan.prefill, table)
            if scored is not None:
                (chunk,) = plan.prefill
                self._put_in_flight(self._read_score, scored, [chunk.seq], chunk=chunk)
        for seq in plan.admit:
            self._admit(seq)
        if plan.first:
            self._first(plan.first, table)
        if plan.rows:
            self._round(plan.rows, plan.rounds, table, deltas)
        overlap = bool(plan.rows or plan.first) and not self.config.disable_overlap
        self._due = max(len(self._in_flight) - overlap, 0)
        return prompts

    def _move_cache(self) -> None:
        """Go on with what comes from the host. Wait for it where there is nothing else to do."""
        scheduler, cache = self.scheduler, self.host_cache
        cache.tier.token = self.prefill_budget.token
        idle = not (self._in_flight or scheduler.running or scheduler.prefilling)
        for seq in cache.move(idle):
            scheduler.landed(seq)
            self._note_cached(seq)

    def _first(self, seqs: list[SequenceState], table: np.ndarray) -> None:
        mode, slots = _mode(seqs), [seq.slot for seq in seqs]
        if not _constrained(seqs):
            mode = self.runner.mode_of_first(mode, slots)
            self._put_in_flight(self._read_first, self.runner.first(slots, table, mode), seqs, mode)
            return
        masks = first_masks([seq.owner.matcher for seq in seqs], self.runner.width, self.model_config.vocab_size)
        for seq in seqs:
            if seq.owner.matcher is not None:
                seq.owner.matcher.epoch = seq.epoch
        self._put_in_flight(self._read_first, self.runner.masked_first(slots, table, *masks), seqs, LOGPROBS)

    def _round(self, seqs: list[SequenceState], rounds: int, table: np.ndarray, deltas: list[Delta]) -> None:
        """Dispatch a round. With grammars it takes three programs, and the masks are made behind the second."""
        mode, slots = _mode(seqs), [seq.slot for seq in seqs]
        dispatched = self.prefill_budget.round(time.monotonic(), rounds, self.runner.encoded)
        if not _constrained(seqs):
            mode = self.runner.mode_of_round(mode, slots, rounds)
            started, (drafts, chosen) = time.monotonic(), self._choose(seqs, mode, rounds)
            result = self.runner.round(slots, table, mode, rounds, drafts)
            self._in_flight.append(
                InFlight(self._read_rounds, result, _rows(seqs), mode, None, drafts, chosen, dispatched, started)
            )
            return
        mode = self.runner.mode_of_open_round(mode, slots)
        opened = self.runner.open_round(slots, table, mode, [self._forced(seq) for seq in seqs])
        rows = _rows(seqs)
        self._read(deltas, keep=0)  # while the device runs the forward: matchers are to stand where it starts
        matchers = [seq.owner.matcher if seq.epoch == epoch else None for seq, epoch in rows]
        masks = round_masks(matchers, np.asarray(opened.drafts), self.runner.width, self.model_config.vocab_size)
        result = self.runner.close_round(opened, *masks)
        self._in_flight.append(
            InFlight(self._read_rounds, result, rows, mode, None, self.runner.drafts[-1], None, dispatched)
        )

    def _choose(self, seqs: list[SequenceState], mode: str, rounds: int) -> tuple[int, Group | None]:
        """How many drafts a round has, and the group of programs it was chosen from; None if there was no choice.

        Where a drafter gives probabilities, sampled text depends on how many drafts there are, though its distribution
        doesn't. So none is chosen beside a request that samples under a seed: its text must not depend on the load. Nor
        beside one that asks for `fixed_drafts`.
        """
        if self.chooser is None or any(seq.owner.request.fixed_drafts for seq in seqs):
            return self.runner.drafts[-1], None
        name, rows = of_rounds(rounds), self.runner.rows_for([seq.slot for seq in seqs])
        chosen = group(name, mode, fit(rows, sizes_of(self.runner.shapes, name, mode)))
        return skipped_drafts.choose(self.chooser, chosen, seqs, self.scheduler.trees[0].reach), chosen

    def _forced(self, seq: SequenceState) -> list[int] | None:
        """The drafts that a grammar forces next, if the device doesn't know them. It knows them from a slot's first
        round or token on, until the slot is lost."""
        matcher = seq.owner.matcher
        if matcher is None:
            return []
        if matcher.epoch == seq.epoch:
            return None
        matcher.epoch = seq.epoch
        return matcher.forced_next(self.runner.width - 1)

    def _put_in_flight(
        self, read: Callable, result: jax.Array, seqs: list[SequenceState], mode=GREEDY, chunk=None
    ) -> None:
        self._in_flight.append(InFlight(read, result, _rows(seqs), mode, chunk))

    def _admit(self, seq: SequenceState) -> None:
        choice: Choice = seq.owner
        request = choice.request
        if seq.status is Status.WAITING:  # its load failed at once
            return
        self.runner.admit(seq, request.params, request.seed + choice.index, list(request.stop_ids))
        if not seq.preemptions:
            choice.metrics.queue = time.monotonic() - request.added
        if seq.status is not Status.LOADING:
            self._note_cached(seq)

    def _note_cached(self, seq: SequenceState) -> None:
        """Note how much of a prompt was cached, once all of that is on the device."""
        if not seq.preemptions:
            metrics, totals = seq.owner.metrics, self.counts.totals
            metrics.cached_tokens, metrics.cached_on_host = seq.cached, seq.from_host
            metrics.cached_on_disk = seq.from_disk
            totals.update(cached_tokens=seq.cached, host_cached_tokens=seq.from_host, disk_cached_tokens=seq.from_disk)

    def _read(self, deltas: list[Delta], keep: int) -> None:
        while len(self._in_flight) > keep:
            program = self._in_flight.popleft()
            result, now = np.asarray(program.result), time.monotonic()
            if program.dispatched is not None:
                self.prefill_budget.read(program.dispatched, now)
            if program.group is not None and program.dispatched.alone:
                self.chooser.took(program.group, program.drafts, now - max(self._read_at, program.started))
            self._read_at = now
            program.read(program, result, deltas)
        if self._decode_log.due(idle=not self.scheduler.unfinished):
            self._decode_log.write(self.counts.totals, self.scheduler)

    def read_all(self, deltas: list[Delta]) -> None:
        """Read the results of all that was dispatched."""
        self._read(deltas, keep=0)
        self._due = 0

    def _read_first(self, program: InFlight, result: np.ndarray, deltas: list[Delta]) -> None:
        for choice, rows, logprobs in self._live(program, result[None], 1):
            deltas.append(self._take(choice, rows, logprobs))

    def _read_rounds(self, program: InFlight, result: np.ndarray, deltas: list[Delta]) -> None:
        rounds = result.reshape(-1, *result.shape[-2:])
        live = Counter()  # by round of the program, requests that hadn't ended before it
        yielded = Counter()  # by how many tokens, rows that may have had drafts
        for choice, rows, logprobs in self._live(program, rounds, self.runner.yields_of(program.drafts)):
            ended = next((i for i, row in enumerate(rows) if row[DONE]), len(rows) - 1)
            rows = rows[: ended + 1]  # the program's later rounds ran for nobody
            for i, row in enumerate(rows):
                self._count(choice.metrics, row[ACCEPTED], row[DRAFTED])
                live[i] += 1
                yielded[row[ACCEPTED]] += choice.request.params.speculative and choice.seq.drafter_seen is None
            deltas.append(self._take(choice, rows, logprobs, len(rounds)))
        self.counts.totals["rounds"] += len(rounds)
        self.counts.rounds_by_drafts[max(program.drafts, 0)] += len(rounds)
        self.counts.totals["rested_rounds"] += len(rounds) * (program.drafts == SKIP_DRAFTER)
        if program.group is not None:
            self.chooser.accepted(program.drafts, yielded)
        for i in range(len(rounds)):
            self._decode_log.count(live[i], program.started)

    def _live(self, program: InFlight, rounds: np.ndarray, width: int) -> list[tuple[Choice, list[list[int]], Any]]:
        """The rows of a program that still belong to a request: the request, its row of each round, its packed
        logprobs."""
        logprobs = [None] * len(program.rows)
        if program.mode == LOGPROBS:
            logprobs = rounds[..., TOKENS + width :].reshape(*rounds.shape[:2], width, LOGPROB_WIDTH).swapaxes(0, 1)
        requests = rounds[:, : len(program.rows), : TOKENS + width].swapaxes(0, 1).tolist()
        return [
            (seq.owner, rows, logprobs[i])
            for i, ((seq, epoch), rows) in enumerate(zip(program.rows, requests, strict=True))
            if seq.epoch == epoch  # otherwise it finished, or was preempted, after this program was dispatched
        ]

    def _take(self, choice: Choice, rows: list[list[int]], logprobs: np.ndarray | None, rounds: int = 1) -> Delta:
        """Give a request the tokens of its rows, those of `rounds` rounds in program."""
        tokens = [token for row in rows for token in row[TOKENS : TOKENS + row[EMITTED]]]
        known = self.scheduler.append(choice.seq, tokens, rounds)
        if rows[-1][DONE] == NOT_FINITE:
            return self._fail(choice)
        choice.seq.score = False
        entries, wanted = None, choice.request.params.logprobs
        if wanted is not None:
            packed = np.concatenate([each[: row[EMITTED]] for each, row in zip(logprobs, rows, strict=False)])
            entries = unpack_logprobs(packed, tokens, wanted)[known:]
        tokens = tokens[known:]
        try:
            if choice.matcher is not None:
                self.counts.totals["forced_tokens"] += choice.matcher.advance(tokens)
            delta = self._advance(choice, tokens, entries, bool(rows[-1][DONE]))
        except Exception as error:  # of this text alone, a tokenizer's for example: other requests go on
            log.error("request %s failed while its text was made; others go on", choice.request.id, exc_info=error)
            choice.detokenizer = None
            delta = self._finish(choice, "error")
            delta.error = error
        if choice.request.params.token_sources:
            sources = [sources_of(row[EMITTED], row[ACCEPTED], row[DRAFTED]) for row in rows]
            delta.token_sources = list(chain(*sources))[known:][: len(delta.token_ids)]
        return delta

    def _fail(self, choice: Choice) -> Delta:
        """End a completion whose logits aren't finite numbers."""
        error = LogitsError(
            f"the model's logits after {len(choice.seq.tokens)} tokens, the prompt's included, are NaN or infinite. "
            "Its weights may be damaged, or too large for its dtype (see --dtype)"
        )
        log.error("request %s failed: %s; other requests go on", choice.request.id, error)
        self.counts.totals["nonfinite"] += 1
        self.scheduler.flush()  # or others would find pages of these tokens
        self._damaged.update(choice.seq.pages)
        choice.detokenizer = None
        delta = self._finish(choice, "error")
        delta.error = error
        self._clear_damaged()
        return delta

    def _clear_damaged(self) -> None:
        """Clear the damaged pages that nobody holds any more, before they have another owner."""
        free = [page for page in self._damaged if not self.scheduler.device.holders(page)]
        self._damaged.difference_update(free)
        self.runner.clear(free)

    def _count(self, metrics: RequestMetrics, accepted: int, drafted: int) -> None:
        metrics.verify_rounds += 1
        metrics.verified_tokens += accepted
        if drafted:
            metrics.drafted_tokens += drafted
            metrics.acceptance_histogram[accepted - 1] += 1
        self._watch.count(accepted, drafted, first=metrics.verify_rounds == 1)
        self.counts.verified(accepted, drafted)

    def _read_score(self, program: InFlight, result: np.ndarray, deltas: list[Delta]) -> None:
        ((seq, epoch),) = program.rows
        if seq.epoch != epoch:
            return
        request, after = seq.owner.request, program.chunk.start + 1
        tokens = request.tokens[after : after + program.chunk.count]  # the token after the prompt isn't the prompt's
        rows = result.reshape(-1, LOGPROB_WIDTH)[: len(tokens)]
        if np.isnan(rows[:, 0].view(np.float32)).any():
            deltas.append(self._fail(seq.owner))
            return
        request.prompt_logprobs[after : after + len(tokens)] = unpack_logprobs(
            rows, tokens, request.params.prompt_logprobs
        )

    def _advance(self, choice: Choice, tokens: list[int], entries: list | None, done: bool) -> Delta:
        """Turn new tokens into a delta: text, stop strings, and the end if it has come."""
        metrics, request = choice.metrics, choice.request
        if metrics.ttft is None:
            metrics.ttft = time.monotonic() - request.added
        stop_token = tokens[-1] if done and tokens[-1] in request.stop_ids else None
        text, stop, used = "", None, len(tokens)
        if choice.detokenizer is not None:
            hidden = stop_token is not None and not request.params.include_stop_str_in_output
            text, stop, used = choice.detokenizer.push(tokens[:-1] if hidden else tokens)
        if stop is not None:
            tokens, entries = tokens[:used], entries and entries[:used]
        metrics.output_tokens += len(tokens)
        self.counts.totals["generation_tokens"] += len(tokens)
        if stop is None and not done:
            delta = Delta(request.id, choice.index, text, tokens, entries)
        else:
            ended = stop is not None or stop_token is not None
            reason = stop if stop is not None else stop_token if stop_token not in self.eos_ids else None
            delta = self._finish(choice, "stop" if ended else "length", reason, text, tokens, entries)
        if not choice.answered and choice.index == 0:
            delta.prompt_logprobs = request.prompt_logprobs
        choice.answered = True
        return delta

    def _finish(self, choice: Choice, why: str, reason=None, text: str = "", tokens=(), entries=None) -> Delta:
        request, metrics = choice.request, choice.metrics
        hidden_states, routed_experts = self._reported(choice)
        self.scheduler.finish(choice.seq)
        if choice.detokenizer is not None:
            text += choice.detokenizer.finish()
        if choice.matcher is not None:
            choice.matcher.close()
        metrics.latency = time.monotonic() - request.added
        metrics.preemptions, metrics.weight_version = choice.seq.preemptions, self.rollout.version
        self.counts.finished[why] += 1
        if not request.unfinished:
            self.requests.pop(request.id, None)
        rows = {"hidden_states": hidden_states, "routed_experts": routed_experts}
        return Delta(request.id, choice.index, text, list(tokens), entries, why, reason, metrics, **rows)

    def _reported(self, choice: Choice) -> list[np.ndarray | None]:
        """The rows that a completion's request asks for, `REPORTS`, as far as there are any yet."""
        params, seq = choice.request.params, choice.seq
        if not any(getattr(params, name) for name in REPORTS):
            return [None, None]
        there = {Status.PREFILL: seq.computed, Status.RUNNING: len(seq.tokens) - 1}.get(seq.status, 0)
        count = min(there, seq.prompt_len + max(choice.metrics.output_tokens - 1, 0))
        rows = self.runner.reported(seq.pages, count)
        return [rows if getattr(params, name) else None for name, rows in zip(REPORTS, rows, strict=True)]

    @property
    def adapters(self) -> Adapters:
        """The adapters that requests may have. **Raises:** `ConfigError` if there is no room for any."""
        return present(self.runner.adapters)

    def flush_cache(self) -> bool:
        """Empty the prefix tree. False, and nothing done, while requests run; in a pause, while any keeps its pages."""
        paused = self.rollout.stopped and not self.scheduler.admitted
        if self.requests and not paused:
            return False
        self.scheduler.flush()
        return True

    def recover(self) -> None:
        """Restart after a step that raised: drop all requests, empty the prefix tree, make the device's state again.

        The program that failed may have consumed the state, and later programs may have written anything.

        **Raises:** whatever the device raises if it can't be used any more; `RuntimeError` if pages don't balance.
        """
        self._in_flight.clear()
        self._due = 0
        self._damaged.clear()
        self.scheduler.flush()  # first, so that no sequence publishes pages whose prefill may not have run
        for request in self.requests.values():
            for choice in self._leaving(request):
                self.scheduler.finish(choice.seq)
                self.counts.finished["error"] += 1
        self.requests.clear()
        audit(self.scheduler)
        if (adapters := self.runner.adapters) is not None:  # the failed step may have consumed their arrays
            adapters.reset()
            self.scheduler.adapters = adapters.places
            self.runner.set_weights(self.runner.model, self.runner.draft)
        if self.host_cache is not None:
            self.host_cache.reset()
        self.runner.reset()

    def stats(self) -> dict[str, Any]:
        """Figures since start, cheap, from any thread."""
        own = figures(self.counts, self.scheduler, self.runner, self.chooser)
        return own | host_cache.stats(self.host_cache) | self.rollout.figures()


def _mode(seqs: list[SequenceState]) -> str:
    """The cheapest mode that serves them all."""
    return max((seq.owner.request.mode for seq in seqs), key=MODES.index)


def _constrained(seqs: list[SequenceState]) -> bool:
    return any(seq.owner.matcher is not None for seq in seqs)


def _rows(seqs: list[SequenceState]) -> list[tuple[SequenceState, int]]:
    """Sequences with their epochs now."""
    return [(seq, seq.epoch) for seq in seqs]
