#!/usr/bin/env bash
# Form, tidiness and layers of every source. Runs all checks, then fails if one did.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 1
python=$(tools/setup.sh python build) || exit 1
failed=()

# check NAME COMMAND...: shows the output of a check only when it failed.
check() {
    local name=$1 output
    shift
    if output=$("$@" 2>&1); then
        echo "lint: $name: ok"
    else
        printf '%s\n' "$output"
        echo "lint: $name: failed"
        failed+=("$name")
    fi
}

# One line for each file, with its first place.
format() {
    find csrc tests/cpp bench \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' \) -print0 |
        xargs -0 -r clang-format --dry-run -Werror 2>&1 | grep ' error: ' | sort -s -u -t: -k1,1
    [ "${PIPESTATUS[1]}" -eq 0 ]
}

# The commands are clang's own: it does not know all of gcc's warnings.
tidy() {
    cmake --preset clang >/dev/null && "$python" tools/tidy.py build/core-clang
}

check clang-format format
check layers "$python" tools/check_layers.py
check "ruff check" "$python" -m ruff check --quiet .
check "ruff format" "$python" -m ruff format --check --quiet .
check clang-tidy tidy

if [ ${#failed[@]} -gt 0 ]; then
    echo "lint: failed: ${failed[*]} (make format repairs what can be repaired by itself)"
    exit 1
fi
