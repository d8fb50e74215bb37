"""The precision policy: a format per path, each an independent switch.

The packing itself is an operator; here is only which path asks for which format, and what is not available yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from firstlight.errors import FirstlightError
from firstlight.spec.caches import CacheDtypes

DTYPES = ("float32", "bfloat16", "float16")
PLANNED = {"mxfp8": "MXFP8 in groups of 32", "fp8": "FP8 in tiles of 128", "fp8_e4m3": "FP8 in tiles of 128"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionPolicy:
    """Formats of the backbone, of the cache kinds, and of the recurrent state."""

    backbone: str = "bfloat16"
    kv_cache: str = "auto"
    index: str = "auto"
    state: str = "float32"

    def __post_init__(self) -> None:
        paths = {
            "dtype": self.backbone,
            "kv-cache-dtype": self.kv_cache,
            "index-dtype": self.index,
            "state-dtype": self.state,
        }
        for path, name in paths.items():
            allowed = DTYPES if path == "dtype" else ("float32",) if path == "state-dtype" else ("auto", *DTYPES)
            if name not in allowed:
                why = f"{PLANNED[name]} is not available yet" if name in PLANNED else f"it can be {', '.join(allowed)}"
                raise FirstlightError(f"--{path} {name} cannot be used", why=why, fix=f"--{path} {allowed[0]}")

    def cache_dtypes(self) -> CacheDtypes:
        """Return the storage formats; auto follows the backbone."""
        kv = self.backbone if self.kv_cache == "auto" else self.kv_cache
        index = self.backbone if self.index == "auto" else self.index
        return CacheDtypes(kv=kv, index=index, state=self.state)
