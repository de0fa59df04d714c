"""`make clients`: people's own clients, unchanged, against a live server of the demo model.

Each client has an environment of its own in `.venv-clients/`, with the versions that `clients/requirements/CLIENT.txt`
pins, because they don't agree on the versions of what they share. One in JavaScript has a `CLIENT.json`, which npm
reads, and needs Node 22 or newer. Prints a table: client, version, check, outcome.

    python clients/run.py                       all clients, against a server that is started and stopped here
    python clients/run.py openai litellm        these alone
    python clients/run.py --url http://host:30000 --model NAME --tokenizer FOLDER
    python clients/run.py --python python3.11   with another Python's environments

Needs a package index, 5 GiB of disk, and half an hour the first time. guidellm needs torch, which brings CUDA on Linux,
3 GiB more. A CPU build is taken where pip's own settings (`PIP_EXTRA_INDEX_URL`, `PIP_FIND_LINKS`) lead to one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

HERE = Path(__file__).parent
ROOT = HERE.parent
VENVS = ROOT / ".venv-clients"
CLIENTS = (
    *("openai", "openai_agents", "anthropic", "pydantic_ai", "langchain", "vercel_ai", "instructor", "litellm"),
    *("guidellm", "aiperf", "bench_serving", "sglang", "lm_eval"),
)
MODEL = "smollm2-135m-instruct"
START_SECONDS, CLIENT_SECONDS, INSTALL_SECONDS = 1800, 3600, 3600


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(CLIENTS)} (default: all)")
    parser.add_argument("--url", help="of a running server (default: one is started, with the demo model)")
    parser.add_argument("--model", default=MODEL, help="the model's name at --url (default: %(default)s)")
    parser.add_argument("--tokenizer", help="folder with that model's tokenizer (default: the demo's is written)")
    parser.add_argument("--python", default=sys.executable, help="makes the clients' environments (default: this one)")
    args = parser.parse_args()
    if unknown := [name for name in args.clients if name not in CLIENTS]:
        parser.error(f"unknown client {unknown[0]}; known: {', '.join(CLIENTS)}")
    tokenizer = args.tokenizer or written_tokenizer(args.model)
    failed = 0
    with serving(args.url) as url:
        print(f"| client | version | check | seconds | outcome |\n|{'---|' * 5}")
        for client in args.clients or CLIENTS:
            for version, check, seconds, ok, said in outcomes(client, args.python, url, args.model, tokenizer):
                failed += not ok
                short = said if len(said) <= 160 or not ok else said[:157] + "..."
                outcome = f"{'' if ok else '**failed**: '}{short}"
                print(f"| {client} | {version} | {check} | {seconds:.0f} | {outcome} |", flush=True)
    print(f"\n{failed} failed" if failed else "\nall passed")
    return int(failed > 0)


def outcomes(
    client: str, base: str, url: str, model: str, tokenizer: str
) -> Iterator[tuple[str, str, float, bool, str]]:
    """(version, check, seconds, whether it passed, a few words) of each of a client's checks."""
    began = time.monotonic()
    javascript = (HERE / "requirements" / f"{client}.json").exists()
    try:
        command, version = node(client) if javascript else python(client, base)
    except (subprocess.SubprocessError, OSError) as error:
        last = (getattr(error, "stdout", None) or str(error)).strip().splitlines()[-1]
        yield "?", "install", time.monotonic() - began, False, last
        return
    with tempfile.TemporaryFile("w+") as complaints:
        script = subprocess.Popen(
            [*command, url, model, tokenizer], stdout=subprocess.PIPE, stderr=complaints, text=True
        )
        limit = threading.Timer(CLIENT_SECONDS, script.kill)
        limit.start()
        for line in script.stdout:
            if line.startswith('{"check"'):
                told = json.loads(line)
                yield version, told["check"], told["seconds"], told["ok"], told["said"].replace("|", "\\|")
        limit.cancel()
        if status := script.wait():
            complaints.seek(0)
            said = " ".join(complaints.read().split())[-400:]
            seconds = time.monotonic() - began
            yield version, "all", seconds, False, f"exit status {status} (it has {CLIENT_SECONDS} s): {said}"


def python(client: str, base: str) -> tuple[list[str], str]:
    """The command of a client in Python, and its version."""
    made = environment(client, base)
    return [made, str(HERE / f"use_{client}.py")], installed(made, client)


def node(client: str) -> tuple[list[str], str]:
    """The command of a client in JavaScript, in a folder with its packages, and its version: the first package's."""
    wanted, folder = HERE / "requirements" / f"{client}.json", VENVS / client
    folder.mkdir(parents=True, exist_ok=True)
    there = folder / "package.json"
    if not there.exists() or there.read_bytes() != wanted.read_bytes():
        print(f"installing {client}", file=sys.stderr, flush=True)
        shutil.copy(wanted, there)
        npm = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--prefix", str(folder)]
        shell = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        try:
            subprocess.run(npm, check=True, timeout=INSTALL_SECONDS, **shell)
        except BaseException:
            there.unlink()
            raise
    script = shutil.copy(HERE / f"use_{client}.mjs", folder)  # beside its packages, where Node looks
    return ["node", str(script)], next(iter(json.loads(wanted.read_text())["dependencies"].values()))


def environment(client: str, base: str) -> str:
    """The Python of a client's environment. `base` makes it if it isn't there or its requirements have changed."""
    wanted = requirements(client)
    folder = VENVS / client
    python, ready = folder / "bin" / "python", folder / ".ready"
    key = hashlib.sha256(b"".join([base.encode(), *(file.read_bytes() for file in wanted)])).hexdigest()
    if not ready.exists() or ready.read_text() != key:
        print(f"installing {client}", file=sys.stderr, flush=True)
        shell = {"check": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        subprocess.run([base, "-m", "venv", "--clear", str(folder)], **shell)
        for file in wanted:
            options = ["--no-deps"] if file.stem.endswith("-alone") else []
            pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *options]
            subprocess.run([*pip, "-r", str(file)], timeout=INSTALL_SECONDS, **shell)
        ready.write_text(key)
    return str(python)


def requirements(client: str) -> list[Path]:
    """The files to install, in order. What `CLIENT-alone.txt` names is installed without its dependencies."""
    names = (f"{client}-alone.txt", f"{client}.txt")
    return [HERE / "requirements" / name for name in names if (HERE / "requirements" / name).exists()]


def installed(python: str, client: str) -> str:
    """The client's version: that of the first package in its requirements."""
    lines = requirements(client)[0].read_text().splitlines()
    package = next(line for line in lines if line and line[0] not in "#-").partition("==")[0].partition("[")[0]
    ask = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([python, "-c", ask], capture_output=True, text=True).stdout.strip()


def written_tokenizer(model: str) -> str:
    folder = VENVS / "tokenizer"
    subprocess.run([sys.executable, str(ROOT / "scripts" / "write_tokenizer.py"), model, str(folder)], check=True)
    return str(folder)


@contextmanager
def serving(url: str | None) -> Iterator[str]:
    """`url`, or a server of the demo model for as long as this lasts."""
    if url is not None:
        yield url
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "server", "--model", MODEL, "--port", str(port)]
    server = subprocess.Popen(command, cwd=ROOT)
    try:
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + START_SECONDS
        while not _healthy(url):
            if server.poll() is not None or time.monotonic() > end:
                sys.exit(f"the server didn't start; its exit status is {server.poll()}")
            time.sleep(1)
        yield url
    finally:
        server.terminate()
        server.wait()


def _healthy(url: str) -> bool:
    try:
        return urlopen(f"{url}/health", timeout=5).status == 200
    except (URLError, OSError):
        return False


if __name__ == "__main__":
    sys.exit(main())
