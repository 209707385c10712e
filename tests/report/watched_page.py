"""A browser page that is watched for complaints and for requests to a network."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page

# What a page may take beside ranks that want every core.
PATIENCE_MS = 120_000


class Watched:
    """A browser page that remembers what it complained of and what it asked of a network."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on(
            "console",
            lambda message: self.complaints.append(message.text) if message.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def open(self, path: Path) -> Page:
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready]", state="attached")
        return self.page


@contextmanager
def watching(browser: Browser) -> Iterator[Watched]:
    """A page without a network, which in the end has complained of nothing and asked a network for nothing."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
    context.set_default_timeout(PATIENCE_MS)
    watched = Watched(context.new_page())
    yield watched
    context.close()
    assert watched.complaints == []
    assert all(url.startswith(("file:", "data:", "blob:")) for url in watched.requests)
