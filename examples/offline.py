"""Complete a batch of prompts without a server, and see what drafting gained.

    python examples/offline.py                          # the demo model, drafts by ngram
    python examples/offline.py --draft none             # the same text, one token a round
    python examples/offline.py --model Qwen/Qwen3-8B --draft standalone

A drafter of your own is `--draft module:Class`, for example `--draft markov:Markov` for the one in this folder.
"""

import argparse
import time

import jaxspec
from jaxspec.config.flags import positive

QUESTIONS = [
    "What is the capital of France?",
    "Write the numbers from 1 to 30, separated by commas.",
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog.",
]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as the server's (default: %(default)s)")
    parser.add_argument("--draft", default="ngram", help="as the server's (default: %(default)s)")
    parser.add_argument("--max-tokens", type=positive, default=96, help="new tokens of each (default: %(default)s)")
    parser.add_argument("questions", nargs="*", default=QUESTIONS, metavar="QUESTION")
    args = parser.parse_args(argv)

    # Compiling on first use is quicker than warming up the whole ladder of shapes for a handful of prompts.
    llm = jaxspec.LLM(args.model, args.draft, skip_warmup=True)
    chats = [[{"role": "user", "content": question}] for question in args.questions]
    started = time.perf_counter()
    outs = llm.chat(chats, jaxspec.SamplingParams(temperature=0.0, max_tokens=args.max_tokens))
    seconds = time.perf_counter() - started

    for question, out in zip(args.questions, outs, strict=True):
        print(f"> {question}\n{out.text}")
        print(f"[{len(out.token_ids)} tokens, {out.metrics.accept_length:.2f} a round, ended by {out.finish_reason}]\n")
    tokens = sum(len(out.token_ids) for out in outs)
    print(f"{tokens} tokens in {seconds:.1f} s, what was compiled on the way included")


if __name__ == "__main__":
    main()
