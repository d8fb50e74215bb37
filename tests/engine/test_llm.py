"""LLM: the offline interface, and what it does with bad input."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from firstlight import LLM, EngineArgs, SamplingParams
from firstlight.engine.batch import BatchPlan, StepResult
from firstlight.engine.llm import progress_bar
from firstlight.errors import FirstlightError

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
CONTEXT = 256
TEXT = "At first light"
# longer than what the index keeps (32), and no multiple of a page, a pool or a chunk
PROMPT = torch.randint(12, 512, (101,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Return the demo in fp32."""
    made = LLM("demo", dtype="float32", max_model_len=CONTEXT, max_num_seqs=8)
    yield made
    assert not made.engine.groups and not made.engine.owner
    made.close()


def ids_of(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> list[int]:
    """Return the new tokens of one prompt."""
    (output,) = llm.generate([prompt], params)
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("budget", [1, 3, 512])
def test_greedy_tokens_are_those_of_transformers_however_the_prompt_is_cut(
    budget: int, llm: LLM, expected: list[int]
) -> None:
    assert len(set(expected)) > 8
    cut = LLM("demo", dtype="float32", max_num_seqs=1, max_num_batched_tokens=budget)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    assert ids_of(cut, PROMPT, params) == expected
    cut.close()


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[int]:
    """Return the 16 tokens that transformers continues PROMPT with."""
    import transformers

    load = transformers.Glm5NextForConditionalGeneration.from_pretrained
    model = load(llm.folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.tensor([PROMPT])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, eos_token_id=None
    )
    tokens: list[int] = out[0, len(PROMPT) :].tolist()
    return tokens


def test_every_form_of_a_prompt_means_the_same(llm: LLM) -> None:
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(TEXT)
    forms: list[Any] = [TEXT, [TEXT], ids, [ids], tuple(ids), {"prompt": TEXT}, {"prompt_token_ids": ids}]
    found = [llm.generate(form, GREEDY) for form in forms]
    assert all(len(outputs) == 1 and outputs[0].finished for outputs in found)
    assert len({outputs[0].outputs[0].text for outputs in found}) == 1
    assert [outputs[0].prompt for outputs in found] == [TEXT, TEXT, None, None, None, TEXT, None]
    assert all(outputs[0].prompt_token_ids == tuple(ids) for outputs in found)
    assert llm.generate([], GREEDY) == []


def test_outputs_keep_the_order_of_their_prompts(llm: LLM) -> None:
    prompts = [PROMPT[start : start + length] for start, length in ((0, 90), (5, 3), (40, 30), (9, 61))]
    counts = [2, 20, 9, 1]
    asked = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in counts]
    found = llm.generate(prompts, asked)
    assert [list(output.prompt_token_ids) for output in found] == prompts
    assert [len(output.outputs[0].token_ids) for output in found] == counts
    alone = [ids_of(llm, one, params) for one, params in zip(prompts, asked, strict=True)]
    assert [list(output.outputs[0].token_ids) for output in found] == alone


def test_default_parameters_are_those_of_vllm(llm: LLM) -> None:
    (output,) = llm.generate(TEXT)
    assert 1 <= len(output.outputs[0].token_ids) <= 16


def test_n_continuations_come_in_one_output_and_differ(llm: LLM) -> None:
    (output,) = llm.generate(TEXT, SamplingParams(n=3, seed=5, max_tokens=8, temperature=2.0, ignore_eos=True))
    assert [one.index for one in output.outputs] == [0, 1, 2]
    assert len({one.token_ids for one in output.outputs}) == 3


def test_the_engine_seed_decides_unseeded_requests() -> None:
    hot = SamplingParams(temperature=2.0, max_tokens=8, ignore_eos=True)
    texts = []
    for seed in (1, 1, 2):
        made = LLM("demo", dtype="float32", seed=seed)
        texts.append(ids_of(made, TEXT, hot))
        made.close()
    assert texts[0] == texts[1] != texts[2]


def test_chat_renders_the_template_without_a_second_set_of_special_tokens(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(messages, GREEDY)
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None and one.prompt is not None
    assert "hello" in one.prompt != "hello"
    assert list(one.prompt_token_ids) == tokenizer.encode(one.prompt, add_special_tokens=False)
    two = llm.chat([messages, [{"role": "user", "content": "goodbye"}]], GREEDY)
    assert two[0].outputs == one.outputs
    assert "goodbye" in str(two[1].prompt)


def test_stream_grows_to_what_generate_gives(llm: LLM) -> None:
    given = list(llm.stream(TEXT, GREEDY))
    texts = [output.outputs[0].text for output in given]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert [output.finished for output in given] == [False] * (len(given) - 1) + [True]
    assert given[-1].outputs == llm.generate(TEXT, GREEDY)[0].outputs
    assert len(given) >= 6


def test_closing_a_stream_frees_its_memory(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.groups
    while llm.engine.has_work:
        llm.engine.step()
    llm.engine.runner.pool.check_ledger([])


def test_a_second_request_reports_what_it_took_from_the_prefix_cache(llm: LLM) -> None:
    prompt = PROMPT[::-1]
    first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 64)
    assert first.outputs == second.outputs


def test_a_model_without_a_tokenizer_takes_and_gives_ids(tiny: Callable[[str], Path]) -> None:
    made = LLM(str(tiny("llama")), max_model_len=64)
    (output,) = made.generate([5, 6], GREEDY)
    assert output.outputs[0].text == ""
    assert made.shown(output.outputs[0]).split() == [str(token) for token in output.outputs[0].token_ids]
    for prompt, params, said in (
        (TEXT, GREEDY, "a text prompt needs a tokenizer"),
        ([5], SamplingParams(bad_words=["x"]), "bad_words needs a tokenizer"),
        ([5], SamplingParams(stop="x"), "stop needs text"),
    ):
        with pytest.raises(FirstlightError, match=said):
            made.generate(prompt, params)
    with pytest.raises(FirstlightError, match=r"no chat template|needs a tokenizer"):
        made.chat([{"role": "user", "content": "hello"}])
    assert not made.engine.has_work
    made.close()


def test_padding_of_the_head_is_never_chosen(llm: LLM) -> None:
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None
    assert llm.engine.runner.vocab_size == min(tokenizer.vocab_size, llm.engine.runner.model.arch.vocab_size)


def test_end_of_text_and_stop_tokens_end_a_text(llm: LLM, expected: list[int]) -> None:
    stop = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, stop_token_ids=[expected[4]])
    (output,) = llm.generate([PROMPT], stop)
    assert list(output.outputs[0].token_ids) == expected[: expected.index(expected[4]) + 1]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", expected[4])


def test_max_tokens_none_fills_the_context(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    assert len(ids_of(llm, PROMPT * 2 + PROMPT[:40], params)) == CONTEXT - 242
    assert len(ids_of(llm, (PROMPT * 3)[: CONTEXT - 1], params)) == 1


BAD: dict[str, tuple[Any, Callable[[], SamplingParams | list[SamplingParams]], str]] = {
    "max_tokens 0": ([5], lambda: SamplingParams(max_tokens=0), "max_tokens must be an integer >= 1"),
    "max_tokens negative": ([5], lambda: SamplingParams(max_tokens=-4), "max_tokens must be an integer >= 1"),
    "empty text": ("", lambda: GREEDY, "prompt is empty"),
    "no ids": ([[]], lambda: GREEDY, "prompt is empty"),
    "prompt too long": (
        [5] * CONTEXT,
        lambda: GREEDY,
        f"the prompt has {CONTEXT} tokens, the maximum is {CONTEXT - 1}",
    ),
    "beyond the limit": ([5], lambda: SamplingParams(max_tokens=CONTEXT), f"max_tokens ask for 257 tokens.* {CONTEXT}"),
    "id too large": ([5, 512], lambda: GREEDY, "token id 512 at position 1 of the prompt.*outside"),
    "id negative": ([5, -1], lambda: GREEDY, "token id -1 at position 1 of the prompt.*outside"),
    "id is a bool": ([[5, True]], lambda: GREEDY, "token id True at position 1"),
    "id is no number": ([[5, 1.5]], lambda: GREEDY, r"token id 1.5 at position 1"),
    "temperature NaN": ([5], lambda: SamplingParams(temperature=float("nan")), "temperature must be a number >= 0"),
    "temperature infinite": ([5], lambda: SamplingParams(temperature=float("inf")), "temperature must be"),
    "top_p 0": ([5], lambda: SamplingParams(top_p=0.0), r"top_p must be a number in \(0, 1\]"),
    "top_k": ([5], lambda: SamplingParams(top_k=-2), "top_k must be an integer >= -1"),
    "min_p": ([5], lambda: SamplingParams(min_p=1.1), r"min_p must be a number in \[0, 1\]"),
    "n 0": ([5], lambda: SamplingParams(n=0), "n must be an integer in"),
    "stops contradict": ([5], lambda: SamplingParams(min_tokens=9, max_tokens=3), "min_tokens must be at most max_tok"),
    "stop without text": ([5], lambda: SamplingParams(stop="a", detokenize=False), "stop needs text"),
    "stop id": ([5], lambda: SamplingParams(stop_token_ids=[512]), "token id 512 of stop_token_ids"),
    "bias id": ([5], lambda: SamplingParams(logit_bias={9999: 1.0}), "token id 9999 of logit_bias"),
    "allowed id": ([5], lambda: SamplingParams(allowed_token_ids=[512]), "token id 512 of allowed_token_ids"),
    "no prompt at all": (None, lambda: GREEDY, "a prompt is a text, token ids"),
    "a number": ([[5], 7], lambda: GREEDY, "a prompt is a text, token ids"),
    "mapping of neither": ({"text": "a"}, lambda: GREEDY, "prompt_token_ids"),
    "params for others": ([[5], [6]], lambda: [GREEDY], "1 sampling_params for 2 prompts"),
    "the second of two": ([[5], [9999]], lambda: GREEDY, "token id 9999"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_by_name_and_disturbs_nothing_else(name: str, llm: LLM) -> None:
    prompt, params, said = BAD[name]
    expected = ids_of(llm, PROMPT[:50])
    neighbour = llm.engine.add(PROMPT[:50], GREEDY)
    llm.engine.step()
    with pytest.raises(ValueError, match=said):
        llm.generate(prompt, params())
    assert list(llm.engine.groups) == [neighbour]
    while llm.engine.has_work:
        llm.engine.step()
    assert list(llm.engine.pop(neighbour).outputs[0].token_ids) == expected


def test_what_can_never_fit_the_arenas_is_refused_with_both_numbers() -> None:
    made = LLM("demo", dtype="float32", max_num_seqs=2, engine_args=EngineArgs(cache_tokens=128, state_slots=4))
    with pytest.raises(ValueError, match=r"need memory for 199 tokens; the arenas hold 128"):
        made.generate([5] * 100, SamplingParams(max_tokens=100))
    assert not made.engine.has_work
    assert len(ids_of(made, [5] * 100)) == 6
    made.close()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 3),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", float("nan")),
        ("max_model_len", 10**9),
        ("max_model_len", True),
    ],
)
def test_limits_out_of_range_are_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(FirstlightError, match=option):
        LLM("demo", **{option: value})


def test_a_failing_operator_fails_its_step_with_the_cause_and_the_rest_goes_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = llm.engine.runner.execute

    def broken(plan: BatchPlan) -> StepResult:
        if any(row.request.ids[:2] == [7, 7] for row in plan.rows):
            raise ArithmeticError("operator broke")
        return execute(plan)

    monkeypatch.setattr(llm.engine.runner, "execute", broken)
    (failed,) = llm.generate([7, 7, 7], GREEDY)
    assert (failed.outputs[0].finish_reason, failed.error) == ("error", "ArithmeticError: operator broke")
    assert len(ids_of(llm, PROMPT[:9])) == 6


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


@pytest.mark.parametrize(("asked", "shown"), [(True, True), (False, False)])
def test_a_bar_is_shown_on_a_terminal_unless_it_is_not_wanted(
    asked: bool, shown: bool, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    llm.generate([[5], [6]], GREEDY, use_tqdm=asked)
    assert ("requests" in stream.getvalue()) is shown


def test_no_bar_without_a_terminal(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([5], GREEDY)
    with progress_bar(3, shown=False) as advance:
        advance(1)
    assert capsys.readouterr() == ("", "")


def test_max_tokens_none_fills_the_arenas_where_they_are_smaller_than_the_context() -> None:
    small = LLM("demo", dtype="float32", engine_args=EngineArgs(cache_tokens=64))
    (output,) = small.generate([[5, 6, 7]], SamplingParams(max_tokens=None, temperature=0, ignore_eos=True))
    small.close()
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 64 - 3 + 1


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda llm: llm.stream(None), "a prompt is"),
        (lambda llm: llm.stream(["a", "b"]), "token id a at position 0"),
        (lambda llm: llm.stream("hi", [GREEDY]), "sampling_params"),
        (lambda llm: llm.generate("hi", {"max_tokens": 3}), "sampling_params"),
        (lambda llm: llm.generate("\ud800"), "Unicode"),
        (lambda llm: llm.generate(b"hi"), "a prompt is"),
        (lambda llm: llm.generate({"prompt": "hi", "x": 1}), "'x'"),
        (lambda llm: llm.chat("hello"), "list of messages"),
        (lambda llm: llm.chat([]), "list of messages"),
        (lambda llm: llm.engine.add([5], GREEDY, salt=5), "salt"),
        (lambda llm: llm.engine.add([5], GREEDY, salt="\ud800"), "salt"),
        (lambda llm: llm.engine.add([5], GREEDY, priority="a"), "priority"),
        (lambda llm: llm.engine.add([5], GREEDY, deadline_s=float("nan")), "deadline_s"),
        (lambda llm: llm.engine.add([5], GREEDY, deadline_s="5"), "deadline_s"),
        (lambda llm: llm.generate([[5]], SamplingParams(max_tokens=None, min_tokens=CONTEXT)), "min_tokens"),
        (lambda llm: SamplingParams(repetition_penalty=1e-300), "repetition_penalty"),
        (lambda llm: SamplingParams(n=10**9), "n must be"),
    ],
)
def test_what_nobody_can_mean_is_a_value_error_with_its_name(call: Callable[[LLM], Any], said: str, llm: LLM) -> None:
    with pytest.raises(ValueError, match=said):
        call(llm)
    assert not llm.engine.has_work


def test_allowed_tokens_that_are_all_endings_contradict_min_tokens(llm: LLM) -> None:
    assert llm.engine.tokenizer is not None
    ending = llm.engine.tokenizer.eos_ids[0]
    with pytest.raises(ValueError, match="allowed_token_ids"):
        llm.generate("hi", SamplingParams(allowed_token_ids=[ending], min_tokens=2))


def test_white_space_can_be_a_bad_word(llm: LLM) -> None:
    assert llm.engine.tokenizer is not None
    newline = llm.engine.tokenizer.encode("\n", add_special_tokens=False)
    (output,) = llm.generate("hi", SamplingParams(bad_words=["\n"], max_tokens=30, temperature=5.0, seed=1))
    assert output.outputs[0].finish_reason in ("length", "stop")
    assert len(newline) != 1 or newline[0] not in output.outputs[0].token_ids


def test_a_stream_that_nobody_starts_runs_nothing(llm: LLM) -> None:
    stream = llm.stream("hi", GREEDY)
    assert not llm.engine.has_work
    del stream


def test_engine_args_count_where_nothing_else_is_given() -> None:
    made = LLM("demo", engine_args=EngineArgs(max_num_seqs=4, max_model_len=128), max_model_len=64)
    assert made.engine.config.scheduler.max_num_seqs == 4
    assert made.engine.config.max_model_len == 64
    made.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_closed_engine_refuses(overlap: bool) -> None:
    made = LLM("demo", engine_args=EngineArgs(overlap=overlap))
    made.close()
    with pytest.raises(FirstlightError, match="closed"):
        made.generate("hi")


@pytest.mark.parametrize("length", [63, 64, 65, 128])
def test_equal_prompts_of_any_length_share_a_step(length: int) -> None:
    made = LLM("demo", max_model_len=512)
    made.generate([PROMPT[:length] if length < 101 else (PROMPT * 2)[:length]] * 32, GREEDY)
    # a step or two for the first one, then all together
    assert made.engine.num_steps <= 6 + 4
    made.close()
