#!/usr/bin/env bash
# Sets up what the build needs, from nothing on Debian 12 with python3, g++ and make.
#
#   tools/setup.sh tools              installs what the C++ core, its tests and the linters need
#   tools/setup.sh python [build]     makes the Python environment and prints its interpreter
#   tools/setup.sh python newest      the same for the newest torch
#   tools/setup.sh python ecosystem   the first one and libraries that train with torch
#
# Only the interpreter goes to stdout; progress goes to stderr. Calling it again costs milliseconds,
# and two calls at once wait for each other. Environments lie outside the clone, one for each
# requirements file, so that several clones share them. The ecosystem's sees the packages of the
# first one, torch among them, and has only its libraries itself.
#
# TRAINSTREAM_PYTHON        an interpreter to use as it is: nothing is installed then
# TRAINSTREAM_VENV          where the environment lies instead; TRAINSTREAM_VENV_NEWEST and
#                           TRAINSTREAM_VENV_ECOSYSTEM likewise
set -euo pipefail
unset PYTHONPATH PYTHONHOME

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/trainstream

say() { echo "setup: $*" >&2; }
fail() {
    say "$*"
    exit 1
}

# One caller at a time, until this process ends.
lock() {
    mkdir -p "$(dirname "$1")"
    exec 9>"$1"
    flock 9
}

# install_packages PACKAGE...: from Debian, as root; otherwise says what is missing.
install_packages() {
    [ $# -gt 0 ] || return 0
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        fail "missing: $*. Install these packages (apt-get install $*) and call again."
    fi
    lock "$cache/apt.lock"
    say "installing $*"
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq -o DPkg::Lock::Timeout=300 update >&2
    apt-get -qq -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "$@" >&2
}

has_command() { command -v "$1" >/dev/null; }

set_up_tools() {
    local missing=()
    has_command cmake || missing+=(cmake)
    has_command ninja || missing+=(ninja-build)
    has_command clang++ || missing+=(clang)
    has_command clang-format || missing+=(clang-format)
    has_command run-clang-tidy || missing+=(clang-tidy)
    has_command ccache || missing+=(ccache)
    [ -e /usr/include/gtest/gtest.h ] || missing+=(libgtest-dev)
    [ -e /usr/include/benchmark/benchmark.h ] || missing+=(libbenchmark-dev)
    install_packages "${missing[@]}"
}

# What python3 needs to make environments and to build extensions. ccache only saves time, but the
# commands of the build contain it, so it comes before the first build or not at all.
set_up_base_python() {
    has_command python3 || fail "python3 is missing. Install Python 3.10 or newer and call again."
    local missing=()
    python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
    python3 -c 'import os, sysconfig as s, sys
sys.exit(not os.path.exists(os.path.join(s.get_path("include"), "Python.h")))' ||
        missing+=(python3-dev)
    has_command g++ || missing+=(g++)
    if [ "$(id -u)" -eq 0 ] && has_command apt-get; then
        has_command ccache || missing+=(ccache)
    fi
    install_packages "${missing[@]}"
}

site_of() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# make_environment FOLDER REQUIREMENTS [BASE]: nothing when its stamp shows that it is complete.
# With BASE, an interpreter, the packages of that one's environment are seen, and not installed.
make_environment() {
    local folder=$1 requirements=$2 base=${3:-} wanted
    wanted="$(sha256sum <"$requirements")$base"
    local mark=$folder/.trainstream-environment stamp=$folder/.complete
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    lock "$folder.lock"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return  # Another caller made it while this one waited.
    fi
    if [ -e "$folder" ] && [ ! -e "$mark" ] && [ -n "$(ls -A "$folder")" ]; then
        fail "$folder exists and was not made by this script, so it is left alone." \
            "To use an interpreter of your own, set TRAINSTREAM_PYTHON instead."
    fi
    say "making the environment $folder (about $([ -n "$base" ] && echo 400 MB || echo 5 GB))"
    rm -rf "$folder"
    mkdir -p "$folder"
    touch "$mark"
    python3 -m venv "$folder" >&2
    if [ -n "$base" ]; then
        site_of "$base" >"$(site_of "$folder/bin/python")/base.pth"
    fi
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-input \
        --requirement "$requirements" >&2
    echo "$wanted" >"$stamp"
}

set_up_python() {
    local kind=$1
    local requirements=$root/requirements/$kind.txt
    [ -e "$requirements" ] || fail "no $requirements: the kinds are build, newest and ecosystem."
    if [ -n "${TRAINSTREAM_PYTHON:-}" ]; then
        command -v "$TRAINSTREAM_PYTHON" || fail "TRAINSTREAM_PYTHON=$TRAINSTREAM_PYTHON: not found."
        return
    fi
    set_up_base_python
    local minor hash folder base=
    minor=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    hash=$(sha256sum <"$requirements" | cut -c1-12)
    folder=$cache/venv-$minor-$hash
    case $kind in
        build) folder=${TRAINSTREAM_VENV:-$folder} ;;
        newest) folder=${TRAINSTREAM_VENV_NEWEST:-$folder} ;;
        ecosystem)
            # Keyed by what lies below it, too: another torch needs other libraries.
            base=$(set_up_python build)
            hash=$(cat "$root/requirements/build.txt" "$requirements" | sha256sum | cut -c1-12)
            folder=${TRAINSTREAM_VENV_ECOSYSTEM:-$cache/venv-$minor-$hash}
            ;;
    esac
    make_environment "$folder" "$requirements" "$base"
    echo "$folder/bin/python"
}

case "${1:-}" in
    tools) set_up_tools ;;
    python) set_up_python "${2:-build}" ;;
    *) fail "usage: tools/setup.sh tools | python [build|newest|ecosystem]" ;;
esac
