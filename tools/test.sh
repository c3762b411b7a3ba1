#!/usr/bin/env bash
# Every part of `make test`, each with its time. A failed part does not stop the others. The Python
# tests of both torch versions and the ecosystem's run side by side: most are one process on one core.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
parts=(lint core-debug core-asan core-tsan core-clang build build-newest)
together=(pytest pytest-newest ecosystem)
table=()
failed=()

# run PART: stdin is closed so that nothing can wait for an answer.
run() {
    local start=$SECONDS result=ok
    echo "== $1"
    make_part "$1" || result=FAILED
    note "$1" $result $((SECONDS - start))
}

# run_together PART...: what each prints comes in one piece, as it ends.
run_together() {
    local part start=$SECONDS result
    local -A processes
    mkdir -p build
    for part in "$@"; do
        make_part "$part" >"build/test-$part.log" 2>&1 &
        processes[$part]=$!
    done
    for part in "$@"; do
        result=ok
        wait "${processes[$part]}" || result=FAILED
        note "$part" $result $((SECONDS - start))
        echo "== $part"
        cat "build/test-$part.log"
    done
}

make_part() { "${MAKE:-make}" --no-print-directory "$1" </dev/null; }

note() {
    [ "$2" = ok ] || failed+=("$1")
    table+=("$(printf '%-14s %-6s %5.1f min' "$1" "$2" "$(minutes "$3")")")
}

minutes() { awk -v s="$1" 'BEGIN { printf "%.1f", s / 60 }'; }

run setup
if [ ${#failed[@]} -eq 0 ]; then
    for part in "${parts[@]}"; do run "$part"; done
    run_together "${together[@]}"
fi

echo "== parts"
printf '%s\n' "${table[@]}"
[ ${#failed[@]} -eq 0 ] || {
    echo "failed: ${failed[*]}"
    exit 1
}
