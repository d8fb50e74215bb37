"""Where the value of a field comes from: a config key that agrees with the tensors, the tensors, the reference."""

from __future__ import annotations

import re
from typing import Any

from firstlight.port.observe import Observation
from firstlight.port.reference import ModuleFact
from firstlight.port.text import Call, Value, quoted

EPS_KEYS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", "norm_epsilon")
ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta")
ACTS = {"silu": "silu", "swish": "silu", "relu2": "relu2", "gelu_pytorch_tanh": "gelu_tanh"}
ACT_KEYS = ("mlp_hidden_act", "hidden_act", "hidden_activation")


def reader(key: str, method: str, *arguments: str) -> str:
    """Return the code that reads a key; a dot leads into an object."""
    table, _, leaf = key.rpartition(".")
    owner = f'cfg.section("{table}")' if table else "cfg"
    return f"{owner}.{method}({', '.join((quoted(leaf), *arguments))})"


def size(seen: Observation, number: int, *keys: str, shape: str) -> Value:
    """Return the code of a size: the first key whose value agrees, else the number itself. shape: its evidence."""
    for key in keys:
        if seen.value(key) == number:
            return Value(reader(key, "positive"))
    tried = f" ({', '.join(keys)}: none agrees)" if any(seen.value(key) is not None for key in keys) else ""
    return Value(str(number), guess=f"{shape}{tried}")


def needed(seen: Observation, *keys: str, what: str) -> Value:
    """Return the code of a count that no shape shows: the first key that is there, or a todo."""
    key = seen.key(*keys)
    if key:
        return Value(reader(key, "positive"))
    usual = next(((key, seen.usual(key)) for key in keys if isinstance(seen.usual(key), int)), None)
    if usual:
        return Value(str(usual[1]), guess=f"{seen.says} takes that for {usual[0]}, which config.json lacks")
    return Value("1", todo=f"{what}: no key of config.json names it")


def flag(seen: Observation, here: bool, *keys: str, tensor: str) -> Value:
    """Return the code of a yes or no that tensors show. tensor: that is there or not."""
    for key in keys:
        if seen.value(key) is here:
            return Value(f'cfg.get("{key}", False)')
    return Value(repr(here), guess=f"there is a {tensor}" if here else "")


def either(seen: Observation, key: str, default: Any, evidence: str) -> Value:
    """Return the code that reads a key, or the default as a guess where there is none."""
    if seen.value(key) is not None:
        return Value(reader(key, "get", repr(type(seen.value(key))(default))))
    usual = seen.usual(key)
    if usual is not None:
        return Value(repr(usual), guess=f"{seen.says} takes that for {key}, which config.json lacks")
    return Value(repr(default), guess=f"no key {key}; {evidence}")


def epsilon(seen: Observation, layer: int | None, path: str, *, usual: str = "") -> Value:
    """Return the epsilon of a norm. path: of its module below the layer, as the checkpoint spells it.

    usual: what it is where no reference tells; the key of config.json by default.
    """
    key = seen.key(*EPS_KEYS)
    read = f'cfg.require("{key}", float)' if key else "1e-6"
    fact = seen.reference.norm_like(layer, path)
    if fact is None and usual:
        return Value(usual, guess=f"usual for {path}, whatever the other norms have")
    if fact is None:
        return Value(read, guess=f"that of the other norms, for {path}" if "." in path else "")
    named = key_of_epsilon(seen, layer, path)
    if named is not None and seen.value(named) == fact.eps:
        return Value(f'cfg.require("{named}", float)')
    if "." not in path and seen.value(key or "") == fact.eps:
        return Value(read)
    return Value(repr(fact.eps), guess=f"{seen.says} {fact.cls} of {path}")


def key_of_epsilon(seen: Observation, layer: int | None, path: str) -> str | None:
    """Return the config key that the class of the owner gives to a norm, as its text says."""
    owner_path, _, attribute = path.rpartition(".")
    owner = seen.reference.find(layer, owner_path) if owner_path else None
    made = owner and re.search(rf"self\.{attribute}\s*=\s*\w+\((?:[^()]|\([^()]*\))*\)", owner.text)
    given = made and re.search(r"eps\w*\s*=\s*(config|self)\.(\w+)", made[0])
    if not owner or not given:
        return None
    if given[1] == "config":
        return given[2]
    kept = re.search(rf"self\.{given[2]}\s*=\s*config\.(\w+)", owner.text)
    return kept[1] if kept else None


def norm(seen: Observation, layer: int | None, path: str, *, biased: bool = False, usual: str = "") -> Call:
    """Return the Norm of a module. biased: the checkpoint holds a bias for it; usual: as in epsilon."""
    call = Call("Norm").set("eps", epsilon(seen, layer, path, usual=usual))
    fact = seen.reference.find(layer, path)
    if biased:
        return call.set("kind", '"layer"')
    if fact and fact.says(r"1(\.0)?\s*\+\s*self\.weight"):
        return call.set("kind", Value('"rms1p"', guess=f"{seen.says} {fact.cls} adds 1 to the weight"))
    return call


def rope(seen: Observation, dim: str, fact: ModuleFact | None, *, usual: str, switch: str = "") -> Value:
    """Return rotary positions over `dim` dimensions. usual: the layout where no text tells. switch: a flag for it."""
    if not any(seen.value(key) is not None for key in ROPE_KEYS):
        return Value("None", guess="config.json holds no rotary parameters")
    if switch and seen.value(switch) is not None:
        default = usual == "interleave"
        layout = f'"interleave" if cfg.get("{switch}", {default}) else "half"'
        return Value(f"cfg.rope({dim}, layout={layout})")
    text = fact.text if fact else ""
    if not re.search(r"apply_rotary|rotate_half|rotary", text):
        evidence = "usual for this mixer; the other layout is told apart by verify"
    elif re.search(r"apply_rotary_pos_emb_interleave|0::2|::2\]", text):
        usual, evidence = "interleave", f"{seen.says} {fact.cls if fact else ''} pairs neighbours"
    else:
        usual, evidence = "half", f"{seen.says} {fact.cls if fact else ''} pairs the halves"
    return Value(f'cfg.rope({dim}, layout="{usual}")', guess=evidence)


def act(seen: Observation, *, gated: bool) -> Value | None:
    """Return the activation of a feed-forward, None for plain silu."""
    key = seen.key(*ACT_KEYS)
    word = str(seen.value(key)) if key else "silu"
    if seen.value("swiglu_limit") is not None and gated:
        return Value(Call("Act").set("kind", '"clamp"').set("limit", 'cfg.above_zero("swiglu_limit")'))
    kind = ACTS.get(word)
    if kind is None or gated != (kind != "relu2"):
        shown = "with" if gated else "without"
        return Value(Call("Act"), todo=f"{key} = {word} {shown} a gate projection: no Act of the vocabulary is that")
    return None if kind == "silu" else Value(Call("Act").set("kind", f'"{kind}"'))


def act_of_gate(seen: Observation, fact: ModuleFact | None, *, usual: str) -> Value:
    """Return the activation of an output gate, by the text of the module that applies it."""
    told = "sigmoid" if fact and fact.says("sigmoid") else "silu" if fact and fact.says("silu") else ""
    if fact and told:
        return Value(f'"{told}"', guess=f"{seen.says} {fact.cls} applies {told}")
    return Value(f'"{usual}"', guess="usual for this mixer; the other activation is told apart by verify")
