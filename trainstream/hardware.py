"""What this machine's link and memories give: measured once, kept in a file, read from then on.

Apart from the extension that measures, which knows no files. Rates are kept; how much memory is
available is asked anew at every call, since other processes change it.

The file is `trainstream/hardware-<key>.json` in `$XDG_CACHE_HOME` or `~/.cache`. The key is a hash
of what the rates depend on: machine, device, driver, cores, and the versions of torch and
trainstream. What is damaged, from elsewhere or of another form is measured again.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import pathlib
import platform
import tempfile
import time
from dataclasses import dataclass
from types import ModuleType

from trainstream import errors

_FORMAT = 2  # 1 had the caches' rates for the memory's on hosts with large ones.
_TURN_SECONDS_MAX = 10.0  # Five times what another process needs to measure.


@dataclass(frozen=True)
class CopyRates:
    """Copies between host and device, bytes a second; 0 where a note says that it failed.

    Args:
        to_device: From page-locked host memory to the device.
        to_host: From the device to page-locked host memory.
    """

    to_device: float
    to_host: float


@dataclass(frozen=True)
class HardwareProfile:
    """Rates in bytes a second and sizes in bytes, as measured by `trainstream.profile_hardware`.

    Host memory is one budget for cores and copies: a copied byte counts once there, an updated one
    as read and as written. Other work that ran while it was measured makes the rates smaller.

    Args:
        device: The device's name; "sim" for the simulation.
        alone: Large copies, one direction, nothing else at work.
        both: Large copies, both directions at once; each one's rate.
        beside_cores: Large copies, one direction, while all cores but one update.
        everything: Large copies, both directions at once, while all cores but one update.
        copies_64_kib: Copies of 64 KiB, one direction, many under way.
        copies_1_mib: Copies of 1 MiB, likewise.
        large_copy_bytes: Size of a large copy: 16 MiB; less where memory is short or the link slow.
        cores: Threads that updated: what affinity and the control groups' quota allow.
        update_bytes_per_second: Three streams read, changed and written by all cores, as by an
            optimizer: bytes read plus bytes written. In three times as much memory as the cores'
            last-level caches have, 256 MiB at least and 1 GiB at most.
        update_beside_copies_bytes_per_second: The cores' part of `everything`.
        host_memory_bytes_per_second: The sum over `everything`, cores and copies.
        page_lock_bytes_per_second: Mapping, touching and locking of host memory.
        page_locked_bytes: Locked at once to see that: 256 MiB, or what was granted.
        page_lock_refusal: Why no more may be locked; "" where nothing was refused.
        device_free_bytes: Free now by the driver's count; what torch has cached is not free.
        device_total_bytes: Of the device.
        host_available_bytes: What this process may still take now: control groups and other
            processes counted, a sixteenth kept back.
        notes: What was measured otherwise than said here, or not at all; a profile with notes is
            not kept in a file.

    Source: csrc/pager/hardware_profile.h.
    """

    device: str
    alone: CopyRates
    both: CopyRates
    beside_cores: CopyRates
    everything: CopyRates
    copies_64_kib: CopyRates
    copies_1_mib: CopyRates
    large_copy_bytes: int
    cores: int
    update_bytes_per_second: float
    update_beside_copies_bytes_per_second: float
    host_memory_bytes_per_second: float
    page_lock_bytes_per_second: float
    page_locked_bytes: int
    page_lock_refusal: str
    device_free_bytes: int
    device_total_bytes: int
    host_available_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def page_lock_limit_bytes(self) -> int:
        """Host memory that may be page-locked beside what is, in bytes, as far as one can know.

        What was granted, if more was refused; else what the system can spare.
        """
        return self.page_locked_bytes if self.page_lock_refusal else self.host_available_bytes


@dataclass(frozen=True)
class _Target:
    """Which device to measure, through which extension."""

    extension: ModuleType
    kind: str  # "sim" or "cuda".
    index: int
    name: str


def profile(refresh: bool) -> HardwareProfile:
    """See trainstream.profile_hardware."""
    target = _find_target()
    facts = _facts_of(target)
    path = _cache_path(facts)
    measured = None if refresh else _read(path, facts)
    if measured is None:
        with _turn_at(path):
            # Another process may have measured while this one waited.
            measured = None if refresh else _read(path, facts)
            if measured is None:
                measured = _measure(target, path, facts)
    available = target.extension.available_memory(target.kind, target.index)
    return _profile_of({"device": target.name, **measured, **available})


def kept_rates() -> dict | None:
    """What was measured on this machine before, as the file has it; None where nothing was.

    Measures nothing. Raises as profile_hardware does where there is no device.
    """
    facts = _facts_of(_find_target())
    return _read(_cache_path(facts), facts)


def _measure(target: _Target, path: pathlib.Path | None, facts: dict) -> dict:
    measured = dict(target.extension.measure_hardware(target.kind, target.index))
    if not measured["notes"]:  # Else the reason may be gone the next time.
        _write(path, facts, measured)
    return measured


def _find_target() -> _Target:
    import torch

    from trainstream import _switch

    state = _switch.current()
    if state is not None and state.device == "sim":
        return _Target(state.extension, "sim", 0, "sim")
    extension = _switch.load_extension() if state is None else state.extension
    count, reason = extension.cuda_device_count()
    if count == 0:
        raise errors.no_device_to_measure(reason)
    if torch.cuda.is_current_stream_capturing():
        raise errors.measured_in_capture()
    index = torch.cuda.current_device()
    return _Target(extension, "cuda", index, torch.cuda.get_device_name(index))


def _facts_of(target: _Target) -> dict:
    """What the rates depend on."""
    import torch

    from trainstream import __version__

    driver = _text_of("/proc/driver/nvidia/version") if target.kind == "cuda" else ""
    return {
        "format": _FORMAT,
        "device": target.name,
        "driver": f"{target.extension.driver_version()} {driver}".strip(),
        "torch": str(torch.__version__),
        "trainstream": __version__,
        "host": platform.node(),
        "machine": _text_of("/etc/machine-id"),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "cores": target.extension.usable_cores(),
    }


def _text_of(path: str) -> str:
    try:
        return pathlib.Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _cache_path(facts: dict) -> pathlib.Path | None:
    """None where the user has no folder for caches."""
    folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not folder.is_absolute():  # Not set; a relative one is to be ignored, says its standard.
        try:
            folder = pathlib.Path.home() / ".cache"
        except RuntimeError:
            return None
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return folder / "trainstream" / f"hardware-{key}.json"


def _read(path: pathlib.Path | None, facts: dict) -> dict | None:
    """What was measured; None where there is no file, or none that can be believed."""
    if path is None:
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        measured = content["measured"]
        if content["facts"] != facts or measured["notes"]:
            return None
        # Whatever is missing or of another kind shows here.
        _profile_of({**dict.fromkeys(_ASKED_ANEW, 0), "device": "", **measured})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return measured


def _write(path: pathlib.Path | None, facts: dict, measured: dict) -> None:
    """Replaces the file as a whole; nothing happens where that is not allowed."""
    if path is None:
        return
    text = json.dumps({"facts": facts, "measured": measured}, indent=2) + "\n"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        try:
            with open(number, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise


@contextlib.contextmanager
def _turn_at(path: pathlib.Path | None):
    """Lets one process of a user measure at a time: two at once would take from each other's rates.

    Without a place for the lock, and when the other one takes too long, it goes on.
    """
    file = _open_lock(path)
    if file is None:
        yield
        return
    with file:
        deadline = time.monotonic() + _TURN_SECONDS_MAX
        while not _lock(file) and time.monotonic() < deadline:
            time.sleep(0.02)
        yield


def _open_lock(path: pathlib.Path | None):
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path.with_suffix(".lock"), "a")
    except OSError:
        return None


def _lock(file) -> bool:
    """False: another process holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # No locks on this file system.
    return True


_ASKED_ANEW = ("device_free_bytes", "device_total_bytes", "host_available_bytes")


def _profile_of(values: dict) -> HardwareProfile:
    """Raises TypeError or ValueError for what is no profile."""
    fields = {field.name: field.type for field in dataclasses.fields(HardwareProfile)}
    made = {name: _value_of(fields.get(name), value) for name, value in values.items()}
    return HardwareProfile(**made)


def _value_of(kind: object, value: object):
    """A field's value from its JSON."""
    if kind is CopyRates:
        return CopyRates(**{name: _value_of(float, rate) for name, rate in dict(value).items()})
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, (int, kind)):
            raise TypeError(f"not a number: {value!r}")
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"no rate or size: {value!r}")
        return kind(value)
    if kind is str:
        if not isinstance(value, str):
            raise TypeError(f"not a text: {value!r}")
        return value
    return tuple(str(note) for note in value)
