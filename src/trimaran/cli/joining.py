"""The place of this process among ranks that torchrun or Slurm has started, where it is one of them."""

from __future__ import annotations

import atexit
import io
import os
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimaran.bench.launch.joined import Joined

# torchrun ends all ranks when one has left: the others wait until rank 0 has said why it refuses.
SPEAKS_WITHIN_S = 5.0


def place_among_ranks() -> Joined | None:
    """This process's place among ranks that something else has started, if it is one; all but rank 0 fall silent."""
    from trimaran.bench.launch.joined import joined

    place = joined(os.environ)
    if place and place.rank:
        sys.stderr = io.StringIO()  # rank 0 says the same
        atexit.register(time.sleep, SPEAKS_WITHIN_S)
    return place
