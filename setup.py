"""Builds trainstream._C against the torch of the interpreter that runs this.

    python setup.py egg_info build_ext --inplace    for work in the clone (what `make build` does)
    pip install --no-build-isolation .              to install

Environment:
    TRAINSTREAM_CUDA=0|1     Without, or with the CUDA door. Default: with it where torch is a CUDA
                             build and a toolkit of the same major version is found (CUDA_HOME).
    TRAINSTREAM_DEBUG=1      Checks assertions and invariants (TS_DEBUG_CHECKS).
    TRAINSTREAM_WERROR=1     Warnings are errors.
    TORCH_CUDA_ARCH_LIST     What the kernels are compiled for. Default: the visible GPUs; without
                             one, machine code for 8.0 and 9.0 and PTX for later ones.
    CXX, MAX_JOBS            As for every torch extension. Default: ccache where Debian's lies, and
                             one job a core.

Outputs of one torch version never meet those of another: they lie in build/torch-<version>.
"""

import datetime
import os
import pathlib
import re
import sys

from setuptools import setup
from setuptools.command.build import build

try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    sys.exit(
        f"trainstream: cannot import torch ({error}). The extension is built against the torch "
        "that will load it: install torch first, then use `pip install --no-build-isolation`."
    )

ROOT = pathlib.Path(__file__).resolve().parent
LAYERS = ("base", "device", "pager", "optim", "allocator", "binding")
CCACHE_COMPILER = "/usr/lib/ccache/g++"


def flag(name):
    """The value of a 0/1 environment variable; None when it is not set."""
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        sys.exit(f"trainstream: {name}={value!r}, but only 0 and 1 are allowed.")
    return None if value == "" else value == "1"


def toolkit_major():
    """The major version of the CUDA toolkit whose headers are found; None without one."""
    if cpp_extension.CUDA_HOME is None:
        return None
    header = pathlib.Path(cpp_extension.CUDA_HOME, "include", "cuda.h")
    if not header.exists():
        return None
    version = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", header.read_text(errors="replace"))
    return int(version.group(1)) // 1000 if version else None


def wants_cuda():
    """Whether to build the CUDA door, and why not."""
    wanted = flag("TRAINSTREAM_CUDA")
    if wanted is False:
        return False, "TRAINSTREAM_CUDA=0"
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} is not a CUDA build"
    elif toolkit_major() is None:
        reason = "no CUDA toolkit found (CUDA_HOME)"
    elif toolkit_major() != int(torch.version.cuda.partition(".")[0]):
        reason = f"the toolkit is of CUDA {toolkit_major()}, torch of {torch.version.cuda}"
    else:
        return True, ""
    if wanted:
        sys.exit(f"trainstream: TRAINSTREAM_CUDA=1, but {reason}.")
    return False, reason


def is_cuda_source(path):
    """Sources that include CUDA headers: see tools/check_layers.py for where these may be."""
    name = path.name
    if path.parent.name == "allocator":
        return "cuda" in name or name.startswith(("evicting_", "native_"))
    return name.startswith("cuda_")


def make_extension(with_cuda):
    sources = [path for layer in LAYERS for path in sorted((ROOT / "csrc" / layer).glob("*.cpp"))]
    if with_cuda:
        sources += sorted((ROOT / "csrc" / "optim").glob("*.cu"))
    else:
        sources = [path for path in sources if not is_cuda_source(path)]
    # The compiler then ignores -I for these folders, and their headers raise none of our warnings.
    paths = cpp_extension.include_paths("cuda" if with_cuda else "cpu")
    system = [f"-isystem{path}" for path in paths]
    # NDEBUG is part of the interface: at::RecordFunction has a member more without it.
    flags = ["-O3", "-g1", "-std=c++20", "-DNDEBUG", "-fvisibility=hidden", "-Wall", "-Wextra"]
    flags += ["-ffp-contract=off"]  # See CMakeLists.txt, as for the next one.
    flags += ["-Wno-restrict"] if sys.platform == "linux" else []
    kernel_flags = ["-O3", "-std=c++20", "-DNDEBUG", "-fmad=false"]
    kernel_flags += ["-Xcompiler=-Wall,-Wextra,-ffp-contract=off,-fvisibility=hidden"]
    if flag("TRAINSTREAM_WERROR"):
        flags.append("-Werror")
        kernel_flags.append("--Werror=all-warnings")
    macros = [("TS_WITH_CUDA", None)] if with_cuda else []
    macros += [("TS_DEBUG_CHECKS", None)] if flag("TRAINSTREAM_DEBUG") else []
    kind = cpp_extension.CUDAExtension if with_cuda else cpp_extension.CppExtension
    return kind(
        name="trainstream._C",
        sources=[str(path.relative_to(ROOT)) for path in sources],
        depends=[str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("csrc/*/*.h"))],
        include_dirs=[str(ROOT / "csrc")],
        define_macros=macros,
        extra_compile_args={"cxx": [*system, *flags], "nvcc": kernel_flags},
    )


# The tools of the environment, ninja above all, whether or not it is the active one.
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])


class Build(build):
    """Keeps the outputs of each torch version apart."""

    def initialize_options(self):
        super().initialize_options()
        self.build_base = f"build/torch-{torch.__version__}"


class BuildExtension(cpp_extension.BuildExtension):
    """Builds, then notes what it was built against where the extension was put."""

    def run(self):
        if "CXX" not in os.environ and os.access(CCACHE_COMPILER, os.X_OK):
            os.environ["CXX"] = CCACHE_COMPILER
            os.environ["TORCH_NO_COMPILER_WRAPPER"] = "1"  # Later torch puts ccache before ccache.
            if WITH_CUDA:
                nvcc = os.path.join(cpp_extension.CUDA_HOME, "bin", "nvcc")
                os.environ.setdefault("PYTORCH_NVCC", f"ccache {nvcc}")
        if WITH_CUDA and not torch.cuda.is_available():
            os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")  # Not torch's own, all.
        os.environ.setdefault("CCACHE_BASEDIR", str(ROOT))  # As in the Makefile.
        os.environ.setdefault("CCACHE_NOHASHDIR", "1")
        os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
        super().run()
        package = ROOT if self.inplace else pathlib.Path(self.build_lib)
        info = {
            "torch_version": torch.__version__,
            "cuda": torch.version.cuda if WITH_CUDA else None,
            "debug_checks": bool(flag("TRAINSTREAM_DEBUG")),
            "built_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        }
        lines = ['"""Written by setup.py: what trainstream._C was built against."""', ""]
        lines += [f"{name} = {value!r}" for name, value in info.items()]
        target = package / "trainstream" / "_build_info.py"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("\n".join(lines) + "\n", encoding="utf-8")


WITH_CUDA, REASON = wants_cuda()
ANSWER = "yes" if WITH_CUDA else f"no, {REASON}"
print(f"trainstream: torch {torch.__version__}, CUDA door: {ANSWER}")
os.chdir(ROOT)
setup(
    license="Apache-2.0",  # Not in pyproject.toml: its form there differs between setuptools.
    ext_modules=[make_extension(WITH_CUDA)],
    cmdclass={"build": Build, "build_ext": BuildExtension},
)
