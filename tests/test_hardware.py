"""The hardware profile: what is measured when, and what becomes of the file that keeps it."""

import dataclasses
import json
import math
import subprocess
import sys

import pytest
import torch
from real_runner import DEVICES, needs_extension, on_gpu
from script_runner import FAKE, make_site, plain_environment, run_script

import trainstream
from trainstream import hardware

pytestmark = pytest.mark.any_torch

ON = {"PYTORCH_TRAINSTREAM": "1", "PYTORCH_TRAINSTREAM_CONF": "device:sim,log:off"}
RATES = {"to_device": 5e10, "to_host": 4e10}
PAIRS = ("alone", "both", "beside_cores", "everything", "copies_64_kib", "copies_1_mib")
MEASURED = {
    **dict.fromkeys(PAIRS, RATES),
    "large_copy_bytes": 2**24,
    "cores": 16,
    "update_bytes_per_second": 1e11,
    "update_beside_copies_bytes_per_second": 6e10,
    "host_memory_bytes_per_second": 1.5e11,
    "page_lock_bytes_per_second": 1.2e10,
    "page_locked_bytes": 2**28,
    "page_lock_refusal": "",
    "notes": [],
}

# A fake extension that counts how often it measures. What it answers is in MEASURED.
PRELUDE = f"""
import sys, torch, trainstream
fake = sys.modules["trainstream._C"]
fake.MEASURED = {MEASURED!r}
fake.measured = 0

def measure_hardware(kind, index):
    fake.measured += 1
    return dict(fake.MEASURED)

def available_memory(kind, index):
    return dict(device_free_bytes=1000 + fake.measured, device_total_bytes=5000,
                host_available_bytes=7000)

fake.measure_hardware, fake.available_memory = measure_hardware, available_memory
fake.usable_cores, fake.driver_version = (lambda: 16), (lambda: 13000)
"""


def run(tmp_path, script, *, cache=None, **environment):
    environment = {**ON, "XDG_CACHE_HOME": str(cache or tmp_path / "cache"), **environment}
    script = PRELUDE + "\n" + script
    result = run_script(tmp_path, script, **environment)
    assert result.status == 0, result.stderr
    return result


def files_of(tmp_path):
    return sorted((tmp_path / "cache" / "trainstream").glob("hardware-*.json"))


TWICE = """
first, second = trainstream.profile_hardware(), trainstream.profile_hardware()
print(fake.measured, first.alone == second.alone)
"""


def test_second_call_and_second_process_do_not_measure(tmp_path):
    assert run(tmp_path, TWICE).stdout == "1 True\n"
    assert len(files_of(tmp_path)) == 1
    assert run(tmp_path, TWICE).stdout == "0 True\n"


def test_fields_are_what_was_measured_and_what_is_available(tmp_path):
    script = """
    p = trainstream.profile_hardware()
    print(p.device, p.alone, p.cores, p.page_locked_bytes, p.notes)
    print(p.device_free_bytes, p.device_total_bytes, p.host_available_bytes)
    print(p.page_lock_limit_bytes, isinstance(p, trainstream.HardwareProfile))
    """.replace("\n    ", "\n")
    assert run(tmp_path, script).stdout.splitlines() == [
        "sim CopyRates(to_device=50000000000.0, to_host=40000000000.0) 16 268435456 ()",
        "1001 5000 7000",
        "7000 True",
    ]


def test_available_memory_is_asked_anew(tmp_path):
    script = """
trainstream.profile_hardware()
fake.available_memory = lambda *_: dict.fromkeys(
    ("device_free_bytes", "device_total_bytes", "host_available_bytes"), 7)
print(trainstream.profile_hardware().device_free_bytes, fake.measured)
"""
    assert run(tmp_path, script).stdout == "7 1\n"


def test_refresh_measures_again_and_replaces_the_file(tmp_path):
    run(tmp_path, "trainstream.profile_hardware()")
    script = """
fake.MEASURED["cores"] = 3
print(trainstream.profile_hardware(refresh=True).cores, fake.measured)
print(trainstream.profile_hardware().cores, fake.measured)
"""
    assert run(tmp_path, script).stdout == "3 1\n3 1\n"
    assert len(files_of(tmp_path)) == 1


def damaged(change):
    def apply(text):
        content = json.loads(text)
        change(content)
        return json.dumps(content)

    return apply


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "\x00\xff",
        damaged(lambda content: content["facts"].update(torch="1.0")),
        damaged(lambda content: content["measured"].pop("cores")),
        damaged(lambda content: content["measured"].update(cores="many")),
        damaged(lambda content: content["measured"].update(alone=5)),
        damaged(lambda content: content["measured"].update(alone={"to_host": 1.0})),
        damaged(lambda content: content["measured"].update(update_bytes_per_second=math.nan)),
        damaged(lambda content: content["measured"].update(page_locked_bytes=-1)),
        damaged(lambda content: content["measured"].update(unknown=1)),
        damaged(lambda content: content["measured"].update(notes=["no room"])),
    ],
)
def test_file_that_cannot_be_believed_is_replaced(tmp_path, damage):
    run(tmp_path, "trainstream.profile_hardware()")
    (path,) = files_of(tmp_path)
    good = path.read_text()
    path.write_text(damage(good))
    assert run(tmp_path, TWICE).stdout == "1 True\n"
    assert path.read_text() == good


@pytest.mark.parametrize(
    "other",
    [
        "fake.usable_cores = lambda: 8",
        "fake.driver_version = lambda: 12000",
        "trainstream.__version__ = '9'",
        "torch.__version__ = '9'",
        "import platform; platform.node = lambda: 'elsewhere'",
    ],
)
def test_other_machine_or_version_has_a_file_of_its_own(tmp_path, other):
    run(tmp_path, "trainstream.profile_hardware()")
    assert run(tmp_path, other + TWICE).stdout == "1 True\n"
    assert len(files_of(tmp_path)) == 2


@pytest.mark.parametrize("kind", ["a file", "below a file", "nowhere"])
def test_cache_folder_that_cannot_be_written_is_no_error(tmp_path, kind):
    # Permissions would not stop root, who may run this.
    file = tmp_path / "file"
    file.write_text("")
    cache = {"a file": file, "below a file": file / "below", "nowhere": "/proc/nowhere"}[kind]
    assert run(tmp_path, TWICE, cache=cache).stdout == "2 True\n"
    assert file.read_text() == ""


def test_relative_cache_folder_is_ignored(tmp_path):
    assert run(tmp_path, TWICE, cache="here", HOME=str(tmp_path)).stdout == "1 True\n"
    assert len(list((tmp_path / ".cache" / "trainstream").glob("hardware-*.json"))) == 1


def test_profile_with_notes_is_not_kept(tmp_path):
    script = """
fake.MEASURED["notes"] = ["no room"]
print(trainstream.profile_hardware().notes, trainstream.profile_hardware().notes, fake.measured)
"""
    assert run(tmp_path, script).stdout == "('no room',) ('no room',) 2\n"
    assert files_of(tmp_path) == []


def test_refusal_of_page_locks_is_the_limit(tmp_path):
    script = """
fake.MEASURED.update(page_lock_refusal="limit", page_locked_bytes=4096, notes=["refused"])
print(trainstream.profile_hardware().page_lock_limit_bytes)
"""
    assert run(tmp_path, script).stdout == "4096\n"


def test_write_that_fails_leaves_nothing_behind(tmp_path):
    script = """
import os, pathlib
def refuse(*_):
    raise OSError("disk full")
os.replace = refuse
trainstream.profile_hardware()
folder = pathlib.Path(os.environ["XDG_CACHE_HOME"]) / "trainstream"
print([path.suffix for path in folder.iterdir()])
"""
    assert run(tmp_path, script).stdout == "['.lock']\n"


def test_two_processes_at_once_measure_once(tmp_path):
    # Both start before either has measured: the measuring takes until both have come this far.
    script = tmp_path / "both.py"
    script.write_text(
        PRELUDE
        + """
import pathlib, time
here = pathlib.Path(sys.argv[1])
(here / f"ready-{sys.argv[2]}").touch()
while len(list(here.glob("ready-*"))) < 2:
    time.sleep(0.01)
slow = fake.measure_hardware
fake.measure_hardware = lambda *arguments: (time.sleep(0.3), slow(*arguments))[1]
print(trainstream.profile_hardware().cores, fake.measured)
"""
    )
    site = make_site(
        tmp_path / "site",
        f"TORCH_VERSION, CUDA, HAS_CUDA = {str(torch.__version__)!r}, None, False\n{FAKE}",
    )
    environment = {**plain_environment(site), **ON, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    both = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), str(number)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    assert sorted(process.communicate(timeout=120)[0] for process in both) == ["16 0\n", "16 1\n"]
    assert len(files_of(tmp_path)) == 1


def test_without_a_device_the_error_says_what_to_do(tmp_path):
    script = """
try:
    trainstream.profile_hardware()
except trainstream.TrainstreamError as error:
    print(error)
"""
    result = run(tmp_path, script, PYTORCH_TRAINSTREAM="0")
    assert "no GPU to measure: no driver; trainstream.enable(device='sim')" in result.stdout
    assert files_of(tmp_path) == []


def test_names_are_there_without_torch(tmp_path):
    script = """
    import sys, trainstream
    print(trainstream.HardwareProfile.__name__, "profile_hardware" in trainstream.__all__)
    print("torch" in sys.modules, hasattr(trainstream, "hardware_profile"))
    """
    result = run_script(tmp_path, script, fresh=True)
    assert result.stdout == "HardwareProfile True\nFalse False\n", result.stderr


def test_profile_is_frozen_and_every_field_is_described():
    with pytest.raises(dataclasses.FrozenInstanceError):
        hardware.CopyRates(1.0, 2.0).to_host = 3.0
    for kind in (hardware.CopyRates, trainstream.HardwareProfile):
        names = [field.name for field in dataclasses.fields(kind)]
        assert [name for name in names if f" {name}: " not in kind.__doc__] == []


@needs_extension
@pytest.mark.parametrize("device", DEVICES)
def test_real_device_is_measured_and_everything_given_back(tmp_path, device):
    script = """
    import dataclasses, json, torch, trainstream
    before = trainstream.memory_stats()
    profile = trainstream.profile_hardware()
    after = trainstream.memory_stats()
    print(json.dumps(dataclasses.asdict(profile)))
    same = ("host_in_use_bytes", "page_locked_bytes", "resident_bytes", "evicted_bytes")
    print(all(before[key] == after[key] for key in same))
    print(trainstream.profile_hardware().alone == profile.alone)
    """
    environment = {**ON, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment["PYTORCH_TRAINSTREAM_CONF"] = f"device:{device},vram:1GiB,ram:1GiB,log:off"
    result = run_script(tmp_path, script, fake=False, **environment)
    assert result.status == 0, result.stderr
    profile, *rest = result.stdout.splitlines()
    profile = json.loads(profile)
    # With notes (little host memory here) it is measured anew.
    assert rest[0] == "True" and (profile["notes"] or rest[1] == "True")
    check_profile(profile)


@needs_extension
@pytest.mark.parametrize("device", [on_gpu("cuda")])
def test_gpu_is_measured_while_trainstream_is_off(tmp_path, device):
    script = """
    import dataclasses, json, torch, trainstream
    profile = trainstream.profile_hardware()
    print(json.dumps(dataclasses.asdict(profile)))
    print(trainstream.is_enabled(), torch.cuda.memory_reserved(), torch.ones(3, device="cuda"))
    """
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    result = run_script(tmp_path, script, fake=False, **environment)
    assert result.status == 0, result.stderr
    profile, rest = result.stdout.splitlines()
    assert rest == "False 0 tensor([1., 1., 1.], device='cuda:0')"
    check_profile(json.loads(profile))


def check_profile(profile):
    rates = [rate for pair in PAIRS for rate in profile[pair].values()]
    rates += [value for name, value in profile.items() if name.endswith("_per_second")]
    assert all(math.isfinite(rate) and rate > 0 for rate in rates)
    sizes = [value for name, value in profile.items() if name.endswith("_bytes")]
    assert all(size > 0 for size in sizes)
    assert profile["device_free_bytes"] <= profile["device_total_bytes"]
    assert profile["device"] and profile["cores"] >= 1
