"""Which sequences share a batch, and which process takes it.

Receives sequences in order; hands on windows of a few batches each. Inside a window sequences of like length are put
together. The batches depend on the corpus and on `batch_tokens` alone, never on how many processes there are or where a
scan was interrupted, so that every sequence is computed in the same company, to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

# Rows are written in the order of the corpus, so a kill loses the finished rows of one window at most. With 8 batches
# to sort among, little padding is left.
WINDOW_BATCHES = 8

T = TypeVar("T")


class Batch(NamedTuple, Generic[T]):
    number: int  # over the whole corpus, from 0
    members: list[T]


def windows(items: Iterable[T], *, cost: Callable[[T], int], batch_tokens: int) -> Iterator[list[Batch[T]]]:
    """Neighbours of the corpus, in batches whose padded tokens are at most `batch_tokens`; a longer item is alone."""
    index = 0
    for window in _windows(items, cost, WINDOW_BATCHES * batch_tokens):
        batches = _cut(window, cost, batch_tokens)
        yield [Batch(index + place, members) for place, members in enumerate(batches)]
        index += len(batches)


def _windows(items: Iterable[T], cost: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    window: list[T] = []
    total = 0
    for item in items:
        window.append(item)
        total += max(cost(item), 1)
        if total >= limit:
            yield window
            window, total = [], 0
    if window:
        yield window


def _cut(window: Sequence[T], cost: Callable[[T], int], batch_tokens: int) -> list[list[T]]:
    """Batches of like length; the one that holds the earliest item comes first, so that rows can be written soon."""
    order = sorted(range(len(window)), key=lambda place: (cost(window[place]), place))
    batches: list[list[int]] = []
    for place in order:  # the newest is the longest
        if batches and cost(window[place]) * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(place)
        else:
            batches.append([place])
    return [[window[place] for place in batch] for batch in sorted(batches, key=min)]
