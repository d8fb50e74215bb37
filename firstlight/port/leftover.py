"""What becomes of the config keys that the declaration does not read: expected, ignored with a reason, or left open."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from firstlight.port.observe import Observation, per_layer_keys
from firstlight.port.text import GUESS, WIDTH, quoted, tuple_code
from firstlight.port.values import ACT_KEYS, reader
from firstlight.spec.clues import CLUES, Clue

# keys that change no number at inference, with the reason written into the port
INERT: dict[str, str] = {
    "training only": r"\w*dropout(_\w+)?|initializer_\w+|\w*init_(std|range|method)|\w*aux_loss\w*"
    r"|rescale_prenorm_residual|time_step_(max|floor)",
    "no effect on a forward pass": r"\w+_token_id|num_logits_to_keep|use_\w*kernels?|use_cache|\w*cache_dtype"
    r"|chunk_size|moe_\w*overlap|max_window_layers|mtp_\w+",
}
# the last two: a range without bounds, as json and as transformers write infinity
OFF: tuple[Any, ...] = (False, 0, 0.0, [], "", [0.0, math.inf], [0.0, {"__float__": "Infinity"}])
OF_A_NOUN = ("mixer", "index", "rope", "size")
EXPECTED = GUESS + "named by the clue beside it, and not needed here: a model with another value is refused"


def leftovers(
    seen: Observation, unread: Sequence[str], operators: Collection[str], *, complete: bool
) -> tuple[list[str], list[str]]:
    """Return (statements that settle keys, keys left open). operators: those that exist.

    A key stays open if no clue explains it, if its feature needs an operator nobody has, or if it may belong to a
    noun still to be written (complete False).
    """
    lists, lines, told = per_layer_keys(seen), [], []
    left = []
    for key in unread:
        value = seen.value(key)
        clue = explained(key, value)
        if reason_of(key):
            continue
        if key in lists:
            words = tuple_code([quoted(word) for word in dict.fromkeys(lists[key])])
            lines.append(f"cfg.names({quoted(key)}, num_layers, {words})")
        elif key in seen.integer_lists and set(seen.integer_lists[key]) <= set(range(len(seen.layers) + 1)):
            told.append(f"{reader(key, 'expect', repr(value))}  # numbers of layers, which the tensors tell")
        elif key in ACT_KEYS or (value in OFF and not isinstance(value, dict)):
            lines.append(reader(key, "expect", quoted(value)))
        elif (
            clue
            and set(clue.operators) <= set(operators)
            and not isinstance(value, (dict, list))
            and (complete or clue.part not in OF_A_NOUN)
        ):
            told.append(f"{reader(key, 'expect', quoted(value))}  # {clue.meaning}")
        else:
            left.append(key)
    lines += [EXPECTED, *told] if told else []
    for reason in INERT:
        keys = [quoted(key) for key in unread if reason_of(key) == reason]
        lines += ignored(keys, reason) if keys else []
    return lines, left


def ignored(keys: Sequence[str], reason: str) -> list[str]:
    """Return the statement that declares keys without effect."""
    flat = f"cfg.ignore({', '.join(keys)})  # {reason}"
    if len(flat) + 4 <= WIDTH:
        return [flat]
    return [f"# {reason}", "cfg.ignore(", *(f"    {key}," for key in keys), ")"]


def reason_of(key: str) -> str:
    """Return why a key changes nothing, "" if it may."""
    return next((reason for reason, pattern in INERT.items() if re.fullmatch(pattern, key)), "")


def explained(key: str, value: Any) -> Clue | None:
    """Return the clue that explains a key, None if none does."""
    facts = (key, f"{key}={value}")
    return next((clue for clue in CLUES if clue.facts and any(re.fullmatch(clue.facts, fact) for fact in facts)), None)


def open_keys(seen: Observation, keys: Iterable[str]) -> list[str]:
    """Return a comment line per key that nobody read."""
    return [f"# unread: {key} = {str(seen.value(key))[:80]}" for key in keys]
