"""The page in a real browser: it opens from a file without a network, sorts, filters, follows the reader, prints."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page
from typer.testing import CliRunner

from trimaran.api import plan
from trimaran.cli.app import app
from trimaran.cost.effects.time_effects import PARTS
from trimaran.files.row_table import packaged_table, write_table
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.report.figures import write_figure
from trimaran.report.page.content import Content
from trimaran.report.page.html import page
from trimaran.report.page.measured import measured_content
from trimaran.report.page.planned import plan_content
from trimaran.report.planned import as_json
from trimaran.store import Store
from watched_page import Watched, watching


@pytest.fixture(scope="module")
def bloom() -> dict[str, Any]:
    return as_json(plan("bloom-176b", "jean-zay-a100-80gb", 2048, devices=384, top=30))


@pytest.fixture(scope="module")
def bloom_page(bloom: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(plan_content(bloom), tmp_path_factory.mktemp("bloom"))


@pytest.fixture(scope="module")
def looked_at(browser: Browser, bloom_page: Path) -> Iterator[Page]:
    """The plan's page as it opens, for all tests that look and leave everything as it is."""
    with watching(browser) as watched:
        yield watched.open(bloom_page)


def written(content: Content, folder: Path) -> Path:
    path = folder / "report.html"
    path.write_text(page(content))
    return path


def column(opened: Any, key: str) -> list[str]:
    place = opened.locator("thead th").evaluate_all("heads => heads.map(head => head.dataset.key)").index(key)
    return list(opened.locator(f"tbody tr > :nth-child({place + 1})").all_inner_texts())


def measured(**cells: Any) -> Measurement:
    return Measurement.model_validate(
        {"layers": 4, "hidden": 64, "heads": 4, "seq_len": 32, "vocab": 257, "mbs": 1, "gbs": 8, "dp": 1, "devices": 1,
         "nodes": 1, "sec_per_it": 1.0, "mem_gib": 1.0} | cells
    )  # fmt: skip


def test_a_plan_opens_from_a_file_with_its_charts(looked_at: Page, bloom: dict[str, Any]) -> None:
    opened = looked_at
    assert opened.locator("h1").inner_text() == "bloom-176b on jean-zay-a100-80gb"
    assert column(opened, "layout") == [entry["layout"] for entry in bloom["layouts"]]
    titles = opened.locator("figure:visible h2").all_inner_texts()
    assert {"Time against memory", "Where the time goes", "Memory of each stage"} <= set(titles)
    # nothing in a plan is measured
    assert "Predicted against measured" not in titles
    assert opened.locator("#parts .bars .point").count() > 0


def test_its_screenshot_shows_charts_and_table(
    watched: Watched, bloom_page: Path, picture: Callable[[str], Path]
) -> None:
    watched.page.set_viewport_size({"width": 1400, "height": 1250})
    watched.open(bloom_page).screenshot(path=picture("page"), animations="disabled")
    # a page of one colour would be a few kilobytes
    assert picture("page").stat().st_size > 50_000


def test_legends_say_what_each_part_is(looked_at: Page) -> None:
    entries = looked_at.locator("#parts").locator("..").locator(".legend li")
    told = {entry.inner_text(): entry.get_attribute("title") for entry in entries.all()}
    says = {part.name: part.says for part in PARTS}
    assert len(told) > 3
    assert told == {name: says[name] for name in told}


@pytest.mark.proof
def test_columns_sort_both_ways_by_number_not_by_text(watched: Watched, bloom_page: Path) -> None:
    opened = watched.open(bloom_page)
    head = opened.locator('th[data-key="pp"]')
    head.locator("button").click()
    rising = [int(text) for text in column(opened, "pp")]
    assert rising == sorted(rising)
    assert head.get_attribute("aria-sort") == "ascending"
    head.locator("button").press("Enter")
    falling = [int(text) for text in column(opened, "pp")]
    assert falling == sorted(rising, reverse=True)
    assert head.get_attribute("aria-sort") == "descending"


def test_a_filter_takes_words_and_conditions_and_says_what_is_left(
    watched: Watched, bloom_page: Path, bloom: dict[str, Any]
) -> None:
    opened = watched.open(bloom_page)
    chosen = bloom["layouts"][len(bloom["layouts"]) // 2]
    tp, mbs, limit = chosen["tp"], f"mbs{chosen['mbs']}", int(chosen["mem_gib"]) + 1
    opened.get_by_label("Filter").fill(f"tp={tp} mem<{limit} {mbs}")
    wanted = [e["layout"] for e in bloom["layouts"] if e["tp"] == tp and e["mem_gib"] < limit and mbs in e["layout"]]
    assert 0 < len(wanted) < len(bloom["layouts"])
    opened.wait_for_function("n => document.querySelectorAll('tbody tr').length === n", arg=len(wanted))
    assert sorted(column(opened, "layout")) == sorted(wanted)
    assert opened.locator("#count").inner_text() == f"{len(wanted)} of {len(bloom['layouts'])} layouts"
    for filtered, said in (
        ("memory<60", "memory is no column: they are layout, sec, mem,"),
        ("mem<60gib", "60gib is no number"),
    ):
        opened.get_by_label("Filter").fill(filtered)
        opened.wait_for_function("said => document.querySelector('#count').innerText.includes(said)", arg=said)
        assert opened.locator("#count").inner_text().startswith(f"0 of {len(bloom['layouts'])} layouts; ")
    # what the table shows as 35.9% is a share between 0 and 1 in the data
    half = sorted(100 * e["mfu"] for e in bloom["layouts"])[len(bloom["layouts"]) // 2]
    above = [e["layout"] for e in bloom["layouts"] if 100 * e["mfu"] > half]
    assert 0 < len(above) < len(bloom["layouts"])
    for filtered in (f"mfu>{half}", f"mfu>{half}%", f"mfu>{half / 100}"):
        opened.get_by_label("Filter").fill(filtered)
        opened.wait_for_function("n => document.querySelectorAll('tbody tr').length === n", arg=len(above))
        assert sorted(column(opened, "layout")) == sorted(above)
    opened.get_by_role("button", name="Clear").click()
    opened.wait_for_function("n => document.querySelectorAll('tbody tr').length === n", arg=len(bloom["layouts"]))


@pytest.mark.proof
def test_a_layout_chosen_by_keyboard_shows_its_memory(
    watched: Watched, bloom_page: Path, bloom: dict[str, Any]
) -> None:
    opened = watched.open(bloom_page)
    third = bloom["layouts"][2]
    opened.locator("tbody tr").nth(2).locator("button").press("Enter")
    assert opened.locator('tr[aria-current="true"] th').inner_text() == third["layout"]
    said = opened.locator("#memory-said").inner_text()
    assert said.startswith(third["layout"])
    assert f"{third['mem_gib']:.2f} GiB predicted" in said


def test_a_point_tells_its_layout_when_hovered(looked_at: Page) -> None:
    looked_at.locator("#front .scatterlayer .point").first.hover(force=True)
    assert "s/it" in str(looked_at.locator("#front .hoverlayer").text_content())


def test_the_pareto_front_is_the_one_of_the_data(looked_at: Page, bloom: dict[str, Any]) -> None:
    entries = bloom["layouts"]
    best = [
        one for one in entries
        if not any(o["mem_gib"] <= one["mem_gib"] and o["sec_per_it"] < one["sec_per_it"] for o in entries)
    ]  # fmt: skip
    said = looked_at.locator("#front-said").inner_text()
    assert said.startswith(f"{len(best)} of {len(entries)} layouts are on the front")


@pytest.mark.proof
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_follow_the_system_and_the_button(watched: Watched, bloom_page: Path, scheme: str) -> None:
    watched.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    opened = watched.open(bloom_page)
    paper = "getComputedStyle(document.body).backgroundColor"
    before = opened.evaluate(paper)
    assert (before == "rgb(255, 255, 255)") == (scheme == "light")
    opened.locator("#theme").click()
    assert opened.evaluate(paper) != before


@pytest.mark.proof
def test_nothing_is_wider_than_a_phone_but_the_table_in_its_frame(watched: Watched, bloom_page: Path) -> None:
    watched.page.set_viewport_size({"width": 390, "height": 800})
    opened = watched.open(bloom_page)
    assert opened.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.proof
def test_it_prints(watched: Watched, bloom_page: Path) -> None:
    opened = watched.open(bloom_page)
    opened.emulate_media(media="print")
    assert not opened.locator("#filters").is_visible()
    assert opened.pdf()[:5] == b"%PDF-"


def test_controls_have_names_and_charts_have_sentences(looked_at: Page) -> None:
    for name in ("Filter", "Status"):
        assert looked_at.get_by_label(name, exact=True).count() == 1
    for said in looked_at.locator("figure:visible figcaption").all_inner_texts():
        assert len(said) > 20
    assert looked_at.locator("thead th:not([scope=col])").count() == 0
    assert looked_at.locator("html").get_attribute("lang") == "en"


@pytest.mark.proof
def test_ten_thousand_layouts(watched: Watched, tmp_path: Path) -> None:
    rows = [
        measured(dp=n, devices=n, sec_per_it=100.0 / n, mem_gib=1 + n % 77, layout_label=f"dp{n},mbs1")
        for n in range(1, 10_001)
    ]
    opened = watched.open(written(measured_content({"many": rows}), tmp_path))
    assert opened.locator("#count").inner_text().startswith("10,000 of 10,000")
    assert column(opened, "layout")[0] == "dp10000,mbs1"
    opened.get_by_role("button", name="Next rows").click()
    assert opened.locator("tbody tr").count() == 100
    assert column(opened, "layout")[0] == "dp9900,mbs1"
    assert "2,000 of 10,000 are drawn" in opened.locator("#front-said").inner_text()


def test_sequences_of_two_lengths_are_no_samples_of_one_work(tmp_path: Path) -> None:
    """A page of llm-foundry's rows said that 128 devices keep 21% of linear scaling: those of 8 had shorter samples."""
    rows = [measured(seq_len=32, sec_per_it=1.0), measured(seq_len=128, sec_per_it=2.0, dp=2, devices=2)]
    content = measured_content({"rows": rows})
    assert [answer.work.split(" on ")[0] for answer in content.answers] == ["0.2M of 32 tokens", "0.2M of 128 tokens"]
    assert len({case.work for case in content.cases}) == 2
    with pytest.raises(TrimaranError, match="at one length of sequences, and the rows are of 2"):
        write_figure("scaling", content, tmp_path / "scaling.svg")


@pytest.mark.proof
def test_published_tables_are_compared_within_one_work(watched: Watched, tmp_path: Path) -> None:
    rows = packaged_table("seeds").measurements
    opened = watched.open(written(measured_content({"seeds": rows}), tmp_path))
    # the most frequent model and cluster is shown first; all of them on request
    chosen = opened.get_by_label("Work").input_value()
    assert chosen and set(column(opened, "work")) == {chosen}
    opened.get_by_label("Work").select_option("")
    assert opened.locator("#count").inner_text().startswith(f"{len(rows)} of {len(rows)}")
    assert not opened.locator("#front").is_visible()


def test_text_of_others_is_text(watched: Watched, tmp_path: Path) -> None:
    hostile = "</script><img src=x onerror=alert(1)><b>{{data}}"
    rows = [measured(notes=hostile, layout_label=hostile, recipe=hostile, sec_per_it=n, mem_gib=n) for n in (1.0, 2.0)]
    opened = watched.open(written(measured_content({hostile: rows}), tmp_path))
    assert opened.locator("h1").inner_text() == hostile
    assert opened.locator("img").count() == 0
    assert hostile in column(opened, "notes")


@pytest.mark.proof
def test_the_verb_writes_a_page_of_a_store_and_of_a_plan(
    watched: Watched, tmp_path: Path, bloom: dict[str, Any]
) -> None:
    with Store(tmp_path / "store.sqlite") as store:
        for row in (measured(losses=(5.0, 4.0)), measured(dp=2, devices=2, sec_per_it=0.6, trial_key="b")):
            store.add(row)
    out = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(tmp_path / "store.sqlite"), "-o", str(out)])
    assert done.exit_code == 0, done.output
    opened = watched.open(out)
    assert {"Scaling over devices", "Loss"} <= set(opened.locator("figure:visible h2").all_inner_texts())
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(bloom))
    assert CliRunner().invoke(app, ["report", str(saved), "-o", str(out)]).exit_code == 0
    assert watched.open(out).locator("h1").inner_text() == "bloom-176b on jean-zay-a100-80gb"


@pytest.mark.proof
def test_two_stores_stand_side_by_side(watched: Watched, tmp_path: Path) -> None:
    for name, seconds in (("before", 1.0), ("after", 0.8)):
        write_table(tmp_path / f"{name}.csv", [measured(dp=n, devices=n, sec_per_it=seconds / n) for n in (1, 2)])
    out = tmp_path / "both.html"
    arguments = ["report", str(tmp_path / "before.csv"), str(tmp_path / "after.csv"), "-o", str(out)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    opened = watched.open(out)
    assert set(column(opened, "source")) == {"before", "after"}
    assert {"before", "after"} <= set(opened.locator("#scaling").locator("..").locator(".legend li").all_inner_texts())


def test_a_page_says_what_the_whole_training_takes_and_with_faults_where_its_extent_is_known(tmp_path: Path) -> None:
    asked = [
        "plan",
        "--model",
        "llama3-8b",
        "--cluster",
        "dgx-h100",
        "--devices",
        "64",
        "--gbs",
        "256",
        "--seq",
        "8192",
    ]
    facts = {}
    for extent in ([], ["--tokens", "1e12", "--price", "2"]):
        printed = CliRunner().invoke(app, [*asked, *extent, "--top", "1", "--format", "json"], catch_exceptions=False)
        planned = json.loads(printed.stdout)
        facts = dict(plan_content(planned).facts)
        assert ("Days expected" in facts) == bool(extent)
    best, faulty = planned["layouts"][0], planned["goodput"]
    assert facts["Days without faults"] == f"{best['days']:.1f}"
    assert facts["Days expected"] == f"{faulty['days']:.1f} (P90 {faulty['days_p90']:.1f})"
    assert facts["Cost without faults"] == f"{best['cost']:,.0f}"
    assert facts["Cost expected"].startswith(f"{faulty['cost']:,.0f} ")


@pytest.mark.parametrize(
    ("plan_text", "said"),
    [("{", "is not valid JSON"), ("[]", "holds no plan"), ("{}", "docs/json.md")],
)
def test_what_is_no_plan_is_told_in_one_line(tmp_path: Path, plan_text: str, said: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan_text)
    done = CliRunner().invoke(app, ["report", str(path), "-o", str(tmp_path / "x.html")])
    assert isinstance(done.exception, TrimaranError)
    assert said in str(done.exception)
    assert not (tmp_path / "x.html").exists()


def test_a_recipe_is_not_chosen_of_a_plan(tmp_path: Path) -> None:
    """It was dropped without a word."""
    asked = ["report", str(tmp_path / "plan.json"), "--recipe", "laptop", "-o", str(tmp_path / "x.html")]
    done = CliRunner().invoke(app, asked)
    assert isinstance(done.exception, TrimaranError)
    assert "--recipe laptop chooses among measured rows" in str(done.exception)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layouts": []}, "plan has no layout to show"),
        ({"notes": None}, "plan is not as docs/json.md says"),
        ({"devices": "many"}, "plan is not as docs/json.md says"),
        ({"seq_len": None}, "plan is not as docs/json.md says"),
        ({"nodes": "x"}, "plan is not as docs/json.md says: nodes: "),
        ({"sec_per_it": "x"}, "plan is not as docs/json.md says: sec_per_it: "),
        ({"days": "x"}, "plan is not as docs/json.md says"),
        ({"time_s": 3}, "plan is not as docs/json.md says: time_s: "),
    ],
)
def test_a_plan_that_somebody_changed_is_told_in_one_line(
    bloom: dict[str, Any], changes: dict[str, object], said: str
) -> None:
    """They ended in a traceback, or said that the plan had no `object is not iterable`."""
    of_plan = {key: value for key, value in changes.items() if key in bloom}
    first = {**bloom["layouts"][0], **{key: value for key, value in changes.items() if key not in bloom}}
    with pytest.raises(TrimaranError, match=said):
        plan_content({**bloom, "layouts": [first], **of_plan})


def test_a_page_says_what_a_step_works_on_and_under_which_software(bloom: dict[str, Any]) -> None:
    """Seconds an iteration stood there without the batch and the length that they are of."""
    facts = dict(plan_content(bloom).facts)
    assert facts["Global batch"] == "2,048 sequences of 2,048 tokens"
    assert facts["Software"] == "trimaran (Trimaran's own trainer)"
    rows = [measured(gbs=8), measured(gbs=1024, seq_len=16)]
    assert dict(measured_content({"one": rows[:1]}).facts)["Global batch"] == "8 sequences of 32 tokens"
    assert dict(measured_content({"two": rows}).facts)["Global batch"] == "8 to 1,024 sequences of 16 to 32 tokens"


def test_rows_whose_log_does_not_state_their_layout_are_shown_without_it(watched: Watched, tmp_path: Path) -> None:
    """They ended the report with a traceback, and a data parallelism that nobody knows was shown as 1."""
    blank = dict.fromkeys(("nodes", "devices", "dp", "tp", "pp", "vpp", "cp", "zero_stage", "precision", "schedule"))
    told = {**blank, "devices": 8, "tp": 2, "pp": 2, "cp": 1}
    cells = ({**blank, "mbs": 1}, {**blank, "mbs": 2}, {**told, "mbs": 4})
    rows = [measured(**each, sec_per_it=1.0 + n, mem_gib=2.0 - n / 4) for n, each in enumerate(cells)]
    opened = watched.open(written(measured_content({"log": rows}), tmp_path))
    assert column(opened, "layout") == ["mbs1", "mbs2", "dp2,tp2,pp2,mbs4"]
    assert (column(opened, "devices"), column(opened, "dp")) == (["", "", "8"], ["", "", "2"])
    assert "TP not stated" in opened.locator("figure:has(#front)").inner_text()
    content = measured_content({"log": rows})
    write_figure("front", content, tmp_path / "front.svg")
    assert "TP not stated" in (tmp_path / "front.svg").read_text()
    with pytest.raises(TrimaranError, match="figure scaling has nothing to show here"):
        write_figure("scaling", content, tmp_path / "scaling.svg")
