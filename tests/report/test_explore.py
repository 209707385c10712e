"""Explore in a real browser: the ranking follows the question, mistakes are told, strangers are refused."""

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser
from typer.testing import CliRunner
from werkzeug.serving import make_server

from trimaran.api import plan
from trimaran.cli.app import app
from trimaran.nouns.noun import TrimaranError
from trimaran.report.explore import HOST, explore_app, question_of


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = make_server(HOST, 0, explore_app("gpt2-124m", "dgx-h100", 64).server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://{HOST}:{server.server_port}"
    server.shutdown()


def test_the_ranking_follows_what_is_asked(browser: Browser, address: str, picture: Callable[[str], Path]) -> None:
    page = browser.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    elsewhere: list[str] = []
    page.on("request", lambda request: elsewhere.append(request.url) if not request.url.startswith(address) else None)
    page.goto(address)
    said = page.locator("#answer li").first
    best = plan("gpt2-124m", "dgx-h100", 64).best
    said.wait_for()
    assert str(best.layout) in said.inner_text()
    page.locator("#fix").fill("tp=2 dp=1")
    held = plan("gpt2-124m", "dgx-h100", 64, fix={"tp": 2, "dp": 1}).best
    page.wait_for_function(
        "text => document.querySelector('#answer li')?.innerText.includes(text)", arg=str(held.layout)
    )
    assert held.layout.tp == 2 and best.layout.tp != 2
    page.set_viewport_size({"width": 1400, "height": 1100})
    page.screenshot(path=picture("explore"), animations="disabled")
    # what is typed is told as text, not taken for the page's own
    page.locator("#fix").fill("<i>tq</i>=2")
    page.locator("#answer [role=alert]").wait_for()
    assert "<i>tq</i>" in page.locator("#answer [role=alert]").inner_text()
    assert complaints == []
    # all of it comes from this machine
    assert [url for url in elsewhere if not url.startswith(("data:", "blob:"))] == []
    page.close()


def test_a_request_under_another_name_is_refused(address: str) -> None:
    request = urllib.request.Request(address, headers={"Host": "elsewhere.example"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert refused.value.code == 403


def test_a_field_without_a_number_is_told() -> None:
    values = {"model": "gpt2-124m", "cluster": "dgx-h100", "stack": "trimaran", "gbs": 64, "devices": "x", "seq": None,
              "fix": None, "mem_margin": 5}  # fmt: skip
    with pytest.raises(TrimaranError, match="no number"):
        question_of(values)
    with pytest.raises(TrimaranError, match="global batch is empty"):
        question_of(values | {"gbs": None})


def test_a_taken_port_is_told() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        done = CliRunner().invoke(app, ["explore", "--port", str(taken.getsockname()[1])])
    assert "cannot be had" in str(done.exception)
