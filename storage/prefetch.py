"""Reading ahead: samples in a given order, read by threads before they are asked for, within a bound on
their bytes.

In: a way to read one sample, its size, and a sequence of numbers. Out: the samples, in exactly that sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")

IN_FLIGHT_BYTES = 256 << 20


def prefetch(
    numbers: Iterable[int],
    read: Callable[[int], Item],
    size: Callable[[int], int],
    threads: int = 2,
    in_flight_bytes: int = IN_FLIGHT_BYTES,
) -> Iterator[Item]:
    """Yield read(n) for every n in turn, reading ahead as long as all that was read ahead stays within
    `in_flight_bytes` (one sample is always read). An error of a read is raised where its sample would have
    come.

    Leaving the iteration early stops the threads after the reads they are at.
    """
    if threads < 1:
        raise ValueError(f"threads {threads}: at least 1")
    ahead: deque[tuple[Future[Item], int]] = deque()
    held = 0
    pool = ThreadPoolExecutor(threads, thread_name_prefix="prefetch")
    waiting = iter(numbers)
    number = next(waiting, None)
    try:
        while number is not None or ahead:
            while number is not None and (not ahead or held + size(number) <= in_flight_bytes):
                held += size(number)
                ahead.append((pool.submit(read, number), size(number)))
                number = next(waiting, None)
            future, size_of_first = ahead.popleft()
            held -= size_of_first
            yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
