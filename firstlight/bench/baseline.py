"""transformers `generate` on the same checkpoint: greedy, cached, called as its users call it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from firstlight.errors import FirstlightError

# two likeliest logits nearer than this are a tie, which rounding decides
TIE = 1e-5


@dataclass(frozen=True, slots=True)
class Continued:
    """New tokens per sequence, and seconds until the first and the last of them."""

    ids: list[list[int]]
    first_s: float
    total_s: float


class Clock:
    """What `generate` calls as tokens come: the prompt first, then each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: object) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to note."""


class Baseline:
    """A transformers model in a format, with the attention it chooses itself. Raises: FirstlightError."""

    def __init__(self, folder: Path, dtype: str, device: str) -> None:
        try:
            import transformers
        except ImportError:
            raise FirstlightError(
                "transformers is not installed",
                where="--baseline transformers",
                why="the baseline is its generate",
                fix="pip install 'firstlight[verify]', or --baseline none",
            ) from None
        transformers.utils.logging.disable_progress_bar()
        self.name = f"transformers {transformers.__version__}"
        config = transformers.AutoConfig.from_pretrained(folder)
        cls = getattr(transformers, (config.architectures or ["AutoModelForCausalLM"])[0])
        self.model: Any = cls.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
        self.device = device

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, eos_ids: Sequence[int] = ()) -> Continued:
        """Return greedy continuations of prompts of one length, run as one batch. eos_ids: none never ends early."""
        ids_BT = torch.tensor(prompts, device=self.device)
        clock = Clock()
        began = time.perf_counter()
        out_BT = self.model.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            max_new_tokens=max_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=list(eos_ids) or None,
            pad_token_id=0,
            streamer=clock,
        )
        total_s = time.perf_counter() - began
        new = out_BT[:, ids_BT.shape[1] :].tolist()
        return Continued([upto(ids, eos_ids) for ids in new], clock.times[1] - began, total_s)

    @torch.inference_mode()
    def gap(self, ids: Sequence[int]) -> float:
        """Return by how much the likeliest next logit leads the second."""
        logits_V = self.model(torch.tensor([ids], device=self.device)).logits[0, -1].float()
        first, second = logits_V.topk(2).values.tolist()
        return float(first - second)

    def differences(
        self, prompts: Sequence[Sequence[int]], ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]
    ) -> list[str]:
        """Return, per continuation that differs for another reason than a tie, where it does first."""
        found = []
        for number, (prompt, mine, other) in enumerate(zip(prompts, ours, theirs, strict=True)):
            if list(mine) == list(other):
                continue
            at = next(
                (i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other))
            )
            gap = self.gap([*prompt, *other[:at]])
            if gap > TIE:
                found.append(
                    f"prompt {number} token {at}: {mine[at : at + 1]} for {other[at : at + 1]}, lead {gap:.1e}"
                )
        return found


def upto(ids: list[int], eos_ids: Sequence[int]) -> list[int]:
    """Return ids up to the first that ends a text, that one included."""
    ends = [index for index, token in enumerate(ids) if token in eos_ids]
    return ids[: ends[0] + 1] if ends else ids
