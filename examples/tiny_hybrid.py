"""A hybrid with a multi-token prediction module, trained on a CPU: what Qwen3-Next is, fifty thousand times smaller.

    pip install -e '.[train]'
    python examples/tiny_hybrid.py hybrid                   # the texts, the training, a trial
    python -m server --model hybrid --draft mtp             # and then, in another terminal:

    curl http://127.0.0.1:30000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "Write a short story about a fox."}], "temperature": 0}'
    curl http://127.0.0.1:30000/server_info                 # avg_spec_accept_length: tokens a round

The demo model answers a few hundred prompts; a tokenizer and a model are made for these texts alone. Three layers of
gated delta-rule attention and one of full attention learn to write them, while the MTP module learns to guess what they
will write. Nothing of it is defined here: layers are those that serving runs (`jaxspec.decoder`), the module is
the drafter (`jaxspec.drafters.mtp`), unrolled on its own outputs as EAGLE-3's training does it, and loop and export are
the trainer's. The folder is in the public layout, with the module as its tensors `mtp.*`.

`--experts 4` makes a mixture of it, `--modules 3` gives it an MTP module for each draft. For other drafters than the
module, docs/training.md has the commands.

The same command again goes on where it was: texts, then steps.
"""

import argparse
import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxspec import LLM, SamplingParams, load_model
from jaxspec.cache.mixers import WholeTexts
from jaxspec.checkpoint import Model
from jaxspec.config.engine_config import EngineConfig
from jaxspec.config.flags import checked, positive
from jaxspec.decoder.forward import forward, unembed
from jaxspec.drafters.mtp import parameters as mtp_parameters
from jaxspec.drafters.mtp_modules import MtpModules
from jaxspec.train import loop
from jaxspec.train.data import Text
from jaxspec.train.eagle3 import MtpObjective
from jaxspec.train.export import Fresh
from jaxspec.train.packing import Packed

OPENINGS = (
    "Write a short story about {}.",
    "Tell me a bedtime story about {}.",
    "Write a short fairy tale about {}.",
    "Describe {} to a child.",
    "Write a letter from {} to an old friend.",
    "What can we learn from {}?",
)
SUBJECTS = (
    "a fox", "a lighthouse", "a lost key", "an old clock", "a dragon", "a small boat", "a wolf", "a baker", "the moon",
    "a violin", "a train", "a garden", "a robot", "a painter", "a storm", "a cat", "a bridge", "a library", "a king",
    "a mirror", "a river", "a mountain", "a snowman", "a whale", "a map", "an oak tree", "a soldier", "a candle",
    "a market", "a bear", "a ghost", "a teacher", "an owl", "a farmer", "the sea", "a castle", "a doctor", "a mouse",
    "a desert", "a princess",
)  # fmt: skip
PROMPTS = [opening.format(subject) for opening, subject in itertools.product(OPENINGS, SUBJECTS)]
HELD_OUT = 16  # one prompt in so many is asked in the trial, and its text isn't trained on

END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DRAFTS = 3  # a round, and steps that the module is unrolled for


def write_texts(path: Path, model: str, prompts: list[str], max_tokens: int) -> list[dict[str, str]]:
    """Have `model` answer the prompts, greedily, but for those whose answers are in the file already."""
    done = path.read_text().splitlines() if path.exists() else []
    if len(done) < len(prompts):
        options = {"max_running_requests": 16, "context_length": max_tokens + 64, "decode_log_interval": 0}
        llm = LLM(model, skip_warmup=True, few_programs=True, **options)
        chat, greedy = llm.engine.tokenizer.apply_chat_template, SamplingParams(temperature=0.0, max_tokens=max_tokens)
        with path.open("a") as file:
            for batch in itertools.batched(prompts[len(done) :], 16):
                outs = llm.generate([chat([{"role": "user", "content": prompt}]) for prompt in batch], greedy)
                for prompt, out in zip(batch, outs, strict=True):
                    done.append(json.dumps({"prompt": prompt, "answer": out.text}))
                    file.write(done[-1] + "\n")
                file.flush()
                print(f"{len(done)} of {len(prompts)} texts")
    return [json.loads(line) for line in done[: len(prompts)]]


def make_tokenizer(folder: Path, texts: list[dict[str, str]], vocab_size: int) -> None:
    """Byte-level BPE over these texts: the demo model's 49,152 tokens would be most of a small model's arithmetic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, START, STOP],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((part for text in texts for part in text.values()), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": STOP, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def write_config(
    folder: Path, vocab_size: int, width: int, experts: int = 0, layers: int = 4, modules: int = 1
) -> None:
    """Qwen3.5's config: Qwen3-Next's layers, all of linear attention but the last. With `experts`, so many in each."""
    size = {"intermediate_size": 3 * width}
    if experts:
        size = {
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": width,
            "shared_expert_intermediate_size": width,
        }
    config = {
        "architectures": ["Qwen3_5MoeForCausalLM" if experts else "Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_moe_text" if experts else "qwen3_5_text",
        "vocab_size": vocab_size,
        "hidden_size": width,
        **size,
        "num_hidden_layers": layers,
        "full_attention_interval": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "mtp_num_hidden_layers": modules,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def fresh(folder: Path, model: Model, seed: int) -> Fresh:
    """The model and its module, made up from their declarations, to be trained together."""
    options = EngineConfig(draft="mtp", num_draft_tokens=DRAFTS, load_format="dummy", seed=seed)
    drafter, module = MtpModules.load(model, None, options)
    declared = mtp_parameters(drafter.config, model.config.mtp_layers)
    trained = {**model.params, "mtp": {name: module[name] for name in declared}}
    for layer in trained["layers"]:
        if "decay_bias" in layer:  # heads that forget within a token or two, and heads that remember for hundreds
            layer["decay_bias"] = jnp.linspace(-6.0, 1.0, len(layer["decay_bias"]))
    return Fresh(folder, drafter, {**model.family.tensors(model.config.decoder), "mtp": declared}, trained, {})


@dataclass(frozen=True)
class HybridObjective(MtpObjective):
    """The model's own next-token loss, and that of its module's chain, which is scored as EAGLE-3's.

    The module learns the model's distributions, not the texts: what it drafts is what the model would say.
    """

    def loss(self, trained, frozen, target_params, batch, keys, done=0.0):
        layers = self.drafter.feature_layers
        hidden = forward(self.target.decoder, trained, batch.tokens, batch.positions, WholeTexts(), None, layers)
        logits, answers = unembed(trained, hidden.last, self.target.decoder)[:, :-1], batch.answer[:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.tokens[:, 1:])
        own = (losses * answers).sum() / answers.sum()
        shared = {"embed": trained["embed"], "head": {"embed": trained["embed"]}}
        drafting, report = self.chain_loss(trained["mtp"], shared, trained, hidden, batch)
        return own + drafting, report.replace(loss=own)

    def flops(self, trained, row_length):
        return 6 * sum(x.size for x in jax.tree.leaves(trained))


def training_texts(model: Model, texts: list[dict[str, str]]) -> list[Text]:
    """Chats as token ids, of which the answers are trained on. Most were cut off: here they end with a sentence."""
    chats = []
    for text in texts:
        prompt = model.tokenizer.apply_chat_template([{"role": "user", "content": text["prompt"]}])
        answer = text["answer"][: text["answer"].rfind(".") + 1] or text["answer"]
        tokens = prompt + model.tokenizer.encode(answer + STOP)
        chats.append(Text(np.array(tokens, np.int32), ((len(prompt), len(tokens)),)))
    return chats


def train(folder: Path, texts: list[dict[str, str]], settings: loop.Settings, batch_size: int = 8) -> None:
    """Train the folder's config on the texts, and write the weights beside it. `folder/training` has the run."""
    model = load_model(str(folder), "float32", load_format="dummy", seed=settings.seed)
    start = fresh(folder, model, settings.seed)
    chats = training_texts(model, texts)
    # A row a text, as the state of linear attention would run from one into the next.
    data = Packed(chats, [[i] for i in range(len(chats))], max(len(c.tokens) for c in chats), batch_size, settings.seed)
    objective = HybridObjective(start.drafter, model.config, "float32", "soft", steps=DRAFTS)
    config = json.loads((folder / "config.json").read_text())
    run = loop.Run(folder / "training", {**config, **vars(settings), "texts": len(texts), "batch_size": batch_size})
    start.save(loop.train(run, objective, start.trained, {}, {}, data, settings))


def trial(folder: Path, prompts: list[str], max_tokens: int) -> float:
    """Serve prompts with the module's drafts and without: the texts must be the same. Tokens a round."""
    options = {"context_length": max_tokens + 64, "max_running_requests": 4, "skip_warmup": True, "few_programs": True}
    greedy, texts = SamplingParams(temperature=0.0, max_tokens=max_tokens), {}
    for draft, drafts in (("none", None), ("mtp", DRAFTS)):
        llm = LLM(str(folder), draft, num_draft_tokens=drafts, **options)
        chat = llm.engine.tokenizer.apply_chat_template
        outs = llm.generate([chat([{"role": "user", "content": prompt}]) for prompt in prompts], greedy)
        texts[draft] = [out.text for out in outs]
    if texts["none"] != texts["mtp"]:
        raise SystemExit("drafting changed a greedy text")
    print(f"> {prompts[0]}\n{outs[0].text}\n")
    rounds, tokens = (sum(getattr(out.metrics, name) for out in outs) for name in ("verify_rounds", "verified_tokens"))
    return tokens / rounds


_texts = checked(int, f"must be 2 to {len(PROMPTS)} texts", lambda n: 2 <= n <= len(PROMPTS))
_experts = checked(int, "must be 0, or at least 2 experts", lambda n: n == 0 or n >= 2)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the model; texts and training are kept in it too")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="who writes the texts (default: %(default)s)")
    parser.add_argument("--texts", type=_texts, default=len(PROMPTS), help="how many (default and most: %(default)s)")
    parser.add_argument("--max-tokens", type=positive, default=128, help="tokens of each (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=200, help="of training (default: %(default)s)")
    parser.add_argument("--vocab-size", type=positive, default=2048, help="of the new model (default: %(default)s)")
    parser.add_argument("--width", type=positive, default=128, help="of the new model (default: %(default)s)")
    parser.add_argument("--experts", type=_experts, default=0, help="in each layer, of which two serve a token (none)")
    parser.add_argument("--modules", type=positive, default=1, help="that draft, one token each (default: %(default)s)")
    args = parser.parse_args(argv)

    args.folder.mkdir(parents=True, exist_ok=True)
    prompts = PROMPTS[: args.texts]
    texts = write_texts(args.folder / "texts.jsonl", args.model, prompts, args.max_tokens)
    held_out = prompts[::HELD_OUT]
    texts = [text for text in texts if text["prompt"] not in held_out]
    for name, some in (("prompts", [text["prompt"] for text in texts]), ("held_out", held_out)):
        lines = (json.dumps({"prompt": prompt}) + "\n" for prompt in some)
        (args.folder / f"{name}.jsonl").write_text("".join(lines))  # to train and try other drafters on
    make_tokenizer(args.folder, texts, args.vocab_size)
    write_config(args.folder, args.vocab_size, args.width, args.experts, modules=args.modules)
    train(args.folder, texts, loop.Settings(steps=args.steps, learning_rate=5e-3, warm_up=50))
    length = trial(args.folder, held_out, args.max_tokens)
    print(f"{len(held_out)} prompts that it never saw, {DRAFTS} drafts a round: accept length {length:.2f}")


if __name__ == "__main__":
    main()
