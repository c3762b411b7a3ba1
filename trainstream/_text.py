"""How sizes and times are written for a person. Imports no torch."""


def format_bytes(size_bytes: int) -> str:
    """ "1.50 GiB", "64.00 MiB", "512 B": as csrc/base/bytes.h has it."""
    value, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{int(size_bytes)} B" if unit == "B" else f"{value:.2f} {unit}"


def format_seconds(seconds: float) -> str:
    """ "2.21 s", "87.3 ms", "412 us"."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def format_rate(bytes_per_second: float) -> str:
    """ "49.2 GB/s": rates are decimal, as the makers of links have them."""
    return f"{bytes_per_second / 1e9:.1f} GB/s"
