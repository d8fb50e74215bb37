"""AsyncEngine: many coroutines on one engine, and nothing lost when one of them, or the engine, goes away."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from tagged_engine import VOCAB, continuation, tagged_engine

from firstlight.engine import async_engine
from firstlight.engine.async_engine import AsyncEngine, EngineDeadError
from firstlight.engine.batch import BatchPlan
from firstlight.engine.core import Engine
from firstlight.engine.llm import LLM
from firstlight.engine.outputs import RequestOutput
from firstlight.engine.sampling_params import SamplingParams


def params(count: int = 8, **more: Any) -> SamplingParams:
    """Return greedy parameters for so many tokens."""
    return SamplingParams(temperature=0.0, max_tokens=count, detokenize=False, **more)


def prompt(number: int, length: int = 20) -> list[int]:
    """Return the prompt of a number."""
    return [(number * 7 + index * 3) % VOCAB for index in range(length)]


@asynccontextmanager
async def running(engine: Engine | None = None) -> AsyncIterator[AsyncEngine]:
    """Give an AsyncEngine that is shut down at the end."""
    made = AsyncEngine(engine or tagged_engine())
    try:
        yield made
    finally:
        made.shutdown()


async def outputs(engine: AsyncEngine, ids: list[int], asked: SamplingParams, **more: Any) -> list[RequestOutput]:
    """Return everything a reader is given."""
    return [output async for output in engine.generate(ids, asked, **more)]


def in_time(test: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine; a hang is a failure."""

    async def limited() -> None:
        await asyncio.wait_for(test, 30)

    asyncio.run(limited())


async def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    while not holds():
        await asyncio.sleep(0.001)


async def is_free(engine: AsyncEngine) -> bool:
    """Return whether no memory is held; the ledger is checked on the way."""

    def look() -> bool:
        own = engine._engine
        own.runner.pool.check_ledger(own.live_sequences(), own.pinned_slots())
        blocks = own.runner.pool.blocks
        return not any(pool.num_held for pool in (blocks.slots, *(role.pool for role in blocks.roles.values())))

    return await engine.call(look)


async def freed(engine: AsyncEngine) -> None:
    """Wait until no memory is held: a step in flight holds its own a little longer."""
    while not await is_free(engine):
        await asyncio.sleep(0.001)


def slow(plan: BatchPlan) -> None:
    """Take time for a step."""
    time.sleep(0.002)


def test_fifty_readers_get_the_tokens_they_would_get_alone() -> None:
    async def test() -> None:
        async with running() as engine:
            found = await asyncio.gather(*(outputs(engine, prompt(i, 5 + i), params(3 + i % 9)) for i in range(50)))
            for number, given in enumerate(found):
                final = given[-1]
                assert final.finished and not any(output.finished for output in given[:-1])
                expected = continuation(prompt(number, 5 + number), 3 + number % 9)
                assert list(final.outputs[0].token_ids) == expected
            await freed(engine)

    in_time(test())


def test_outputs_are_cumulative_and_only_grow() -> None:
    async def test() -> None:
        async with running(tagged_engine(before=slow)) as engine:
            given = await outputs(engine, prompt(1), params(12), request_id="mine")
            assert {output.request_id for output in given} == {"mine"}
            lengths = [len(output.outputs[0].token_ids) for output in given]
            assert lengths == sorted(set(lengths)) and lengths[-1] == 12 and len(lengths) > 3

    in_time(test())


def test_a_slow_reader_gets_the_newest_output_and_never_misses_the_last() -> None:
    async def test() -> None:
        async with running() as engine:
            given = []
            async for output in engine.generate(prompt(1), params(40)):
                given.append(output)
                # the loop is free, so that other readers could go on
                await until(lambda: not engine._engine.has_work)
            assert len(given) <= 3
            assert given[-1].finished
            assert list(given[-1].outputs[0].token_ids) == continuation(prompt(1), 40)

    in_time(test())


@pytest.mark.parametrize("way", ["cancel", "close"])
def test_a_reader_that_leaves_frees_its_memory_and_disturbs_nobody(way: str) -> None:
    async def test() -> None:
        async with running(tagged_engine(before=slow)) as engine:
            neighbour = asyncio.create_task(outputs(engine, prompt(2), params(30)))
            stream = engine.generate(prompt(1), params(1000))
            await anext(stream)
            if way == "close":
                await stream.aclose()
            else:
                waiting = asyncio.create_task(outputs(engine, prompt(3), params(1000)))
                await asyncio.sleep(0.02)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                await stream.aclose()
            assert list((await neighbour)[-1].outputs[0].token_ids) == continuation(prompt(2), 30)
            await freed(engine)
            assert await engine.call(lambda: (len(engine._engine.groups), len(engine._engine.owner))) == (0, 0)

    in_time(test())


def test_readers_cancelled_at_any_moment_leave_nothing_behind() -> None:
    async def test() -> None:
        async with running(tagged_engine(before=slow)) as engine:
            for delay in range(12):
                task = asyncio.create_task(outputs(engine, prompt(delay, 100), params(50)))
                await asyncio.sleep(delay * 0.001)
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await freed(engine)
            assert await engine.call(lambda: len(engine._engine.groups)) == 0
            final = (await outputs(engine, prompt(1), params()))[-1]
            assert list(final.outputs[0].token_ids) == continuation(prompt(1), 8)

    in_time(test())


def test_abort_ends_a_request_with_a_last_output() -> None:
    async def test() -> None:
        async with running(tagged_engine(before=slow)) as engine:
            task = asyncio.create_task(outputs(engine, prompt(1), params(1000), request_id="long"))
            await until(lambda: bool(engine._readers))
            await engine.abort("long")
            final = (await task)[-1]
            assert final.finished and final.outputs[0].finish_reason == "abort"
            await engine.abort("long")
            await freed(engine)

    in_time(test())


def test_a_deadline_ends_a_request() -> None:
    async def test() -> None:
        async with running(tagged_engine(before=slow)) as engine:
            final = (await outputs(engine, prompt(1), params(1000), deadline_s=0.05))[-1]
            assert final.finished and len(final.outputs[0].token_ids) < 1000

    in_time(test())


@pytest.mark.parametrize(
    ("ids", "asked", "said"),
    [
        ([], params(), "prompt is empty"),
        ([VOCAB], params(), f"token id {VOCAB}"),
        ([1] * 5000, params(), "the prompt has 5000 tokens"),
        ([1], params(5000), "max_tokens"),
        ([1], params(2000), "the arenas hold"),
        ("text", params(), "needs a tokenizer"),
    ],
)
def test_what_cannot_run_is_refused_to_its_caller_alone(ids: Any, asked: SamplingParams, said: str) -> None:
    async def test() -> None:
        async with running() as engine:
            neighbour = asyncio.create_task(outputs(engine, prompt(2), params(30)))
            with pytest.raises(ValueError, match=said):
                await outputs(engine, ids, asked)
            assert list((await neighbour)[-1].outputs[0].token_ids) == continuation(prompt(2), 30)
            await freed(engine)

    in_time(test())


def test_a_request_id_is_unique_among_live_requests_only() -> None:
    async def test() -> None:
        async with running(tagged_engine(before=slow)) as engine:
            first = engine.generate(prompt(1), params(), request_id="same")
            await anext(first)
            with pytest.raises(ValueError, match="'same' is in use"):
                await outputs(engine, prompt(2), params(), request_id="same")
            assert [output async for output in first][-1].finished
            assert (await outputs(engine, prompt(2), params(), request_id="same"))[-1].finished

    in_time(test())


def test_a_failing_step_fails_its_requests_with_the_cause_and_the_engine_serves_on() -> None:
    def before(plan: BatchPlan) -> None:
        if any(row.request.ids[0] == 49 for row in plan.rows):
            raise ArithmeticError("operator broke")

    async def test() -> None:
        async with running(tagged_engine(before=before)) as engine:
            final = (await outputs(engine, [49, 1, 2], params()))[-1]
            assert final.outputs[0].finish_reason == "error"
            assert final.error == "ArithmeticError: operator broke"
            assert engine.is_alive
            assert list((await outputs(engine, prompt(1), params()))[-1].outputs[0].token_ids) == continuation(
                prompt(1), 8
            )

    in_time(test())


def test_a_failure_of_the_engine_reaches_everybody_who_waits_and_everybody_later() -> None:
    async def test() -> None:
        own = tagged_engine(before=slow)
        async with running(own) as engine:
            tasks = [asyncio.create_task(outputs(engine, prompt(i), params(1000))) for i in range(4)]
            await until(lambda: len(engine._readers) == 4)
            own.scheduler.schedule = lambda: 1 // 0  # type: ignore[assignment]
            for error in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(error, EngineDeadError)
                assert isinstance(error.__cause__, EngineDeadError | ZeroDivisionError)
                assert "ZeroDivisionError" in str(error)
            assert not engine.is_alive
            with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
                await outputs(engine, prompt(1), params())
            with pytest.raises(EngineDeadError):
                await engine.abort("any")

    in_time(test())


def test_an_output_given_before_a_failure_is_not_lost_and_the_failure_comes_next() -> None:
    async def test() -> None:
        reader = async_engine.Reader(asyncio.get_running_loop())
        output = RequestOutput(request_id="a", prompt=None, prompt_token_ids=(1,), outputs=(), finished=False)
        reader.give(output)
        reader.give(None, EngineDeadError("gone"))
        assert await reader.next() is output
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="gone"):
                await reader.next()

    in_time(test())


def test_shutdown_ends_what_runs_and_refuses_what_comes_later() -> None:
    async def test() -> None:
        engine = AsyncEngine(tagged_engine(before=slow))
        tasks = [asyncio.create_task(outputs(engine, prompt(i), params(1000))) for i in range(12)]
        await until(lambda: len(engine._readers) == 12)
        await asyncio.to_thread(engine.shutdown)
        assert [(await task)[-1].outputs[0].finish_reason for task in tasks] == ["abort"] * 12
        with pytest.raises(EngineDeadError, match="was shut down"):
            await outputs(engine, prompt(1), params())
        engine.shutdown()
        assert not any(thread.name.startswith("firstlight-engine") for thread in threading.enumerate())

    in_time(test())


def test_an_idle_engine_takes_no_steps() -> None:
    async def test() -> None:
        own = tagged_engine()
        steps = 0
        step = own.step

        def counted() -> Any:
            nonlocal steps
            steps += 1
            return step()

        own.step = counted  # type: ignore[method-assign]
        async with running(own) as engine:
            await outputs(engine, prompt(1), params())
            await freed(engine)
            before = steps
            await asyncio.sleep(0.05)
            assert steps == before

    in_time(test())


def test_readers_of_two_event_loops_share_an_engine() -> None:
    engine = AsyncEngine(tagged_engine())
    found: dict[int, list[RequestOutput]] = {}

    def reader(number: int) -> None:
        found[number] = asyncio.run(outputs(engine, prompt(number), params(20)))

    threads = [threading.Thread(target=reader, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    engine.shutdown()
    for number in range(3):
        assert list(found[number][-1].outputs[0].token_ids) == continuation(prompt(number), 20)


def test_readers_of_a_loop_that_was_closed_are_forgotten() -> None:
    engine = AsyncEngine(tagged_engine(before=slow))
    loop = asyncio.new_event_loop()
    stream = engine.generate(prompt(1), params(1000))
    loop.run_until_complete(anext(stream))
    loop.close()

    async def test() -> None:
        await until(lambda: not engine._readers)
        await freed(engine)
        assert (await outputs(engine, prompt(2), params()))[-1].finished

    in_time(test())
    engine.shutdown()


@pytest.mark.parametrize("text", ["At first light", "At first light " * 400])
def test_texts_give_what_the_offline_interface_gives(text: str) -> None:
    asked = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, bad_words=["the"])
    offline, shared = LLM("demo", dtype="float32"), LLM("demo", dtype="float32")
    (expected,) = offline.generate(text, asked)
    offline.close()

    async def test() -> None:
        async with running(shared.engine) as engine:
            final = [output async for output in engine.generate(text, asked)][-1]
            assert (final.prompt, final.outputs) == (expected.prompt, expected.outputs)

    in_time(test())
