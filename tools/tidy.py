"""Runs clang-tidy on the core, and skips what it has found clean before.

    python tools/tidy.py <build folder of the preset clang>

clang-tidy takes seconds a file and finds the same in the same text. A clean file's key is kept in
~/.cache/trainstream/tidy: a hash of clang-tidy's version and settings, the compile command, and
the file with all of our headers that it reaches. What is not clean is looked at again each time.
The system's headers are known by the version that their packages share with the compiler.
Exit status: 0 when all is clean, 1 with what clang-tidy said.
"""

import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import time

from check_layers import includes_of

ROOT = pathlib.Path(__file__).resolve().parents[1]
CHECKED = re.compile(r"csrc/(base|device|pager|optim)/")
KEPT_DAYS = 30
NOISE = re.compile(r"^\d+ warnings? generated|^Suppressed \d+ warnings")


def keys_folder() -> pathlib.Path:
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(home, "trainstream", "tidy")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def forget_old(folder: pathlib.Path) -> None:
    for key in folder.iterdir():
        if time.time() - key.stat().st_mtime > KEPT_DAYS * 86400:
            key.unlink(missing_ok=True)  # Another clone may do the same.


def tools_version() -> str:
    """What decides beside our own text: both compilers' versions stand for the system's headers."""
    versions = (["clang-tidy", "--version"], ["clang++", "--version"], ["g++", "--version"])
    said = [subprocess.run(v, capture_output=True, text=True, check=True).stdout for v in versions]
    return "".join(said) + (ROOT / ".clang-tidy").read_text(encoding="utf-8")


def reached_from(path: pathlib.Path, seen: set[pathlib.Path]) -> set[pathlib.Path]:
    """`path` and the headers of ours that it includes, directly or not."""
    seen.add(path)
    for _, _, name in includes_of(path):
        for target in (ROOT / "csrc" / name, path.parent / name):
            if target.is_file() and target not in seen:
                reached_from(target, seen)
    return seen


def key_of(command: dict, tools: str) -> str:
    """The same in every clone: paths count from its root."""
    text = hashlib.sha256(tools.encode())
    text.update(command["command"].replace(str(ROOT), ".").encode())
    for path in sorted(reached_from(pathlib.Path(command["file"]), set())):
        content = path.read_bytes()
        text.update(f"\n{path.relative_to(ROOT)} {len(content)}\n".encode() + content)
    return text.hexdigest()


def tidy(build: str, file: str) -> tuple[int, str]:
    command = ["clang-tidy", "-quiet", "-p", build, file]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = [line for line in done.stdout.splitlines() if not NOISE.match(line)]
    return done.returncode, "\n".join(lines)


def main(build: str) -> int:
    folder, tools = keys_folder(), tools_version()
    forget_old(folder)
    commands = json.loads(pathlib.Path(build, "compile_commands.json").read_text(encoding="utf-8"))
    unknown = {}
    for command in commands:
        file = pathlib.Path(command["file"])
        if not CHECKED.match(str(file.relative_to(ROOT))):
            continue
        key = folder / key_of(command, tools)
        if key.exists():
            key.touch()
        else:
            unknown[str(file)] = key
    status = 0
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as workers:
        results = workers.map(lambda file: tidy(build, file), unknown)
        for key, (returned, said) in zip(unknown.values(), results, strict=True):
            if returned == 0 and not said:
                key.touch()
            else:
                status = 1
                print(said or f"clang-tidy ended with status {returned}")
    return status


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
