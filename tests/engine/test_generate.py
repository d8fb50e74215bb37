"""Generation of one sequence: the tokens of transformers, every way it ends, and memory given back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers

from firstlight.engine.assemble import Declared, build_runner, declare
from firstlight.engine.generate import check_prompt, generate
from firstlight.engine.runner import Runner
from firstlight.engine.sampler import SamplingParams
from firstlight.errors import FirstlightError
from firstlight.quant.policy import PrecisionPolicy

CONTEXT = 192
VOCAB = 512
GREEDY = SamplingParams(temperature=0, max_tokens=16)
# longer than what the index keeps (32), and no multiple of a page, a pool or a chunk
PROMPT = torch.randint(12, VOCAB, (101,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Run on one thread: the layers are too small to share, and waiting for the other thread costs more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def declared() -> Declared:
    """Return the demo's declaration."""
    return declare("demo")


@pytest.fixture(scope="module")
def runner(declared: Declared) -> Runner:
    """Return a runner of the demo in fp32 with memory for two sequences of CONTEXT tokens."""
    plan = declared.plan(PrecisionPolicy(backbone="float32"))
    return build_runner(declared, plan, max_tokens=CONTEXT, num_slots=2)[0]


@pytest.fixture(scope="module")
def expected(declared: Declared) -> list[int]:
    """Return the 16 tokens that transformers continues PROMPT with."""
    load = transformers.Glm5NextForConditionalGeneration.from_pretrained
    model = load(declared.source.folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.tensor([PROMPT])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, eos_token_id=None
    )
    tokens: list[int] = out[0, len(PROMPT) :].tolist()
    return tokens


def run(runner: Runner, prompt: list[int] = PROMPT, params: SamplingParams = GREEDY, **options: object) -> list[int]:
    """Return all new tokens, without end-of-text tokens unless given."""
    settings = {"eos_ids": (), "max_model_len": CONTEXT, **options}
    return list(generate(runner, prompt, params, **settings))  # type: ignore[arg-type]


def num_free(runner: Runner) -> list[int]:
    """Return the free slots and the free pages of every role."""
    return [runner.pool.slots.num_free, *(arena.free.num_free for arena in runner.pool.pages.values())]


@pytest.mark.parametrize("chunk_tokens", [1, 3, 512])
def test_greedy_tokens_are_those_of_transformers_however_the_prompt_is_cut(
    chunk_tokens: int, runner: Runner, expected: list[int]
) -> None:
    assert len(set(expected)) > 8
    assert run(runner, chunk_tokens=chunk_tokens) == expected


def test_a_second_run_in_the_same_memory_gives_the_same_tokens(runner: Runner, expected: list[int]) -> None:
    run(runner, prompt=PROMPT[::-1])
    assert run(runner) == expected


def test_an_end_of_text_token_ends_the_text_and_is_the_last_one(runner: Runner, expected: list[int]) -> None:
    eos, upto = expected[4], expected[: expected.index(expected[4]) + 1]
    assert run(runner, eos_ids=(1, eos)) == upto
    assert run(runner, eos_ids=(), params=SamplingParams(temperature=0, stop_token_ids=(eos,))) == upto


def test_ignoring_end_of_text_leaves_the_stop_tokens_of_the_request(runner: Runner, expected: list[int]) -> None:
    ignore = SamplingParams(temperature=0, ignore_eos=True)
    assert run(runner, params=ignore, eos_ids=(expected[4],)) == expected
    both = SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=(expected[0],))
    assert run(runner, params=both, eos_ids=(expected[4],)) == expected[:1]


@pytest.mark.parametrize("max_tokens", [1, 2, 16])
def test_max_tokens_are_made(max_tokens: int, runner: Runner, expected: list[int]) -> None:
    assert run(runner, params=SamplingParams(temperature=0, max_tokens=max_tokens)) == expected[:max_tokens]


@pytest.mark.parametrize(("room", "max_tokens"), [(1, None), (1, 2), (4, None), (4, 5), (4, 10**9)])
def test_prompt_and_answer_never_exceed_the_context(
    room: int, max_tokens: int | None, runner: Runner, expected: list[int]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    assert run(runner, params=params, max_model_len=len(PROMPT) + room) == expected[:room]


def test_padding_of_the_head_is_never_chosen(runner: Runner, expected: list[int]) -> None:
    size = max(expected)
    assert max(run(runner, vocab_size=size)) < size
    hot = SamplingParams(temperature=100.0, seed=0, max_tokens=20)
    assert max(run(runner, params=hot)) >= 64 > max(run(runner, params=hot, vocab_size=64))


def test_a_seed_gives_the_same_text_and_temperature_another(runner: Runner, expected: list[int]) -> None:
    def text(seed: int) -> list[int]:
        return run(runner, params=SamplingParams(temperature=2.0, seed=seed, max_tokens=6))

    assert text(1) == text(1)
    assert len({tuple(text(1)), tuple(text(2)), tuple(expected[:6])}) == 3


def test_memory_is_given_back_at_the_end(runner: Runner) -> None:
    before = num_free(runner)
    tokens = generate(runner, PROMPT, GREEDY, eos_ids=(), max_model_len=CONTEXT)
    next(tokens)
    assert all(now < then for now, then in zip(num_free(runner), before, strict=True))
    assert len(list(tokens)) == 15
    assert num_free(runner) == before


def test_memory_is_given_back_when_the_reader_leaves(runner: Runner) -> None:
    before = num_free(runner)
    tokens = generate(runner, PROMPT, GREEDY, eos_ids=(), max_model_len=CONTEXT)
    next(tokens)
    tokens.close()  # type: ignore[attr-defined]
    assert num_free(runner) == before


def test_memory_is_given_back_when_the_pool_is_full(runner: Runner, expected: list[int]) -> None:
    before = num_free(runner)
    with pytest.raises(MemoryError):
        run(runner, prompt=PROMPT * 6, chunk_tokens=50, max_model_len=4096)
    assert num_free(runner) == before
    assert run(runner) == expected


def test_two_sequences_in_turns_do_not_touch_each_other(runner: Runner, expected: list[int]) -> None:
    prompts, params = (PROMPT, PROMPT[::-1]), SamplingParams(temperature=0, max_tokens=6)
    alone = [run(runner, prompt=ids, params=params) for ids in prompts]
    both = [generate(runner, ids, params, eos_ids=(), max_model_len=CONTEXT) for ids in prompts]
    assert list(zip(*both, strict=True)) == list(zip(*alone, strict=True))
    assert alone[0] == expected[:6] != alone[1]


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(length: int, runner: Runner) -> None:
    check_prompt([5] * (CONTEXT - 1), VOCAB, CONTEXT)
    with pytest.raises(FirstlightError, match=f"prompt has {length} tokens, the maximum is {CONTEXT - 1}") as error:
        generate(runner, [5] * length, GREEDY, eos_ids=(), max_model_len=CONTEXT)
    assert str(CONTEXT) in error.value.why
    assert "--max-model-len" in error.value.fix


def test_an_empty_prompt_is_refused(runner: Runner) -> None:
    with pytest.raises(FirstlightError, match="prompt is empty"):
        generate(runner, [], GREEDY, eos_ids=(), max_model_len=CONTEXT)


@pytest.mark.parametrize("bad", [VOCAB, -1, 2**40])
def test_the_first_id_outside_the_vocabulary_is_named_with_its_position(bad: int, runner: Runner) -> None:
    check_prompt([0, VOCAB - 1], VOCAB, CONTEXT)
    with pytest.raises(FirstlightError, match=f"token id {bad} at position 2 of the prompt") as error:
        generate(runner, [0, VOCAB - 1, bad, -7], GREEDY, eos_ids=(), max_model_len=CONTEXT)
    assert f"0 to {VOCAB - 1}" in error.value.why


def test_a_stop_token_outside_the_vocabulary_is_refused(runner: Runner) -> None:
    params = SamplingParams(stop_token_ids=(3, VOCAB))
    with pytest.raises(FirstlightError, match=f"token id {VOCAB} at position 1 of stop_token_ids"):
        generate(runner, PROMPT, params, eos_ids=(), max_model_len=CONTEXT)


def test_chunks_without_tokens_are_refused(runner: Runner) -> None:
    with pytest.raises(FirstlightError, match="chunks of 0 tokens"):
        generate(runner, PROMPT, GREEDY, eos_ids=(), max_model_len=CONTEXT, chunk_tokens=0)
