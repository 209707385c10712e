"""Explore in a real browser: the ranking follows the question, mistakes are told, strangers are refused."""

import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
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
from watched_page import PATIENCE_MS

TOKEN = "the-token"
KNOWN = {"model": "gpt2-124m", "cluster": "dgx-h100"}
VALUES = {**KNOWN, "stack": "trimaran", "gbs": 64, "devices": None, "seq": None, "fix": None, "mem_margin": 5}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = make_server(HOST, 0, explore_app("gpt2-124m", "dgx-h100", 64, TOKEN).server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://{HOST}:{server.server_port}"
    server.shutdown()


def test_the_ranking_follows_what_is_asked(browser: Browser, address: str, picture: Callable[[str], Path]) -> None:
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    elsewhere: list[str] = []
    page.on("request", lambda request: elsewhere.append(request.url) if not request.url.startswith(address) else None)
    page.goto(f"{address}/?token={TOKEN}")
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


def status(address: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers)) as response:
            return int(response.status)
    except urllib.error.HTTPError as refused:
        return refused.code


def test_a_request_under_another_name_is_refused(address: str) -> None:
    assert status(f"{address}/?token={TOKEN}", Host="elsewhere.example") == 403


def test_a_request_without_the_token_is_refused(address: str) -> None:
    port = address.rpartition(":")[2]
    for path in (
        "/",
        "/_dash-layout",
        "/_dash-dependencies",
        "/_dash-update-component",
        "/?token=another",
        "/?token=\u00e9",
    ):
        assert status(address + urllib.parse.quote(path, safe="/?=")) == 403, path
    assert status(address, Cookie=f"trimaran-{port}=another") == 403
    assert status(f"{address}/?token={TOKEN}") == 200
    # the page's own requests come with the cookie that the first answer has set
    assert status(f"{address}/_dash-layout", Cookie=f"trimaran-{port}={TOKEN}") == 200


def test_the_one_address_that_is_printed_has_a_token_of_its_own() -> None:
    """Dash printed another behind it, without the token, which answers nobody."""
    command = [sys.executable, "-m", "trimaran", "explore", "--port", "{}"]
    with socket.socket() as free:
        free.bind((HOST, 0))
        command[-1] = str(free.getsockname()[1])
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        printed = re.search(r"(http://\S+/\?token=(\S+))", process.stderr.readline())
        assert printed and len(printed[2]) >= 20
        until = time.monotonic() + PATIENCE_MS / 1000
        while not answers(printed[1]) and time.monotonic() < until:
            time.sleep(0.1)
        process.terminate()
        assert process.communicate() == ("", "trimaran: terminated\n")


def answers(address: str) -> bool:
    try:
        return status(address) == 200
    except urllib.error.URLError:
        return False


@pytest.mark.parametrize("field", ["model", "cluster", "stack"])
@pytest.mark.parametrize("value", ["/etc/passwd.toml", "./m.json", "../x.toml", ["a"], {"a": 1}, None, 7])
def test_it_opens_the_catalogue_and_what_it_was_started_with(field: str, value: object) -> None:
    with pytest.raises(TrimaranError, match=f"{field} .* is neither of the catalogue"):
        question_of(VALUES | {field: value}, KNOWN)
    assert question_of(VALUES, KNOWN).model == "gpt2-124m"
    assert question_of(VALUES | {"model": "./mine.toml"}, KNOWN | {"model": "./mine.toml"}).model == "./mine.toml"


def test_a_fraction_is_told_and_not_dropped() -> None:
    """2.5 sequences were planned as 2."""
    for name in ("gbs", "devices", "seq"):
        with pytest.raises(TrimaranError, match=r"2\.5 is not whole"):
            question_of(VALUES | {name: 2.5}, KNOWN)
    assert question_of(VALUES | {"gbs": 64.0}, KNOWN).gbs == 64


def test_a_field_without_a_number_is_told() -> None:
    with pytest.raises(TrimaranError, match="no number"):
        question_of(VALUES | {"devices": "x"}, KNOWN)
    with pytest.raises(TrimaranError, match="global batch is empty"):
        question_of(VALUES | {"gbs": None}, KNOWN)


def test_a_taken_port_is_told() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        done = CliRunner().invoke(app, ["explore", "--port", str(taken.getsockname()[1])])
    assert "cannot be had" in str(done.exception)
