"""Checkpoint -> parameters: a plan made from headers alone, then one copy of each byte needed."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from firstlight.layers.parameter import Target
from firstlight.spec.names import Candidate, NameMap, Source
from firstlight.weights.checkpoint import DTYPES, Checkpoint, part_shape
from firstlight.weights.loadplan import EMBED, HEAD, Entry, LoadPlan, Mismatch, Missing, below

RELEASE_BYTES = 256 << 20
"""Mapped pages stay in memory until the mapping goes; after so many copied bytes it goes."""
COMPARE_ROWS = 1024
OWN_MAPPING_BYTES = 1 << 20
"""Parameters from this size on bypass malloc, which keeps freed blocks of less than 32 MiB: streaming
eight layers of 12 MiB grew the heap by 60 MiB."""


def resolve(targets: Iterable[Target], names: NameMap, checkpoint: Checkpoint) -> LoadPlan:
    """Return how a checkpoint fills the targets, with everything that does not fit.

    Shapes are compared without their dimensions of size 1.
    """
    entries: list[Entry] = []
    missing: list[Missing] = []
    mismatched: list[Mismatch] = []
    wanted = list(targets)
    for target in wanted:
        found = find(target, names, checkpoint)
        if isinstance(found, Entry):
            entries.append(found)
        elif isinstance(found, Mismatch):
            mismatched.append(found)
        else:
            missing.append(found)
    mismatched += _experts_left_over(entries, checkpoint)
    used = {entry.candidate.name for entry in entries} | {mismatch.name for mismatch in mismatched}
    rest = [name for name in checkpoint.names() if name not in used]
    tied = None if any(target.name == HEAD for target in wanted) else _tied(entries, names, rest)
    skipped = {name: reason for name in rest if (reason := names.ignored(name)) is not None}
    if tied:
        skipped[tied[0]] = "the embedding serves as the head (tie_word_embeddings)"
    unexpected = tuple(name for name in rest if name not in skipped)
    return LoadPlan(
        entries=tuple(entries),
        missing=tuple(missing),
        unexpected=unexpected,
        mismatched=tuple(mismatched),
        skipped=skipped,
        unsupported=tuple(
            (name, checkpoint.dtype(name))
            for name in checkpoint.names()
            if name not in skipped and checkpoint.dtype(name) not in DTYPES
        ),
        tied=tied,
    )


def find(target: Target, names: NameMap, checkpoint: Checkpoint) -> Entry | Mismatch | Missing:
    """Return what fills a target, or why nothing does: no tensor of that name, or one of another shape."""
    candidates, shape = names.candidates(target.name), target.shape
    present = [candidate for candidate in candidates if candidate.name in checkpoint]
    fitting = [candidate for candidate in present if _fits(shape, checkpoint, candidate)]
    if fitting:
        return Entry(target=target, candidate=fitting[0])
    if present:
        whole = checkpoint.shape(present[0].name)
        found = part_shape(whole, present[0])
        return Mismatch(name=present[0].name, expected=shape, found=whole if found is None else found)
    return Missing(name=target.name, spellings=tuple(candidate.name for candidate in candidates), shape=shape)


def _fits(shape: tuple[int, ...], checkpoint: Checkpoint, candidate: Candidate) -> bool:
    found = part_shape(checkpoint.shape(candidate.name), candidate)
    return found is not None and [n for n in found if n != 1] == [n for n in shape if n != 1]


def _experts_left_over(entries: list[Entry], checkpoint: Checkpoint) -> list[Mismatch]:
    """Return the fused tensors with more experts than the model has; each part of them would fit."""
    used: dict[str, set[int]] = {}
    for entry in entries:
        if entry.candidate.expert is not None:
            used.setdefault(entry.candidate.name, set()).add(entry.candidate.expert)
    shapes = {name: checkpoint.shape(name) for name in used}
    return [
        Mismatch(name=name, expected=(len(experts), *shapes[name][1:]), found=shapes[name])
        for name, experts in used.items()
        if len(experts) != shapes[name][0]
    ]


def _tied(entries: list[Entry], names: NameMap, rest: list[str]) -> tuple[str, str] | None:
    heads = [candidate.name for candidate in names.candidates(HEAD) if candidate.name in rest]
    embeds = [entry.candidate.name for entry in entries if entry.target.name == EMBED]
    return (heads[0], embeds[0]) if heads and embeds else None


def check_tied(plan: LoadPlan, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return a notice on the head that a tied model leaves unread; a warning if it is not the embedding.

    Reads both tensors, some rows at a time.
    """
    if plan.tied is None:
        return ()
    head, embed = plan.tied
    if _same_values(checkpoint, head, embed):
        return (f"{head} is not used: the embedding serves as the head, with the same values",)
    return (
        f"warning: {head} is not used, but differs from {embed}; if the head was trained on its own, "
        f'set "tie_word_embeddings": false in config.json',
    )


def _same_values(checkpoint: Checkpoint, first: str, second: str) -> bool:
    if checkpoint.shape(first) != checkpoint.shape(second) or checkpoint.dtype(first) not in DTYPES:
        return False
    try:
        wholes = [Candidate(name=name, source=Source(name=name), expert=None) for name in (first, second)]
        tensors = [checkpoint.read(whole) for whole in wholes]
        blocks = [slice(start, start + COMPARE_ROWS) for start in range(0, len(tensors[0]), COMPARE_ROWS)]
        return all(torch.equal(tensors[0][rows].float(), tensors[1][rows].float()) for rows in blocks)
    finally:
        checkpoint.close()


def load_into(
    plan: LoadPlan,
    checkpoint: Checkpoint,
    *,
    prefix: str = "",
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> int:
    """Return the bytes of the parameters filled: those of all modules at or below prefix.

    Values are cast to the dtype of the parameter. A tensor on the CPU that needs neither cast nor
    move stays in the file and is read when used. progress gets the bytes of each parameter once it
    is filled. No parameter changes unless all can be filled.

    Raises: FirstlightError if the plan has faults or a file cannot be read.
    """
    plan.raise_if_bad(str(checkpoint.folder))
    filled: list[tuple[nn.Module, str, Tensor]] = []
    num_bytes = unreleased_bytes = 0
    try:
        for entries in _by_parameter(plan, prefix):
            target = entries[0].target
            tensor = _fill(entries, checkpoint, torch.device(device))
            filled.append((target.module, target.attribute, tensor))
            num_bytes += tensor.nbytes
            unreleased_bytes += tensor.nbytes
            if unreleased_bytes > RELEASE_BYTES:
                checkpoint.close()
                unreleased_bytes = 0
            if progress:
                progress(tensor.nbytes)
    finally:
        checkpoint.close()
    for module, attribute, tensor in filled:
        setattr(module, attribute, nn.Parameter(tensor, requires_grad=False))
    return num_bytes


def _by_parameter(plan: LoadPlan, prefix: str) -> Iterable[list[Entry]]:
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in plan.entries:
        if below(entry.target.path, prefix):
            groups.setdefault((entry.target.path, entry.target.attribute), []).append(entry)
    return groups.values()


def _fill(entries: list[Entry], checkpoint: Checkpoint, device: torch.device) -> Tensor:
    target = entries[0].target
    parameter: Tensor = getattr(target.module, target.attribute)
    if len(entries) == 1 and target.index == ():
        stored = checkpoint.read(entries[0].candidate)
        aligned = stored.data_ptr() % stored.element_size() == 0
        if device.type == "cpu" and stored.dtype == parameter.dtype and stored.is_contiguous() and aligned:
            return stored.view(parameter.shape)
    tensor = _allocate(parameter, device)
    covered = 0
    for entry in entries:
        region = tensor[entry.target.index]
        region.copy_(checkpoint.read(entry.candidate).reshape(region.shape))
        covered += region.numel()
    assert covered == tensor.numel(), f"the parts of {target.path}.{target.attribute} do not cover it"
    return tensor


def _allocate(like: Tensor, device: torch.device) -> Tensor:
    """Return an uninitialised tensor of the same shape and dtype."""
    if device.type != "cpu" or like.nbytes < OWN_MAPPING_BYTES:
        return torch.empty(like.shape, dtype=like.dtype, device=device)
    memory = mmap.mmap(-1, like.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


def unload(module: nn.Module) -> None:
    """Turn the parameters of a module and of all below it back to meta, of the same shapes and dtypes."""
    for owner in module.modules():
        for attribute, parameter in list(owner.named_parameters(recurse=False)):
            empty = torch.empty_like(parameter, device="meta")
            setattr(owner, attribute, nn.Parameter(empty, requires_grad=False))
