"""Runs scripts in processes of their own, with the entry point and, if wanted, a fake extension.

The fake `trainstream._C` records its calls, so that the Python side is tested where nothing was
built. Torch is patched for good when trainstream is switched on, so tests do that in child
processes only.
"""

import contextlib
import functools
import json
import os
import pathlib
import subprocess
import sys
import textwrap
from dataclasses import dataclass

import torch

ROOT = pathlib.Path(__file__).parents[1]


def has_real_extension() -> bool:
    """Whether the extension is built, and for the torch that runs these tests."""
    built = ROOT / "trainstream" / "_build_info.py"
    return built.exists() and repr(str(torch.__version__)) in built.read_text(encoding="utf-8")


FAKE = """
import sys, types

calls = []
def recorder(name):
    return lambda *arguments: calls.append((name, *arguments))

fake = types.ModuleType("trainstream._C")
for name in ("start_sim", "cuda_allocator", "install_cuda_allocator", "pin", "pin_briefly",
             "pin_storage", "step_done", "mark_written", "UnseenStep", "close"):
    setattr(fake, name, recorder(name))
fake.calls, fake.has_cuda, fake.torch_version = calls, HAS_CUDA, TORCH_VERSION
fake.cuda_device_count = lambda: (0, "no driver")
fake.make_deferred_updates = lambda: None
fake.is_cold = lambda tensor: True
fake.stats = lambda: dict(
    device="sim", budget_bytes=100, peak_bytes=90, evicted_bytes=80, restored_bytes=70,
    in_place_bytes=60, page_locked_bytes=40, page_locked_bytes_peak=50, stall_ns=0,
    steps=sum(call[0] == "step_done" for call in calls))
sys.modules["trainstream._C"] = fake
built = types.ModuleType("trainstream._build_info")
built.torch_version, built.cuda = TORCH_VERSION, CUDA
sys.modules["trainstream._build_info"] = built
"""


@dataclass
class Result:
    status: int
    stdout: str
    stderr: str

    def lines(self) -> list[str]:
        """What trainstream itself wrote to stderr."""
        return [line for line in self.stderr.splitlines() if line.startswith("trainstream:")]


def run_script(
    folder: pathlib.Path,
    script: str,
    *,
    fresh: bool = False,
    fake: bool = True,
    torch_version: str = torch.__version__,
    cuda: str | None = None,
    has_cuda: bool = False,
    preload: tuple[str, ...] = (),
    **environment: str,
) -> Result:
    """Runs `script` as a file in `folder`; trainstream's variables are only those given.

    Args:
        fresh: Start a Python of its own, which imports torch itself. Default: a process forked at
            the end of `import torch`, which takes milliseconds.
        fake: Put the fake extension in place of a real one. Default True.
        torch_version, cuda: What the fake was built for. Default: this torch, without CUDA.
        has_cuda: What the fake says of itself. Default False.
        preload: Modules that the process that is forked has imported. Default: torch alone.
    """
    values = f"TORCH_VERSION, CUDA, HAS_CUDA = {str(torch_version)!r}, {cuda!r}, {has_cuda}\n"
    before = values + FAKE if fake else ""
    return run_scripts(folder, script, [environment], before, fresh=fresh, preload=preload)[0]


def run_scripts(
    folder: pathlib.Path,
    script: str,
    environments: list[dict[str, str]],
    before: str = "",
    *,
    fresh: bool = False,
    preload: tuple[str, ...] = (),
) -> list[Result]:
    """Runs `script` in several processes at once, one for each environment; see run_script.

    Args:
        before: Code that runs before everything else.
    """
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    outputs = [
        {name: str(folder / f"{name}{i or ''}.txt") for name in ("stdout", "stderr")}
        for i in range(len(environments))
    ]
    if fresh:
        site = make_site(folder / "site", before)
        statuses = run_fresh(path, plain_environment(site), environments, outputs)
    else:
        requests = [
            {"script": str(path), "environment": environment, "before": before, **files}
            for environment, files in zip(environments, outputs, strict=True)
        ]
        zygote = start_zygote(*preload)
        print(json.dumps(requests), file=zygote.stdin, flush=True)
        statuses = json.loads(zygote.stdout.readline())
    return [
        Result(status, *(pathlib.Path(files[name]).read_text() for name in files))
        for status, files in zip(statuses, outputs, strict=True)
    ]


def run_fresh(
    path: pathlib.Path,
    common: dict[str, str],
    environments: list[dict[str, str]],
    outputs: list[dict[str, str]],
) -> list[int]:
    """The exit statuses of Pythons of their own; scripts end themselves before the time-out."""
    processes = []
    with contextlib.ExitStack() as stack:
        for environment, files in zip(environments, outputs, strict=True):
            opened = {name: stack.enter_context(open(file, "w")) for name, file in files.items()}
            command = [sys.executable, str(path)]
            processes.append(subprocess.Popen(command, env={**common, **environment}, **opened))
        try:
            return [process.wait(timeout=400) for process in processes]
        finally:
            for process in processes:
                process.kill()


def make_site(site: pathlib.Path, before: str) -> pathlib.Path:
    """A folder for the import path: the entry point, and code that runs as Python starts."""
    info = site / "trainstream-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trainstream\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[torch.backends]\ntrainstream = trainstream._autoload:autoload\n"
    )
    (site / "sitecustomize.py").write_text(before)
    return site


def plain_environment(*import_path: pathlib.Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTORCH_TRAINSTREAM")}
    return {**kept, "PYTHONPATH": os.pathsep.join(map(str, [*import_path, ROOT]))}


@functools.cache
def start_zygote(*preload: str) -> subprocess.Popen:
    """The one that all tests of this run share; it ends when its standard input does.

    Args:
        preload: Modules that it imports, one process for each choice of them.
    """
    return subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "zygote.py"), *preload],
        env={**plain_environment(), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
