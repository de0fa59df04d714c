"""Recordings of an engine: its programs in order, its steps, and the gains of each request."""

import json
import sys
from itertools import pairwise

import pytest

from jaxspec import SamplingParams
from jaxspec.engine.timeline import FIRST, PROMPTS, ROUNDS, Timeline
from tests.support.engines import engine, idle


@pytest.fixture(scope="module")
def recorded():
    """Five requests for three slots, and the recording of them."""
    core = engine("ngram").engine
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    prompts = [[3 + i] * (20 + 30 * i) for i in range(5)]
    requests = [core.prepare(prompt, params, f"r{i}") for i, prompt in enumerate(prompts)]
    switch = sys.getswitchinterval()
    timeline = Timeline(core)
    timeline.start()
    with pytest.raises(RuntimeError, match="recorded already"):
        Timeline(core).start()
    for request in requests[:4]:
        core.add(request)
    while core.busy:
        core.step()
    core.add(requests[4])
    core.step()  # its prompt is being computed when the recording ends
    recording = timeline.stop()
    assert core.timeline is core.runner.programs.watch is None
    assert sys.getswitchinterval() == pytest.approx(switch, abs=2e-6)  # Python keeps whole microseconds
    core.abort("r4")
    while core.busy:
        core.step()
    idle(core)
    return recording


def test_programs_come_in_order_and_never_at_once(recorded):
    programs = recorded.programs
    assert {p.what for p in programs} == {PROMPTS, FIRST, ROUNDS}
    for one, other in pairwise(programs):
        assert one.called <= other.called and one.began <= one.ended <= other.began
    for p in programs:
        assert recorded.began <= p.called <= p.began and 0 < p.rows <= p.size
    assert max(p.rows for p in programs if p.what == ROUNDS) == 3 == max(p.running for p in programs)
    assert max(p.waiting for p in programs) > 0


def test_all_prompt_tokens_and_all_new_ones_are_in_it(recorded):
    assert sum(p.tokens for p in recorded.programs) == sum(20 + 30 * i for i in range(4)) + 64  # a program of the last
    assert sum(step.prompt_tokens for step in recorded.steps) == sum(p.tokens for p in recorded.programs)
    assert sum(step.gained for step in recorded.steps) == 4 * 9
    for i in range(4):
        track = recorded.tracks[f"r{i}"]
        assert track.prompt_tokens == 20 + 30 * i and sum(gain.tokens for gain in track.gains) == 9
        assert track.added <= track.admitted <= track.gains[0].time
        assert [gain.reason for gain in track.gains[-2:]] == [None, "length"]
    assert recorded.tracks["r4"].admitted and not recorded.tracks["r4"].gains


def test_a_trace_has_a_track_for_each_request(recorded):
    trace = json.loads(json.dumps(recorded.trace()))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert [names[3, i] for i in range(5)] == ["r0", "r1", "r2", "r3", "r4"] and {(1, 0), (2, 0)} < set(names)
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 and (event["pid"], event["tid"]) in names for event in slices)
    mine = [event["name"] for event in slices if (event["pid"], event["tid"]) == (3, 1)]
    assert mine[:2] == ["waits", "prompt"] and mine[-1] == "length" and len(mine) > 3
    assert [event["name"] for event in slices if (event["pid"], event["tid"]) == (3, 4)] == ["waits", "prompt"]
    assert sum(event["pid"] == 1 for event in slices) == len(recorded.programs)
    assert {event["name"] for event in trace["traceEvents"] if event["ph"] == "C"} == {"running", "waiting"}


def test_a_full_recording_ends_itself(monkeypatch):
    monkeypatch.setattr("jaxspec.engine.timeline.MOST", 3)
    core = engine("ngram").engine
    timeline = Timeline(core)
    timeline.start()
    core.add(core.prepare([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)))
    while core.busy:
        core.step()
    assert core.timeline is None
    recording = timeline.stop()
    assert recording.full and recording.programs and recording.trace()["otherData"] == {"full": True}
