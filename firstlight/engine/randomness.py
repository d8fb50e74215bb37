"""Random numbers that are a pure function of a seed and a position: no state, no batch, no device."""

from __future__ import annotations

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mixed(value: int) -> int:
    """Return 64 bits of which each depends on every bit of value: one step of splitmix64.

    Source: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", 2014, figure 17.
    """
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def uniform(seed: int, index: int) -> float:
    """Return the number in [0, 1) that output token number index (from 0) of a seed is drawn with; 53 bits."""
    return (mixed(mixed(seed) + index) >> 11) * 2.0**-53


def sample_seed(seed: int, sample: int) -> int:
    """Return the seed of one of the n samples of a request; sample 0 has the request's own."""
    return seed if sample == 0 else mixed(mixed(seed) ^ sample) >> 1
