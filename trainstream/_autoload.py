"""The entry point that torch calls at the end of `import torch` (group `torch.backends`).

It runs in every process that imports torch, wanted or not. So it imports nothing more while the
variable is unset, and no fault gets out of it: a script without a working trainstream is a plain
PyTorch script with one more line on stderr.
"""

import atexit
import os
import sys

_ON = ("1", "true", "yes", "on")
_OFF = ("", "0", "false", "no", "off")


def autoload() -> None:
    """Switches trainstream on if PYTORCH_TRAINSTREAM says so. Never raises."""
    value = _variable()
    if value in _OFF:
        atexit.register(_say_if_set_too_late, os.getpid())
        return
    try:
        if value not in _ON:
            from trainstream import errors

            raise errors.bad_switch(os.environ["PYTORCH_TRAINSTREAM"])
        from trainstream import _switch

        _switch.switch_on({})
    except Exception as fault:
        say_off(_text_of(fault))


def say_off(reason: str) -> None:
    """Writes the one line that says why trainstream is off; gives up silently without a stderr."""
    say(f"off: {reason}")


def say(text: str) -> None:
    """Writes one line to stderr; gives up silently without one."""
    try:
        # One write, so that lines of several processes do not mix.
        sys.stderr.write(f"trainstream: {text}\n")
        sys.stderr.flush()
    except Exception:
        pass


def _variable() -> str:
    return os.environ.get("PYTORCH_TRAINSTREAM", "").strip().lower()


def _text_of(fault: Exception) -> str:
    """The message on one line; other errors than our own with their type."""
    text = " ".join(str(fault).split())
    ours = type(fault).__module__.startswith("trainstream.")
    return text if ours and text else f"{type(fault).__name__}: {text}"


def _say_if_set_too_late(pid: int) -> None:
    if pid != os.getpid() or _variable() not in _ON:
        return  # A forked child runs its parent's exit functions too.
    switch = sys.modules.get("trainstream._switch")
    if switch is None or not switch.was_tried():
        from trainstream import errors

        say_off(errors.set_too_late())
