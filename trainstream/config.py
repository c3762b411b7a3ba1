"""The configuration: `PYTORCH_TRAINSTREAM_CONF=key:value,...` and the same keys as keywords.

Knows neither torch nor the extension, so that a bad key is found before anything is loaded.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from trainstream import errors

SWITCH_VARIABLE = "PYTORCH_TRAINSTREAM"
CONF_VARIABLE = "PYTORCH_TRAINSTREAM_CONF"

# Bare letters are binary, as in PyTorch's own settings; with a B they are what the SI says.
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[_letter] = _UNITS[_letter + "ib"] = 1024**_power
    _UNITS[_letter + "b"] = 1000**_power

_SIZE = re.compile(r"(\d+)(?:\.(\d+))?\s*([a-z]*)")
_SIZE_BYTES_MAX = 2**62  # The extension takes 64-bit integers with a sign.

SIZE_ALLOWED = "a size above 0 such as 8589934592, 8GiB, 1.5GiB, 800MB or 8G (= 8GiB)"
_AMOUNT_ALLOWED = f"auto, {SIZE_ALLOWED}, or a whole percent from 1% to 100%"


@dataclass(frozen=True)
class Amount:
    """How much memory: a size, a percent of what there is, or (neither) as much as is sensible.

    Args:
        size_bytes: Bytes, > 0; 0 when `percent` is given or for auto.
        percent: 1 to 100; 0 when `size_bytes` is given or for auto.
    """

    size_bytes: int = 0
    percent: int = 0

    def encoded(self) -> int:
        """As the extension takes it: bytes, 0 for auto, -40 for 40 percent."""
        return -self.percent if self.percent else self.size_bytes

    def resolved(self, total_bytes: int) -> int:
        """Bytes, of `total_bytes` where a percent is asked for; 0 for auto."""
        return total_bytes * self.percent // 100 if self.percent else self.size_bytes

    def __str__(self) -> str:
        if self.percent:
            return f"{self.percent}%"
        return str(self.size_bytes) if self.size_bytes else "auto"


@dataclass(frozen=True)
class Config:
    """Every setting, checked. Equal configurations compare equal.

    Args:
        vram: Budget of device memory. Default auto.
        ram: Limit of page-locked host memory. Default auto.
        device: "auto" (the GPU), "cuda" or "sim". Default "auto".
        optimizer: "stock", the script's own; or the engine that torch.optim.Adam and AdamW get in
            place of their own: "host", "stream", "hybrid" or "auto". Default "stock".
        moments: "float32", "bfloat16" or "auto", of those. Default "auto".
        activations: What is saved for backward, and leaves before its room is needed: "auto" and
            "off", only where the script says so (trainstream.spill_activations); "all"; or a
            fraction of its bytes, such as "0.5". Default "auto".
        min_storage: Storages under this many bytes are never touched. Default 1 MiB.
        plan: Load ahead of need once a step was recorded; False moves on demand only. Default True.
        late_updates: Pieces of fused steps of torch's own optimizers are made just before their
            weights are next used, where the run does not fit; False: all at once. Default True.
        verify: Check that every clean drop loses nothing; slow. Default False.
        report: File that gets the run report; "" for none. Default "".
        log: "off", "warn", "info" or "debug". Default "warn".
    """

    vram: Amount = Amount()
    ram: Amount = Amount()
    device: str = "auto"
    optimizer: str = "stock"
    moments: str = "auto"
    activations: str = "auto"
    min_storage: int = 2**20
    plan: bool = True
    late_updates: bool = True
    verify: bool = False
    report: str = ""
    log: str = "warn"

    def __str__(self) -> str:
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        given = ((k, v) for k, v in values if v != "")
        return ",".join(f"{k}:{int(v) if isinstance(v, bool) else v}" for k, v in given)


def parse_size(text: str) -> int | None:
    """Bytes of a size such as "4096", "1.5GiB" or "8g"; None when it is not one."""
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or match[3] not in _UNITS or (match[2] and not match[3]):
        return None
    digits, decimals = match[1] + (match[2] or ""), len(match[2] or "")
    # Integers throughout: a float would round sizes above 2**53 and decimals such as 0.1.
    size_bytes = int(digits) * _UNITS[match[3]] // 10**decimals
    return size_bytes if 0 < size_bytes <= _SIZE_BYTES_MAX else None


def _size(key: str, text: str) -> int:
    size_bytes = parse_size(text)
    if size_bytes is None:
        raise errors.bad_value(key, text, SIZE_ALLOWED)
    return size_bytes


def _amount(key: str, text: str) -> Amount:
    if text.lower() == "auto":
        return Amount()
    percent = re.fullmatch(r"(\d{1,3})\s*%", text)
    if percent and 1 <= int(percent[1]) <= 100:
        return Amount(percent=int(percent[1]))
    size_bytes = parse_size(text)
    if size_bytes is None:
        raise errors.bad_value(key, text, _AMOUNT_ALLOWED)
    return Amount(size_bytes=size_bytes)


def _one_of(*allowed: str) -> Callable[[str, str], str]:
    def parse(key: str, text: str) -> str:
        if text.lower() not in allowed:
            raise errors.bad_value(key, text, ", ".join(allowed))
        return text.lower()

    return parse


def _activations(key: str, text: str) -> str:
    if text.lower() in ("auto", "off", "all"):
        return text.lower()
    if re.fullmatch(r"\d*\.?\d+", text) and 0 <= float(text) <= 1:
        return str(float(text))
    raise errors.bad_value(key, text, "auto, off, all, or a fraction from 0 to 1 such as 0.5")


def _flag(key: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise errors.bad_value(key, text, "0, 1")
    return text == "1"


def _file(key: str, text: str) -> str:
    # With a comma the text of a configuration would not give it back.
    if not text or "," in text:
        raise errors.bad_value(key, text, "the name of a file, without a comma, such as run.json")
    return text


_PARSERS: dict[str, Callable[[str, str], object]] = {
    "vram": _amount,
    "ram": _amount,
    "device": _one_of("auto", "cuda", "sim"),
    "optimizer": _one_of("stock", "host", "stream", "hybrid", "auto"),
    "moments": _one_of("auto", "float32", "bfloat16"),
    "activations": _activations,
    "min_storage": _size,
    "plan": _flag,
    "late_updates": _flag,
    "verify": _flag,
    "report": _file,
    "log": _one_of("off", "warn", "info", "debug"),
}
KEYS = list(_PARSERS)


def _parse_value(key: str, text: str) -> object:
    if key not in _PARSERS:
        import difflib  # Only on the way to an error.

        nearest = difflib.get_close_matches(key.lower(), KEYS, n=1)
        raise errors.unknown_key(key, KEYS, nearest[0] if nearest else None)
    return _PARSERS[key](key, text)


def parse_conf(text: str) -> Config:
    """The configuration in `key:value,key:value`; the defaults where `text` is empty.

    Raises:
        ConfigError: An item is no pair, a key is unknown or given twice, or a value is not allowed.
    """
    texts: dict[str, str] = {}
    for item in text.split(",") if text.strip() else []:
        key, colon, value = (part.strip() for part in item.partition(":"))
        if not colon:
            raise errors.not_a_pair(item, KEYS)
        if key in texts:
            raise errors.duplicate_key(key, texts[key], value)
        texts[key] = value
    return Config(**{key: _parse_value(key, value) for key, value in texts.items()})


def with_keywords(config: Config, keys: dict[str, object]) -> Config:
    """`config` with the values in `keys` in place of its own; numbers, flags and texts are taken.

    Raises:
        ConfigError: A key is unknown or a value is not allowed.
    """

    def as_text(value: object) -> str:
        return str(int(value)) if isinstance(value, bool) else str(value).strip()

    return replace(config, **{key: _parse_value(key, as_text(v)) for key, v in keys.items()})
