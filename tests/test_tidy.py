"""What tools/tidy.py skips has been found clean in this very text, and nothing else is skipped."""

import json
import os
import pathlib
import stat
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tools"))
import tidy

pytestmark = pytest.mark.any_torch

# Says what it was asked to look at; what holds the word BAD is not clean.
FAKE = """#!/bin/sh
[ "$1" = --version ] && { echo "$(basename "$0") ${VERSION:-14}"; exit; }
for file; do :; done
echo "$file" >>"$LOOKED"
! grep -H BAD "$file" "$(dirname "$file")/../base/deep.h"
"""


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """Makes a tree with two files and enters it. One home and fake tools for all."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("clang-tidy", "clang++", "g++"):
        (tools / name).write_text(FAKE)
        (tools / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LOOKED", str(tmp_path / "looked"))

    def make(name: str) -> pathlib.Path:
        root = tmp_path / name
        texts = {
            "csrc/base/a.cpp": '#include "base/near.h"\n',
            "csrc/base/near.h": '#include "base/deep.h"\n',
            "csrc/base/deep.h": "int deep;\n",
            "csrc/pager/b.cpp": "int b;\n",
            ".clang-tidy": "Checks: '*'\n",
        }
        for path, text in texts.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        commands = [
            {"file": f"{root}/{path}", "command": f"clang++ -I{root}/csrc -c {root}/{path}"}
            for path in texts
            if path.endswith(".cpp")
        ]
        (root / "compile_commands.json").write_text(json.dumps(commands))
        monkeypatch.setattr(tidy, "ROOT", root)
        return root

    return make


def looked_at(tmp_path, root, status=0) -> list[str]:
    looked = tmp_path / "looked"
    looked.write_text("")
    assert tidy.main(str(root)) == status
    return sorted(pathlib.Path(line).name for line in looked.read_text().splitlines())


def test_clean_text_is_looked_at_once_in_all_clones(tmp_path, clone):
    assert looked_at(tmp_path, clone("one")) == ["a.cpp", "b.cpp"]
    assert looked_at(tmp_path, clone("one")) == []
    assert looked_at(tmp_path, clone("two")) == []


@pytest.mark.parametrize(
    ("path", "seen"),
    [
        ("csrc/base/a.cpp", ["a.cpp"]),
        ("csrc/base/deep.h", ["a.cpp"]),  # Included by what it includes.
        (".clang-tidy", ["a.cpp", "b.cpp"]),
        ("compile_commands.json", ["a.cpp", "b.cpp"]),
    ],
)
def test_whatever_decides_is_looked_at_again(tmp_path, clone, path, seen):
    looked_at(tmp_path, clone("one"))
    root = clone("two")
    text = (root / path).read_text()
    (root / path).write_text(text.replace("-c", "-DX -c") if "json" in path else text + "//\n")
    assert looked_at(tmp_path, root) == seen


def test_another_version_looks_again(tmp_path, clone, monkeypatch):
    looked_at(tmp_path, clone("one"))
    monkeypatch.setenv("VERSION", "15")
    assert looked_at(tmp_path, clone("one")) == ["a.cpp", "b.cpp"]


def test_fault_is_said_each_time(tmp_path, clone, capsys):
    root = clone("one")
    (root / "csrc/base/deep.h").write_text("BAD\n")
    for _ in range(2):
        # Only a.cpp reaches it, but the fake looks at it for both.
        assert looked_at(tmp_path, root, status=1) == ["a.cpp", "b.cpp"]
        assert "BAD" in capsys.readouterr().out
