"""Large numbers for people: three digits and a decimal prefix."""

from __future__ import annotations

PREFIXES = ("", "k", "M", "G", "T", "P")


def amount(value: float, *, thousand: str = "k", billion: str = "G") -> str:
    """Return a number with its prefix: 49.1G, 728k, 12. billion: what 10^9 is called, "B" for parameters."""
    size, step = float(value), 0
    # 999.5 and more would round to 1000
    while abs(size) >= 999.5 and step < len(PREFIXES) - 1:
        size, step = size / 1000, step + 1
    prefix = {"k": thousand, "G": billion}.get(PREFIXES[step], PREFIXES[step])
    return f"{_digits(size)}{prefix}"


def quantity(value: float, unit: str) -> str:
    """Return a number with its prefix and unit: 98.2 GB, 144 B, 70.2 GFLOP."""
    text = amount(value)
    digits = text.rstrip("".join(PREFIXES))
    return f"{digits} {text[len(digits) :]}{unit}"


def tokens(count: int) -> str:
    """Return a context length: 4k, 128k, 1,000."""
    return f"{count:,}" if count % 1024 else f"{count // 1024}k"


def _digits(size: float) -> str:
    return f"{size:.0f}" if size >= 99.95 or size == int(size) else f"{size:.1f}" if size >= 9.995 else f"{size:.2f}"
