"""Which nodes measure at once: pairs of a tournament, in rounds in which each node is in one pair at most."""

from __future__ import annotations

from collections.abc import Iterator

Pair = tuple[int, int]


def rounds_of_pairs(players: int) -> Iterator[tuple[Pair, ...]]:
    """Rounds in which each two of the players meet once: n - 1 of n / 2 pairs, or n of (n - 1) / 2 where n is odd.

    The circle method: one player stays (nobody, where n is odd), and the others move on by a place around it.
    """
    others = players - 1 if players % 2 == 0 else players
    for turn in range(others if players > 1 else 0):
        pairs = [(turn, others)] if players % 2 == 0 else []
        for apart in range(1, (others + 1) // 2):
            pairs.append(((turn + apart) % others, (turn - apart) % others))
        yield tuple((min(pair), max(pair)) for pair in pairs)
