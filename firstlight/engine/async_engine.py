"""AsyncEngine: one thread steps an Engine, any number of coroutines read from it.

The thread owns the Engine. Everybody else puts commands in a queue, which the thread empties between two steps and
sleeps on when there is no work. What a step brings goes to each reader's event loop, one hand-over per loop and step.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TypeVar

from firstlight.engine.core import Engine, Update
from firstlight.engine.outputs import RequestOutput
from firstlight.engine.prompts import Prompt, read_params, read_prompt
from firstlight.engine.sampling_params import SamplingParams

T = TypeVar("T")
# run with None between two steps, or, once the engine is dead, with the reason why it will never run
Command = Callable[[BaseException | None], None]
# longer texts are turned into ids beside the loop, on which other readers wait
LONG_TEXT = 4096


class EngineDeadError(RuntimeError):
    """The engine has failed or was shut down: nothing runs on it any more. The cause is the exception's own."""


@dataclass(slots=True, eq=False)
class Reader:
    """One consumer. The loop's side: event, output, error. The engine's side: request_id, is_behind.

    wants: True from the moment the consumer has taken what it was given; written by the loop, read by the thread.
    """

    loop: asyncio.AbstractEventLoop
    event: asyncio.Event = field(default_factory=asyncio.Event)
    output: RequestOutput | None = None
    error: BaseException | None = None
    wants: bool = True
    request_id: str = ""
    is_behind: bool = False

    def give(self, output: RequestOutput | None, error: BaseException | None = None) -> None:
        """Take in the newest output, in place of one that was not read. Called in the loop."""
        self.output, self.error = output or self.output, error
        self.event.set()

    async def next(self) -> RequestOutput:
        """Return the newest output that was not read yet. Raises: EngineDeadError."""
        await self.event.wait()
        output, self.output = self.output, None
        if output is None:
            assert self.error is not None, "a reader is woken for an output or an error"
            raise EngineDeadError(str(self.error)) from self.error
        if self.error is None:
            self.event.clear()
        self.wants = True
        return output


# to whom, and what: an output, or an error
Given = tuple[Reader, RequestOutput | None, BaseException | None]


class AsyncEngine:
    """An Engine that coroutines of any number of event loops share. The Engine is its own from now on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._readers: dict[str, Reader] = {}
        self._lock = threading.Lock()
        self._stopping = self._ended = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="firstlight-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """True until it fails or is shut down."""
        return not self._ended

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the output of a prompt as it grows; the last one is finished. Arguments as those of Engine.add.

        A slow reader gets the newest output and misses those between. Cancelling the reader, or closing the
        iterator, ends the request and frees its memory.
        Raises, at the first iteration: FirstlightError or ValueError for a request that cannot be run; EngineDeadError.
        """
        reader = Reader(asyncio.get_running_loop())
        tokenizer = self._engine.tokenizer
        if isinstance(prompt, str) and len(prompt) > LONG_TEXT:
            text, ids = await asyncio.to_thread(read_prompt, prompt, tokenizer)
        else:
            text, ids = read_prompt(prompt, tokenizer)
        ready = read_params(params or SamplingParams(), tokenizer)

        def submit() -> None:
            reader.request_id = self._engine.add(
                ids, ready, prompt=text, request_id=request_id, priority=priority, deadline_s=deadline_s, salt=salt
            )
            self._readers[reader.request_id] = reader

        try:
            await self.call(submit)
            finished = False
            while not finished:
                output = await reader.next()
                finished = output.finished
                yield output
        finally:
            # after a submission that was cancelled half-way too: commands run in order
            with contextlib.suppress(EngineDeadError):
                self._put(lambda dead: self._forget(reader))

    async def abort(self, request_id: str) -> None:
        """End a request; its reader gets a last output with finish_reason "abort". Unknown ids are ignored."""
        await self.call(lambda: self._engine.abort(request_id))

    async def call(self, function: Callable[[], T]) -> T:
        """Return what a function returns that is run in the engine's thread between two steps: the only place
        from which the Engine may be looked at. Raises: what it raises; EngineDeadError."""
        future: Future[T] = Future()

        def command(dead: BaseException | None) -> None:
            if not future.set_running_or_notify_cancel():
                return
            if dead is not None:
                future.set_exception(dead)
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._put(command)
        return await asyncio.wrap_future(future)

    def shutdown(self) -> None:
        """End every request, whose readers get a last output with finish_reason "abort", and join the thread."""
        with contextlib.suppress(EngineDeadError):
            self._put(self._stop)
        self._thread.join()

    def _put(self, command: Command) -> None:
        with self._lock:
            if self._ended:
                raise self._dead()
            self._commands.put(command)

    def _dead(self) -> EngineDeadError:
        failure = self._failure
        error = EngineDeadError(f"the engine has failed: {failure!r}" if failure else "the engine was shut down")
        error.__cause__ = failure
        return error

    def _stop(self, dead: BaseException | None) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._run_commands()
                if self._engine.has_work:
                    self._deliver(self._engine.step())
            for request_id in list(self._readers):
                self._engine.abort(request_id)
            self._deliver(self._engine.step())
        except BaseException as error:
            self._failure = error
        self._end()

    def _run_commands(self) -> None:
        if not self._engine.has_work:
            self._commands.get()(None)
        with contextlib.suppress(Empty):
            while True:
                self._commands.get_nowait()(None)

    def _end(self) -> None:
        """Tell everybody who waits, now or later, and let go of the engine."""
        with self._lock:
            self._ended = True
        readers, self._readers = self._readers, {}
        error = self._dead()
        self._hand_over([(reader, None, error) for reader in readers.values()])
        with contextlib.suppress(Empty):
            while True:
                self._commands.get_nowait()(error)
        try:
            self._engine.close()
        except Exception as second:
            # a broken engine may not close cleanly; the first failure is the one to tell
            self._failure = self._failure or second

    def _deliver(self, news: list[Update]) -> None:
        """Give each reader that wants it the newest output of its request; a finished one always."""
        for update in news:
            if update.request_id in self._readers:
                self._readers[update.request_id].is_behind = True
        given: list[Given] = []
        for request_id, reader in list(self._readers.items()):
            if not reader.is_behind:
                continue
            finished = self._engine.groups[request_id].is_finished
            if finished:
                del self._readers[request_id]
            elif not reader.wants:
                continue
            reader.wants = reader.is_behind = False
            read = self._engine.pop if finished else self._engine.output
            given.append((reader, read(request_id), None))
        self._hand_over(given)

    def _hand_over(self, given: list[Given]) -> None:
        for loop in {reader.loop for reader, _, _ in given}:
            own = [entry for entry in given if entry[0].loop is loop]
            try:
                loop.call_soon_threadsafe(_give_all, own)
            except RuntimeError:
                # the loop is closed, and its readers with it
                for reader, _, _ in own:
                    self._forget(reader)

    def _forget(self, reader: Reader) -> None:
        if self._readers.get(reader.request_id) is reader:
            del self._readers[reader.request_id]
            self._engine.pop(reader.request_id)


def _give_all(given: list[Given]) -> None:
    for reader, output, error in given:
        reader.give(output, error)
