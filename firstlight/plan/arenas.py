"""How large the arenas are: one planner for all roles, from the mixers' declarations and a byte budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from firstlight.errors import FirstlightError
from firstlight.spec.caches import CacheDecl

# of the budget, what state checkpoints of the prefix cache may take beside the live states
CHECKPOINT_SHARE = 0.25
# a longer list of checkpoints than sequences have turns is seldom asked for
CHECKPOINTS_PER_SEQUENCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaSizes:
    """num_tokens: capacity of the pages, over all sequences. num_slots: live states and checkpoints together.

    bytes: of both. notices: what was asked for and could not be had.
    """

    num_tokens: int
    num_slots: int
    max_num_seqs: int
    bytes: int
    notices: tuple[str, ...] = ()


def size_arenas(
    decls: Sequence[CacheDecl], *, budget_bytes: int, max_model_len: int, max_num_seqs: int, checkpoints: bool
) -> ArenaSizes:
    """Return sizes that fit the budget; never more than max_num_seqs sequences of max_model_len can use.

    checkpoints: whether slots for state checkpoints are wanted. Fewer sequences than asked for are granted, with a
    notice, where their states do not fit; Raises: FirstlightError if not one sequence of one page fits.
    """
    token_bytes = sum(decl.bytes_per_token for decl in decls)
    state_bytes = sum(decl.bytes_per_sequence for decl in decls)
    page_tokens = max((page.page_tokens for decl in decls for page in decl.pages), default=0)
    smallest = state_bytes + int(page_tokens * token_bytes)
    # scratch page and slot come on top
    usable = budget_bytes - smallest
    if usable < smallest:
        raise FirstlightError(
            f"a cache budget of {budget_bytes:,} bytes holds no sequence",
            why=f"one sequence needs {state_bytes:,} bytes of state and {int(page_tokens * token_bytes):,} of pages",
            fix="give more memory: --gpu-memory-utilization",
        )
    notices = []
    # at most half of the budget for live states, so that there are pages for them to go on
    room = usable // 2 if token_bytes else int((1 - CHECKPOINT_SHARE) * usable)
    num_seqs = max(1, min(max_num_seqs, room // state_bytes)) if state_bytes else max_num_seqs
    if num_seqs < max_num_seqs:
        notices.append(f"max_num_seqs is {num_seqs}, not {max_num_seqs}: {state_bytes:,} bytes of state per sequence")
    spare = int(CHECKPOINT_SHARE * usable) // state_bytes if state_bytes and checkpoints else 0
    num_checkpoints = min(spare, CHECKPOINTS_PER_SEQUENCE * num_seqs)
    num_slots = num_seqs + num_checkpoints
    left = usable - num_slots * state_bytes
    most = num_seqs * -(-max_model_len // page_tokens) * page_tokens if page_tokens else num_seqs * max_model_len
    num_tokens = min(most, int(left / token_bytes)) if token_bytes else most
    if page_tokens:
        num_tokens = max(page_tokens, num_tokens // page_tokens * page_tokens)
    # a role with smaller pages is rounded up by up to one of them
    while num_tokens > page_tokens > 0 and allocated_bytes(decls, num_tokens, num_slots) > budget_bytes:
        num_tokens -= page_tokens
    if token_bytes and num_tokens < max_model_len:
        notices.append(f"the cache holds {num_tokens} tokens, fewer than max_model_len={max_model_len}")
    return ArenaSizes(
        num_tokens=num_tokens,
        num_slots=num_slots,
        max_num_seqs=num_seqs,
        bytes=allocated_bytes(decls, num_tokens, num_slots),
        notices=tuple(notices),
    )


def allocated_bytes(decls: Sequence[CacheDecl], num_tokens: int, num_slots: int) -> int:
    """Return the bytes of arenas for so many tokens and slots: whole pages of every role, scratch page and slot."""
    pages = [page for decl in decls for page in decl.pages]
    held = sum((-(-num_tokens // p.page_tokens) + 1) * p.page_tokens * p.bytes_per_token for p in pages)
    return int(held) + (num_slots + 1) * sum(decl.bytes_per_sequence for decl in decls)
