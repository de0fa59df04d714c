#!/bin/sh
# usage: setup.sh LOCK
# Make .venv hold exactly what LOCK pins, hashes checked, and this checkout as an editable install.
# Needs a Python 3.12 or newer with venv: $PYTHON if set, otherwise the first that is found.
set -eu
lock=$1

# An environment that is linked here may be another clone's, whose own code it would no longer run after this.
if [ -L .venv ]; then
    owner=$(.venv/bin/python -I -c 'import importlib.metadata as installed, json
print(json.loads(installed.distribution("jaxspec").read_text("direct_url.json"))["url"].removeprefix("file://"))' \
        2>/dev/null) || owner=
    if [ -d "$owner" ] && [ "$(cd "$owner" && pwd -P)" != "$(pwd -P)" ]; then
        echo "make: .venv is a link to the environment of $owner, and setting it up here would change what runs there;" \
            "remove the link to have one of your own, or do without make: .venv/bin/python -m server" >&2
        exit 1
    fi
fi

suits() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

# 3.12 and 3.13 come first: for a brand-new Python some wheels may not exist yet.
candidates() {
    printf '%s\n' python3.12 python3.13
    if command -v pyenv >/dev/null 2>&1; then
        ls -d "$(pyenv root)"/versions/3.12.*/bin/python "$(pyenv root)"/versions/3.13.*/bin/python 2>/dev/null || true
    fi
    if command -v uv >/dev/null 2>&1; then
        uv python find '>=3.12,<3.14' 2>/dev/null || true
    fi
    printf '%s\n' python3 python3.14
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        suits "$PYTHON" && printf '%s\n' "$PYTHON" && return
        echo "PYTHON=$PYTHON is not a Python 3.12 or newer with the venv module; name another or unset it" >&2
        return 1
    fi
    candidates | while read -r candidate; do
        suits "$candidate" && printf '%s\n' "$candidate" && break
    done | grep . && return
    cat >&2 <<'HELP'
jaxspec needs Python 3.12 or newer with the venv module, and none was found. Install one, by any of:
    apt install python3.12-venv     # Ubuntu 24.04; on Debian 13: python3.13-venv
    pyenv install 3.12
    uv python install 3.12
or name one that is elsewhere: make test PYTHON=/path/to/python3.12
HELP
    return 1
}

if ! suits .venv/bin/python; then
    python=$(find_python)
    echo "setting up .venv with $("$python" --version) (a few minutes the first time)"
    "$python" -m venv --clear .venv
fi
pip=".venv/bin/python -m pip --disable-pip-version-check"

# Count packages as pip takes them up, on one line of a terminal, else every tenth. What is read is pip's output.
progress() {
    total=$(grep -c '^[A-Za-z0-9].*==' "$lock")
    count=0
    while read -r word name _; do
        case $word in
        Collecting) count=$((count + 1)) shown="fetching $count of up to $total packages: ${name%%[=<>;~!]*}" ;;
        Installing) shown="installing $count packages (a minute or two)" ;;
        *) continue ;;
        esac
        if [ -t 2 ]; then
            printf '\r%-72s' "$shown" >&2
        elif [ $((count % 10)) -eq 0 ] || [ "$word" = Installing ]; then
            printf '%s\n' "$shown" >&2
        fi
    done
    if [ -t 2 ]; then printf '\r%-72s\r' '' >&2; fi
}

# pip would compile every package to bytecode on one core, most of it of models that transformers knows and we don't.
log=.venv/pip.log
{ $pip install --no-compile --require-hashes -r "$lock" 2>&1 || echo 'setup.sh: pip failed'; } | tee "$log" | progress
if grep -q '^setup.sh: pip failed$' "$log"; then
    grep -v '^Collecting \|^  Downloading \|^  Using cached \|^setup.sh: ' "$log" >&2
    exit 1
fi
$pip --quiet install --no-deps --no-build-isolation --no-index -e .
.venv/bin/python -m compileall -q -j 0 -x '/(tests?|transformers/models)/' .venv/lib >/dev/null || true
