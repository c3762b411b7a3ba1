"""Where a measured result goes: bench/results/<date>-<what>.json, with all that a reader needs."""

import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def commit():
    """The commit measured; "+changes" when the tree differed from it."""
    override = os.environ.get("TRAINSTREAM_COMMIT")
    if override:
        return override
    try:
        git = ["git", "-C", str(ROOT)]
        name = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
        changed = subprocess.check_output([*git, "status", "--porcelain", "-uno"], text=True)
        return name + ("+changes" if changed.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def command():
    """What was run, less where it put the result: that says something of one machine only."""
    words = list(sys.argv)
    if "--folder" in words:
        at = words.index("--folder")
        del words[at : at + 2]
    return "python " + " ".join(words)


def write(what, hardware, versions, rows, folder=None):
    """Writes rows of (name, value, unit) and returns the path."""
    folder = pathlib.Path(folder or ROOT / "bench" / "results")
    folder.mkdir(parents=True, exist_ok=True)
    date = datetime.date.today().isoformat()
    path = folder / f"{date}-{what}.json"
    content = {
        "what": what,
        "date": date,
        "hardware": hardware,
        "versions": {"python": platform.python_version(), **versions},
        "commit": commit(),
        "command": command(),
        "rows": [{"name": name, "value": value, "unit": unit} for name, value, unit in rows],
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path
