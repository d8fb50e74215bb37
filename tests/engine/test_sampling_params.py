"""Sampling parameters: every wrong value is refused by name, and so is what cannot hold together."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
from typing import Any

import pytest

from firstlight.engine.sampling_params import SamplingParams
from firstlight.errors import FirstlightError

NOT_FINITE = (math.nan, math.inf, -math.inf, 10**400)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("n", value) for value in (0, -1, 1.0, None, True)],
        *[("temperature", value) for value in (-0.1, "1", None, True, *NOT_FINITE)],
        *[("top_p", value) for value in (0, -1, 1.01, None, *NOT_FINITE)],
        *[("top_k", value) for value in (-2, 1.5, None, True)],
        *[("min_p", value) for value in (-0.1, 1.1, *NOT_FINITE)],
        *[("repetition_penalty", value) for value in (0, -1, None, *NOT_FINITE)],
        *[(f"{kind}_penalty", value) for kind in ("presence", "frequency") for value in (2.1, -2.1, None, *NOT_FINITE)],
        *[("logit_bias", value) for value in ([3], {"3": 1}, {3: "1"}, {-1: 1}, {3: 100.5}, {3: math.nan}, {2**63: 1})],
        *[("allowed_token_ids", value) for value in ([], (), 3, (-1,), ("a",), (1.0,), (2**63,))],
        *[("bad_words", value) for value in ("word", [""], [3], 3)],
        *[("bad_words_ids", value) for value in ([3], [[]], [["a"]], [[-1]], 3)],
        *[("stop", value) for value in ("", [""], ["a", ""], [3], 3)],
        *[("stop_token_ids", value) for value in (3, (-1,), ("a",), (True,), (2**63,))],
        *[("seed", value) for value in (-1, 2**63, 0.5, False)],
        *[("min_tokens", value) for value in (-1, None, 1.5, True)],
        # K7: none of the values that stand for no output
        *[("max_tokens", value) for value in (0, -1, 2**63, 1.5, True)],
        *[(name, value) for name in ("logprobs", "prompt_logprobs") for value in (-2, 1.5, True)],
        *[
            (name, value)
            for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize")
            for value in (None, 1, "yes")
        ],
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(FirstlightError, match=f"{name} must be") as error:
        SamplingParams(**{name: value})
    assert error.value.where == name
    assert repr(value)[:200] in error.value.what


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
        ("n", {"n": 2, "temperature": 0}),
        ("stop", {"stop": "x", "detokenize": False}),
        ("allowed_token_ids", {"allowed_token_ids": [1, 2], "bad_words_ids": [[1], [2], [3]]}),
        ("allowed_token_ids", {"allowed_token_ids": [1], "stop_token_ids": [1, 2], "min_tokens": 1}),
    ],
)
def test_what_cannot_hold_together_is_refused(name: str, params: dict[str, Any]) -> None:
    with pytest.raises(FirstlightError, match=name) as error:
        SamplingParams(**params)
    assert error.value.where == name


@pytest.mark.parametrize(
    "params",
    [
        {"min_tokens": 4, "max_tokens": 4},
        {"min_tokens": 99, "max_tokens": None},
        {"n": 2, "temperature": 0.1},
        {"allowed_token_ids": [1, 2], "logit_bias": {3: 5.0}},
        {"allowed_token_ids": [1, 2], "bad_words_ids": [[1], [2, 2]]},
        {"allowed_token_ids": [1], "stop_token_ids": [1]},
        {"stop_token_ids": [3], "logit_bias": {3: -100}},
        {"top_k": -1, "top_p": 1, "min_p": 1, "seed": 2**63 - 1, "logprobs": -1, "prompt_logprobs": 0},
    ],
)
def test_what_is_odd_but_possible_is_accepted(params: dict[str, Any]) -> None:
    made = SamplingParams(**params)
    assert all(
        getattr(made, name) in (value, tuple(value) if isinstance(value, list) else value)
        for name, value in params.items()
        if name != "bad_words_ids"
    )


def test_a_list_of_the_caller_is_not_kept() -> None:
    ids, texts, bias = [1, 2], ["x", "y"], {3: 1.0}
    params = SamplingParams(allowed_token_ids=ids, stop_token_ids=ids, stop=texts, bad_words=texts, logit_bias=bias)
    before = copy.deepcopy(params)
    ids.append(3)
    texts.append("z")
    bias[4] = 1.0
    assert params == before == pickle.loads(pickle.dumps(params))
    assert params.stops == ("x", "y") and SamplingParams(stop="xy").stops == ("xy",)


def test_none_stands_for_an_empty_list() -> None:
    given: dict[str, Any] = dict.fromkeys(("stop", "stop_token_ids", "bad_words", "bad_words_ids"))
    assert SamplingParams(**given) == SamplingParams()


@pytest.mark.parametrize("value", [[-1] * 10_000, [10**5000], 10**5000], ids=["list", "in a list", "integer"])
def test_a_long_wrong_value_is_shortened_in_the_message(value: Any) -> None:
    with pytest.raises(FirstlightError, match="stop_token_ids must be token ids") as error:
        SamplingParams(stop_token_ids=value)
    assert len(error.value.what) < 300


@pytest.mark.parametrize("token", [100, 103, 2**40])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("logit_bias", lambda token: {"logit_bias": {0: 1.0, token: 1.0}}),
        ("allowed_token_ids", lambda token: {"allowed_token_ids": [99, token]}),
        ("stop_token_ids", lambda token: {"stop_token_ids": [99, token]}),
        ("bad_words", lambda token: {"bad_words_ids": [[99], [1, token]]}),
    ],
)
def test_k6_an_id_outside_the_vocabulary_is_named(name: str, make: Any, token: int) -> None:
    params = SamplingParams(**make(token))
    params.validate_ids(token + 1)
    with pytest.raises(FirstlightError, match=f"token id {token} of {name}") as error:
        params.validate_ids(100)
    assert error.value.where == name and "0 to 99" in error.value.why


def test_the_ids_that_end_a_text() -> None:
    assert SamplingParams(stop_token_ids=[3]).ending_ids([1, 2]) == {1, 2, 3}
    assert SamplingParams(stop_token_ids=[3], ignore_eos=True).ending_ids([1, 2]) == {3}


def test_parameters_pull_no_torch() -> None:
    code = "import sys, firstlight.engine.sampling_params; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
