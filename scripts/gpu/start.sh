#!/usr/bin/env bash
# How long a server takes from its start to its first token and to all of its programs, with empty caches and with kept
# ones, and what the seconds to the first token are, on a machine with one GPU that has Python and jax with CUDA, but not
# this project installed. From the repository's root:
#
#     scripts/gpu/start.sh OUT [PART...]
#
# PART is of: plain eagle3 mtp; plain and eagle3 by default. With FIRST=1 a server ends after its first token, and COLD=1
# leaves out starts with kept caches. OUT receives start.md and a log of each start, in which each line begins with the
# seconds since it began; caches are kept elsewhere. Needed as well, as wheels on PYTHONPATH where they aren't installed:
# fastapi, uvicorn, pydantic and gguf with what they need. QWEN is a folder with Qwen3-8B's config.json (weights are made
# up) and a tokenizer, EAGLE3 one with its drafter's config.json, HYBRID one with Qwen3.5-35B-A3B's config.json.
# Modules should be byte-compiled (`python3 -m compileall`), as pip does that; otherwise each start spends 2.6 s on it
# where Python may not write.
. "$(dirname "$0")/common.sh"
export FIRST=${FIRST:-}
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT

# start NAME ARGUMENTS...: one server from its start to its last program, as a row, and as the parts of its first token
start() {
    local name=$1
    shift
    JAXSPEC_CACHE=$cache python3 - "$name" "$out" "$@" <<'END' || status=1
import contextlib, glob, json, os, re, subprocess, sys, threading, time, urllib.request
from collections import defaultdict

name, out, *arguments = sys.argv[1:]
url, lines = "http://127.0.0.1:30007", []


def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=100) as answer:
        return json.loads(answer.read() or b"null")


def wait(condition, seconds=300):
    """Seconds from the server's start until it holds, or what an error was."""
    error = None
    while time.monotonic() - began < seconds:
        assert server.poll() is None, f"the server ended with status {server.returncode}"
        try:
            if condition():
                return time.monotonic() - began
        except OSError as failed:
            error = failed
        time.sleep(0.1)
    raise SystemExit(f"{name}: not within {seconds} s: {error}")


def text(tokens):
    asked = {"prompt": list(range(100, 400)), "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    started = time.monotonic()
    ask("/v1/completions", {"model": "default", **asked})
    return tokens / (time.monotonic() - started)


def processors():
    """Processor seconds of the server so far, and of those that it started."""
    ticks = 0
    for stat in glob.glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, rest = stat.split("/")[2], open(stat).read().rpartition(")")[2].split()
            if pid == str(server.pid):
                ticks += sum(map(int, rest[11:15]))  # with children that have ended
            elif rest[1] == str(server.pid):
                ticks += sum(map(int, rest[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def read(stream):
    with open(f"{out}/{name}.log", "w") as log:
        for line in stream:
            lines.append((time.monotonic() - began, line.rstrip()))
            print(f"{lines[-1][0]:6.2f} {line[:400].rstrip()}", file=log)


def told(first):
    """The log's lines until then that say how long something took: when it was over, what it was, and its seconds."""
    for when, line in lines:
        if when <= first and (found := re.search(r"jaxspec: (.*) in (\d+\.\d+) s$", line)):
            yield when, found[1], float(found[2])


def parts(ready, first):
    """What there was to do until the first token, by kind."""
    kinds = defaultdict(list)
    for when, what, seconds in told(ready):
        one, _, of = what.partition(" ")
        kind = f"{one} kernels" if of.startswith("kernel ") else what if "programs" not in what else "start"
        kind = f"{one} programs" if re.search(r" \d+$", what) else kind
        kinds[kind].append((when, seconds, of.removeprefix("kernel ")))
    started = next((when for when, line in lines if "jaxspec:" in line), 0.0)
    print(f"\n{name}: imports until {started:.1f} s, ready after {ready:.1f}, the first token after {first:.1f}\n")
    print("| what | how many | from, s | to, s | seconds in all | longest |\n|---|---|---|---|---|---|")
    for kind, each in kinds.items():
        longest = ", ".join(f"{of} {seconds:.1f}" for _, seconds, of in sorted(each, key=lambda x: -x[1])[:4])
        begins, ends = min(when - seconds for when, seconds, _ in each), max(when for when, _, _ in each)
        print(f"| {kind} | {len(each)} | {begins:.1f} | {ends:.1f} | {sum(x[1] for x in each):.1f} | {longest} |")
    print()


began = time.monotonic()
command = [sys.executable, "-m", "server", "--port", "30007", "--served-model-name", "default", "--log-level", "debug"]
server = subprocess.Popen(command + arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
threading.Thread(target=read, args=[server.stdout], daemon=True).start()
try:
    ready = wait(lambda: ask("/health") is None or True)
    text(1)
    first, spent = time.monotonic() - began, processors()
    speeds, whole, after = [text(64)], "", ""
    stats = lambda: ask("/server_info")["stats"]
    pending = len(stats()["programs_pending"])
    busy = f"{spent / first:.1f}"
    if not os.environ["FIRST"]:
        done = threading.Event()

        def serve():
            while not done.is_set():
                speeds.append(text(64))

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        seconds = wait(lambda: not stats()["programs_pending"])
        whole, busy = f"{seconds:.1f}", f"{busy}, {(processors() - spent) / (seconds - first):.1f}"
        done.set()
        serving.join()
        if name.endswith("-cold") and "none" not in arguments:  # kept for the next start, as programs are
            wait(lambda: any(re.search("rounds of .* drafts timed in", line) for _, line in lines))
        wait(lambda: sum("jaxspec: kept " in line for _, line in lines) >= pending)
        text(64)
        after = f"{text(256):.0f}"
    row = f"| {name} | {ready:.1f} | {first:.1f} | {whole} | {pending} | {busy} | {min(speeds):.0f} | {after} |"
    print(row)
    with open(f"{out}/start.md", "a") as file:
        print(row, file=file)
    parts(ready, first)
finally:
    began_to_stop = time.monotonic()
    server.terminate()
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        server.kill()
    print(f"{name}: stopped in {time.monotonic() - began_to_stop:.1f} s, status {server.returncode}", file=sys.stderr)
END
}

echo "| start | ready, s | first token, s | all programs, s | programs behind | processors busy before, after | tokens/s meanwhile | after |" >"$out/start.md"
echo "|---|---|---|---|---|---|---|---|" >>"$out/start.md"
[ $# -gt 0 ] || set -- plain eagle3
for part; do
    case $part in
        plain) load=(--model "$QWEN" --load-format dummy --draft none) ;;
        eagle3) load=(--model "$QWEN" --load-format dummy --draft "eagle3:$EAGLE3" --num-draft-tokens 3) ;;
        mtp) load=(--model "$HYBRID" --load-format dummy --draft mtp --num-draft-tokens 3) ;;
        *) echo "no part $part" >&2; exit 2 ;;
    esac
    rm -rf "${cache:?}"/*
    load+=(${FLAGS-})
    start "$part-cold" "${load[@]}"
    [ -n "${COLD:-}" ] || start "$part-kept" "${load[@]}"
done
exit $status
