"""Run a Dockerfile's steps without Docker: `python scripts/run_dockerfile.py deploy/Dockerfile [--build-arg CUDA=12]`.

Reads the file's own FROM, ARG, ENV, WORKDIR, COPY, RUN and USER lines, so what is tried is what would be built, and
then starts the ENTRYPOINT, with the arguments after `--`, until the HEALTHCHECK passes, and stops it with SIGTERM.

Each stage has a mount namespace of its own in which the folders that it may write are empty, but for /etc, a copy, and
/usr/local, where this machine's Python 3.12 stands in for the base image's. Needs Linux, root and util-linux.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EMPTY = ("opt/jaxspec", "src", "home", "cache", "tmp")  # the image's folders that its steps write
KNOWN = {"FROM", "ARG", "ENV", "WORKDIR", "COPY", "RUN", "USER", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"}
SERVER_SECONDS = 1800


def instructions(text: str) -> list[tuple[str, str]]:
    """(keyword, rest) of each instruction, comments gone and continued lines joined."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    found = [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]
    if unknown := {keyword for keyword, _ in found} - KNOWN:
        raise SystemExit(f"this script doesn't know the instructions {', '.join(sorted(unknown))}")
    return found


def ignored(path: str, patterns: list[str]) -> bool:
    """Whether .dockerignore keeps `path` from the build; its last pattern that fits decides."""
    verdict = False
    for pattern in patterns:
        bare = pattern.removeprefix("!")
        parts = [path.split("/")[:n] for n in range(1, path.count("/") + 2)]
        names = [part[-1] for part in parts] if bare.startswith("**/") else ["/".join(part) for part in parts]
        if any(fnmatch.fnmatchcase(name, bare.removeprefix("**/")) for name in names):
            verdict = not pattern.startswith("!")
    return verdict


def send_context(root: Path, into: Path) -> None:
    """Copy what Docker would be sent: all that .dockerignore leaves."""
    lines = (root / ".dockerignore").read_text().splitlines()
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    for folder, folders, files in os.walk(root):
        inside = Path(folder).relative_to(root)
        folders[:] = [name for name in folders if not ignored((inside / name).as_posix(), patterns)]
        for name in files:
            if not ignored((inside / name).as_posix(), patterns):
                (into / inside).mkdir(parents=True, exist_ok=True)
                shutil.copy2(Path(folder) / name, into / inside / name)


class Stage:
    """One FROM: its folders under `root`, and the environment, folder and user of its next command."""

    def __init__(self, root: Path, context: Path, arguments: dict[str, str]):
        self.root, self.context, self.arguments = root, context, arguments
        self.env = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root", "LANG": "C.UTF-8"}
        self.env |= {name: os.environ[name] for name in os.environ if name.startswith(("PIP_", "SSL_", "REQUESTS_"))}
        self.env["LD_LIBRARY_PATH"] = "/usr/local/lib"  # where the image's own Python finds its library unasked
        self.folder, self.user = "/", "root"
        for name in EMPTY:
            (root / name).mkdir(parents=True)
        (root / "tmp").chmod(0o1777)
        shutil.copytree("/etc", root / "etc", symlinks=True)

    def command(self, argv: list[str]) -> list[str]:
        """`argv` as root or as the stage's user, within the stage's folders."""
        mounts = [f"mount --bind {shlex.quote(sys.base_prefix)} /usr/local"]
        mounts += [f"mount --bind {self.root}/{name} /{name}" for name in (*EMPTY, "etc")]
        switch = "" if self.user == "root" else f"setpriv --reuid {self.user} --regid {self.user} --init-groups "
        steps = [*mounts, f"cd {self.folder}", f"exec {switch}{shlex.join(argv)}"]
        return ["unshare", "--mount", "sh", "-c", " && ".join(steps)]

    def run(self, script: str) -> None:
        subprocess.run(self.command(["/bin/sh", "-c", script]), env=self.env, check=True)

    def copy(self, rest: str, stages: dict[str, Stage]) -> None:
        *options, target = rest.split()
        source = next((stages[option.removeprefix("--from=")].root for option in options if option[0] == "-"), None)
        names = [option for option in options if option[0] != "-"]
        to = Path(self.root, (Path(self.folder) / target).relative_to("/"))
        for name in names:
            found = (source or self.context) / name.removeprefix("/")
            if found.is_dir():
                shutil.copytree(found, to, symlinks=True, dirs_exist_ok=True)
            else:
                to.mkdir(parents=True, exist_ok=True)
                shutil.copy2(found, to / found.name)


def build(steps: list[tuple[str, str]], context: Path, scratch: Path, arguments: dict[str, str]) -> Stage:
    """Run every step, and return the last stage. **Raises:** `CalledProcessError` for a step that fails."""
    stages: dict[str, Stage] = {}
    stage = None
    for keyword, rest in steps:
        print(f"--> {keyword} {rest}", flush=True)
        if keyword == "FROM":
            stage = Stage(scratch / f"stage{len(stages)}", context, arguments)
            stages[rest.partition(" AS ")[2] or "last"] = stage
        elif keyword == "ARG":
            name, _, default = rest.partition("=")
            stage.env[name] = arguments.get(name, default)
        elif keyword == "ENV":
            stage.env |= dict(pair.split("=", 1) for pair in shlex.split(rest))
        elif keyword == "WORKDIR":
            stage.folder = rest
            stage.run("true")
        elif keyword == "COPY":
            stage.copy(rest, stages)
        elif keyword == "RUN":
            stage.run(rest)
        elif keyword == "USER":
            stage.user, stage.env["HOME"] = rest, f"/home/{rest}"
    return stage


def serve(stage: Stage, steps: list[tuple[str, str]], extra: list[str]) -> int:
    """Start the entry point, wait until it is healthy, stop it with SIGTERM; its exit status."""
    last = dict(steps)
    check = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    server = subprocess.Popen(stage.command([*json.loads(last["ENTRYPOINT"]), *extra]), env=stage.env)
    try:
        end = time.monotonic() + SERVER_SECONDS
        while subprocess.run(stage.command(check), env=stage.env, stderr=subprocess.DEVNULL).returncode:
            if server.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the server isn't healthy; its exit status is {server.poll()}")
            time.sleep(2)
        print("--> healthy; sending SIGTERM", flush=True)
    finally:
        server.terminate()
    return server.wait(timeout=120)


def main() -> int:
    ours, extra = sys.argv[1:], []
    if "--" in ours:
        ours, extra = ours[: ours.index("--")], ours[ours.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args(ours)
    steps = instructions(args.dockerfile.read_text())
    given = dict(each.split("=", 1) for each in args.build_arg)
    made = [folder for folder in (Path("/", name) for name in EMPTY) if not folder.exists()]
    with tempfile.TemporaryDirectory(prefix="dockerfile-", dir="/var/tmp") as scratch:
        os.chmod(scratch, 0o755)
        for folder in made:  # what the stages' folders are mounted on
            folder.mkdir()
        try:
            send_context(args.dockerfile.resolve().parent.parent, Path(scratch, "context"))
            status = serve(build(steps, Path(scratch, "context"), Path(scratch), given), steps, extra)
        finally:
            for folder in made:
                folder.rmdir()
    print(f"--> the server ended with status {status}")
    return status


if __name__ == "__main__":
    sys.exit(main())
