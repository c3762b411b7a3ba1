"""`trainstream info`: what this machine gives, and what of trainstream works on it."""

import argparse
import dataclasses
import importlib.util
import json
import platform

import trainstream
from trainstream import errors
from trainstream._text import format_bytes, format_rate
from trainstream.cli.console import Console

EXAMPLES = """\
examples:
  trainstream info                 measures the link and host memory once, under 2 s
  trainstream info --refresh       measures again
  trainstream info --json          for scripts: rates in bytes a second, sizes in bytes
  trainstream info --device sim    the simulated device, where there is no GPU
"""
_OPTIONAL = {
    "transformers": "bench: Qwen2 shapes",
    "rich": "tables in a terminal",
    "matplotlib": "report --png",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--refresh", action="store_true", help="measure again")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--device", choices=("auto", "sim"), default="auto")


def execute(options: argparse.Namespace, console: Console) -> int:
    """Prints what is known. Missing hardware is no failure; a missing extension is."""
    versions, extension, reason = _versions()
    profile = None
    if extension is not None and options.device == "sim":
        trainstream.enable(device="sim")
        profile = trainstream.profile_hardware(options.refresh)
    elif extension is not None:
        profile, reason = _profile_of_gpu(extension, options.refresh)
    works = _works(extension, profile, reason)
    if options.json:
        known = None if profile is None else dataclasses.asdict(profile)
        content = {"versions": versions, "profile": known, "works": dict(works)}
        console.line(json.dumps(content, indent=2))
    else:
        console.table("versions", [], list(versions.items()))
        if profile is not None:
            _print_profile(profile, console)
        elif extension is not None:
            available = format_bytes(extension.host_limit_bytes(0))
            console.table("memory", [], [("host, available now", available)])
        console.table("what works here", [], works)
    return 0 if extension is not None else 1


def _profile_of_gpu(extension, refresh: bool) -> tuple[object, str]:
    """The profile, or None and why there is none."""
    count, reason = extension.cuda_device_count()
    if count == 0:
        return None, reason
    try:
        return trainstream.profile_hardware(refresh), ""
    except RuntimeError as fault:  # TrainstreamError is one.
        return None, " ".join(str(fault).split())


def _versions() -> tuple[dict[str, str], object, str]:
    """Versions, the extension or None, and why there is none."""
    versions = {"trainstream": trainstream.__version__, "python": platform.python_version()}
    try:
        import torch
    except ImportError as fault:
        return {**versions, "torch": "not installed"}, None, str(fault)
    versions["torch"] = str(torch.__version__)
    versions["CUDA of torch"] = str(torch.version.cuda or "none")
    from trainstream import _switch

    try:
        return versions, _switch.load_extension(), ""
    except errors.TrainstreamError as fault:
        return versions, None, str(fault)


def _print_profile(profile, console: Console) -> None:
    sizes = [
        ("device", profile.device),
        ("device memory", format_bytes(profile.device_total_bytes)),
        ("device memory, free now", format_bytes(profile.device_free_bytes)),
        ("host memory, available now", format_bytes(profile.host_available_bytes)),
        ("may be page-locked", format_bytes(profile.page_lock_limit_bytes)),
        ("page-locking", format_rate(profile.page_lock_bytes_per_second)),
        ("cores", str(profile.cores)),
        ("update by all cores", format_rate(profile.update_bytes_per_second)),
        ("update beside copies", format_rate(profile.update_beside_copies_bytes_per_second)),
        ("host memory, cores and copies", format_rate(profile.host_memory_bytes_per_second)),
    ]
    console.table("machine", [], sizes)
    names = {
        "alone": "large copies, one way",
        "both": "large copies, both ways at once",
        "beside_cores": "one way, beside busy cores",
        "everything": "both ways, beside busy cores",
        "copies_1_mib": "copies of 1 MiB",
        "copies_64_kib": "copies of 64 KiB",
    }
    rows = []
    for key, text in names.items():
        rates = getattr(profile, key)
        rows.append((text, format_rate(rates.to_device), format_rate(rates.to_host)))
    console.table("link", ("", "to device", "to host"), rows)
    for note in profile.notes:
        console.line(f"note: {note}")


def _works(extension, profile, reason: str) -> list[tuple[str, str]]:
    """(what, "yes" or "no: why") for a person."""
    works = []
    if extension is None:
        works.append(("trainstream", f"no: {reason}"))
    else:
        works.append(("simulated device (device:sim)", "yes"))
        gpu = profile is not None and profile.device != "sim"
        why = "it was not asked for" if profile is not None else reason
        works.append(("GPU", f"yes: {profile.device}" if gpu else f"no: {why}"))
        if profile is not None:
            refusal = profile.page_lock_refusal
            works.append(("page-locked memory", f"limited: {refusal}" if refusal else "yes"))
    for name, what in _OPTIONAL.items():
        found = importlib.util.find_spec(name) is not None
        works.append((name, f"yes ({what})" if found else f"not installed ({what})"))
    return works
