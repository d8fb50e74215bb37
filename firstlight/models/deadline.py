"""Ends code of others that does not come to an end by itself."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class NoEnd(BaseException):
    """Raised inside code that ran too long; no `except Exception` in it can swallow this."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise NoEnd in the calling thread if the block is not left in time.

    Python code only: a call into C is waited for.
    """
    thread, lock, left = threading.get_ident(), threading.Lock(), False

    def strike() -> None:
        with lock:
            if not left:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(NoEnd))

    timer = threading.Timer(seconds, strike)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        # the lock: once left, nothing strikes any more
        with lock:
            left = True
        timer.cancel()
