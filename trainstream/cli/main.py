"""The command line's entrance: which command, and what becomes of its errors.

Exit status: 0 good, 1 failed (one line on stderr says why), 2 a wrong use of the command line.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from trainstream import __version__, errors

GOOD, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

# A command's module is imported when it is asked for: some take torch, all take time.
_COMMANDS = {
    "run": "run a script under trainstream",
    "info": "what this machine gives, and what works on it",
    "fit": "what a model needs, what fits, and what limits a step",
    "report": "a run report as a page, a picture or a trace",
    "bench": "run a benchmark of a clone",
}
_EXAMPLES = """\
examples:
  trainstream run --vram 12GiB --report run.json train.py --epochs 3
  trainstream report run.json
  trainstream fit config.json --tokens 8192 --vram 24GiB
  trainstream info
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: Without the program's name. Default: those of this process.

    Returns:
        The exit status.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _execute(words)
    except errors.ConfigError as fault:
        return _say(fault, USAGE)
    except (errors.TrainstreamError, errors.BudgetError) as fault:
        return _say(fault, FAILED)
    except BrokenPipeError:
        # Whoever read has enough. Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _execute(words: list[str]) -> int:
    name = words[0] if words and words[0] in _COMMANDS else None
    parser = _parser(name)
    options = parser.parse_args(words)
    if options.command is None:
        parser.print_help()
        return USAGE
    from trainstream.cli.console import Console

    return _module(options.command).execute(options, Console())


def _module(name: str):
    return importlib.import_module(f"trainstream.cli.{name}")


def _parser(asked: str | None) -> argparse.ArgumentParser:
    """Knows the arguments of the command asked for only: the others' modules stay unread."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="trainstream",
        description="Trains PyTorch models that do not fit in GPU memory, with nothing to wrap.",
        epilog=_EXAMPLES,
        formatter_class=form,
    )
    parser.add_argument("--version", action="version", version=f"trainstream {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, text in _COMMANDS.items():
        module = _module(name) if name == asked else None
        made = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=module and module.EXAMPLES,
            formatter_class=form,
            allow_abbrev=False,
        )
        if module is not None:
            module.add_arguments(made)
    return parser


def _say(fault: Exception, status: int) -> int:
    text = str(fault).removeprefix("trainstream: ")  # The core's own messages begin with it.
    print(f"trainstream: {text}", file=sys.stderr)
    return status
