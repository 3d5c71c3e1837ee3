"""Whose processor time it was, where several contestants share a process and have threads and services of their own.

Receives what a contestant does when it attaches and hands on its `Background`: the threads and processes that appeared
meanwhile, and what they have used. Linux only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

Made = TypeVar("Made")


class Background:
    """Threads of this process and other processes; one that has ended keeps what it had used when last seen."""

    def __init__(self, threads: set[int], processes: set[psutil.Process]) -> None:
        self._threads = dict.fromkeys(threads, 0.0)
        self._processes = dict.fromkeys(processes, 0.0)
        self._billed = self.threads_seconds() + self._processes_seconds()

    def threads_seconds(self) -> float:
        """What its threads have used so far, which is part of this process' time."""
        for thread in self._threads:
            try:
                self._threads[thread] = time.clock_gettime(_clock_of(thread))
            except OSError:
                continue
        return sum(self._threads.values())

    def bill(self) -> float:
        """What all have used since the last bill; of processes in units of 10 ms."""
        before, self._billed = self._billed, self.threads_seconds() + self._processes_seconds()
        return self._billed - before

    def _processes_seconds(self) -> float:
        for process in self._processes:
            try:
                self._processes[process] = sum(process.cpu_times()[:2])
            except psutil.NoSuchProcess:
                continue
        return sum(self._processes.values())


def watch(make: Callable[[], Made]) -> tuple[Made, Background]:
    """What `make` returns, and what it has started."""
    threads, processes = _threads(), _processes()
    made = make()
    return made, Background(_threads() - threads, _processes() - processes)


def _threads() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}


def _processes() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _clock_of(thread: int) -> int:
    """As Linux numbers clocks: the thread's number inverted, then 3 bits: it is a thread's (4), of time it ran (2)."""
    return (~thread << 3) | 6
