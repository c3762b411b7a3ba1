#!/usr/bin/env bash
# Every part of `make test`, each with its time. A failed part does not stop the others. Most tests
# are one process on one core, and some wait; so groups of parts run side by side, one more than
# there are cores, the longest first. What a group prints comes in one piece, as it ends.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
# One after another within a group: lint and core-clang configure the same folder.
groups=("pytest" "build-newest pytest-newest" "ecosystem" "core-tsan" "core-asan" "core-debug"
    "lint core-clang")
lanes=$(($(nproc) + 1))
# OpenMP's threads, torch's among them, sleep while they wait: spinning takes the others' cores.
export OMP_WAIT_POLICY=PASSIVE
table=()
failed=()

# run_group PART...: leaves what each prints in build/test-PART.log, result and time in *.result.
run_group() {
    local part start result
    for part in "$@"; do
        start=$SECONDS result=ok
        "${MAKE:-make}" --no-print-directory "$part" </dev/null >"build/test-$part.log" 2>&1 ||
            result=FAILED
        echo "$result $((SECONDS - start))" >"build/test-$part.result"
    done
}

# show PART...: prints what run_group left, and notes it for the table.
show() {
    local part result seconds
    for part in "$@"; do
        echo "== $part"
        cat "build/test-$part.log"
        result=FAILED seconds=0  # Of one that was ended before it could say.
        [ ! -e "build/test-$part.result" ] || read -r result seconds <"build/test-$part.result"
        note "$part" "$result" "$seconds"
    done
}

note() {
    [ "$2" = ok ] || failed+=("$1")
    table+=("$(printf '%-14s %-6s %5.1f min' "$1" "$2" "$(minutes "$3")")")
}

minutes() { awk -v s="$1" 'BEGIN { printf "%.1f", s / 60 }'; }

# run_side_by_side GROUP...: a new one starts as one ends.
run_side_by_side() {
    local group process
    local -A running=()
    while [ $# -gt 0 ] || [ ${#running[@]} -gt 0 ]; do
        if [ $# -gt 0 ] && [ ${#running[@]} -lt "$lanes" ]; then
            group=$1
            shift
            # shellcheck disable=SC2086  # The parts of a group are words.
            run_group $group &
            running[$!]=$group
            continue
        fi
        wait -n -p process "${!running[@]}"
        group=${running[$process]}
        unset "running[$process]"
        # shellcheck disable=SC2086
        show $group
    done
}

mkdir -p build
rm -f build/test-*.result
run_group setup
show setup
if [ ${#failed[@]} -eq 0 ]; then
    run_group build  # All tests of Python need it.
    show build
    run_side_by_side "${groups[@]}"
fi

echo "== parts"
printf '%s\n' "${table[@]}" "$(printf '%-21s %5.1f min' all "$(minutes $SECONDS)")"
[ ${#failed[@]} -eq 0 ] || {
    echo "failed: ${failed[*]}"
    exit 1
}
