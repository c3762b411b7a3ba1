"""`trainstream bench`: the scripts in the folder bench/ of a clone."""

import argparse
import ast
import os
import pathlib
import subprocess
import sys

from trainstream import errors
from trainstream.cli.console import Console

EXAMPLES = """\
examples:
  trainstream bench                                      lists them
  trainstream bench main_job --shape 1.26b --budget 0.4
  trainstream bench compare --help
"""
_FOLDER = pathlib.Path(__file__).resolve().parents[2] / "bench"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("name", nargs="?", help="which one; without it they are listed")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the benchmark's own")


def execute(options: argparse.Namespace, console: Console) -> int:
    """Lists the benchmarks, or runs one; its exit status is the command's."""
    known = _benchmarks(_FOLDER)
    if not known:
        raise errors.no_benchmarks(str(_FOLDER))
    if options.name is None:
        console.table("benchmarks", [], list(known.items()))
        return 0
    name = options.name.removesuffix(".py").replace("-", "_")
    if name not in known:
        raise errors.no_such_benchmark(options.name, list(known))
    paths = [str(_FOLDER.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = [sys.executable, str(_FOLDER / f"{name}.py"), *options.arguments]
    return 0 if subprocess.call(command, env=environment) == 0 else 1


def _benchmarks(folder: pathlib.Path) -> dict[str, str]:
    """Names and first lines of those scripts whose text says how they are called."""
    known = {}
    for path in sorted(folder.glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if f"\n    python bench/{path.name}" in text:
            known[path.stem] = text.splitlines()[0]
    return known
