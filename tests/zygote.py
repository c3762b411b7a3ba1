"""Imports torch once and forks a process for each script that it is asked to run.

Importing torch takes seconds, and the tests of switching on need a hundred fresh processes. Each
child is as a process is at the end of `import torch`: it calls the entry point, then the script.
Reads a JSON list a line, of objects: script, stdout, stderr (paths), environment, before (code).
They run at once; answers with the list of their exit statuses. Its arguments are modules that are
imported after torch.
"""

import atexit
import importlib
import json
import os
import runpy
import sys
import traceback

import torch  # noqa: F401


def run(request: dict) -> int:
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    for name in [n for n in os.environ if n.startswith("PYTORCH_TRAINSTREAM")]:
        del os.environ[name]
    os.environ.update(request["environment"])
    exec(request["before"], {})
    from trainstream import _autoload

    _autoload.autoload()
    try:
        runpy.run_path(request["script"], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def end_like_python(status: int) -> None:
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    os._exit(status)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What modules print as they are imported is no answer.
    while len(sys.argv) > 1:  # A script's arguments are its own: it has none.
        importlib.import_module(sys.argv.pop(1))
    for line in sys.stdin:
        children = []
        for request in json.loads(line):
            children.append(os.fork())
            if children[-1] == 0:
                answers.close()
                atexit._clear()
                end_like_python(run(request))
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        print(json.dumps(statuses), file=answers, flush=True)


if __name__ == "__main__":
    main()
