#!/usr/bin/env bash
# Builds the extension in place and its egg-info, which is how the entry point is found with the
# tree on PYTHONPATH. Prints the folder to put there.
#
#   tools/build.sh [build]    in this clone, for the pinned torch
#   tools/build.sh newest     in a copy of the sources in build/newest, for the newest torch
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
kind=${1:-build}
python=$("$root/tools/setup.sh" python "$kind")
tree=$root
[ "$kind" = build ] || tree=$root/build/$kind
mkdir -p "$tree/build"
# Two builds of one tree at once would write the same files.
exec 9>"$tree/build/extension.lock"
flock 9

if [ "$tree" != "$root" ]; then
    # Replace the sources, keep what was built: time stamps are kept, so only changes are rebuilt.
    find "$tree" -path "$tree/build" -prune -o -type f ! -name '*.so' ! -name _build_info.py \
        -exec rm -f {} +
    find "$root" -mindepth 1 -maxdepth 1 ! -name '.*' ! -name build ! -name dist ! -name shared \
        ! -name '*.egg-info' -printf '%P\0' |
        tar -C "$root" --exclude=__pycache__ --exclude='*.so' --exclude=_build_info.py \
            --null --files-from=- -cf - |
        tar -C "$tree" -xf -
fi

log=$tree/build/extension.log
cd "$tree"
if ! compgen -G "trainstream/_C*.so" >/dev/null; then
    echo "build: compiling the extension, some minutes the first time; log: build/extension.log" >&2
fi
if ! TRAINSTREAM_WERROR=${TRAINSTREAM_WERROR:-1} PYTHONPATH="" \
    "$python" setup.py egg_info build_ext --inplace >"$log" 2>&1; then
    # The compilers' words, or setup.py's: not the commands, and no traceback where both are there.
    grep -v -E ' -c -c |^(running|writing|reading|creating|copying|adding) ' "$log" |
        sed '/^ninja: build stopped/q' | head -100 >&2
    echo "build: failed; everything that was printed is in $log" >&2
    exit 1
fi
grep '^trainstream: torch' "$log" >&2
echo "$tree"
