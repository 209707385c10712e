"""Claims of trials under way: files whose making is atomic, kept alive by heartbeats.

A claim is a file KEY.N in a folder beside the store; that of the largest N holds. Making a file that must not be
there yet is atomic on network file systems too, and needs no lock: a claim that has lapsed is taken over by making
KEY.N+1, which one process alone can do.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from trimaran.files.user_file import open_file
from trimaran.nouns.noun import TrimaranError
from trimaran.store.owner import Owner

# A claim whose heartbeat was not seen to change for so long has lapsed, where its process cannot be looked up.
LOST_AFTER_S = float(os.environ.get("TRIMARAN_LOST_AFTER_S", "120"))
_BEAT_EVERY_S = LOST_AFTER_S / 12
_TRIES = 10
# How long it takes until a file system that cannot say for a moment, as NFS where its server is away, is asked again.
_ASK_AGAIN_S = 0.5
_LIMIT_BYTES = 1 << 16
_Seen = TypeVar("_Seen")


class _Content(BaseModel):
    """What a claim's file holds. The token tells two claims of one process apart."""

    owner: Owner
    token: str


class Claims:
    """What this process holds, and whether others hold what it asks for.

    Heartbeats are changes of a file's time, and ages run on this process's monotonic clock from the moment a change
    was seen: the clocks of two hosts are never compared.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, tuple[Path, str]] = {}
        self._seen: dict[Path, tuple[tuple[int, str], float]] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._beating: threading.Thread | None = None

    def take(self, key: str) -> bool:
        """Claim `key`; False where another holds it.

        Raises TrimaranError where no file can be made, or what is there cannot be read.
        """
        newest = self._newest(key)
        if newest is None:
            generation = 0
        elif self.holds(key):
            return True
        elif not self._lapsed(newest):
            return False
        else:
            generation = _generation(newest) + 1
        claim, token = self._folder / f"{key}.{generation}", secrets.token_hex(8)
        if not self._make(claim, _Content(owner=Owner.current(), token=token).model_dump_json()):
            return False
        with self._lock:
            self._held[key] = claim, token
            if self._beating is None:
                self._beating = threading.Thread(target=self._beat, name="claims", daemon=True)
                self._beating.start()
        for number in range(generation):
            (self._folder / f"{key}.{number}").unlink(missing_ok=True)
        return True

    def holds(self, key: str) -> bool:
        """Whether this process holds `key`: one that was stopped for long may have lost it.

        Raises TrimaranError where the claims cannot be read.
        """
        with self._lock:
            held = self._held.get(key)
        return held is not None and self._newest(key) == held[0] and _is_ours(*held)

    def holder(self, key: str) -> Owner | None:
        """Who holds `key`, as the claim says; None where nobody does."""
        content = self._content(self._newest(key))
        return None if content is None else content.owner

    def is_alive(self, key: str) -> bool:
        """Whether the holder of `key` is known to live: it runs here, or gave a sign since `take` last asked."""
        newest = self._newest(key)
        if (content := self._content(newest)) is None or newest is None:
            return False
        alive, before = content.owner.is_alive(), self._seen.get(newest)
        return alive if alive is not None else before is not None and before[0] != _look(newest)

    def release(self, key: str) -> None:
        """Give `key` back, if this process holds it."""
        with self._lock:
            held = self._held.get(key)
        try:
            if held is not None and _is_ours(*held):
                held[0].unlink(missing_ok=True)
        except (OSError, TrimaranError):
            return  # it is held still, until it is given back again or this process ends
        with self._lock:
            self._held.pop(key, None)
        with contextlib.suppress(OSError):
            self._folder.rmdir()  # where it was the last

    def close(self) -> None:
        """Give everything back."""
        self._closed.set()
        for key in list(self._held):
            self.release(key)

    def _newest(self, key: str) -> Path | None:
        # by listing, which makes a network file system look anew
        names = _seen(lambda: os.listdir(self._folder), f"claims folder {self._folder}")  # noqa: PTH208
        claims = [self._folder / name for name in names or () if name.rpartition(".")[0] == key]
        return max(claims, key=_generation, default=None)

    def _content(self, claim: Path | None) -> _Content | None:
        look = None if claim is None else _look(claim)
        try:
            return None if look is None else _Content.model_validate_json(look[1])
        except ValidationError:
            return None  # not written yet

    def _lapsed(self, claim: Path) -> bool:
        look = _look(claim)
        if look is None:
            return True  # given back meanwhile
        content = self._content(claim)
        alive = None if content is None else content.owner.is_alive()
        if alive is not None:
            return not alive
        now = time.monotonic()
        before = self._seen.get(claim)
        if before is None or before[0] != look:
            self._seen[claim] = look, now
            return False
        return now - before[1] > LOST_AFTER_S

    def _make(self, claim: Path, content: str) -> bool:
        for _ in range(_TRIES):
            is_made = False
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                with claim.open("x") as file:
                    is_made = True
                    file.write(content)
            except FileExistsError as error:
                if _is_no_folder(self._folder):
                    raise TrimaranError(
                        f"claims folder {self._folder} is something else than a folder: remove it"
                    ) from None
                if Path(error.filename) == self._folder:
                    continue  # it was removed between being made and being looked at
                return False
            except FileNotFoundError:
                continue  # who gave back the last claim removed the folder meanwhile
            except OSError as error:
                if is_made:  # else it may be another's
                    claim.unlink(missing_ok=True)
                raise TrimaranError(
                    f"claim {claim} cannot be written ({error.strerror}): free space, or check its permissions"
                ) from None
            return True
        raise TrimaranError(f"claims folder {self._folder} is removed again and again: see who does that")

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT_EVERY_S):
            with self._lock:
                held = list(self._held.values())
            for claim, token in held:
                with contextlib.suppress(OSError, TrimaranError):
                    if _is_ours(claim, token):
                        os.utime(claim)


def _is_no_folder(path: Path) -> bool:
    """Whether there is something that is no folder; where there is nothing any more it is none either."""
    try:
        is_folder = stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return False
    return not is_folder and not path.is_dir()


def _generation(claim: Path) -> int:
    number = claim.suffix.removeprefix(".")
    return int(number) if number.isdecimal() else -1


def _seen(look: Callable[[], _Seen], what: str) -> _Seen | None:
    """What a look at the file system finds; None where there is nothing, or nothing any more.

    What cannot be seen for a moment is there as before: it is looked at again. Raises TrimaranError, with `what` was
    looked at, where it cannot be seen for seconds.
    """
    why = ""
    for number in range(_TRIES):
        if number:
            time.sleep(_ASK_AGAIN_S)
        try:
            return look()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            why = f"{what} cannot be read: {error.strerror}; check its permissions, and whether its file system is well"
        except TrimaranError as error:
            why = str(error)
    raise TrimaranError(why)


def _look(claim: Path) -> tuple[int, str] | None:
    """When the file last changed, ns, and what it holds; None where it is gone.

    Opening makes a network file system ask its server. Raises TrimaranError where that does not answer.
    """

    def look() -> tuple[int, str]:
        claim.lstat()
        try:
            with open_file(claim, f"claim {claim}", _LIMIT_BYTES) as file:
                return os.fstat(file.fileno()).st_mtime_ns, file.read(_LIMIT_BYTES).decode(errors="replace")
        except TrimaranError:
            claim.lstat()  # raises FileNotFoundError where it was given back meanwhile
            raise

    return _seen(look, f"claim {claim}")


def _is_ours(claim: Path, token: str) -> bool:
    look = _look(claim)
    return look is not None and token in look[1]
