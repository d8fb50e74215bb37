"""day0: take a model apart, plan it, prove it, let it write. Everything the report shows, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from firstlight.engine.args import EngineArgs
from firstlight.engine.assemble import Declared
from firstlight.engine.build import has_tokenizer
from firstlight.engine.llm import LLM
from firstlight.engine.prompts import read_prompt
from firstlight.engine.sampling_params import SamplingParams
from firstlight.errors import FirstlightError
from firstlight.plan.explain import MemoryEstimate, PlanRow, fold, memory
from firstlight.plan.planner import Plan
from firstlight.spec.checklist import Checklist, checklist
from firstlight.spec.cost import Cost, contexts, cost
from firstlight.verify.environment import Environment, environment
from firstlight.verify.report import VerifyReport
from firstlight.verify.run import TOLERANCE, VerifyOptions, verify
from firstlight.verify.steps import Facts, Step, mission_steps
from firstlight.verify.summary import repro
from firstlight.weights.report import LoadReport

PROMPT = "At first light"


@dataclass(frozen=True, slots=True, kw_only=True)
class Day0Options:
    """reference: auto takes transformers where it knows the model. prompt: continued greedily by max_tokens tokens.

    flags: what a command that repeats a part of this run must be given besides.
    """

    reference: str = "auto"
    num_tokens: int | None = None
    tolerance: float = TOLERANCE
    seed: int = 0
    prompt: str = PROMPT
    max_tokens: int = 32
    model: str = ""
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What the model wrote. prompt and text: the ids where the model has no tokenizer."""

    prompt: str
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    text: str
    finish_reason: str
    first_token_s: float
    tokens_per_s: float
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Day0Report:
    """A model on its first day. reference_reason: why that reference; repro: repeats the first failure alone."""

    model: str
    model_type: str
    port: str
    created: str
    steps: tuple[Step, ...]
    checklist: Checklist
    costs: tuple[Cost, ...]
    plan: Plan
    rows: tuple[PlanRow, ...]
    memory: MemoryEstimate
    reference: str
    reference_reason: str
    proof: VerifyReport
    written: Written
    environment: Environment
    unknown_keys: tuple[str, ...] = ()
    repro: str = ""

    @property
    def passed(self) -> bool:
        """True if the verification passed."""
        return self.proof.passed

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data, with the verdict and each step's status spelt out."""
        steps = [
            {"name": step.name, "status": step.status, "findings": [asdict(f) for f in step.findings]}
            for step in self.steps
        ]
        spelt = {"passed": self.passed, "steps": steps, "proof": self.proof.to_dict(), "plan": self.plan.to_dict()}
        return {**asdict(self), **spelt, "memory": self.memory.to_dict()}


@dataclass(slots=True)
class Progress:
    """What a run tells while it goes on: layers compared, bytes loaded."""

    layer: Callable[[int], None] = lambda index: None
    loaded: Callable[[int], None] = lambda num_bytes: None


def run_day0(declared: Declared, plan: Plan, options: Day0Options, progress: Progress | None = None) -> Day0Report:
    """Return the report. Raises: FirstlightError if a part cannot be done at all; a failed proof is reported."""
    progress = progress or Progress()
    arch, dtype = declared.arch, plan.precision.backbone
    declared.source.require_folder("day0")
    parts = checklist(arch, declared.table, device=plan.device, dtype=dtype)
    proof, reference, reason = prove(declared, plan, options, progress)
    written, load = write(declared, plan, options, progress)
    facts = Facts(
        declared=declared,
        checklist=parts,
        plan=plan,
        load=load,
        proof=proof,
        text_tokens=len(written.ids),
    )
    first = proof.first_divergence
    name = options.model or declared.source.name
    return Day0Report(
        model=declared.source.name,
        model_type=arch.model_type,
        port=declared.port.origin,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        steps=mission_steps(facts),
        checklist=parts,
        costs=tuple(cost(arch, context=n, dtype=dtype, caches=plan.precision.cache_dtypes()) for n in contexts(arch)),
        plan=plan,
        rows=fold(plan, arch),
        memory=memory(plan, arch),
        reference=reference,
        reference_reason=reason,
        proof=proof,
        written=written,
        environment=environment(),
        unknown_keys=declared.unknown_keys,
        repro=repro(proof, first, model=name, reference=reference, flags=options.flags) if first else "",
    )


def prove(declared: Declared, plan: Plan, options: Day0Options, progress: Progress) -> tuple[VerifyReport, str, str]:
    """Return the verification, the reference it used, and why that one. Raises: FirstlightError."""

    def against(reference: str) -> VerifyReport:
        asked = VerifyOptions(
            reference=reference, num_tokens=options.num_tokens, tolerance=options.tolerance, seed=options.seed
        )
        return verify(declared, plan, asked, progress.layer)

    if options.reference != "auto":
        return against(options.reference), options.reference, "asked for"
    try:
        return (
            against("transformers"),
            "transformers",
            f"transformers is installed and knows {declared.arch.model_type}",
        )
    except (FirstlightError, ImportError) as error:
        # a fault of the checkpoint comes up again with the other reference, and is raised there
        why = (
            error.what + (f" ({error.why})" if error.why else "") if isinstance(error, FirstlightError) else str(error)
        )
        return against("ref"), "ref", f"our own reference operators, because {why}"


def write(declared: Declared, plan: Plan, options: Day0Options, progress: Progress) -> tuple[Written, LoadReport]:
    """Return what the model writes, greedily, and what the loader did. Raises: FirstlightError."""
    arch = declared.arch
    # a model without a tokenizer continues ids
    given = options.prompt if has_tokenizer(declared.source.require_folder("day0")) else range(min(4, arch.vocab_size))
    llm = LLM.of(declared, plan, EngineArgs(max_num_seqs=1, seed=options.seed), progress=progress.loaded)
    text, ids = read_prompt(given, llm.engine.tokenizer)
    room = max(1, arch.max_position_embeddings - len(ids))
    params = SamplingParams(temperature=0.0, max_tokens=min(options.max_tokens, room))
    (output,) = llm.generate([{"prompt": text, "prompt_token_ids": ids}], params, use_tqdm=False)
    llm.close()
    if output.error:
        raise RuntimeError(output.error)
    (continued,) = output.outputs
    written = Written(
        prompt="".join(f"{token} " for token in ids) if text is None else text,
        prompt_ids=ids,
        ids=continued.token_ids,
        text=llm.shown(continued),
        finish_reason=str(continued.finish_reason),
        first_token_s=(output.metrics or {}).get("first_token_s", 0.0),
        tokens_per_s=output.tokens_per_s,
        dtype=plan.precision.backbone,
    )
    return written, llm.load_report
