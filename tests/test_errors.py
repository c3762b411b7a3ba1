"""What is said when something does not work, with the real extension: every number that decided.

Wrong keys and values, a library for another torch and a missing GPU are in test_config.py and
test_autoload.py; here is what only a real run can come to.
"""

import re

import pytest
from real_runner import exit_numbers, needs_extension, run_real

pytestmark = needs_extension

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SIZE = r"(\d+(?:\.\d+)?) (B|KiB|MiB|GiB|TiB)"


def sizes_in(message: str) -> list[int]:
    return [int(float(number) * UNITS[unit]) for number, unit in re.findall(SIZE, message)]


def off_line(result) -> str:
    """The one line of a run that went on as plain PyTorch."""
    assert "result 3.0" in result.stdout
    assert result.stderr.splitlines() == result.lines() and len(result.lines()) == 1
    assert result.lines()[0].startswith("trainstream: off: ")
    return result.lines()[0]


def out_of_memory_numbers(message: str) -> dict[str, int]:
    """The numbers of the message, which must be whole and name what to change."""
    pattern = (
        f"trainstream: cannot place a storage of {SIZE}: device budget {SIZE}, in use {SIZE}, of "
        f"which {SIZE} is pinned and {SIZE} can move; host memory limit {SIZE}, in use {SIZE}. "
        f"Raise vram or ram in PYTORCH_TRAINSTREAM_CONF by at least {SIZE}, or make the batch "
        "smaller."
    )
    assert re.search(pattern, message), message
    names = "asked budget in_use pinned movable host_limit host_in_use raise_by".split()
    numbers = dict(zip(names, sizes_in(message), strict=True))
    assert numbers["raise_by"] == numbers["asked"]
    assert numbers["pinned"] + numbers["movable"] == numbers["in_use"] <= numbers["budget"]
    assert numbers["host_in_use"] <= numbers["host_limit"]
    return numbers


def test_budget_below_one_operators_working_set_says_the_numbers(tmp_path):
    """Two inputs and an output of 4 MiB each, in use at once; there is room for two of them."""
    script = """
    a, b = torch.ones(1024, 1024), torch.ones(1024, 1024)
    try:
        a @ b
    except torch.OutOfMemoryError as fault:
        print(fault)
    print(a.sum().item(), b.sum().item())
    """
    result = run_real(tmp_path, script, "vram:8MiB,ram:2MiB")
    message, sums = result.stdout.splitlines()
    numbers = out_of_memory_numbers(message)
    assert numbers["asked"] == 4 * 2**20 and numbers["budget"] == 8 * 2**20
    assert numbers["pinned"] == 8 * 2**20 and numbers["host_limit"] == 2 * 2**20
    assert sums == "1048576.0 1048576.0"


def test_host_memory_exhausted_says_the_numbers(tmp_path):
    script = """
    kept = []
    try:
        while len(kept) < 50:
            kept.append(torch.ones(2**19))
    except torch.OutOfMemoryError as fault:
        print(len(kept), fault)
    """
    result = run_real(tmp_path, script, "vram:6MiB,ram:10MiB")
    count, message = result.stdout.split(" ", 1)
    numbers = out_of_memory_numbers(message)
    assert int(count) == 8
    assert numbers == {
        "asked": 2 * 2**20,
        "budget": 6 * 2**20,
        "in_use": 6 * 2**20,
        "pinned": 0,
        "movable": 6 * 2**20,
        "host_limit": 10 * 2**20,
        "host_in_use": 10 * 2**20,
        "raise_by": 2 * 2**20,
    }


def test_storage_larger_than_budget_and_host_memory_says_the_numbers(tmp_path):
    script = """
    for make in (lambda: torch.empty(2**24), lambda: torch.empty(0).resize_(2**24)):
        try:
            make()
        except torch.OutOfMemoryError as fault:
            print(fault)
    """
    result = run_real(tmp_path, script, "vram:6MiB,ram:10MiB")
    messages = result.stdout.splitlines()
    assert len(messages) == 2
    for message in messages:
        assert out_of_memory_numbers(message)["asked"] == 2**26


def test_out_of_memory_comes_out_of_backward_and_of_threads(tmp_path):
    script = """
    import threading
    x = torch.ones(1024, 512, requires_grad=True)

    def attempt():
        try:
            torch.cat([(x * i).exp() for i in range(6)]).sum().backward()
        except torch.OutOfMemoryError as fault:
            print("cannot place a storage of" in str(fault), isinstance(fault, RuntimeError))

    attempt()
    t = threading.Thread(target=attempt)
    t.start()
    t.join()
    print((x * 2).sum().item())
    """
    result = run_real(tmp_path, script, "vram:6MiB,ram:10MiB")
    assert result.stdout == "True True\n" * 2 + "1048576.0\n"


def test_refused_page_locks_are_said_once_with_the_numbers(tmp_path):
    script = """
    _C.sim_faults(0, 3 * 2**20)
    kept = [torch.full((2**18,), float(i)) for i in range(30)]
    print(all(x.sum().item() == i * 2.0**18 for i, x in enumerate(kept)))
    print(stats()["page_locked_bytes"] <= 3 * 2**20, stats()["pageable_bytes"] >= 20 * 2**20)
    """
    result = run_real(tmp_path, script, "vram:4MiB")
    assert result.stdout == "True\nTrue True\n"
    refused = [line for line in result.lines() if "page-locking" in line]
    assert len(refused) == 1
    pattern = (
        f"trainstream: page-locking {SIZE} was refused with {SIZE} locked so far: the simulated "
        "limit is 3.00 MiB. Going on in pageable memory: right, but slower. Raise the limit "
        r"\(ulimit -l, the container's memory lock\) or lower ram in PYTORCH_TRAINSTREAM_CONF."
    )
    assert re.fullmatch(pattern, refused[0]), refused[0]
    asked, locked, limit = sizes_in(refused[0])
    assert asked + locked > limit >= locked


def test_no_gpu_is_one_line_with_the_reason_and_the_way_out(tmp_path):
    script = "print('result', torch.ones(3).sum().item())\n"
    result = run_real(tmp_path, script, "vram:1GiB", device="sim")
    assert "off:" not in result.stderr
    exit_numbers(result)
    for device in ("cuda", "auto"):
        result = run_real(tmp_path, script.replace("DEVICE", "'cpu'"), "vram:1GiB", device=device)
        if "off:" not in result.stderr:
            pytest.skip("there is a GPU here")
        line = off_line(result)
        assert "no GPU: " in line and "device:sim simulates one on CPU tensors" in line


def test_budget_that_no_address_space_holds_is_one_line(tmp_path):
    script = "print('result', torch.ones(3).sum().item())\n"
    line = off_line(run_real(tmp_path, script, "vram:500TiB"))
    assert "cannot reserve 500.00 TiB for the simulated device" in line
    assert "Cannot allocate memory" in line


def test_functions_of_the_extension_refuse_what_they_cannot_take(tmp_path):
    script = """
    x = torch.ones(3)
    attempts = [
        lambda: _C.pin_storage(x, True),
        lambda: _C.pin("x"),
        lambda: _C.start_sim(2**20, 0, 2**20, True, False, 0),
        lambda: trainstream.enable(vram="1GiB"),
        lambda: trainstream.pin(None),
    ]
    for attempt in attempts:
        try:
            attempt()
        except Exception as fault:
            print(type(fault).__name__, str(fault).splitlines()[0])
    """
    result = run_real(tmp_path, script, "vram:64MiB")
    lines = result.stdout.splitlines()
    assert lines[0] == "TypeError trainstream: expected a torch.UntypedStorage"
    assert lines[1].startswith("TypeError pin(): incompatible function arguments")
    assert lines[2].endswith("trainstream: the simulated device runs already.")
    assert lines[3].startswith("TrainstreamError already switched on with vram:67108864,")
    assert lines[4] == "TypeError trainstream.pin() takes a torch.Tensor, got NoneType"
