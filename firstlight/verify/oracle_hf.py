"""transformers as the reference, streamed: one layer's weights in memory at a time.

The model is built without weights; hooks load each block just before it runs and drop it after. Which
of its modules corresponds to which of ours follows from the weight map: the module that owns exactly
the parameters that ours consumed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from firstlight.errors import FirstlightError
from firstlight.spec.names import Candidate, Source
from firstlight.verify.oracle import Recorder, Trace, Visit
from firstlight.weights.checkpoint import Checkpoint
from firstlight.weights.load import unload
from firstlight.weights.loadplan import LoadPlan, below

# two orders of summation of one fp32 model, over all its layers
SELF_TOLERANCE = 1e-4


class Enough(Exception):
    """The last layer that was asked for has run."""


class HFOracle:
    """A transformers model in fp32 with eager attention, loaded block by block.

    plan: may lack parts of ours; a module that none of them is filled from is the reference's alone, and runs.
    tied: ours has no head of its own.
    """

    def __init__(self, folder: Path, plan: LoadPlan, num_layers: int, *, tied: bool) -> None:
        transformers = require_transformers()
        self.description = f"transformers {transformers.__version__}"
        self.independent = True
        self.checkpoint = Checkpoint.open(folder)
        self.model = build_model(folder)
        self.names = ParameterNames(self.model, self.checkpoint)
        self.plan, self.tied = plan, tied
        self.consumed = plan.sources("")
        stack = self._stack(num_layers)
        self.blocks = {path: self.names.owner(plan.sources(path)) or "" for path in ("embed", "norm", "head")}
        self.blocks |= {f"layers.{i}": f"{stack}.{i}" for i in range(num_layers)}

    def run(self, ids_T: Tensor, layers: range, visit: Visit) -> Tensor | None:
        """Run one uncached-history pass and show each layer; see Oracle. Raises: FirstlightError."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config.get_text_config())
        outside = Recorder(
            {p: (n, self._module(n)) for p, n in self.blocks.items() if n and not p.startswith("layers.")}
        )
        logits: Tensor | None = None
        with self._streaming() as handles, suppress(Enough):
            handles += [self._show(index, len(ids_T), cache, visit) for index in layers]
            if f"layers.{layers.stop}" in self.blocks:
                handles.append(self._module(self.blocks[f"layers.{layers.stop}"]).register_forward_pre_hook(enough))
            with torch.inference_mode():
                logits = self.model(input_ids=ids_T[None], past_key_values=cache, use_cache=True).logits[0].float()
        outside.close()
        visit(None, Trace(outside.take()))
        return logits

    def contradiction(self, ids_T: Tensor, logits_TV: Tensor) -> str:
        """Return how a pass without any cache differs from the one that was compared; see Oracle.

        Cached passes of some transformers models were wrong; a port must not be blamed for that.
        """
        with self._streaming(), torch.inference_mode():
            plain = self.model(input_ids=ids_T[None], use_cache=False).logits[0].float()
        error = float((plain - logits_TV).abs().max() / plain.abs().max())
        return (
            f"{self.description} contradicts itself: cached and uncached logits differ by {error:.1e}"
            if error > SELF_TOLERANCE
            else ""
        )

    @contextmanager
    def _streaming(self) -> Iterator[list[Any]]:
        handles: list[Any] = []
        try:
            for path, name in self.blocks.items():
                if name:
                    handles += self._stream(path, name)
            for name in self._alone():
                handles += self._stream("", name)
            yield handles
        finally:
            for handle in handles:
                handle.remove()
            self.checkpoint.close()

    def _stack(self, num_layers: int) -> str:
        """Return the list of the reference's layers: where ours are filled from, or the first of that length."""
        lists: dict[str, int] = {name: len(m) for name, m in self.model.named_modules() if isinstance(m, nn.ModuleList)}
        filled = [(i, self.names.target[name]) for i in range(num_layers) for name in self.plan.sources(f"layers.{i}")]
        # the outermost list that holds what fills one of our layers at that layer's number
        held = (name for i, target in filled for name in lists if target.startswith(f"{name}.{i}."))
        found = next(held, None) or next((name for name, length in lists.items() if length == num_layers), None)
        if found is None or lists[found] < num_layers:
            raise FirstlightError(
                f"the reference has no {num_layers} layers",
                where=self.description,
                why=f"its lists of modules: {', '.join(f'{name} ({n})' for name, n in lists.items()) or 'none'}",
                fix="compare the number of layers in the port with config.json",
            )
        return found

    def _alone(self) -> list[str]:
        """Return the modules with parameters that no block of ours holds: the port or the checkpoint lacks them."""
        blocks = [name for name in self.blocks.values() if name]
        filled = {target for target in self.names.target.values() if target in self.names.state}
        owners = {name.rpartition(".")[0] for name in (*filled, *(n for n, _ in self.model.named_parameters()))}
        head = self.model.get_output_embeddings()
        return sorted(
            name
            for name in owners
            if not any(below(name, block) for block in blocks)
            and not any(self._module(name).children())
            and not (self.tied and self._module(name) is head)
        )

    def _module(self, name: str) -> nn.Module:
        module: nn.Module = self.model.get_submodule(name)
        return module

    def _stream(self, path: str, name: str) -> list[Any]:
        module = self._module(name)
        if path == "embed" and self.tied:
            # a tied head shares the embedding's weight, which must outlive the layers
            self.names.load(name)
            self.model.get_output_embeddings().weight = module.weight
            return []

        def before(owner: nn.Module, args: Any) -> None:
            self.names.load(name)

        def after(owner: nn.Module, args: Any, result: Any) -> None:
            unload(module)
            # drops the mapping, whose pages would otherwise stay resident
            self.checkpoint.close()

        return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    def _show(self, index: int, num_tokens: int, cache: Any, visit: Visit) -> Any:
        recorder = Recorder(self.layer_modules(index), batch_tokens=num_tokens)
        layer = self._module(self.blocks[f"layers.{index}"])

        def after(owner: nn.Module, args: Any, result: Any) -> None:
            visit(index, Trace(recorder.take(), cache_states(cache, index)))
            recorder.close()

        return layer.register_forward_hook(after)

    def layer_modules(self, index: int) -> dict[str, tuple[str, nn.Module]]:
        """Return our module path in the layer -> (name, module) of the one that owns exactly the same parameters."""
        base = f"layers.{index}"
        paths = {entry.target.path for entry in self.plan.entries if entry.target.path.startswith(base + ".")}
        parents = {path.rsplit(".", k)[0] for path in paths for k in range(path.count(".") - 1)}
        found: dict[str, tuple[str, nn.Module]] = {"": (self.blocks[base], self._module(self.blocks[base]))}
        for path in sorted(paths | parents):
            name = self.names.owner(self.plan.sources(path), exactly=self.consumed)
            if name and path != base:
                found[path[len(base) + 1 :]] = (name, self._module(name))
        return found


class ParameterNames:
    """Checkpoint name <-> reference parameter, by the conversions that transformers registers for the model."""

    def __init__(self, model: Any, checkpoint: Checkpoint) -> None:
        from transformers import core_model_loading as loading
        from transformers.conversion_mapping import get_model_conversion_mapping

        self.model, self.checkpoint, self.loading = model, checkpoint, loading
        conversions = get_model_conversion_mapping(model)
        self.renamings = [c for c in conversions if isinstance(c, loading.WeightRenaming)]
        self.converters = [c for c in conversions if isinstance(c, loading.WeightConverter)]
        self.state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.target: dict[str, str] = {}
        self.pattern: dict[str, str | None] = {}
        for name in checkpoint.names():
            self.target[name], self.pattern[name] = self._rename(name)

    def _rename(self, name: str) -> tuple[str, str | None]:
        prefix = self.model.base_model_prefix
        renamed, pattern = self.loading.rename_source_key(name, self.renamings, self.converters, prefix, self.state)
        if renamed not in self.state and name in self.state:
            return name, None
        return renamed, pattern

    def owner(self, sources: set[str], *, exactly: set[str] | None = None) -> str | None:
        """Return the innermost module that owns the parameters filled from these checkpoint tensors.

        exactly: None unless it owns no other parameter that is filled from these tensors.
        """
        filled = {self.target[name] for name in sources} & self.state.keys()
        if not filled:
            return None
        levels = zip(*(name.split(".")[:-1] for name in filled), strict=False)
        common = [level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels)]
        name = ".".join(common)
        if exactly is not None:
            owned = {self.target[n] for n in exactly if self.target[n].startswith(name + ".")}
            return name if owned == filled else None
        return name

    def load(self, module: str) -> None:
        """Fill the parameters of a reference module from the checkpoint, in fp32. Raises: FirstlightError."""
        wanted = sorted(n for n, t in self.target.items() if t in self.state and t.startswith(module + "."))
        groups: dict[str, Any] = {}
        by_pattern = {pattern: converter for converter in self.converters for pattern in converter.source_patterns}
        for name in sorted(wanted, key=self.loading.dot_natural_key):
            tensor = self.checkpoint.read(Candidate(name=name, source=Source(name=name), expert=None)).float()
            target, pattern = self.target[name], self.pattern[name]
            if pattern is None:
                self._set(target, tensor)
                continue
            group = groups.setdefault(target, deepcopy(by_pattern[pattern]))
            group.add_tensor(target, name, pattern, tensor)
        for target, group in groups.items():
            for key, value in group.convert(target, model=self.model, config=self.model.config).items():
                self._set(key, value[0] if isinstance(value, list) else value)
        left = [n for n, p in self.model.get_submodule(module).named_parameters() if p.is_meta]
        if left:
            raise FirstlightError(
                f"the reference needs {left[0]} of {module}, which the checkpoint lacks",
                where=str(self.checkpoint.folder),
                why=f"{len(left)} parameters of the transformers module have no tensor",
                fix="--reference ref",
            )

    def _set(self, name: str, value: Tensor) -> None:
        path, _, attribute = name.rpartition(".")
        wanted = self.state[name].shape if name in self.state else value.shape
        if value.shape != wanted:
            raise FirstlightError(
                f"the reference needs {name} as {list(wanted)}, the checkpoint has it as {list(value.shape)}",
                where=str(self.checkpoint.folder),
                why="config.json and the weights do not agree, or transformers reads another key than the authors",
                fix="compare the sizes in config.json with the shapes of the tensors",
            )
        owner = self.model.get_submodule(path)
        if attribute in owner._buffers:
            owner._buffers[attribute] = value
        else:
            owner._parameters[attribute] = nn.Parameter(value, requires_grad=False)


def enough(module: nn.Module, args: Any) -> None:
    """Stop the pass before this module. Raises: Enough."""
    raise Enough


def require_transformers() -> Any:
    """Return the transformers module. Raises: FirstlightError if it is not installed."""
    try:
        import transformers
    except ImportError:
        raise FirstlightError(
            "--reference transformers needs the transformers library",
            why="it is not installed",
            fix="pip install 'firstlight[verify]', or --reference ref",
        ) from None
    transformers.logging.set_verbosity_error()
    return transformers


def build_model(folder: Path) -> Any:
    """Return the transformers model on the meta device, computed buffers real. Raises: FirstlightError if unknown."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        cls = getattr(transformers, (config.architectures or [""])[0], None) or transformers.AutoModelForCausalLM
        for part in (config, config.get_text_config()):
            part.dtype = torch.float32
            part._attn_implementation = "eager"
        with torch.device("meta"):
            model = cls.from_config(config) if cls is transformers.AutoModelForCausalLM else cls(config)
    except (ValueError, KeyError, OSError, AttributeError, TypeError) as error:
        raise FirstlightError(
            "transformers cannot build this model",
            where=str(folder / "config.json"),
            why=f"{type(error).__name__}: {re.split(chr(10), str(error))[0][:200]}",
            fix="--reference ref, or a newer transformers",
        ) from error
    model = model.float().eval()
    for module in model.modules():
        computed = [name for name in module._buffers if name in module._non_persistent_buffers_set]
        for name in computed:
            buffer = module._buffers[name]
            module._buffers[name] = None if buffer is None else torch.empty_like(buffer, device="cpu")
        if computed:
            model._init_weights(module)
    return model


def cache_states(cache: Any, index: int) -> Mapping[str, Tensor]:
    """Return the states of a transformers cache layer: recurrent as it keeps them [H, K, V], conv [W, C]."""
    layer = cache.layers[index]
    states = {}
    for ours, theirs in (("recurrent", "recurrent_states"), ("conv", "conv_states")):
        value = getattr(layer, theirs, None)
        value = value.get(0) if isinstance(value, dict) else value
        if isinstance(value, Tensor):
            kept = value[0].detach().float()
            states[ours] = (kept.mT if ours == "conv" else kept).clone()
    return states
