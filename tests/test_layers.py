"""The layers of csrc/ hold, and tools/check_layers.py notices when they do not."""

import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.any_torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
CHECK = ROOT / "tools" / "check_layers.py"

# A small tree with every include that is allowed and worth a doubt.
GOOD = {
    "base/bytes.h": "#include <cstdint>",
    "device/device.h": '#include "base/bytes.h"',
    "device/cuda_device.h": '#include <cuda_runtime.h>\n#include "device/device.h"',
    "device/cuda_device.cpp": '#include "device/cuda_device.h"',
    "pager/pager.cpp": '#include "base/bytes.h"\n#include "device/device.h"',
    "optim/adamw.cpp": '#include "base/bytes.h"\n#include <immintrin.h>',
    "optim/adamw.cu": "#include <cuda_bf16.h>",
    "allocator/evicting.cpp": '#include "device/cuda_device.h"\n#include <c10/cuda/CUDAStream.h>',
    "binding/module.cpp": '#include <torch/extension.h>\n#include "optim/adamw.h"',
}


def run_check(folder, files):
    for name, text in files.items():
        path = folder / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    command = [sys.executable, str(CHECK), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_layers_of_this_tree_hold():
    command = [sys.executable, str(CHECK)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_allowed_includes_pass(tmp_path):
    assert run_check(tmp_path, GOOD) == (0, "")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("base/x.h", '#include "device/device.h"', "base/x.h:1: device/device.h: base may not"),
        ("base/x.h", '#include "pager/pager.h"', "base may not include pager"),
        ("device/x.cpp", '\n  #  include "pager/p.h"', "device/x.cpp:2: pager/p.h: device may not"),
        ("device/x.cpp", "#include <pager/pager.h>", "device may not include pager"),
        ("pager/x.cpp", '#include "allocator/a.h"', "pager may not include allocator"),
        ("pager/x.cpp", '#include "optim/adamw.h"', "pager may not include optim"),
        ("optim/x.cpp", '#include "pager/pager.h"', "optim may not include pager"),
        ("allocator/x.cpp", '#include "binding/guard.h"', "allocator may not include binding"),
        ("allocator/x.cpp", '#include "optim/adamw.h"', "allocator may not include optim"),
        ("pager/x.cpp", "#include <cuda_runtime.h>", "CUDA headers may not be included here"),
        ("device/sim.cpp", "#include <cuda.h>", "CUDA headers may not be included here"),
        ("optim/x.h", "#include <cublas_v2.h>", "CUDA headers may not be included here"),
        ("pager/x.cpp", "#include <c10/core/Device.h>", "torch headers may not be included here"),
        ("device/cuda_x.cpp", "#include <ATen/ATen.h>", "torch headers may not be included here"),
        ("optim/x.cu", "#include <torch/extension.h>", "torch headers may not be included here"),
        ("base/x.h", "#include <pybind11/pybind11.h>", "torch headers may not be included here"),
        (
            "pager/x.cpp",
            '#include "device/cuda_device.h"',
            "pager/x.cpp: reaches CUDA headers through csrc/device/cuda_device.h",
        ),
        ("pager/x.cpp", '#include "pager.h"', "write our own headers as layer/name.h"),
        ("pager/x.cpp", '#include "../base/bytes.h"', "write our own headers as layer/name.h"),
        ("util/x.h", "#include <cstdint>", "util/x.h: not in a layer"),
        ("pager/deep/x.h", "#include <cstdint>", "deep/x.h: not in a layer"),
    ],
)
def test_forbidden_include_is_reported(tmp_path, name, text, expected):
    status, output = run_check(tmp_path, {**GOOD, name: text})
    assert status == 1
    assert len(output.splitlines()) == 1, output
    assert f"csrc/{name}" in output
    assert expected in output


def test_tree_without_sources_is_an_error(tmp_path):
    status, output = run_check(tmp_path, {})
    assert status == 1
    assert "no sources found" in output
