"""Has the target write the training texts, through the engine: answers to prompts, and prompts too if there are none.

A drafter is accepted as far as it knows what *this* model says, so other models' answers are of no use. Without
prompts, the model writes the user's turn itself, as its continuation of the chat template's opening
(https://arxiv.org/abs/2406.08464). Left alone it would mostly ask what it likes best. So most turns begin with a few
words of ours, which are their categories too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from jaxspec.config.request import SamplingParams
from jaxspec.engine.llm import LLM
from jaxspec.text.prompts import Prompt, read
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.train.data import Text, TrainError
from jaxspec.train.interrupted import Interrupted

# Waves, written to disk at once, are so many times what the engine runs: each ends with its longest text alone. That
# costs more where many run, as on a GPU.
TIMES, TIMES_OF_MANY = 4, 32
MANY = 64
LEAST = 2  # tokens that a text leaves to an answer
MARK = "\u2603"  # stands for the user's words while the template's own are looked up

OPENINGS: dict[str, tuple[str, ...]] = {
    "free": ("", "", "", "I", "The", "Can you", "Please", "My"),
    "writing": ("Write a short story about", "Compose a", "Draft an email to", "Write a blog post", "Write an essay"),
    "roleplay": ("Imagine you are", "You are a", "Pretend to be", "Act as"),
    "reasoning": ("Which of these", "Suppose that", "If all", "Is it true that", "Compare"),
    "mathematics": ("Solve", "Calculate", "What is the sum", "A train", "How many", "If a", "Tom has", "Find the"),
    "word problem": ("Anna buys", "A farmer", "There are", "A bakery sells", "In a class of", "Sam earns", "John's"),
    "coding": ("Write a Python function", "Implement", "Write a C++ program", "How do I", "Fix this code:", "Given an"),
    "extraction": ("Given the following text,", "Extract", "From this paragraph,", "Identify the", "List all"),
    "science": ("Explain", "What happens when", "Describe how", "How does", "Why is", "What causes"),
    "humanities": ("Discuss", "What was the", "Analyze", "How did", "What are the main differences between"),
    "summary": ("Summarize this article:", "Summarize the following", "Give a summary of this text:", "Shorten:"),
    "translation": ("Translate to English:", "Translate this German sentence:", "What does the French"),
    "question": ("Who", "When did", "Where is", "What is the name of", "How long", "In which", "what", "who"),
    "context": ("Answer the question using the passages below.\n\n", "Context:", "Read this and answer:", "Passage 1:"),
}


@dataclass(frozen=True)
class Recipe:
    """How the target is sampled. `temperatures` take turns over the texts; 0 is greedy. `longest`: a whole text."""

    temperatures: tuple[float, ...] = (0.0, 0.0, 0.7, 1.0)
    max_answer: int = 512
    max_prompt: int = 384
    longest: int = 1024
    seed: int = 0

    def answering(self, i: int, prompt_length: int) -> SamplingParams:
        """For answer i. Draws keep away from what is most unlikely (min-p), as those who sample do."""
        temperature = self.temperatures[i % len(self.temperatures)]
        return SamplingParams(
            temperature=temperature,
            min_p=0.05 if temperature else 0.0,
            seed=self.seed * 2**40 + 2 * i,
            max_tokens=min(self.max_answer, self.longest - prompt_length),
        )

    def asking(self, i: int, prompt_length: int, stop_ids: tuple[int, ...]) -> SamplingParams:
        """For prompt i, which leaves half of a short text to its answer."""
        seed, most = self.seed * 2**40 + 2 * i + 1, min(self.max_prompt, (self.longest - prompt_length) // 2)
        return SamplingParams(temperature=1.0, min_p=0.05, seed=seed, max_tokens=most, stop_token_ids=stop_ids)


def synthesise(llm: LLM, source: str, path: Path, num_samples: int | None, recipe: Recipe) -> None:
    """Write `path`, a file of texts, from prompts at `source` or, if that is "self", from `num_samples` of its own.

    Waves are appended to `path` + ".part", which is continued if it is there and renamed at the end.

    **Raises:** `TrainError` for a source or a model that can't be used; `Interrupted` for a Ctrl-C.
    """
    if llm.engine.tokenizer is None or llm.engine.tokenizer.chat_template is None:
        name = llm.engine.runner.model.name
        raise TrainError(f"{name} has no chat template to write texts with; give --data a file of texts, as token ids")
    prompts = None if source == "self" else read(Path(source))[1][:num_samples]
    if prompts is None and num_samples is None:
        raise TrainError("--data self needs --num-samples N: how many texts the model is to write")
    if prompts is not None:
        prompts = _that_fit(llm.engine.tokenizer, prompts, source, recipe)
    total = num_samples if prompts is None else len(prompts)
    part = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    running = llm.engine.config.max_running_requests
    done, wave = _whole_lines(part), (TIMES if running < MANY else TIMES_OF_MANY) * running
    started, tokens = time.monotonic(), 0
    try:
        with (
            part.open("a", encoding="utf-8") as file,
            tqdm(total=total, initial=done, desc="texts", unit="text") as bar,
        ):
            while done < total:
                indices = range(done, min(done + wave, total))
                asked = [prompts[i] for i in indices] if prompts is not None else _ask(llm, indices, recipe)
                for text in _answer(llm, asked, indices, recipe):
                    file.write(text.line())
                    tokens += sum(end - begin for begin, end in text.answers)
                file.flush()
                os.fsync(file.fileno())
                done = indices.stop
                bar.update(len(indices))
                bar.set_postfix(answer_tokens_per_s=round(tokens / (time.monotonic() - started)))
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted after {done} of {total} texts; the same command resumes") from None
    part.replace(path)


def _whole_lines(part: Path) -> int:
    """How many texts a part holds. One that was being written when the process ended is cut off."""
    if not part.exists():
        return 0
    lines = [line for line in part.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    part.write_bytes(b"".join(lines))
    return len(lines)


def _opened(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Token ids up to the first answer."""
    return tokenizer.apply_chat_template(prompt.opening(1), add_generation_prompt=True)


def _that_fit(tokenizer: Tokenizer, prompts: Sequence[Prompt], source: str, recipe: Recipe) -> list[Prompt]:
    """Prompts whose first turn leaves room for an answer: one that is cut would lose its question."""
    fit = [prompt for prompt in prompts if len(_opened(tokenizer, prompt)) <= recipe.longest - LEAST]
    if not fit:
        raise TrainError(
            f"--data {source}: no prompt leaves room for an answer in --row-length {recipe.longest}. Give a longer one"
        )
    if out := len(prompts) - len(fit):
        text = f"{out} of {len(prompts)} prompts are longer than --row-length {recipe.longest} leaves for them"
        print(f"{text}: left out", file=sys.stderr)
    return fit


def template_ends(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Token ids of the chat template before and after the words of a user's first turn.

    **Raises:** `TrainError` for a template that changes the words.
    """
    ids = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], add_generation_prompt=True)
    before, found, after = tokenizer.decode(ids, skip_special_tokens=False).partition(MARK)
    if not found:
        raise TrainError("--data self: the chat template changes what users say, so the model can't write their turn")
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    return encode(before), encode(after)


def _ask(llm: LLM, indices: Sequence[int], recipe: Recipe) -> list[Prompt]:
    """Prompts of the model's own, their category and opening drawn at random."""
    tokenizer = llm.engine.tokenizer
    before, after = template_ends(tokenizer)
    draws, categories = [np.random.default_rng((recipe.seed, i)) for i in indices], list(OPENINGS)
    kinds = [categories[rng.integers(len(categories))] for rng in draws]
    words = [OPENINGS[kind][rng.integers(len(OPENINGS[kind]))] for kind, rng in zip(kinds, draws, strict=True)]
    started = [before + tokenizer.encode(w, add_special_tokens=False) if w else before for w in words]
    if (longest := max(map(len, started)) + len(after)) > recipe.longest - 2 * LEAST:
        raise TrainError(
            f"--row-length {recipe.longest} has no room for a prompt and an answer: the chat template takes {longest} "
            "tokens of it. Give a longer one"
        )
    params = [recipe.asking(i, len(ids), tuple(after[:1])) for i, ids in zip(indices, started, strict=True)]
    outs = llm.generate(started, params)
    asked = [
        Prompt(((word + out.text).strip() or word or "Hello",), category=kind)
        for word, kind, out in zip(words, kinds, outs, strict=True)
    ]
    return [_shortened(tokenizer, prompt, recipe.longest - LEAST) for prompt in asked]


def _shortened(tokenizer: Tokenizer, prompt: Prompt, room: int) -> Prompt:
    """Halve a prompt until it fits its room: read again, it may take more tokens than were written."""
    (words,) = prompt.turns
    while words and len(_opened(tokenizer, prompt)) > room:
        words = words[: len(words) // 2]
        prompt = replace(prompt, turns=(words,))
    return prompt


def _answer(llm: LLM, prompts: Sequence[Prompt], indices: Sequence[int], recipe: Recipe) -> Iterator[Text]:
    """Each prompt's text, in order: its turns answered one after another, until it is as long as it may be."""
    tokenizer, longest = llm.engine.tokenizer, recipe.longest
    chats = [prompt.opening(0) for prompt in prompts]
    texts: list[tuple[list[int], tuple[tuple[int, int], ...]]] = [([], ()) for _ in prompts]
    for turn in range(max(len(p.turns) for p in prompts)):
        starts: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            if turn >= len(prompt.turns):
                continue
            chats[i].append({"role": "user", "content": prompt.turns[turn]})
            ids = tokenizer.apply_chat_template(chats[i], add_generation_prompt=True)
            if len(ids) <= longest - LEAST:
                starts[i] = ids
        params = {i: recipe.answering(indices[i], len(ids)) for i, ids in starts.items()}
        order = sorted(starts, key=lambda i: params[i].temperature)  # a round that only takes the argmax is quicker
        outs = llm.generate([starts[i] for i in order], [params[i] for i in order])
        for i, out in zip(order, outs, strict=True):
            ids = starts[i]
            old, spans = texts[i]
            kept = spans if ids[: len(old)] == old else ()  # an answer's text may have other tokens than it was made of
            texts[i] = ids + out.token_ids, (*kept, (len(ids), len(ids) + len(out.token_ids)))
            chats[i].append({"role": "assistant", "content": out.text})
    for (ids, spans), prompt in zip(texts, prompts, strict=True):
        yield Text(np.array(ids, np.int32), spans, prompt.category)
