"""Tokenizer folders: the demo, and one tokenizer per kind of decoder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from firstlight.text.tokenizer import Tokenizer

SPACE = "\u2581"
Make = Callable[[str], Tokenizer]


def byte_level() -> Library:
    """One token per byte, nothing merged."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return library


def byte_fallback() -> Library:
    """Words with a space mark, bytes for the rest, the first space of a text stripped."""
    words = ["<unk>", SPACE, f"{SPACE}a", f"{SPACE}is", "b", "c", "\u4e16", f"{SPACE}\u00e9"]
    tokens = words + [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {token: i for i, token in enumerate(tokens)}
    library = Library(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(steps)
    return library


def metaspace() -> Library:
    """Words with a space mark; all marks of the first token are dropped."""
    tokens = [f"{SPACE}a", f"{SPACE}{SPACE}b", "c", SPACE, "\u4e16", "<unk>"]
    library = Library(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    library.decoder = decoders.Metaspace()
    return library


def word_piece() -> Library:
    """Words joined by spaces, and pieces that continue a word."""
    tokens = ["[UNK]", "a", "##b", "##c", "do", "n't", ".", "\u4e16"]
    library = Library(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    library.decoder = decoders.WordPiece()
    return library


KINDS = {maker.__name__: maker for maker in (byte_level, byte_fallback, metaspace, word_piece)}


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """Return the folder of the embedded demo."""
    return Path(str(files("firstlight") / "data" / "demo"))


@pytest.fixture
def demo_copy(demo_folder: Path, tmp_path: Path) -> Path:
    """Return a copy of the demo without its weights, to be changed."""
    return Path(shutil.copytree(demo_folder, tmp_path / "demo", ignore=shutil.ignore_patterns("*.safetensors")))


@pytest.fixture(scope="session")
def tokenizer_of(tmp_path_factory: pytest.TempPathFactory, demo_folder: Path) -> Make:
    """Return a function that loads the demo's tokenizer or one of KINDS, with two special tokens added."""

    def load(kind: str) -> Tokenizer:
        if kind == "demo":
            return Tokenizer.load(demo_folder)
        folder = tmp_path_factory.mktemp(kind)
        library = KINDS[kind]()
        library.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
        library.save(str(folder / "tokenizer.json"))
        return Tokenizer.load(folder)

    loaded = {kind: load(kind) for kind in ("demo", *KINDS)}
    return loaded.__getitem__
