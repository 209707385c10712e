"""Where a training or a store's rows took other times than was said, the likely cause is told."""

from __future__ import annotations

import subprocess
import sys

from trimaran.nouns.measurement import Measurement
from trimaran.protocol.host import Work
from trimaran.report.disturbance import disturbed, trained_otherwise
from trimaran.report.measured_rows import record
from trimaran.report.page.measured import measured_content

SHAPE = {"layers": 1, "hidden": 8, "heads": 1, "seq_len": 8, "vocab": 257, "gbs": 2, "mbs": 2, "dp": 1}
BURN = "import time\nend = time.process_time() + {seconds}\nwhile time.process_time() < end: pass\n"


def row(seconds: float, others: float | None, predicted: float | None = None) -> Measurement:
    return Measurement.model_validate(
        {**SHAPE, "sec_per_it": seconds, "others_share": others, "predicted_sec_per_it": predicted}
    )


def test_a_slower_training_names_what_other_programs_took_then_and_now() -> None:
    told = trained_otherwise(row(2.8, 0.63), row(1.0, 0.02))
    assert told == (
        "measured 1.000 s/it before, so 2.8 times as long: other programs took 63% of the cores' time, and 2% while it "
        "was measured"
    )
    faster = trained_otherwise(row(1.0, 0.02), row(2.8, 0.63))
    assert faster is not None and "0.4 times as long: other programs took 2%" in faster and "not why" not in faster


def test_nothing_is_blamed_that_did_not_change_and_nothing_is_said_of_equal_times() -> None:
    innocent = trained_otherwise(row(2.8, 0.02), row(1.0, 0.02))
    assert innocent is not None and "which is not why" in innocent
    busy = trained_otherwise(row(1.3, 0.65), row(1.0, 0.69))
    assert busy is not None and "neither time is certain" in busy and "not why" not in busy
    unseen = trained_otherwise(row(2.8, None), row(1.0, 0.02))
    assert unseen is not None and unseen.endswith("what else ran on its cores is not known")
    assert trained_otherwise(row(1.05, 0.5), row(1.0, 0.0)) is None
    assert trained_otherwise(row(1.05, 0.5), None) is None


def test_a_store_page_says_why_predictions_were_off() -> None:
    rows = [row(2.0, 0.55, 1.0), row(1.0, 0.03, 1.0)]
    content = measured_content({"mine": rows})
    assert content.answers[0].sure.endswith(
        "Predictions were off by 25.0% on average over 2 runs. Other programs took up to 55% of the cores' time in 1 "
        "of 2 runs, which makes times too long: measure again on a quiet machine."
    )
    fast, slow = content.cases
    assert "other programs took 55%" in slow.notes and fast.notes == ""
    assert "other programs took 55%" in record(rows[0], frozenset())["notes"]
    assert disturbed([row(1.0, 0.03), row(1.0, None)]) is None


def test_work_of_processes_below_this_one_is_its_own_while_they_still_run() -> None:
    nested = [sys.executable, "-c", f"{BURN.format(seconds=0.5)}print('done', flush=True)\ninput()"]
    # the shell stays, since it has something to do behind the program
    with subprocess.Popen(
        ["sh", "-c", '"$@"; :', "sh", *nested], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as shell:
        before = Work.so_far()
        assert shell.stdout is not None and shell.stdout.readline() == "done\n"
        after = Work.so_far()
        shell.communicate("\n")
    assert before is not None and after is not None
    assert after.own_s - before.own_s > 0.3
