"""A training's folder is one training's: a second one, begun meanwhile, is refused before it touches anything."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from trimaran.nouns.noun import TrimaranError
from trimaran.store.claims import LOST_AFTER_S, Claims

_KEY, _LOOK_EVERY_S = "training", 1.0


@contextlib.contextmanager
def only_training(folder: Path, on_notice: Callable[[str], None]) -> Iterator[None]:
    """Hold the folder while the block runs.

    What a training that was killed left is taken over: at once where its process can be looked up, and where it was on
    another machine once it has given no sign of life for long. Raises TrimaranError where another training goes on.
    """
    claims = Claims(folder.with_name(f"{folder.name}.claims"))
    try:
        _take(claims, folder, on_notice)
        yield
    finally:
        claims.close()


def _take(claims: Claims, folder: Path, on_notice: Callable[[str], None]) -> None:
    told = False
    while not claims.take(_KEY):
        owner = claims.holder(_KEY)
        who = "another process" if owner is None else f"process {owner.pid} on {owner.host}"
        if claims.is_alive(_KEY):
            raise TrimaranError(
                f"training folder {folder} is in use by {who}, which trains there: wait until it ends, or give --runs "
                f"another folder"
            )
        if not told:
            on_notice(f"{who} trained in {folder}; waiting up to {LOST_AFTER_S:.0f} s for a sign of life of it")
            told = True
        time.sleep(_LOOK_EVERY_S)
