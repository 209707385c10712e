"""Puts what `make demo` measured into README.md, between the demo markers.

make demo && .venv/bin/python docs/readme_demo.py
"""

from __future__ import annotations

import json
from pathlib import Path

from trimaran.cost.score import mape
from trimaran.nouns.measurement import Measurement
from trimaran.protocol.host import QUIET_SHARE
from trimaran.report.measured_rows import FIELDS, records
from trimaran.report.tables import render
from trimaran.store import Store
from trimaran.study.workspace import Workspace

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- demo:begin -->", "<!-- demo:end -->"
SHOWN = ("devices", "dp", "tp", "pp", "vpp", "mbs", "gbs", "zero_stage", "recompute", "schedule", "predicted_mem_gib",
         "mem_gib", "predicted_sec_per_it", "sec_per_it", "tflops", "status")  # fmt: skip


def block(rows: list[Measurement], losses: list[float]) -> str:
    """The README's paragraph and table."""
    ran = [row for row in rows if row.sec_per_it]
    best = min(ran, key=lambda row: row.sec_per_it or 0.0)
    error = mape([row.predicted_sec_per_it or 0.0 for row in ran], [row.sec_per_it or 1.0 for row in ran])
    fields = [field for field in FIELDS if field.key in SHOWN]
    others = max(row.others_share or 0.0 for row in ran)
    busy = f", while other programs took up to {others:.0%} of the cores' time" if others > QUIET_SHARE else ""
    machine = (best.machine or "").split(", Linux")[0]
    return "\n".join(
        (
            BEGIN,
            f"What it measured on one machine ({machine}), beside what `probe` and the "
            f"cost model said before the runs (mean error of Sec/it {error:.1%}{busy}):",
            "",
            render(records(sorted(ran, key=lambda row: row.sec_per_it or 0.0)), fields, "markdown"),
            "",
            f"Winner: `{best.layout_label}`. {len(losses)} training steps with it took the loss from {losses[0]:.2f} "
            f"to {losses[-1]:.2f} nats a token.",
            END,
        )
    )


def main() -> None:
    """Rewrite the block in README.md."""
    place = Workspace(ROOT / "runs" / "laptop")
    with Store(place.store, create=False) as store:
        rows = store.measurements()
    log = (place.training / "log.jsonl").read_text().splitlines()
    losses = [json.loads(line)["lm_loss"] for line in log]
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    readme.write_text(before + block(rows, losses) + rest.split(END)[1])


if __name__ == "__main__":
    main()
