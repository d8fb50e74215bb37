"""What a verification found: data first, JSON from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["weights", "caches", "module", "layer", "state", "selection", "logits", "tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison.

    layer None: outside the layers. module: our module path inside the layer, or the name of a state.
    error: greatest absolute difference; relative: it over the greatest magnitude of the reference.
    position: token of the greatest difference. recall: share of the reference's selection found.
    reference: the reference module compared with. note: what was found besides the numbers; hint: the likely cause.
    weights and caches are faults of structure, with no numbers: they are listed only where there is one.
    """

    layer: int | None
    module: str
    kind: Kind
    error: float
    relative: float
    tolerance: float
    passed: bool
    position: int | None = None
    recall: float | None = None
    reference: str = ""
    note: str = ""
    hint: str = ""

    @classmethod
    def fault(cls, kind: Kind, *, layer: int | None, module: str, note: str, hint: str = "") -> Check:
        """Return a failed check without numbers."""
        inf = float("inf")
        return cls(layer=layer, module=module, kind=kind, error=inf, relative=inf, tolerance=0.0, passed=False,
                   note=note, hint=hint)  # fmt: skip

    @property
    def numeric(self) -> bool:
        """True if numbers were compared."""
        return self.kind not in ("weights", "caches")

    @property
    def place(self) -> str:
        """Layer and module in one word."""
        return (
            self.module
            if self.layer is None
            else f"layers.{self.layer}.{self.module}"
            if self.module
            else f"layers.{self.layer}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """Every check of one verification, in the order of the forward pass.

    independent: the reference has a declaration of its own; without one the bodies are proven, the port is not.
    """

    model: str
    model_type: str
    port: str
    reference: str
    dtype: str
    num_tokens: int
    layers: tuple[int, ...]
    checks: tuple[Check, ...]
    seconds: float
    versions: dict[str, str]
    notices: tuple[str, ...] = ()
    unknown_keys: tuple[str, ...] = ()
    independent: bool = True

    @property
    def verdict(self) -> str:
        """What the checks show, in a few words."""
        if not self.passed:
            return "differs from its reference"
        return "equal to its reference" if self.independent else "bodies equal their reference; the port is unproven"

    @property
    def passed(self) -> bool:
        """True if there were checks and none failed."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def first_divergence(self) -> Check | None:
        """The failed check that explains the others: a fault of structure, or of the first layer the innermost."""
        failed = [check for check in self.checks if not check.passed]
        return next((check for check in failed if not check.numeric), None) or innermost(failed)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data, with the verdict and the first divergence spelt out."""
        first = self.first_divergence
        return {
            **asdict(self),
            "passed": self.passed,
            "first_divergence": asdict(first) | {"place": first.place} if first else None,
        }


def innermost(failed: Sequence[Check]) -> Check | None:
    """Return the failed comparison that explains the others: of the first layer, the innermost module, in run order."""
    numeric = [check for check in failed if check.numeric]
    same = [check for check in numeric if check.layer == numeric[0].layer]
    # a wrong state follows from a wrong module, unless nothing else is wrong
    modules = [check for check in same if check.kind != "state"] or same
    return next((c for c in modules if not any(o is not c and inside(o.module, c.module) for o in modules)), None)


def inside(module: str, outer: str) -> bool:
    """True if a module path lies strictly below another; "" is the whole layer."""
    return module != outer and (not outer or module.startswith(f"{outer}."))
