"""Runs scripts plain and with the real extension under a budget, and compares what they print.

A script sees: `torch`, one thread and deterministic; `DEVICE`, "cpu" where CPU tensors play the
device's, or "cuda"; `evict_all()`, `is_cold(tensor)`, `stats()` and `_C` (None in the plain run),
which the plain run answers with nothing done; `digest(tensor)`, a hash of its bytes.
"""

import os
import pathlib
import textwrap

import pytest
import torch
from script_runner import Result, has_real_extension, run_scripts

needs_extension = pytest.mark.skipif(
    not has_real_extension(), reason="trainstream._C is not built for this torch"
)


def on_gpu(*values):
    """A parameter that needs a GPU, with what it stands for."""
    no_gpu = pytest.mark.skipif(not os.path.exists("/dev/nvidia0"), reason="there is no GPU here")
    return pytest.param(*values, marks=[pytest.mark.gpu, no_gpu], id="cuda")


# For tests that make sense on both: `@pytest.mark.parametrize("device", DEVICES)`.
DEVICES = [pytest.param("sim", id="sim"), on_gpu("cuda")]

# What torch itself imports when a first optimizer is made: 1.5 s of CPU, in most scripts. Under
# `preload=()` a script imports it as a user's does, after trainstream was switched on.
BY_OPTIMIZERS = ("torch._dynamo",)

PRELUDE = """
import faulthandler, hashlib, os, signal, sys
faulthandler.enable()
faulthandler.register(signal.SIGALRM, chain=True)
signal.alarm({seconds})  # Not faulthandler's own watch: a forked child that ends would wait for it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
import torch, trainstream

DEVICE = {device!r}
torch.set_num_threads({threads})
torch.manual_seed(0)  # CUDA's generator begins with a seed of chance.
torch._C._set_deterministic_algorithms(True)  # The public function imports Inductor: 2 s.
_C = sys.modules.get("trainstream._C") if trainstream.is_enabled() else None
is_cold, stats = trainstream.is_cold, trainstream.memory_stats

def evict_all():
    return 0 if _C is None else _C.evict_all()

def digest(tensor):
    flat = tensor.detach().contiguous().reshape(-1).clone()
    raw = bytes(flat.view(torch.uint8).cpu().numpy()) if flat.numel() else b""
    return hashlib.sha256(repr((tensor.dtype, tensor.shape)).encode() + raw).hexdigest()[:16]
"""


def run_real(
    folder: pathlib.Path,
    script: str,
    conf: str | None,
    *,
    fresh: bool = False,
    status: int | None = 0,
    preload: tuple[str, ...] = BY_OPTIMIZERS,
    device: str = "sim",
    threads: int = 1,
    seconds: int = 60,
    **environment: str,
) -> Result:
    """Runs `script` after the prelude, under trainstream where `conf` is not None.

    Args:
        folder: Where the script is put.
        script: Its text, indented or not.
        conf: What follows `device:...` in the configuration, such as "vram:8MiB".
        fresh: Start a Python of its own; see run_script. Needed where its end is what is tested.
        status: The exit status expected; None for any.
        preload: Modules that the process that is forked has imported; see run_script. Default: what
            optimizers need.
        device: "sim" or "cuda".
        threads: Of torch's own.
        seconds: After so many the script is ended, with the tracebacks of all its threads.
        environment: Variables for the script.
    """
    text = with_prelude(script, device, threads, seconds)
    variables = [{**environment, **switch(conf, device)}]
    result = run_scripts(folder, text, variables, fresh=fresh, preload=preload)[0]
    check_status(result, status)
    return result


def with_prelude(script: str, device: str, threads: int = 1, seconds: int = 60) -> str:
    torch_device = "cpu" if device == "sim" else "cuda"
    prelude = PRELUDE.format(seconds=seconds, device=torch_device, threads=threads)
    return prelude + textwrap.dedent(script)


def switch(conf: str | None, device: str) -> dict[str, str]:
    """The variables that switch trainstream on with `conf`; none where that is None."""
    if conf is None:
        return {}
    return {"PYTORCH_TRAINSTREAM": "1", "PYTORCH_TRAINSTREAM_CONF": f"device:{device},{conf}"}


def check_status(result: Result, status: int | None = 0) -> None:
    same = status is None or result.status == status
    assert same, f"status {result.status}\n{result.stdout}{result.stderr}"


def run_both(folder: pathlib.Path, script: str, conf: str, **options) -> Result:
    """Runs `script` plain and under trainstream; both must print the same. Returns the second."""
    # Its start and imports are what trainstream could disturb: the plain one is forked, to be fast.
    plain = run_real(folder, script, None, **{**options, "fresh": False, "preload": BY_OPTIMIZERS})
    under = run_real(folder, script, conf, **options)
    assert under.stdout == plain.stdout, f"{under.stderr}"
    assert plain.stdout, "a script that prints nothing compares nothing"
    return under


def exit_numbers(result: Result) -> dict[str, int]:
    """The numbers of the exit line, which must be the only line of its kind."""
    lines = [line for line in result.lines() if "evicted=" in line]
    assert len(lines) == 1, result.stderr
    pairs = (word.split("=") for word in lines[0].split()[1:])
    return {key: int(value) for key, value in pairs if value.isdigit()}


def torch_at_least(major: int, minor: int) -> bool:
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (major, minor)
