"""Options that ask for more memory than there is are refused in a line, before or after something is allocated."""

import jax
import pytest

from jaxspec import LLM, ConfigError
from jaxspec.cache import memory_check
from jaxspec.cache.memory_plan import MemoryPlan
from jaxspec.config.engine_config import EngineConfig
from tests.support.engines import OPTIONS, checkpoint

GIB = 2**30
FULL = "RESOURCE_EXHAUSTED: Out of memory allocating 68719476736 bytes."


def plan(**changes):
    """A plan of 8 GiB, of which 4 are 64 Ki tokens, the dummy page's included."""
    parts = {"weight_bytes": GIB, "draft_weight_bytes": GIB, "slot_bytes": GIB, "workspace_bytes": GIB}
    kv = {"kv_bytes": 4 * GIB, "tokens": 2**16 - 16, "page_size": 16}
    return MemoryPlan(**{"device_bytes": None} | parts | kv | changes)


def refusal(config, made, memory, monkeypatch):
    monkeypatch.setattr(memory_check, "host_memory", lambda: int(memory))
    with pytest.raises(ConfigError) as error:
        memory_check.check_room(made, config)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_what_just_fits_is_taken(monkeypatch):
    monkeypatch.setattr(memory_check, "host_memory", lambda: 8 * GIB)
    memory_check.check_room(plan(), EngineConfig())
    assert "has 8.00 GiB" in refusal(EngineConfig(), plan(workspace_bytes=GIB + 1), 8 * GIB, monkeypatch)


def test_too_many_tokens_are_refused_with_those_that_fit(monkeypatch):
    given = EngineConfig(max_total_tokens=2**16)
    message = refusal(given, plan(), 6 * GIB, monkeypatch)
    most = 2**15 - 16  # the half of the pool, less the dummy page
    assert message.startswith("--max-total-tokens 65536 does not fit: it makes 8.00 GiB in all, weights 2.00 GiB, KV")
    assert message.endswith(f"and this machine has 6.00 GiB. Set --max-total-tokens to {most} or less")
    memory_check.check_room(plan(kv_bytes=2 * GIB, tokens=most), given)


def test_too_many_requests_are_refused(monkeypatch):
    given = EngineConfig(draft="ngram", max_running_requests=10**6, context_length=99, num_draft_tokens=4)
    message = refusal(given, plan(slot_bytes=100 * GIB), 6 * GIB, monkeypatch)
    assert message.startswith("--max-running-requests 1000000 with --context-length 99 does not fit: it makes 107.00")
    assert "request slots 100.00 GiB" in message and "--num-draft-tokens (now 4)" in message


def test_several_devices_of_one_host_share_its_memory(monkeypatch):
    assert "has 4.00 GiB" in refusal(EngineConfig(), plan(devices=2), 8 * GIB, monkeypatch)


def test_a_devices_own_memory_counts_where_it_tells(monkeypatch):
    monkeypatch.setattr(memory_check, "device_memory", lambda devices: (10 * GIB, 7 * GIB))
    assert "and the device has 7.00 GiB" in refusal(EngineConfig(), plan(device_bytes=10 * GIB), GIB, monkeypatch)


def test_a_container_has_its_limit(monkeypatch, tmp_path):
    monkeypatch.setattr(memory_check, "LIMITS", (tmp_path / "none",))
    whole = memory_check.host_memory()
    assert whole > 2**28
    for text, has in ((f"{2**27}\n", 2**27), ("max\n", whole), (str(2**63 - 1), whole)):
        (tmp_path / "limit").write_text(text)
        monkeypatch.setattr(memory_check, "LIMITS", (tmp_path / "none", tmp_path / "limit"))
        assert memory_check.host_memory() == has


@pytest.mark.parametrize(
    ("option", "value"), [("max_total_tokens", 99_999_999_999), ("max_running_requests", 2_000_000_000)]
)
def test_an_engine_that_cannot_fit_does_not_start(option, value):
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} {value} .*does not fit"):
        LLM(checkpoint(), "ngram", **OPTIONS | {option: value})


def test_memory_that_runs_out_at_start_is_told(monkeypatch):
    """The device's, that of a plan that seemed to fit."""
    monkeypatch.setattr(memory_check, "host_memory", lambda: 2**80)
    with pytest.raises(ConfigError, match=r"memory ran out while the engine.*--max-total-tokens \(now 20000000"):
        LLM(checkpoint(), "ngram", **OPTIONS | {"max_total_tokens": 20_000_000_000})


@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError(FULL), MemoryError("Unable to allocate 149. GiB")])
def test_only_a_lack_of_memory_is_told_as_one(error):
    with (
        pytest.raises(ConfigError, match=r"needs 8\.00 GiB") as told,
        memory_check.explain_out_of_memory(plan(), EngineConfig()),
    ):
        raise error
    assert told.value.__cause__ is error
    other = jax.errors.JaxRuntimeError("INTERNAL: something else")
    with (
        pytest.raises(jax.errors.JaxRuntimeError, match="something else"),
        memory_check.explain_out_of_memory(plan(), EngineConfig()),
    ):
        raise other


@pytest.mark.parametrize("drafts", [192, 100_000])
def test_a_draft_is_shorter_than_the_context(drafts):
    with pytest.raises(ConfigError, match=f"--num-draft-tokens {drafts}: .*--context-length 192. Give 191 or less"):
        LLM(checkpoint(), "ngram", **OPTIONS | {"num_draft_tokens": drafts})
