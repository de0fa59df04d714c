# What the scripts of this folder begin with. Each sources it with its own arguments, of which OUT is the first and is
# taken away. Afterwards the current folder is the repository's root, `out` the whole path of OUT, which exists, and
# `status` what to end with. `usage` prints a script's first comment and ends it.
set -uo pipefail
script=$(cd "$(dirname "$0")" && pwd)/$(basename "$0")
usage() {
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$script" >&2
    exit 2
}
[ $# -ge 1 ] && [ "${1#-}" = "$1" ] || usage
cd "$(dirname "$script")/../.." || exit
mkdir -p "$1" || exit
out=$(cd "$1" && pwd)
shift
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda,cpu}
status=0
