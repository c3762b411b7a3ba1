#!/usr/bin/env bash
# All behaviour cases, by several runners at once: a case is one process after the other, and most
# of it is starting up.
#   tools/cases.sh RUNNERS PYTHON run_cases.py [--device cpu ...]
# Shows each runner's output, ending in its own summary line; fails if one of them does.
set -uo pipefail

runners=$1 python=$2 cases=$3
shift 3
mapfile -t names < <(cd "$(dirname "$cases")" && basename -s .py -- *.py | grep -v '^run_cases$')
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
processes=() status=0
for ((i = 0; i < runners && i < ${#names[@]}; i++)); do
    mine=()
    for ((k = i; k < ${#names[@]}; k += runners)); do mine+=("${names[k]}"); done
    "$python" "$cases" "$@" "${mine[@]}" >"$folder/$i.log" 2>&1 &
    processes+=($!)
done
[ ${#processes[@]} -gt 0 ] || { echo "cases: none beside $cases" >&2; exit 1; }
for i in "${!processes[@]}"; do
    wait "${processes[i]}" || status=1
    cat "$folder/$i.log"
done
exit $status
