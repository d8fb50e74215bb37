"""MODEL -> where its files are: `demo`, a folder, a config.json, a card of a public model, or a hub id."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from firstlight.errors import FirstlightError, closest
from firstlight.models.registry import known_models
from firstlight.spec.cards import card, card_names
from firstlight.spec.files import load_json

DEMO = "demo"
HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
WANTED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model's name, its config.json, and the folder of its weights and tokenizer (None: config only)."""

    name: str
    raw: dict[str, Any]
    where: str
    folder: Path | None

    @property
    def model_type(self) -> str:
        """The config's model_type. Raises: FirstlightError if it has none."""
        found = self.raw.get("model_type")
        if not isinstance(found, str) or not found:
            raise FirstlightError(
                "config.json has no model_type",
                where=self.where,
                why=f"it names the port; there are {', '.join(known_models())}",
                fix='compare with the config.json of the release, or add "model_type" and give --port FILE.py',
            )
        return found

    def require_folder(self, purpose: str) -> Path:
        """Return the folder with weights. Raises: FirstlightError saying what they are needed for."""
        if self.folder is None:
            raise FirstlightError(
                f"{purpose} needs weights",
                where=self.where,
                why="only a config.json was given",
                fix="give the model's folder",
            )
        return self.folder


def locate(model: str, *, config_only: bool = False) -> ModelSource:
    """Return where a MODEL argument points. config_only: a hub id downloads its config.json alone.

    Raises: FirstlightError if there is nothing, or nothing readable, at that place.
    """
    if model == DEMO:
        return read_folder(Path(str(files("firstlight") / "data" / "demo")), name=DEMO)
    path = Path(model).expanduser()
    try:
        is_dir, is_file = path.is_dir(), path.is_file()
    except OSError as error:
        raise FirstlightError("cannot read the model's path", where=model, why=error.strerror or str(error)) from None
    if is_dir:
        return read_folder(path, name=path.resolve().name)
    if is_file:
        return read_file(path)
    if model in card_names():
        return ModelSource(name=model, raw=card(model), where=f"card {model}", folder=None)
    if HUB_ID.match(model) and not model.startswith("."):
        return download(model, config_only=config_only)
    near = closest(model, [DEMO, *card_names()])
    raise FirstlightError(
        f"no model at {model!r}",
        where=str(path),
        why="it is neither a folder, a config.json, a card nor a hub id",
        fix=f"did you mean {near}?" if near else f"demo, or one of the cards: {', '.join(card_names())}",
    )


def read_folder(folder: Path, *, name: str) -> ModelSource:
    """Return the source of a model folder. Raises: FirstlightError if it has no readable config.json."""
    config = folder / "config.json"
    return ModelSource(name=name, raw=load_json(config), where=str(config), folder=folder)


def read_file(path: Path) -> ModelSource:
    """Return the source of a lone config.json; weights beside it count. Raises: FirstlightError for another file."""
    if path.suffix != ".json":
        raise FirstlightError(
            f"{path.name} is a file, not a model folder",
            where=str(path),
            why="a model is a folder with config.json and safetensors, or a config.json",
            fix=f"{path.parent}",
        )
    beside = any(path.parent.glob("*.safetensors")) and path.name == "config.json"
    return ModelSource(
        name=path.resolve().parent.name if path.name == "config.json" else path.stem,
        raw=load_json(path),
        where=str(path),
        folder=path.parent if beside else None,
    )


def download(model: str, *, config_only: bool) -> ModelSource:
    """Return the source of a hub id, downloaded into the hub cache. Raises: FirstlightError without a network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        wanted = ["config.json"] if config_only else WANTED_FILES
        folder = Path(snapshot_download(model, allow_patterns=wanted))
    except (OSError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise FirstlightError(
            f"cannot download {model}",
            where=model,
            why=f"{type(error).__name__}: {str(error).splitlines()[0]}",
            fix="check the name and the network, or give a local folder",
        ) from None
    source = read_folder(folder, name=model)
    return ModelSource(name=source.name, raw=source.raw, where=source.where, folder=None) if config_only else source
