"""Runs the ecosystem matrix and writes its results and the table of docs/compatibility.md.

    make compatibility                                 # the long form, here
    python tools/compatibility.py test_torch           # results of these files of it only,
    python tools/compatibility.py test_torch::test_a   # or of these tests
    python tools/compatibility.py FILE.json FILE.json  # the table, from results that are there

TRAINSTREAM_JOBS tells how many of its tests run at once, each in a pytest of its own (default: 1,
all in one). Results of several machines are joined, with a GPU and without, and of runs that were
made in parts. No result of that table is written by hand.
"""

import concurrent.futures
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "compatibility.md"
BEGIN = "<!-- The matrix: written by tools/compatibility.py -->"
END = "<!-- The end of the matrix -->"
LIBRARIES = ("torch", "transformers", "accelerate", "peft", "lightning", "safetensors")
OPTIONAL = ("torchao", "bitsandbytes")
GROUPS = {
    "test_transformers": "Hugging Face Transformers and peft",
    "test_loops": "Accelerate and Lightning",
    "test_torch": "Plain torch",
    "test_more_torch": "More of torch",
    "test_distributed": "Several ranks (each at half of its own peak; the numbers are rank 0's)",
    "test_examples": "Examples on several ranks (likewise)",
    "test_compile": "torch.compile",
    "test_kernels": "Kernels of other libraries, graphs, torch's allocator",
    "test_files": "Files",
}


def run_matrix(folder: pathlib.Path, modules: list[str], jobs: int) -> list[dict]:
    """One row for each cell: its test, outcome, reason, and the numbers of its tight run."""
    files = [f"tests/ecosystem/{path_of(module)}" for module in modules] or ["tests/ecosystem"]
    parts = [files] if jobs == 1 else [[test] for test in collected(files)]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        ran = pool.map(lambda part: run_part(folder / str(part[0]), part[1]), enumerate(parts))
        return [row for rows in ran for row in rows]


def path_of(word: str) -> str:
    """`test_x` as `test_x.py`, `test_x::test_a` as `test_x.py::test_a`."""
    module, colons, test = word.partition("::")
    return f"{module}.py{colons}{test}"


def pytest_of(arguments: list[str], **variables: str) -> subprocess.CompletedProcess:
    # What needs no GPU is CI's to run, wherever one is there.
    kind = "gpu" if os.path.exists("/dev/nvidia0") else "not gpu"
    command = [sys.executable, "-m", "pytest", "-q", "-m", kind, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, check=False, stdout=subprocess.PIPE
    )


def collected(files: list[str]) -> list[str]:
    lines = pytest_of(["--collect-only", *files]).stdout.decode().splitlines()
    return [line for line in lines if "::" in line]


def run_part(folder: pathlib.Path, tests: list[str]) -> list[dict]:
    folder.mkdir()
    numbers, outcomes = folder / "numbers.jsonl", folder / "outcomes.xml"
    ran = pytest_of([f"--junitxml={outcomes}", *tests], TRAINSTREAM_MATRIX=str(numbers))
    print(ran.stdout.decode(errors="replace"), flush=True)
    if not outcomes.exists():
        sys.exit("compatibility: pytest wrote no results")
    found = {}
    if numbers.exists():
        for line in numbers.read_text().splitlines():
            row = json.loads(line)
            found[row.pop("test")] = row
    return [row_of(case, found) for case in xml.parse(outcomes).iter("testcase")]


def row_of(case: xml.Element, numbers: dict[str, dict]) -> dict:
    test = f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}"
    row = {"test": test, "outcome": "same bits", **numbers.get(test, {})}
    for tag, outcome in (("skipped", "not run"), ("failure", "FAILED"), ("error", "FAILED")):
        found = case.find(tag)
        if found is not None:
            row["outcome"] = outcome
            row["reason"] = reason_of(found.get("message") or "", found.text or "")
    return row


def reason_of(message: str, full: str) -> str:
    """The last error of a script that printed much, or the whole message."""
    lines = [line[1:] for line in full.splitlines() if line[:1] == "E" and "Error: " in line]
    return " ".join((lines[-1] if lines else message).split())[:200]


def keep(rows: list[dict], modules: list[str]) -> pathlib.Path:
    """Writes the rows to bench/results, as every measured figure is."""
    sys.path.append(str(ROOT / "bench"))
    import results
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cores = len(os.sched_getaffinity(0))
    versions = {name: version_of(name) for name in (*LIBRARIES, *OPTIONAL) if version_of(name)}
    path = results.write(
        "-".join(["ecosystem", "cuda" if gpu else "sim", *modules]).replace("::", "-"),
        {"gpu": gpu or "none: CPU tensors play its part", "machine": platform.machine()}
        | {"cores": cores},
        versions,
        [],
    )
    content = json.loads(path.read_text())
    content["form"] = os.environ.get("TRAINSTREAM_ECOSYSTEM", "quick")
    content["rows"] = rows
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def name_of(test: str) -> str:
    """`tests/x.py::test_some_claim[a-sim]` as `some claim (a)`."""
    name, _, parameters = test.partition("::")[2].removeprefix("test_").partition("[")
    words = [word for word in parameters.rstrip("]").split("-") if word not in ("sim", "cuda", "")]
    return name.replace("_", " ") + (f" ({', '.join(words)})" if words else "")


def device_of(test: str) -> str:
    return "cuda" if "cuda" in test.partition("[")[2].rstrip("]").split("-") else "sim"


def size(value: int | None) -> str:
    return "" if value is None else f"{value / 2**20:.1f}"


def joined(contents: list[dict]) -> list[dict]:
    """The rows of all, of each test one: the last one that ran."""
    rows = {}
    for content in contents:
        for row in content["rows"]:
            if row["outcome"] != "not run" or row["test"] not in rows:
                rows[row["test"]] = row
    return sorted(rows.values(), key=lambda row: row["outcome"] == "not run")


def table(contents: list[dict]) -> str:
    rows = joined(contents)
    lines = []
    for content in contents:
        part = content["what"].partition("ecosystem-")[2].replace("-", ", ")
        versions = ", ".join(f"{name} {text}" for name, text in content["versions"].items())
        commit, gpu = content["commit"][:7], content["hardware"]["gpu"]
        lines.append(
            f"* {part}: {content['date']}, {content['form']} form, commit `{commit}`, "
            f"GPU: {gpu}; {versions}."
        )
    lines += ["", "Sizes in MiB: peak of the stock script, budget, and what left and came back."]
    for module, title in GROUPS.items():
        lines += ["", f"### {title}"]
        lines += ["| script | device | result | stock | budget | left | back |"]
        lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
        for row in rows:
            if f"/{module}.py" in row["test"]:
                lines.append(line_of(row))
    return "\n".join(lines)


def line_of(row: dict) -> str:
    result = row["outcome"] + (f": {row['reason']}" if row.get("reason") else "")
    sizes = [row.get(k) for k in ("stock_peak_bytes", "budget_bytes", "evicted", "restored")]
    name, device = name_of(row["test"]), device_of(row["test"])
    return " | ".join(["| " + name, device, result.replace("|", "/"), *map(size, sizes)]) + " |"


def write_document(contents: list[dict]) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rest or END not in rest:
        sys.exit(f"compatibility: {DOCUMENT} has no place for the matrix")
    text = f"{before}{BEGIN}\n{table(contents)}\n\n{END}{after}"
    DOCUMENT.write_text(text, encoding="utf-8")


def main() -> int:
    paths = [pathlib.Path(word) for word in sys.argv[1:] if word.endswith(".json")]
    modules = [word for word in sys.argv[1:] if not word.endswith(".json")]
    if not {module.partition("::")[0] for module in modules} <= set(GROUPS):
        sys.exit(f"compatibility: the files are {', '.join(GROUPS)}")
    if not paths:
        with tempfile.TemporaryDirectory() as folder:
            jobs = int(os.environ.get("TRAINSTREAM_JOBS", "1"))
            paths = [keep(run_matrix(pathlib.Path(folder), modules, jobs), modules)]
    contents = [json.loads(path.read_text()) for path in paths]
    if not modules:
        write_document(contents)
    failed = [row["test"] for row in joined(contents) if row["outcome"] == "FAILED"]
    for test in failed:
        print(f"compatibility: failed: {test}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
