"""A real Chromium, as Debian packages it, driven by Playwright."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from watched_page import Watched, watching

CHROMIUM = Path("/usr/bin/chromium")
# A browser that calls home at its start waits for a network that a test machine may not have.
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync")  # fmt: skip


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    assert CHROMIUM.exists(), f"{CHROMIUM} is not installed: apt-get install chromium"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=str(CHROMIUM), args=list(QUIET))
        yield started
        started.close()


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    with watching(browser) as watched:
        yield watched


@pytest.fixture
def picture(tmp_path: Path) -> Callable[[str], Path]:
    """Where a picture by this name goes: to the docs, where `make screenshots` says so, else nowhere that stays."""
    folder = Path(os.environ.get("TRIMARAN_SCREENSHOTS", tmp_path))
    return lambda name: folder / f"{name}.png"
