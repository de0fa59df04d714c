"""Compile grammars where it can be ended: a process that reads the vocabulary once, and forks for each grammar.

`compiler` starts it, with one socket. Over that come the sockets of jobs, one for each grammar. A fork reads a job,
compiles, follows the grammar for some tokens, and answers. The kernel ends it beyond its CPU time, memory, stack or
time. Its exit status follows the answer.

Invariant: this process has no jax, and until it forks one thread, so that a fork is safe and takes milliseconds.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
import resource
import select
import signal
import socket
import struct
import threading
from contextlib import suppress
from functools import partial
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from jaxspec.structured.limits import COMPILE_SECONDS, TooCostly, parser_limits
from jaxspec.structured.source import at_fault, beside_free_text, source

NARROWING_SECONDS = COMPILE_SECONDS / 2  # of CPU time, in which a refused grammar's part at fault is looked for
WALL_SECONDS = 4 * COMPILE_SECONDS  # on a busy machine
STACK_BYTES = 24 * 2**20  # compiling recurses for each rule and property
STEP_STACK_BYTES = 2 * 2**20  # of the library's own threads, which make masks
TRIED_TOKENS = 48  # of a text, to see that it can be followed
STATUS, DONE = struct.Struct("4si"), b"done"  # behind an answer, which may be cut off or missing
PAGE = resource.getpagesize()


def main(end: int) -> None:
    """Serve the process that started this one until it is gone."""
    control = socket.socket(fileno=end)
    with control.makefile("rb") as stream:
        tokenizer, vocab, end_ids, added = pickle.load(stream)
    try:
        vocabulary = LLTokenizer(tokenizer, n_vocab=vocab, eos_token=end_ids)
    except BaseException as error:
        control.sendall(f"unreadable: {error}".encode())
        return
    gc.freeze()
    control.sendall(b"ready")
    _serve(control, vocabulary, added)


def _serve(control: socket.socket, vocabulary: LLTokenizer, added: dict[str, int]) -> None:
    woken, wake = socket.socketpair()
    for each in (woken, wake):
        each.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    jobs: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            with suppress(BlockingIOError):
                woken.recv(4096)
            _reap(jobs)
        if control in ready:
            kind, ends, _, _ = socket.recv_fds(control, 1, 1)
            if not kind:
                return
            job = socket.socket(fileno=ends[0])
            if pid := os.fork():
                jobs[pid] = job
                continue
            status = 1
            try:
                for other in (control, woken, wake, *jobs.values()):
                    other.close()
                _work(job, vocabulary, added)
                status = 0
            finally:
                os._exit(status)


def _reap(jobs: dict[int, socket.socket]) -> None:
    """Tell the status of each fork that has ended."""
    while jobs:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with jobs.pop(pid) as job, suppress(OSError):  # who asked may be gone
            job.sendall(STATUS.pack(DONE, os.waitstatus_to_exitcode(status)))


def _work(job: socket.socket, vocabulary: LLTokenizer, added: dict[str, int]) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with job.makefile("rb") as stream:
        wanted, seconds, most = pickle.load(stream)
    virtual, before = _memory()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (virtual + most, virtual + most))
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    stack = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (stack, hard))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
    began = _cpu_seconds()
    try:
        text = source(wanted)
        if wanted.prefix is not None or wanted.others is not None:
            text = beside_free_text(text, wanted, added)
        matcher = LLMatcher(vocabulary, text, log_level=0, limits=parser_limits(wanted.kind))
        taken = _cpu_seconds() - began
        threading.stack_size(STEP_STACK_BYTES)
        following = threading.Thread(target=_follow, args=(matcher,))
        following.start()
        following.join()
        answer: dict[str, Any] = {"text": text, "seconds": taken, "bytes": max(_memory()[1] - before, 0)}
        if matcher.is_error():
            answer = {"error": matcher.get_error()}
            label, path, why = at_fault(wanted, partial(_refusal, vocabulary, began + NARROWING_SECONDS))
            answer |= {"error": why, "part": f"{label} can't be compiled: at {path}"} if why else {}
    except TooCostly as error:
        answer = {"costly": str(error)}
    except MemoryError:
        os.abort()
    except BaseException as error:  # what a text that isn't a grammar sets off in one of the library's readers
        answer = {"error": str(error)}
    job.sendall(json.dumps(answer).encode())


def _refusal(vocabulary: LLTokenizer, end: float, schema: dict[str, Any]) -> str:
    """The library's reason against a schema; "" if it takes it, or if the CPU time is past `end`."""
    if _cpu_seconds() > end:
        return ""
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return LLMatcher(vocabulary, grammar, log_level=0, limits=parser_limits("json")).get_error()


def _follow(matcher: LLMatcher) -> None:
    """Draw a text of the grammar, for the limits of its steps. The matcher keeps an error."""
    choose = random.Random(0)
    for _ in range(TRIED_TOKENS):
        tokens = matcher.compute_ff_tokens()[:TRIED_TOKENS]
        if not tokens:
            allowed = matcher.compute_bitmask() if not matcher.is_stopped() else b""
            places = [i for i, byte in enumerate(allowed) if byte]
            if not places:
                return
            place = choose.choice(places)
            tokens = [8 * place + choose.choice([bit for bit in range(8) if allowed[place] >> bit & 1])]
        if matcher.try_consume_tokens(tokens) != len(tokens):
            return


def _memory() -> tuple[int, int]:
    """Bytes of address space, and of resident memory that no file holds."""
    with open("/proc/self/statm") as file:
        virtual, resident, of_files = map(int, file.read().split()[:3])
    return virtual * PAGE, (resident - of_files) * PAGE


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
