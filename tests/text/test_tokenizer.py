"""Tokenizer files: the same ids as transformers, which ids end a text, and faults by name."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from transformers import AutoTokenizer

from firstlight.errors import FirstlightError
from firstlight.text.tokenizer import Tokenizer

TEXTS = ["Hello, world!", "  two  spaces\n\n and 12345", "\u00e9\u4e16\U0001f600", "<|user|>\nhi<|end|>", "", " "]


def write(folder: Path, **tables: dict[str, Any] | None) -> None:
    """Write NAME.json files, or remove those given as None."""
    for name, table in tables.items():
        path = folder / f"{name}.json"
        path.unlink(missing_ok=True) if table is None else path.write_text(json.dumps(table))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_ids_and_text_are_those_of_transformers(text: str, special: bool, demo_folder: Path) -> None:
    ours, theirs = Tokenizer.load(demo_folder), AutoTokenizer.from_pretrained(str(demo_folder))
    ids = ours.encode(text, add_special_tokens=special)
    assert ids == theirs.encode(text, add_special_tokens=special)
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_the_file_says_what_is_added_to_a_text(demo_folder: Path) -> None:
    tokenizer = Tokenizer.load(demo_folder)
    begin = tokenizer.token_id("<|begin|>")
    assert tokenizer.encode("a")[0] == begin
    assert begin not in tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.encode("") == [begin]


def test_vocab_size_is_the_highest_id_plus_one(tokenizer_of) -> None:
    assert tokenizer_of("demo").vocab_size == 512
    assert tokenizer_of("byte_level").vocab_size == 258


def test_truncation_and_padding_of_the_file_are_not_applied(demo_copy: Path) -> None:
    library = Library.from_file(str(demo_copy / "tokenizer.json"))
    before = Tokenizer.load(demo_copy).encode("one two three four")
    library.enable_truncation(2)
    library.enable_padding(length=64)
    library.save(str(demo_copy / "tokenizer.json"))
    assert Tokenizer.load(demo_copy).encode("one two three four") == before
    assert len(before) > 2


@pytest.mark.parametrize(
    ("generation", "config", "eos"),
    [
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 5}, (7, 8)),
        ({"eos_token_id": 0}, {"eos_token_id": 5}, (0,)),
        ({}, {"eos_token_id": 5, "text_config": {"eos_token_id": 6}}, (5,)),
        ({"eos_token_id": None}, {"text_config": {"eos_token_id": [6, 9]}}, (6, 9)),
        (None, {"text_config": None}, (2,)),
        (None, None, (2,)),
    ],
)
def test_eos_comes_from_the_first_file_that_names_it(
    generation: dict[str, Any] | None, config: dict[str, Any] | None, eos: tuple[int, ...], demo_copy: Path
) -> None:
    write(demo_copy, generation_config=generation, config=config)
    assert Tokenizer.load(demo_copy).eos_ids == eos


def test_eos_may_be_written_as_an_object_or_be_absent(demo_copy: Path) -> None:
    write(demo_copy, generation_config=None, config=None, tokenizer_config={"eos_token": {"content": "<|user|>"}})
    assert Tokenizer.load(demo_copy).eos_ids == (4,)
    write(demo_copy, tokenizer_config={"eos_token": None})
    assert Tokenizer.load(demo_copy).eos_ids == ()


@pytest.mark.parametrize("value", ["</s>", True, [1, "2"], -1, 1.5])
def test_an_eos_that_is_no_id_is_refused(value: object, demo_copy: Path) -> None:
    write(demo_copy, generation_config={"eos_token_id": value})
    with pytest.raises(FirstlightError, match="neither a token id nor a list") as error:
        Tokenizer.load(demo_copy)
    assert "generation_config.json  eos_token_id" in error.value.where


def test_a_broken_tokenizer_file_is_named(demo_copy: Path) -> None:
    (demo_copy / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(FirstlightError, match="cannot read the tokenizer") as error:
        Tokenizer.load(demo_copy)
    assert error.value.where.endswith("tokenizer.json")
    assert error.value.why
    assert error.value.fix


def two_files(folder: Path, demo: Path) -> Path:
    """Write the demo's vocabulary in the older format of two files."""
    model = json.loads((demo / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    write(folder, tokenizer_config={"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>"})
    return folder


def test_vocab_and_merges_are_read_through_transformers(tmp_path: Path, demo_folder: Path) -> None:
    tokenizer = Tokenizer.load(two_files(tmp_path, demo_folder))
    ids = tokenizer.encode("the model \U0001f600", add_special_tokens=False)
    assert tokenizer.decode(ids) == "the model \U0001f600"
    assert ids == Tokenizer.load(demo_folder).encode("the model \U0001f600", add_special_tokens=False)
    assert tokenizer.eos_ids == (2,)


def test_a_tokenizer_of_python_code_alone_is_read_through_transformers(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"tokenizer_class": "ByT5Tokenizer", "eos_token": "</s>"})
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode("a\u00e9")
    assert ids == [*(byte + 3 for byte in "a\u00e9".encode()), 1]
    assert tokenizer.decode(ids) == "a\u00e9"
    assert tokenizer.eos_ids == (1,)


def test_a_model_that_transformers_does_not_know_is_no_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, config={"model_type": "unheard_of"}, tokenizer_config={"tokenizer_class": "BertTokenizer"})
    (tmp_path / "vocab.txt").write_text("[UNK]\n[CLS]\n[SEP]\n[PAD]\n[MASK]\na\nb\n")
    logger, records = logging.getLogger("transformers"), list[logging.LogRecord]()
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    monkeypatch.setattr(logger, "handlers", [handler])
    level = logger.level
    assert Tokenizer.load(tmp_path).encode("a b", add_special_tokens=False) == [5, 6]
    assert (records, logger.level) == ([], level)


def test_without_transformers_other_formats_are_refused_by_name(
    tmp_path: Path, demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = two_files(tmp_path, demo_folder)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(FirstlightError, match=r"no tokenizer\.json") as error:
        Tokenizer.load(folder)
    assert error.value.where == str(folder)
    assert "transformers, which is not installed" in error.value.why
    assert "pip install transformers" in error.value.fix


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FirstlightError, match="no tokenizer that can be read") as error:
        Tokenizer.load(tmp_path)
    assert error.value.where == str(tmp_path)
    assert "transformers says" in error.value.why
