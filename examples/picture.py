"""Ask a model about a picture, without a server.

    python examples/picture.py --model Qwen/Qwen3.5-4B picture.jpg "What is in this picture?"

The model needs a vision tower, which the demo model doesn't have. Without a file, the picture is a drawn red circle.
"""

import argparse
import sys

from PIL import Image, ImageDraw

import jaxspec
from jaxspec.config.flags import positive


def drawn() -> Image.Image:
    picture = Image.new("RGB", (256, 256), "white")
    ImageDraw.Draw(picture).ellipse((48, 48, 208, 208), fill="red")
    return picture


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="as the server's (default: %(default)s)")
    parser.add_argument("--draft", default="none", help="as the server's (default: %(default)s)")
    parser.add_argument("--max-tokens", type=positive, default=128, help="new tokens (default: %(default)s)")
    parser.add_argument("picture", nargs="?", help="a file (default: a drawn circle)")
    parser.add_argument("question", nargs="?", default="What is in this picture?")
    args = parser.parse_args(argv)

    llm = jaxspec.LLM(args.model, args.draft, skip_warmup=True)
    parts = [{"type": "image", "image": args.picture or drawn()}, {"type": "text", "text": args.question}]
    try:
        (out,) = llm.chat([{"role": "user", "content": parts}], jaxspec.SamplingParams(max_tokens=args.max_tokens))
    except jaxspec.RequestError as error:
        sys.exit(str(error))
    print(out.text)


if __name__ == "__main__":
    main()
