#!/usr/bin/env bash
# How long a server takes from its start to its first token and to all of its programs, with empty caches and with kept
# ones, on a machine with one GPU that has Python and jax with CUDA, but not this project installed. From the
# repository's root:
#
#     scripts/gpu/start.sh OUT [PART...]
#
# PART is of: plain eagle3; both by default. OUT receives a log for each start and start.md. Needed as well, as wheels on
# PYTHONPATH where they aren't installed: fastapi, uvicorn, pydantic and gguf with what they need. QWEN is a folder with
# Qwen3-8B's config.json (weights are made up) and a tokenizer, EAGLE3 one with its drafter's config.json.
set -uo pipefail
cd "$(dirname "$0")/../.."
[ $# -ge 1 ] || { sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
status=0

# start NAME ARGUMENTS...: one server from its start to its last program, as a row
start() {
    local name=$1
    shift
    JAXSPEC_CACHE=$out/cache python3 - "$name" "$out/$name.log" "$@" <<'END' | tee -a "$out/start.md" || status=1
import json, subprocess, sys, time, urllib.request

name, log, *arguments = sys.argv[1:]
url = "http://127.0.0.1:30007"


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


with open(log, "w") as file:
    began = time.monotonic()
    command = [sys.executable, "-m", "server", "--port", "30007", "--served-model-name", "default", *arguments]
    server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        ready = wait(lambda: ask("/health") is None or True)
        text(1)
        first = time.monotonic() - began
        speeds = []
        stats = lambda: ask("/server_info")["stats"]
        pending = len(stats()["programs_pending"])
        whole = wait(lambda: speeds.append(text(64)) or not stats()["programs_pending"])
        time.sleep(5)  # rounds are timed
        text(64)
        after = text(256)
        cells = name, f"{ready:.1f}", f"{first:.1f}", f"{whole:.1f}", pending, f"{min(speeds):.0f}", f"{after:.0f}"
        print("|", " | ".join(map(str, cells)), "|", stats()["draft_policy"], "|")
        began_to_stop = time.monotonic()
    finally:
        server.terminate()
        server.wait(60)
    print(f"<!-- {name}: stopped in {time.monotonic() - began_to_stop:.1f} s, status {server.returncode} -->")
END
}

echo "| start | ready, s | first token, s | all programs, s | programs behind | tokens/s meanwhile | after | drafts |" >"$out/start.md"
echo "|---|---|---|---|---|---|---|---|" >>"$out/start.md"
for part in "${@:-plain eagle3}"; do
    for part in $part; do
        case $part in
            plain) load=(--model "$QWEN" --load-format dummy --draft none) ;;
            eagle3) load=(--model "$QWEN" --load-format dummy --draft "eagle3:$EAGLE3" --num-draft-tokens 3) ;;
            *) echo "no part $part" >&2; exit 2 ;;
        esac
        rm -rf "$out/cache"
        start "$part-cold" "${load[@]}"
        start "$part-kept" "${load[@]}"
    done
done
rm -rf "$out/cache"
exit $status
