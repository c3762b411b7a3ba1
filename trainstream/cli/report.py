"""`trainstream report`: a run report as a page, a picture and a trace."""

import argparse
import json

from trainstream import errors
from trainstream.cli import run_file
from trainstream.cli.console import Console

EXAMPLES = """\
examples:
  trainstream report run.json                        writes run.html beside it
  trainstream report run.json -o out.html --png out.png
  trainstream report run.json --trace out.json       for ui.perfetto.dev or chrome://tracing
A run writes run.json with report:run.json in PYTORCH_TRAINSTREAM_CONF, or under
trainstream run --report run.json train.py.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("run", metavar="run.json", help="what report:run.json wrote")
    parser.add_argument("-o", "--output", metavar="out.html", help="default: run.html beside it")
    parser.add_argument("--png", metavar="out.png", help="the charts as a picture (matplotlib)")
    parser.add_argument("--trace", metavar="out.json", help="a trace for Perfetto or Chrome")


def execute(options: argparse.Namespace, console: Console) -> int:
    """Writes what was asked for: the page where nothing else was."""
    run = run_file.load(options.run)
    written = []
    if options.output or not (options.png or options.trace):
        from trainstream.cli import page

        path = options.output or run_file.default_output(options.run, ".html")
        written.append(_write(path, page.make(run)))
    if options.trace:
        from trainstream.cli import trace

        written.append(_write(options.trace, json.dumps(trace.make(run))))
    if options.png:
        from trainstream.cli import figure

        try:
            figure.write(run, options.png)
        except OSError as fault:
            raise errors.cannot_write(options.png, fault.strerror or str(fault)) from None
        written.append(options.png)
    console.table("run", [], run_file.summary(run))
    console.line(run_file.limit(run))
    for path in written:
        console.line(f"written: {path}")
    return 0


def _write(path: str, text: str) -> str:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as fault:
        raise errors.cannot_write(path, fault.strerror or str(fault)) from None
    return path
