"""Checks what each folder of csrc/ includes.

    python tools/check_layers.py [root of the tree]

base <- device <- pager <- allocator <- binding and device <- optim <- binding: each may include
what is to its left. CUDA's headers are for csrc/device/cuda_*, *.cu, csrc/allocator and
csrc/binding, torch's for the last two; other files may not reach them through headers of ours.
Exit status: 0 when all is well, 1 with one line for each violation.
"""

import pathlib
import re
import sys

MAY_INCLUDE = {
    "base": {"base"},
    "device": {"base", "device"},
    "pager": {"base", "device", "pager"},
    "optim": {"base", "device", "optim"},
    "allocator": {"base", "device", "pager", "allocator"},
    "binding": {"base", "device", "pager", "optim", "allocator", "binding"},
}
SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
TORCH = re.compile(r"^(torch|ATen|c10|caffe2|pybind11)/|^Python\.h$")
CUDA = re.compile(
    r"^(cuda|cublas|cudnn|cufft|cufile|curand|cusolver|cusparse|nccl|nvml|nvToolsExt)[^/]*\.h(pp)?$"
    r"|^(driver_types|vector_types|device_launch_parameters)\.h$|^(cub|thrust|cuda|nvtx3)/"
)


def includes_of(path):
    """Yields (line number, whether in quotes, included name)."""
    text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), start=1):
        if match := INCLUDE.match(line):
            yield number, match.group(1) == '"', match.group(2)


def kinds_allowed(path, layer):
    """Which of "CUDA" and "torch" this file may include."""
    if layer in ("allocator", "binding"):
        return {"CUDA", "torch"}
    if path.suffix in (".cu", ".cuh") or (layer == "device" and path.name.startswith("cuda_")):
        return {"CUDA"}
    return set()


def kind_of(name):
    """ "torch", "CUDA" or None: whose header this is."""
    if TORCH.match(name):
        return "torch"
    return "CUDA" if CUDA.match(name) else None


def kinds_reached(path, csrc, seen):
    """Maps "CUDA" and "torch" to the file that includes such a header, over headers of ours."""
    reached = {}
    for _, _, name in includes_of(path):
        kind = kind_of(name)
        if kind is not None:
            reached.setdefault(kind, path)
        target = csrc / name
        if target not in seen and target.is_file():
            seen.add(target)
            for other, where in kinds_reached(target, csrc, seen).items():
                reached.setdefault(other, where)
    return reached


def check_file(path, csrc):
    """Yields a line for each violation in one file."""
    layer = path.relative_to(csrc).parts[0]
    shown = path.relative_to(csrc.parent)
    if layer not in MAY_INCLUDE or len(path.relative_to(csrc).parts) != 2:
        yield f"{shown}: not in a layer; the layers are csrc/{{{','.join(MAY_INCLUDE)}}}/"
        return
    allowed = kinds_allowed(path, layer)
    direct = set()
    for number, in_quotes, name in includes_of(path):
        folder = name.partition("/")[0]
        kind = kind_of(name)
        if kind is not None:
            direct.add(kind)
            if kind not in allowed:
                yield f"{shown}:{number}: {name}: {kind} headers may not be included here"
        elif folder in MAY_INCLUDE and "/" in name:
            if folder not in MAY_INCLUDE[layer]:
                yield f"{shown}:{number}: {name}: {layer} may not include {folder}"
        elif in_quotes:
            yield f"{shown}:{number}: {name}: write our own headers as layer/name.h"
    for kind, where in sorted(kinds_reached(path, csrc, {path}).items()):
        if kind not in allowed and kind not in direct:
            through = where.relative_to(csrc.parent)
            yield f"{shown}: reaches {kind} headers through {through}"


def check_tree(root):
    """The violations of the tree at `root`, each a line `file:line: what`."""
    csrc = root / "csrc"
    paths = sorted(path for path in csrc.rglob("*") if path.suffix in SUFFIXES)
    if not paths:
        return [f"{csrc}: no sources found"]
    return [line for path in paths for line in check_file(path, csrc)]


def main():
    default = pathlib.Path(__file__).resolve().parent.parent
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else default
    violations = check_tree(root)
    print("\n".join(violations), end="\n" if violations else "")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
