"""What other programs took of the cores while a benchmark ran, as its page says it."""

from __future__ import annotations

from trimaran.protocol.host import Work


def others_since(began: Work | None) -> str:
    """A sentence on the time since `began`; none where the system does not say."""
    now = Work.so_far()
    return f"Other programs took {began.others_share(now):.0%} of the cores' time." if began and now else ""
