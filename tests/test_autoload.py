"""Switching on by the environment and by call, and what is said when that does not work."""

import pytest
import torch
from script_runner import run_script

TRAIN = """
import torch
print("result", torch.ones(3).sum().item())
"""


def off_line(result) -> str:
    """The one line of a run that went on as plain PyTorch."""
    assert result.status == 0, result.stderr
    assert "result 3.0" in result.stdout
    assert result.stderr.splitlines() == result.lines() and len(result.lines()) == 1
    assert result.lines()[0].startswith("trainstream: off: ")
    return result.lines()[0]


@pytest.mark.parametrize("variable", [{}, {"PYTORCH_TRAINSTREAM": "0"}])
def test_unset_imports_nothing_and_says_nothing(tmp_path, variable):
    script = """
    import sys, torch
    ours = {name for name in sys.modules if name.startswith("trainstream")}
    print(sorted(ours - {"trainstream._C", "trainstream._build_info"}))  # Put there by the fake.
    print(hasattr(torch.Tensor.data_ptr, "__wrapped__"))
    """
    result = run_script(tmp_path, script, fresh=True, **variable)
    expected = "['trainstream', 'trainstream._autoload', 'trainstream.errors']\nFalse\n"
    assert (result.stdout, result.stderr) == (expected, "")


def test_package_alone_does_not_import_torch(tmp_path):
    script = """
    import sys, trainstream
    print(trainstream.is_enabled(), trainstream.memory_stats(), "torch" in sys.modules)
    """
    result = run_script(tmp_path, script, fresh=True)
    assert result.stdout == "False {} False\n", result.stderr


@pytest.mark.parametrize("value", ["1", "true", "YES", " on "])
def test_variable_switches_on(tmp_path, value):
    # The first value by the true way, through `import torch`; the others only differ in reading.
    script = """
    import torch, trainstream
    from trainstream import _C
    print(trainstream.is_enabled(), _C.calls)
    """
    conf = "vram:1GiB,ram:2GiB,device:sim,min_storage:4096,verify:1"
    on = {"PYTORCH_TRAINSTREAM": value, "PYTORCH_TRAINSTREAM_CONF": conf}
    result = run_script(tmp_path, script, fresh=value == "1", **on)
    assert result.stdout == f"True [('start_sim', {2**30}, {2**31}, 4096, True, True, 0)]\n"


def test_variable_set_in_the_script_before_torch_switches_on(tmp_path):
    script = """
    import os
    os.environ.update(PYTORCH_TRAINSTREAM="1", PYTORCH_TRAINSTREAM_CONF="device:sim")
    import torch, trainstream
    print(trainstream.is_enabled())
    """
    result = run_script(tmp_path, script, fresh=True)
    assert result.stdout == "True\n", result.stderr


def test_variable_set_too_late_says_so(tmp_path):
    script = TRAIN + "import os; os.environ['PYTORCH_TRAINSTREAM'] = '1'"
    line = off_line(run_script(tmp_path, script))
    assert "was set after torch was imported" in line and "trainstream.enable()" in line


def test_variable_set_late_and_enabled_by_call_says_nothing_of_it(tmp_path):
    script = """
    import torch, os, trainstream
    os.environ["PYTORCH_TRAINSTREAM"] = "1"
    trainstream.enable(device="sim")
    """
    result = run_script(tmp_path, script)
    assert len(result.lines()) == 1 and "evicted=80" in result.lines()[0]


def test_forked_child_does_not_say_that_the_variable_is_late(tmp_path):
    script = """
    import torch, os, sys
    os.environ["PYTORCH_TRAINSTREAM"] = "1"
    pid = os.fork()
    if pid == 0:
        sys.exit(0)
    os.waitpid(pid, 0)
    """
    assert len(run_script(tmp_path, script).lines()) == 1


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ("vramm:1GiB", "unknown key 'vramm' (did you mean 'vram'?)"),
        ("vram:lots", "bad value 'lots' for key 'vram'"),
        ("device:cuda", "no GPU: this trainstream was built without CUDA; device:sim simulates"),
        ("", "no GPU: this trainstream was built without CUDA; device:sim simulates"),
    ],
)
def test_bad_configuration_is_one_line_and_the_script_runs(tmp_path, conf, words):
    result = run_script(tmp_path, TRAIN, PYTORCH_TRAINSTREAM="1", PYTORCH_TRAINSTREAM_CONF=conf)
    assert words in off_line(result)


def test_no_gpu_is_one_line_with_the_reason(tmp_path):
    result = run_script(
        tmp_path,
        TRAIN,
        cuda=torch.version.cuda,
        has_cuda=True,
        PYTORCH_TRAINSTREAM="1",
        PYTORCH_TRAINSTREAM_CONF="device:cuda",
    )
    assert "no GPU: no driver; device:sim simulates one" in off_line(result)


@pytest.mark.skipif(not torch.version.cuda, reason="this torch has no CUDA allocators")
def test_allocator_that_is_not_torchs_native_one_is_refused(tmp_path):
    script = """
    import torch, trainstream
    from trainstream import _C
    _C.cuda_device_count = lambda: (1, "")
    for call in (trainstream.enable, trainstream.allocator):
        try:
            call(device="cuda")
        except trainstream.TrainstreamError as fault:
            print(fault)
    print(_C.calls)
    """
    result = run_script(
        tmp_path,
        script,
        fresh=True,
        cuda=torch.version.cuda,
        has_cuda=True,
        PYTORCH_ALLOC_CONF="backend:cudaMallocAsync",
    )
    first, second, calls = result.stdout.splitlines()
    assert first == second and "'cudaMallocAsync'" in first and "PYTORCH_ALLOC_CONF" in first
    assert calls == "[]"


def test_bad_switch_is_one_line(tmp_path):
    line = off_line(run_script(tmp_path, TRAIN, PYTORCH_TRAINSTREAM="maybe"))
    assert "bad value 'maybe' for PYTORCH_TRAINSTREAM; allowed: 1, true, yes, on or 0" in line


@pytest.mark.parametrize(
    ("built", "cuda", "text"),
    [
        ("2.3.1", None, "built for torch 2.3.1 without CUDA"),
        ("1.99.0+cu999", "99.9", "built for torch 1.99.0 with CUDA 99.9"),
        (torch.__version__, "99.9", "with CUDA 99.9"),
    ],
)
def test_library_for_another_torch_names_both_versions(tmp_path, built, cuda, text):
    result = run_script(
        tmp_path,
        TRAIN + "import sys; print(sys.modules['trainstream._C'].calls)",
        torch_version=built,
        cuda=cuda,
        PYTORCH_TRAINSTREAM="1",
        PYTORCH_TRAINSTREAM_CONF="device:sim",
    )
    line = off_line(result)
    assert text in line and f"this is torch {torch.__version__.partition('+')[0]}" in line
    assert "[]" in result.stdout  # The extension was not touched.


def test_patch_releases_of_one_minor_fit(tmp_path):
    version = ".".join(torch.__version__.split(".")[:2]) + ".77"
    result = run_script(
        tmp_path,
        TRAIN,
        torch_version=version,
        PYTORCH_TRAINSTREAM="1",
        PYTORCH_TRAINSTREAM_CONF="device:sim",
    )
    assert "off" not in result.stderr and "evicted=80" in result.stderr


def test_missing_extension_is_one_line(tmp_path):
    script = "import sys; sys.modules['trainstream._C'] = None" + TRAIN
    result = run_script(
        tmp_path, script, fresh=True, PYTORCH_TRAINSTREAM="1", PYTORCH_TRAINSTREAM_CONF="device:sim"
    )
    assert "trainstream._C cannot be loaded" in off_line(result)


def test_any_fault_of_the_extension_is_one_line(tmp_path):
    script = """
    import sys
    def refuse(*arguments): raise RuntimeError("no\\nroom")
    sys.modules["trainstream._C"].start_sim = refuse
    """
    result = run_script(
        tmp_path,
        script + TRAIN.replace("\n", "\n    "),
        fresh=True,
        PYTORCH_TRAINSTREAM="1",
        PYTORCH_TRAINSTREAM_CONF="device:sim",
    )
    assert off_line(result) == "trainstream: off: RuntimeError: no room"


def test_second_enable_with_other_settings_is_an_error_and_with_the_same_is_not(tmp_path):
    script = """
    import trainstream
    from trainstream import _C
    trainstream.enable(vram="1GiB", device="sim")
    trainstream.enable(vram=2**30, device="sim")
    print([name for name, *_ in _C.calls])
    try:
        trainstream.enable(vram="2GiB", device="sim")
    except trainstream.TrainstreamError as fault:
        print(fault)
    """
    result = run_script(tmp_path, script)
    calls, fault = result.stdout.splitlines()
    assert calls == "['start_sim']"
    assert f"vram:{2**30}" in fault and f"vram:{2**31}" in fault


def test_enable_takes_what_it_is_not_given_from_the_environment(tmp_path):
    script = """
    import trainstream
    from trainstream import _C
    trainstream.enable(min_storage="8KiB")
    print(_C.calls)
    """
    result = run_script(tmp_path, script, PYTORCH_TRAINSTREAM_CONF="vram:5MiB,device:sim")
    assert result.stdout == f"[('start_sim', {5 * 2**20}, 0, 8192, True, False, 0)]\n"


def test_allocator_is_switched_on_when_torch_takes_it(tmp_path):
    script = """
    import sys, torch, trainstream
    from trainstream import _C
    _C.cuda_device_count = lambda: (1, "")
    make = _C.cuda_allocator
    _C.cuda_allocator = lambda *arguments: (make(*arguments), "shared pointer")[1]
    allocator = trainstream.allocator(vram="40%")
    print(isinstance(allocator, torch.cuda.memory._CUDAAllocator), trainstream.is_enabled())
    print(allocator.allocator(), trainstream.is_enabled(), _C.calls)
    """
    result = run_script(tmp_path, script, cuda=torch.version.cuda, has_cuda=True)
    assert result.stdout.splitlines() == [
        "True False",
        f"shared pointer True [('cuda_allocator', -40, 0, {2**20}, True, False)]",
    ], result.stderr


def test_functions_for_tensors(tmp_path):
    script = """
    import torch, trainstream
    from trainstream import _C
    x = torch.ones(3)
    print(trainstream.pin(x), trainstream.is_cold(x))
    trainstream.enable(device="sim")
    trainstream.pin(x)
    print(trainstream.is_cold(x), _C.calls[-1][0], trainstream.memory_stats()["peak_bytes"])
    for call in (trainstream.pin, trainstream.is_cold):
        try:
            call([1])
        except TypeError as fault:
            print(fault)
    """
    result = run_script(tmp_path, script)
    assert result.stdout.splitlines() == [
        "None False",
        "True pin 90",
        "trainstream.pin() takes a torch.Tensor, got list",
        "trainstream.is_cold() takes a torch.Tensor, got list",
    ], result.stderr
