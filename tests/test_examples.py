"""The examples run, the drafter among them is what it claims (short, lossless, better the second time), and what the
README and docs/ say of flags, drafters, files and tests is so.
"""

import ast
import dataclasses
import importlib.util
import inspect
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from examples.markov import Markov
from jaxspec import LLM, SamplingParams, load_model
from jaxspec.cache.paged import Rows
from jaxspec.config.engine_config import SERVER_DEFAULTS, EngineConfig
from jaxspec.config.options import flag
from jaxspec.drafters.base import DraftBatch, PrefillBatch, Verified
from jaxspec.drafters.registry import DRAFTERS
from jaxspec.models.families import MODELS
from jaxspec.train import loop
from jaxspec.train.objective import Objective
from server.cli.options import make_parser
from tests.support.engines import assert_own
from tests.support.tiny import tiny_checkpoint

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
README = (ROOT / "README.md").read_text()
FLAGS = (ROOT / "docs" / "flags.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
DESIGN = (ROOT / "docs" / "design.md").read_text()
PAGES = sorted(str(page.relative_to(ROOT)) for pattern in ("*.md", "docs/**/*.md") for page in ROOT.glob(pattern))
GUIDES = [page for page in PAGES if "adding" in page]
OPTIONS = {
    "page_size": 8,
    "context_length": 128,
    "max_running_requests": 2,
    "skip_warmup": True,
    "few_programs": True,
    "chunked_prefill_size": 64,
    "prefill_sizes": "64",
}
NAMED = re.compile(r"\bdocs/[\w/-]+\.md")
VOCAB = 272
DRAFT = "examples.markov:Markov"
PROMPTS = [np.random.default_rng(n).integers(0, 256, n).tolist() for n in (1, 3, 9, 40)]


@pytest.fixture(scope="module")
def folder():
    return str(tiny_checkpoint("qwen3", VOCAB, 5, tokenizer=True, num_hidden_layers=1))


@pytest.fixture(scope="module")
def plain(folder):
    return LLM(folder, "none", **OPTIONS)


@pytest.fixture(scope="module")
def markov(folder):
    return LLM(folder, DRAFT, num_draft_tokens=4, **OPTIONS)


def test_a_drafter_fits_in_100_lines():
    assert len((EXAMPLES / "markov.py").read_text().splitlines()) < 100


def test_markov_is_lossless_and_learns(markov):
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    first, second = markov.generate(PROMPTS, greedy), markov.generate(PROMPTS, greedy)
    assert_own(markov.engine.runner.model, first)
    assert [out.token_ids for out in second] == [out.token_ids for out in first]
    # 24 tokens are five rounds when every draft is accepted, save where the same four tokens went on in two ways.
    rounds = [[out.metrics.verify_rounds for out in outs] for outs in (first, second)]
    assert min(rounds[0]) > 15 and min(rounds[1]) == 5 and max(rounds[1]) < 9


@pytest.mark.exhaustive
def test_markov_leaves_seeded_text_as_it_is(plain, markov):
    sampled = SamplingParams(temperature=0.8, top_k=8, seed=3, max_tokens=24, ignore_eos=True)
    again = [markov.generate(PROMPTS, sampled) for _ in range(2)][1]
    assert [out.token_ids for out in again] == [out.token_ids for out in plain.generate(PROMPTS, sampled)]
    assert all(out.metrics.accept_length > 4 for out in again)


def draft_after(drafter, table, *texts):
    """Draft after each of some texts of equal length."""
    length = jnp.full(len(texts), len(texts[0]))
    batch = DraftBatch(None, length, jnp.array(texts), None, length > 0, None, greedy=True)
    proposal, _ = jax.jit(drafter.propose)({}, table, batch)
    return batch, [tokens[:count].tolist() for tokens, count in zip(proposal.tokens, proposal.count, strict=True)]


def test_markov_learns_what_a_round_yielded_and_no_more():
    drafter = Markov(vocab_bits=9, table_bits=12, contexts=(3, 2))
    empty = drafter.init_state(None, 0)
    batch, proposed = draft_after(drafter, empty, [0, 1, 2], [0, 3, 4])
    assert proposed == [[], []]
    outputs = jnp.array([[5, 6, 7], [8, 9, 10]])
    verified = Verified(outputs, outputs, jnp.array([2, 0]), ())  # the second request had ended
    table = jax.jit(drafter.commit)({}, empty, batch, verified)
    assert draft_after(drafter, table, [0, 1, 2], [0, 3, 4])[1] == [[5, 6], []]
    assert draft_after(drafter, table, [9, 1, 2])[1] == [[5, 6]], "the shorter context is the fallback"
    assert draft_after(drafter, table, [9, 9, 2])[1] == [[]]
    assert int((table > 0).sum()) == 2 * 2


def test_markov_learns_from_prompts():
    drafter = Markov(vocab_bits=9, table_bits=12, contexts=(2,))
    text = jnp.array([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]])
    rows = Rows(jnp.array([0, 0]), jnp.array([5, 3]), None)  # of the second block, three positions are real
    batch = PrefillBatch(None, text[:, :-1], text[:, 1:], rows)
    table = jax.jit(drafter.prefill)({}, drafter.init_state(None, 0), batch, ())
    assert draft_after(drafter, table, [1, 2], [7, 8])[1] == [[3, 4, 5, 6], [9, 10]]


def test_offline_prints_what_drafting_changes_nothing_about(folder, capsys):
    offline = load("offline")
    texts = []
    for draft in ("none", "ngram"):
        offline.main(["--model", folder, "--draft", draft, "--max-tokens", "8", "hi"])
        printed = capsys.readouterr().out
        assert printed.startswith("> hi\n") and "8 tokens" in printed and " a round, ended by length]" in printed
        texts.append(printed[: printed.index("[8 tokens")])
    assert texts[0] == texts[1]


def test_a_script_of_its_own_objective_takes_what_the_trainer_gives():
    given = inspect.signature(load("tiny_hybrid").HybridObjective.loss).parameters
    assert list(given) == list(inspect.signature(Objective.loss).parameters)


@pytest.mark.parametrize("flag, value, words", [
    ("--texts", "1", "must be 2 to 240 texts, got '1'"),
    ("--experts", "1", "must be 0, or at least 2 experts, got '1'"),
    ("--steps", "0", "must be an integer of at least 1, got '0'"),
])  # fmt: skip
def test_a_size_that_a_script_cannot_take_is_refused(flag, value, words, tmp_path, capsys):
    with pytest.raises(SystemExit):
        load("tiny_hybrid").main([str(tmp_path), flag, value])
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("name", ["offline", "picture"])
def test_no_engine_starts_for_a_number_of_tokens_that_cant_be(name, capsys):
    with pytest.raises(SystemExit):
        load(name).main(["--max-tokens", "-5"])
    assert "--max-tokens: must be an integer of at least 1, got '-5'" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_tiny_hybrid_is_trained_and_served(tmp_path, plain, monkeypatch, capsys):
    tiny = load("tiny_hybrid")
    file, prompts = tmp_path / "texts.jsonl", ["Say a.", "Say b.", "Say c."]
    with monkeypatch.context() as patch:
        patch.setattr(tiny, "LLM", lambda *_, **__: plain)
        first = tiny.write_texts(file, "", prompts[:2], max_tokens=24)
        texts = tiny.write_texts(file, "", prompts, max_tokens=24)
    assert texts[:2] == first and [text["prompt"] for text in texts] == prompts
    assert tiny.write_texts(file, "no model is asked for what is there", prompts, max_tokens=24) == texts

    tiny.make_tokenizer(tmp_path, texts, 272)
    tiny.write_config(tmp_path, 272, width=32, layers=2)
    monkeypatch.setattr(tiny, "DRAFTS", 1)  # of each, a gradient is compiled
    tiny.train(tmp_path, texts, loop.Settings(steps=2, optimizer="adamw", warm_up=0), batch_size=1)
    trained, model = load_file(tmp_path / "model.safetensors"), load_model(str(tmp_path), progress=False)
    assert trained["mtp.fc.weight"].shape == (32, 64) and model.config.num_linear_layers == 1
    assert 1 <= tiny.trial(tmp_path, prompts[:2], max_tokens=12) <= 2
    assert "> Say a." in capsys.readouterr().out


def load(name):
    """Import a script by its path, as `python examples/NAME.py` would find it."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def section(text, title):
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_docs_have_every_flag_and_no_other():
    named = set(re.findall(r"`(--[a-z0-9-]+)`", FLAGS))
    flags = {name for action in make_parser()._actions for name in action.option_strings}
    assert named == {name for name in flags if name.startswith("--")} - {"--help", "--version", "--config"}
    for option in dataclasses.fields(EngineConfig):
        row = next(row for row in FLAGS.splitlines() if f"`{flag(option.name)}`" in row)
        default = SERVER_DEFAULTS.get(option.name, option.default)
        assert default in (None, ()) or isinstance(default, bool) or str(default) in row, (
            f"{row} lacks the default {default}"
        )


def test_the_help_of_draft_has_every_method():
    (row,) = (row for row in FLAGS.splitlines() if row.startswith("| `--draft` |"))
    assert set(re.search(r"a method \((.*?)\)", row)[1].split(", ")) == set(DRAFTERS)


def test_readme_has_every_drafter():
    cells = re.findall(r"^\| (`.*?) \|", section(README, "Drafters"), re.M)
    methods = {method for cell in cells for method in re.findall(r"`(\w+)", cell)} - {"module"}
    assert methods == {"none", "auto", *DRAFTERS}


def test_models_has_every_family_once_and_no_other():
    cells = re.findall(r"^\|[^|]*\| (`.*?) \|", (ROOT / "docs" / "models.md").read_text(), re.M)
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell) if name != "model_type"]
    assert sorted(named) == sorted(MODELS)


def anchors(page):
    """A page's headings as GitHub spells them in links: small letters, no punctuation, hyphens for spaces."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)", prose, re.M)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_code_names_pages_that_exist():
    files = [
        file
        for folder in ("jaxspec", "server", "scripts", "examples", "deploy")
        for file in (ROOT / folder).rglob("*.*")
    ]
    named = {
        name for file in files if file.suffix in (".py", ".sh", ".yaml") for name in NAMED.findall(file.read_text())
    }
    assert len(named) > 5 and not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere_and_python_is_python(page):
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), f"{page} links to {link}, and there is no such file"
        assert not anchor or anchor in anchors(target), f"{page} links to {link}, and {target.name} has no such heading"
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        ast.parse(block)


@pytest.mark.parametrize("page", [*GUIDES, "docs/architecture.md"])
def test_guides_name_files_and_functions_that_exist(page):
    """In code spans: `folder/file.py`, `folder/file.py::name`. NAME stands for one that a reader chooses."""
    text = (ROOT / page).read_text()
    found = re.findall(r"`((?:jaxspec|tests|examples|scripts|server)/[\w/]+(?:\.\w+)?)/?(?:::(\w+))?`", text)
    named = [(path, name) for path, name in found if "NAME" not in path]
    assert len(named) > 2
    for path, name in named:
        assert (ROOT / path).exists(), path
        assert not name or re.search(rf"^(def |class )?{name}\b", (ROOT / path).read_text(), re.M), f"{path}::{name}"


@pytest.mark.parametrize("page", GUIDES)
def test_guides_quote_the_code_as_it_is(page):
    """Line by line, but for `...` and blocks that a reader would run, which import jaxspec."""
    code = {line.strip() for file in (ROOT / "jaxspec").rglob("*.py") for line in file.read_text().splitlines()}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    quoted = [line.strip() for block in blocks if "import jaxspec" not in block for line in block.splitlines()]
    assert quoted and not [line for line in quoted if line not in code | {"..."}]


@pytest.mark.parametrize("page", [*PAGES, ".github/workflows/test.yml"])
def test_make_has_every_target_that_is_named(page):
    """A line of a shell block, or a code span."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = re.findall(r"(?:^|`|run: )make ([a-z][a-z-]*)", (ROOT / page).read_text(), re.M)
    assert set(named) <= targets


def test_workflows_run_lint_and_tests_and_the_gpus_on_a_runner_that_has_one():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]
    runs = {job["steps"][-1]["run"]: job["runs-on"] for job in jobs.values()}
    assert runs.keys() == {"make lint", "make test", "make exhaustive", "make test-gpu"}
    assert "gpu" in runs["make test-gpu"] and runs["make test"] == runs["make lint"] == "ubuntu-latest"


def test_the_drafter_is_as_long_as_the_readme_says():
    (lines,) = re.findall(r"\[(\d+) lines\]\(examples/markov.py\)", README)
    assert int(lines) == len((EXAMPLES / "markov.py").read_text().splitlines())


def test_design_names_tests_that_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", DESIGN)
    assert len(named) > 10
    for path, test in named:
        assert f"def {test}(" in (ROOT / path).read_text(), f"{path} has no {test}"


def test_architecture_has_every_room_and_no_other():
    rooms = re.findall(r"`jaxspec/(\w+)/`", section(ARCHITECTURE, "The house"))
    assert set(rooms) == {path.parent.name for path in (ROOT / "jaxspec").glob("*/__init__.py")}
