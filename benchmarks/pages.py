"""How long a person waits: for help, a first answer, pages of many layouts, and for explore to follow a change.

Run by `make bench`; needs Chromium. Writes benchmarks/results/pages.md.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Browser, Page, sync_playwright
from werkzeug.serving import make_server

from _others import others_since
from trimaran.bench.trial.machine import hardware
from trimaran.nouns.measurement import Measurement
from trimaran.protocol.host import Work
from trimaran.report.explore import HOST, answer, explore_app, question_of
from trimaran.report.page.html import page as page_of
from trimaran.report.page.measured import measured_content

RESULTS = Path(__file__).parent / "results" / "pages.md"
CHROMIUM = "/usr/bin/chromium"
REPEATS = 7
LAYOUTS = (10_000, 50_000)
TOKEN = "of-this-benchmark"
OPENS = {"model": "bloom-176b", "cluster": "jean-zay-a100-80gb", "stack": "trimaran", "gbs": "2048", "devices": "",
         "seq": "", "fix": "", "mem_margin": "5"}  # fmt: skip
README_ASKS = (
    "plan --model bloom-176b --cluster jean-zay-a100-80gb --devices 384 --gbs 2048 --stack megatron-deepspeed --top 3"
)
# What is changed, one after another, on a page that opens so.
CHANGES = (("gbs", "1024"), ("devices", "192"), ("fix", "tp=4"), ("mem_margin", "10"), ("seq", "4096"), ("gbs", "512"))
FIRST = "document.querySelector('#answer li')?.innerText"


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def told(name: str, seconds: list[float], goal: str) -> str:
    return f"| {name} | {np.median(seconds):.2f} s | {max(seconds):.2f} s | {goal} |"


def answered(what: str, goal: str, *arguments: str) -> str:
    """One run of the command line, start-up included."""

    def run() -> None:
        subprocess.run([sys.executable, "-m", "trimaran", *arguments], check=True, stdout=subprocess.DEVNULL)

    return told(what, [seconds_of(run) for _ in range(REPEATS)], goal)


def page_opens(browser: Browser, folder: Path, layouts: int) -> str:
    shape = {"layers": 4, "hidden": 64, "heads": 4, "seq_len": 32, "vocab": 257, "mbs": 1, "gbs": 8, "nodes": 1}
    rows = [
        Measurement.model_validate(
            {
                **shape,
                "dp": n,
                "devices": n,
                "sec_per_it": 100 / n,
                "mem_gib": 1 + n % 77,
                "layout_label": f"dp{n},mbs1",
            }
        )
        for n in range(1, layouts + 1)
    ]
    file = folder / "report.html"
    file.write_text(page_of(measured_content({"many": rows})), encoding="utf-8")
    page = browser.new_page()

    def open_it() -> None:
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")

    seconds = [seconds_of(open_it) for _ in range(REPEATS)]
    page.close()
    size = file.stat().st_size / 1e6
    return told(f"a page of {layouts:,} layouts ({size:.1f} MB), drawn", seconds, "3 s")


def ranking_follows(browser: Browser) -> str:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server(
        HOST, 0, explore_app(OPENS["model"], OPENS["cluster"], int(OPENS["gbs"]), TOKEN).server, threaded=True
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page = browser.new_page()
    page.goto(f"http://{HOST}:{server.server_port}/?token={TOKEN}")
    page.wait_for_function(FIRST)
    seconds = []
    for _ in range(2):
        answer.cache_clear()
        seconds += [followed(page, name, value) for name, value in CHANGES]
        for name in ("gbs", "devices", "fix", "mem_margin", "seq"):
            followed(page, name, OPENS[name])
    server.shutdown()
    return told("explore: from a change to the new ranking, BLOOM on 416 GPUs and fewer", seconds, "0.3 s")


def planned() -> str:
    """The part of it that is planning."""
    seconds = []
    for _ in range(2):
        answer.cache_clear()
        asked: dict[str, Any] = dict(OPENS)
        for change in CHANGES:
            asked |= [change]
            seconds.append(seconds_of(partial(answer, question_of(asked, {}))))
    return told("explore: planning alone, the same questions", seconds, "")


def followed(page: Page, name: str, value: str) -> float:
    """Seconds from the last key to an answer that has come in, whatever it is."""
    page.evaluate(
        """() => {
            window.followed = false;
            new MutationObserver((_, seen) => { window.followed = true; seen.disconnect(); })
                .observe(document.querySelector('#answer'), {childList: true, subtree: true, characterData: true});
        }"""
    )
    start = time.perf_counter()
    page.locator(f"#{name}").fill(value)
    page.wait_for_function("window.followed")
    return time.perf_counter() - start


def main() -> None:
    began = Work.so_far()
    lines = ["| what | median | worst | goal |", "| --- | --: | --: | --: |"]
    lines.append(answered("`trimaran --help`", "0.3 s", "--help"))
    lines.append(answered("README's first question: BLOOM on 384 A100", "1 s", *README_ASKS.split()))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        lines += [page_opens(browser, Path(folder), layouts) for layouts in LAYOUTS]
        lines += [ranking_follows(browser), planned()]
        browser.close()
    head = ["# How long a person waits", "", f"`python benchmarks/pages.py` on {hardware()}. {others_since(began)}", ""]
    text = "\n".join([*head, *lines])
    print(text)
    RESULTS.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
