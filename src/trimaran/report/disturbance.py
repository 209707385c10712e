"""What other programs took of the cores while something was measured, as a person is told."""

from __future__ import annotations

from collections.abc import Iterable

from trimaran.nouns.measurement import Measurement
from trimaran.protocol.host import QUIET_SHARE

# Times of one layout that differ by less than this factor are the same: steps of one run differ by as much.
SAME = 1.1


def others_took(row: Measurement) -> str | None:
    """That other programs took some of the cores' time while a row was measured, where that shows in its figures."""
    share = row.others_share
    return None if share is None or share <= QUIET_SHARE else f"other programs took {share:.0%} of the cores' time"


def disturbed(rows: Iterable[Measurement]) -> str | None:
    """How many of some rows were measured beside other programs, what those took, and what to do; None where none."""
    known = list(rows)
    shares = [row.others_share or 0.0 for row in known if others_took(row)]
    if not shares:
        return None
    return (
        f"other programs took up to {max(shares):.0%} of the cores' time in {len(shares)} of {len(known)} runs, which "
        f"makes times too long: measure again on a quiet machine"
    )


def trained_otherwise(trained: Measurement, measured: Measurement | None) -> str | None:
    """Why a training's steps took another time than those of its layout's trial; None where they took the same.

    Blames other programs where they took more of the cores than while the trial ran, or less where the training was
    the faster; where they took much both times, neither time is certain. Else it says that they are not why, or that
    nobody has looked.
    """
    if measured is None or not trained.sec_per_it or not measured.sec_per_it:
        return None
    ratio = trained.sec_per_it / measured.sec_per_it
    if 1 / SAME <= ratio <= SAME:
        return None
    told = f"measured {measured.sec_per_it:.3f} s/it before, so {ratio:.1f} times as long: "
    if trained.others_share is None or measured.others_share is None:
        return f"{told}what else ran on its cores is not known"
    then, now = f"{measured.others_share:.0%}", f"{trained.others_share:.0%}"
    more = trained.others_share - measured.others_share
    likely = abs(more) > QUIET_SHARE / 2 and (more > 0) == (ratio > 1)
    took = f"other programs took {now} of the cores' time, and {then} while it was measured"
    if likely:
        return f"{told}{took}"
    if min(trained.others_share, measured.others_share) > QUIET_SHARE:
        return f"{told}{took}, beside which neither time is certain: measure and train on a quiet machine"
    return f"{told}{took}, which is not why: look at the clock, the memory and the disk"
