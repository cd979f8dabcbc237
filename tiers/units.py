"""Bytes in words: `8GiB`, `512 MB`, `80%`."""

import re

_FACTORS = {
    "": 1, "b": 1,
    "k": 1000, "kb": 1000, "ki": 1 << 10, "kib": 1 << 10,
    "m": 1000**2, "mb": 1000**2, "mi": 1 << 20, "mib": 1 << 20,
    "g": 1000**3, "gb": 1000**3, "gi": 1 << 30, "gib": 1 << 30,
    "t": 1000**4, "tb": 1000**4, "ti": 1 << 40, "tib": 1 << 40,
}  # fmt: skip
_MAX_NBYTES = 1 << 62  # more than any machine has, and what 64 bits can add up
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


def parse_bytes(text: str | int) -> int:
    """Bytes of `8GiB` (binary), `8GB` (decimal) or a plain number. ValueError if it is none."""
    if isinstance(text, bool):
        raise ValueError(f"{text!r} is not a size; write for example 8GiB")
    nbytes: float
    if isinstance(text, int):
        nbytes = text
    else:
        match = _SIZE.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r:.40} is not a size; write for example 8GiB, 512MiB or 1.5TB")
        value, unit = match.groups()
        if unit.lower() not in _FACTORS:
            raise ValueError(
                f"{unit!r} is not a unit of bytes; use KiB, MiB, GiB, TiB (or KB, MB, ...)"
            )
        exact = value.isdigit() and len(value) < 20
        nbytes = (int(value) if exact else float(value)) * _FACTORS[unit.lower()]
    if nbytes > _MAX_NBYTES:
        raise ValueError(
            f"{text!r:.40} is more than any machine has ({format_bytes(_MAX_NBYTES)}); write "
            "for example 8GiB"
        )
    return int(nbytes)


def parse_percent(text: str) -> float:
    """The fraction (0..1) of `40%`. ValueError if it is no percentage or over 100."""
    match = _PERCENT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r:.40} is not a percentage; write for example 40%")
    # as decimal digits: dividing by 100 would round a second time
    fraction = float(f"{match.group(1)}e-2")
    if fraction > 1:
        raise ValueError(f"{text!r:.40} is over 100%")
    return fraction


def format_bytes(nbytes: int) -> str:
    """`96.0 MiB`: one decimal, binary units, exact below 1 KiB."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{int(size)} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def in_one_unit(first: int, *others: int) -> tuple[str, ...]:
    """Amounts that are compared, in the unit that `format_bytes` gives the first one, with as many
    decimals as tell it from others: `1.2 GiB`, `0.8 GiB`. A smaller unit where three do not."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = next((n for n in range(4) if abs(first) < 1024 ** (n + 1)), 4)
    for exponent in range(power, 0, -1):
        for decimals in range(1, 4):
            texts = [f"{n / 1024**exponent:,.{decimals}f}" for n in (first, *others)]
            if all(
                n == first or text != texts[0] for n, text in zip(others, texts[1:], strict=True)
            ):
                return tuple(f"{text} {units[exponent]}" for text in texts)
    return tuple(f"{n:,} B" for n in (first, *others))


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
