"""What a step cannot be faster than: max(compute, to device, to host, host memory), and why.

Arithmetic alone: no torch, so that the commands and the report of a run share it with the process
that trains.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from trainstream._text import format_seconds

# By the key of a term, how a sentence names it.
TERMS = {
    "compute": "compute",
    "to_device": "the link to the device",
    "to_host": "the link to the host",
    "host_memory": "host memory",
}


@dataclass(frozen=True)
class Traffic:
    """Bytes of one step.

    Args:
        to_device: Copied or read over the link, from host memory.
        to_host: Copied or written over the link, to host memory.
        cores: Read and written in host memory by the host's own cores. Default 0.
    """

    to_device: int
    to_host: int
    cores: int = 0

    @property
    def host_memory(self) -> int:
        """Of host memory's one budget: what cores and the link touch together."""
        return self.to_device + self.to_host + self.cores


def link_seconds(traffic: Traffic, rates: Mapping) -> tuple[float, float]:
    """The least that the link takes, to the device and to the host.

    Both directions run at once, each slower beside the other, until the shorter one is done.

    Args:
        rates: "alone" and "both", each with "to_device" and "to_host" in bytes a second, as
            trainstream.HardwareProfile has them. A rate of 0 is not known: 0 seconds.
    """
    sizes = (traffic.to_device, traffic.to_host)
    alone, both = (
        tuple(rates[key][way] for way in ("to_device", "to_host")) for key in ("alone", "both")
    )
    shared = [size / rate if rate else 0.0 for size, rate in zip(sizes, both, strict=True)]
    together = min(shared)
    times = []
    for size, rate, slow in zip(sizes, alone, both, strict=True):
        rest = max(0.0, size - together * slow)
        times.append(together + rest / rate if rate and slow else 0.0)
    return times[0], times[1]


def terms(compute_seconds: float, traffic: Traffic, rates: Mapping) -> dict[str, float]:
    """Seconds that each of TERMS takes at least.

    Args:
        compute_seconds: What is left of a step when nothing is waited for.
        rates: As for link_seconds, and "host_memory_bytes_per_second": what cores and copies reach
            together.
    """
    to_device, to_host = link_seconds(traffic, rates)
    rate = rates["host_memory_bytes_per_second"]
    host_memory = traffic.host_memory / rate if rate else 0.0
    return {
        "compute": compute_seconds,
        "to_device": to_device,
        "to_host": to_host,
        "host_memory": host_memory,
    }


def largest(values: Mapping[str, float]) -> str:
    """The key of the term that limits."""
    return max(values, key=lambda key: values[key])


def limit_text(report: dict) -> str:
    """The bound and the term that limits, in a sentence."""
    if report["bound"] is None:
        return "bound: not known; trainstream.profile_hardware() measures this machine's rates"
    each = ", ".join(f"{key} {format_seconds(value)}" for key, value in report["bound"].items())
    reached = report["bound_seconds"] / max(report["step_seconds"], 1e-9)
    return (
        f"bound: {format_seconds(report['bound_seconds'])}, {reached:.0%} of the step; "
        f"{TERMS[report['limit']]} limits ({each})"
    )
