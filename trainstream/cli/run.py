"""`trainstream run`: sets the variables, then becomes the script's process."""

import argparse
import importlib.metadata
import os
import pathlib
import shutil
import sys

from trainstream import config, errors
from trainstream.cli.console import Console

EXAMPLES = """\
examples:
  trainstream run --vram 12GiB train.py --epochs 3
  trainstream run --vram 40% --ram 64GiB --report run.json -m mypackage.train
  trainstream run --vram 24GiB torchrun --nproc-per-node 2 train.py
  torchrun --nproc-per-node 2 -m trainstream run --vram 24GiB train.py
Options of trainstream come before the script; what follows it is the script's own. A setting that
is given here takes precedence over the same one in PYTORCH_TRAINSTREAM_CONF.
"""
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments: the configuration's keys, then the script."""
    amount = "auto, a size such as 12GiB, or a percent such as 40%%"
    helps = {
        "vram": f"budget of device memory: {amount}",
        "ram": f"limit of page-locked host memory: {amount}",
        "device": "auto, cuda, or sim: CPU tensors play the device",
        "optimizer": "stock, host, stream, hybrid or auto",
        "moments": "float32, bfloat16 or auto, of those optimizers but stock",
        "activations": "auto, off, all or a fraction: what backward needs leaves early",
        "min_storage": "size below which a storage is left alone",
        "report": "file for the run report, which `trainstream report` shows",
        "log": "off, warn, info or debug",
    }
    for key, text in helps.items():
        name = key.upper() if key != "report" else "FILE"
        parser.add_argument(f"--{key.replace('_', '-')}", metavar=name, help=text)
    parser.add_argument(
        "--no-plan",
        dest="plan",
        action="store_false",
        default=None,
        help="move on demand only, load nothing ahead",
    )
    parser.add_argument(
        "--no-late-updates",
        dest="late_updates",
        action="store_false",
        default=None,
        help="make fused optimizer steps at once, not as weights are next used",
    )
    parser.add_argument("--verify", action="store_true", default=None, help="check every drop")
    parser.add_argument("-m", "--module", action="store_true", help="as python -m")
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, help="train.py, a module after -m, or a program"
    )


def execute(options: argparse.Namespace, console: Console) -> int:
    """Replaces this process, so that whoever watches it (torchrun, a shell) watches the script."""
    words = options.script[1:] if options.script[:1] == ["--"] else options.script
    if not words:
        raise errors.no_script()
    variables = _variables(vars(options), os.environ)
    program = _program(words, options.module)
    sys.stdout.flush()
    try:
        os.execve(program[0], program, {**os.environ, **variables})
    except OSError as fault:
        raise errors.cannot_start(words[0], fault.strerror or str(fault)) from None


def _program(words: list[str], module: bool) -> list[str]:
    """The command line, its program with its path."""
    if module:
        return [sys.executable, "-m", *words]
    first = words[0]
    if first.endswith((".py", ".pyw")) or os.path.isdir(first):
        if os.path.exists(first):
            return [sys.executable, *words]
        raise errors.no_such_program(first)
    # Torch's programs lie beside the interpreter, whether or not its environment is active.
    beside = os.path.dirname(sys.executable)
    found = shutil.which(first, path=os.pathsep.join([os.environ.get("PATH", ""), beside]))
    if found is not None:
        return [found, *words[1:]]
    if os.path.isfile(first):
        return [sys.executable, *words]
    raise errors.no_such_program(first)


def _variables(options: dict, environment: dict) -> dict[str, str]:
    """What the script's environment gets.

    Raises:
        ConfigError: A setting is wrong.
        TrainstreamError: The script would not find trainstream.
    """
    keys = {key: options[key] for key in config.KEYS if options[key] is not None}
    known = config.parse_conf(environment.get(config.CONF_VARIABLE, ""))
    made = {
        config.SWITCH_VARIABLE: "1",
        config.CONF_VARIABLE: str(config.with_keywords(known, keys)),
    }
    found = importlib.metadata.entry_points(group="torch.backends")
    if not any(point.name == "trainstream" for point in found):
        raise errors.no_entry_point()
    if environment.get(_AUTOLOAD, "1") == "0":
        raise errors.autoload_is_off(_AUTOLOAD)
    root = pathlib.Path(__file__).resolve().parents[2]
    if root.name not in ("site-packages", "dist-packages"):  # A clone: found from here only.
        paths = [str(root), environment.get("PYTHONPATH", "")]
        made["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return made
