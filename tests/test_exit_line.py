"""The line on exit: its form, and which processes print it."""

import re

import pytest
from script_runner import run_script

ON = {"PYTORCH_TRAINSTREAM": "1", "PYTORCH_TRAINSTREAM_CONF": "device:sim"}
LINE = re.compile(
    r"trainstream: device=sim budget=100 peak=90 evicted=80 restored=70 in_place=60 pinned=50 "
    r"steps=(\d+) stall=\d+\.\d%"
)


def steps_of(result) -> list[int]:
    """The steps of each exit line; every line of ours must be one."""
    matches = [LINE.fullmatch(line) for line in result.lines()]
    assert all(matches), result.stderr
    return [int(match[1]) for match in matches]


def test_line_counts_steps_of_any_optimizer_and_follows_closing(tmp_path):
    script = """
    import torch, sys
    fake = sys.modules["trainstream._C"]
    stats = fake.stats
    fake.stats = lambda: stats() if fake.calls[-1][0] == "close" else {}
    weight = torch.nn.Parameter(torch.ones(2))
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        optimizer = kind([weight], lr=0.1)
        for _ in range(2):
            weight.sum().backward()
            optimizer.step()
    """
    assert steps_of(run_script(tmp_path, script, **ON)) == [4]


@pytest.mark.parametrize(
    ("ending", "status"),
    [("", 0), ("sys.exit(3)", 3), ("raise ValueError('a fault')", 1)],
)
def test_line_comes_however_the_script_ends(tmp_path, ending, status):
    result = run_script(tmp_path, f"import sys, torch\n{ending}\n", fresh=status == 1, **ON)
    assert result.status == status and steps_of(result) == [0]


def test_failing_statistics_change_neither_status_nor_number_of_lines(tmp_path):
    script = """
    import torch, sys
    del sys.modules["trainstream._C"].stats
    """
    result = run_script(tmp_path, script, **ON)
    assert result.status == 0 and len(result.lines()) == 1
    assert "no summary: AttributeError" in result.lines()[0]


def test_closed_stderr_does_not_change_the_status(tmp_path):
    result = run_script(tmp_path, "import torch, sys\nsys.stderr.close()\n", **ON)
    assert (result.status, result.stderr) == (0, "")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_print_unless_they_are_forked_copies(tmp_path, method):
    """A forked child of a switched-on parent has its parent's extension; others have their own."""
    script = f"""
    import multiprocessing
    import torch

    def work():
        import torch
        torch.ones(3)

    if __name__ == "__main__":
        child = multiprocessing.get_context({method!r}).Process(target=work)
        child.start()
        child.join()
        assert child.exitcode == 0
    """
    expected = {"fork": 1, "spawn": 2, "forkserver": 2}
    assert (
        len(steps_of(run_script(tmp_path, script, fresh=method != "fork", **ON)))
        == expected[method]
    )


def test_fork_before_torch_is_imported_prints_in_the_child(tmp_path):
    script = """
    import multiprocessing

    def work():
        import torch

    if __name__ == "__main__":
        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
        child.join()
    """
    assert steps_of(run_script(tmp_path, script, fresh=True, **ON)) == [0]


def test_loader_workers_print_nothing(tmp_path):
    script = """
    import torch
    from torch.utils.data import DataLoader

    if __name__ == "__main__":
        for batch in DataLoader(torch.arange(8), batch_size=2, num_workers=2):
            pass
    """
    assert steps_of(run_script(tmp_path, script, **ON)) == [0]
