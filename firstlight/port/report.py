"""The report of a port: what it reuses and what is new, its parity layer by layer, its speed against the floor."""

from __future__ import annotations

import ast
import io
import time
import tokenize
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from jinja2 import FileSystemLoader

from firstlight.engine.args import EngineArgs
from firstlight.engine.assemble import Declared, declare
from firstlight.engine.llm import LLM
from firstlight.engine.sampling_params import SamplingParams
from firstlight.ops.registry import operator_table
from firstlight.plan.planner import Plan
from firstlight.port.status import Status, status
from firstlight.spec.checklist import checklist
from firstlight.spec.cost import cost
from firstlight.verify.environment import Environment, environment
from firstlight.verify.html import TEMPLATES, error_bars, templates
from firstlight.verify.summary import worst_by_place

OWN_TEMPLATES = Path(__file__).parent / "templates"
PROMPT_TOKENS, NEW_TOKENS = 16, 32
# beyond every cache of a CPU, and enough for a device to reach its rate
COPY_BYTES, COPIES = 1 << 28, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOrigin:
    """A part of the model. origin: reused, reused by its reference body only, or new with this port."""

    part: str
    where: str
    origin: Literal["reuse", "modify", "new"]
    operators: tuple[str, ...]
    flops_share: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Lines of the port file. code: without blank lines, comments and docstrings."""

    total: int
    code: int
    guesses: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Decoding at batch 1. floor_ms: the bytes a token must read over the rate at which this device copies.

    ms: median time per token. tokens: how many were generated after how many of prompt.
    """

    ms: float
    floor_ms: float
    bytes_per_token: int
    bytes_per_s: float
    tokens: tuple[int, int]
    dtype: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PortReport:
    """All of it, as data."""

    model: str
    model_type: str
    status: Status
    parts: tuple[PartOrigin, ...]
    operators: tuple[str, ...]
    lines: Lines
    speed: Speed
    environment: Environment

    @property
    def passed(self) -> bool:
        """True if nothing is left to do and an independent reference agrees."""
        return self.status.complete and self.status.proof is not None and self.status.proof.independent

    def count(self, origin: str) -> int:
        """Return how many parts are of an origin."""
        return sum(part.origin == origin for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {**asdict(self), "status": self.status.to_dict(), "passed": self.passed}


def report(
    model: str, file: Path, *, reference: str = "transformers", progress: Callable[[int], None] | None = None
) -> PortReport:
    """Return the report of a port file. Raises: FirstlightError if the model cannot be run with it at all."""
    found = status(model, file, reference=reference, progress=progress)
    declared = declare(model, port_file=file, allow_unknown_keys=True)
    made = declared.plan()
    return PortReport(
        model=declared.source.name,
        model_type=declared.arch.model_type,
        status=found,
        parts=origins(declared, made),
        operators=own_operators(declared),
        lines=count_lines(file.read_text(encoding="utf-8")),
        speed=speed(declared, made),
        environment=environment(),
    )


def own_operators(declared: Declared) -> tuple[str, ...]:
    """Return the operators that the port brings."""
    shared = operator_table()
    return tuple(name for name in declared.table.names() if name not in shared)


def origins(declared: Declared, plan: Plan) -> tuple[PartOrigin, ...]:
    """Return the parts of the model; one that calls an operator of the port is new."""
    own = own_operators(declared)
    items = checklist(declared.arch, declared.table, device=plan.device, dtype=plan.precision.backbone).items
    return tuple(
        PartOrigin(
            part=item.part,
            where=item.where,
            origin="new" if {*own} & {*item.operators} else item.status,
            operators=item.operators,
            flops_share=item.flops_share,
            reason=item.reason,
        )
        for item in items
    )


def count_lines(text: str) -> Lines:
    """Return the lines of a file."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef)
    documented = [node for node in ast.walk(ast.parse(text)) if isinstance(node, holders) and ast.get_docstring(node)]
    docs = {
        line
        for node in documented
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or node.body[0].lineno) + 1)
    }
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in skipped]
    code = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - docs
    return Lines(total=text.count("\n"), code=len(code), guesses=text.count("# guess: "))


def speed(declared: Declared, plan: Plan) -> Speed:
    """Return how fast the model decodes here, beside what the device could do. Raises: FirstlightError."""
    vocabulary, room = declared.arch.vocab_size, declared.arch.max_position_embeddings
    prompt = [token % vocabulary for token in range(min(PROMPT_TOKENS, max(1, room // 2)))]
    count = min(NEW_TOKENS, room - len(prompt))
    llm = LLM.of(declared, plan, EngineArgs(max_num_seqs=1))
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    # the first run fills caches and allocators
    for _ in range(2):
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    llm.close()
    total = cost(declared.arch, context=len(prompt) + count, dtype=plan.precision.backbone).total
    share = total.active_parameters / max(1, total.parameters)
    needed = int(
        total.weight_bytes * share + total.cache_bytes_per_token * len(prompt) + total.state_bytes_per_sequence
    )
    rate = copy_rate(plan.device)
    return Speed(
        ms=1000 / output.tokens_per_s if output.tokens_per_s else 0.0,
        floor_ms=1000 * needed / rate,
        bytes_per_token=needed,
        bytes_per_s=rate,
        tokens=(len(prompt), count),
        dtype=plan.precision.backbone,
        device=plan.device,
    )


def copy_rate(device: str) -> float:
    """Return the bytes per second that a large copy reads and writes on a device, median of several."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(COPIES):
        began = time.perf_counter()
        target.copy_(source)
        if device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * COPY_BYTES / median(seconds)


def render(found: PortReport) -> str:
    """Return the report as a page without external assets."""
    env = templates().overlay(loader=FileSystemLoader([OWN_TEMPLATES, TEMPLATES]))
    proof = found.status.proof
    bars, worst = (error_bars(proof), worst_by_place(proof)) if proof else ((), ())
    return env.get_template("report.html").render(report=found, proof=proof, bars=bars, worst=worst)
