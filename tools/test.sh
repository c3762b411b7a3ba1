#!/usr/bin/env bash
# Every part of `make test`, each with its time. A failed part does not stop the others.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
parts=(lint core-debug core-asan core-tsan core-clang build pytest pytest-newest)
table=()
failed=()

# run PART: stdin is closed so that nothing can wait for an answer.
run() {
    local start=$SECONDS result=ok
    echo "== $1"
    "${MAKE:-make}" --no-print-directory "$1" </dev/null || result=FAILED
    [ $result = ok ] || failed+=("$1")
    table+=("$(printf '%-14s %-6s %5.1f min' "$1" $result "$(minutes $((SECONDS - start)))")")
}

minutes() { awk -v s="$1" 'BEGIN { printf "%.1f", s / 60 }'; }

run setup
if [ ${#failed[@]} -eq 0 ]; then
    for part in "${parts[@]}"; do run "$part"; done
fi

echo "== parts"
printf '%s\n' "${table[@]}"
[ ${#failed[@]} -eq 0 ] || {
    echo "failed: ${failed[*]}"
    exit 1
}
