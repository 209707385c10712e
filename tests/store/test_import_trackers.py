"""Histories that trackers keep or export become rows: event files of TensorBoard, exports of Weights & Biases."""

from __future__ import annotations

import csv
import io
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from trimaran.nouns.measurement import Measurement
from trimaran.nouns.noun import TrimaranError
from trimaran.store.importers.formats import Asked, Imported, import_file, sources_of
from trimaran.store.importers.profile import typed_cells

CELLS: dict[str, str | int | float] = {
    "layers": 12, "hidden": 768, "heads": 12, "vocab": 50257, "seq_len": 1024, "mbs": 4, "gbs": 64,
}  # fmt: skip
Scalars = Sequence[tuple[str, int, float, float]]


def read(path: Path, form: str = "auto") -> Imported:
    return import_file(path, Asked(given=typed_cells(CELLS)), form)


def only(path: Path, form: str) -> Measurement:
    found = read(path)
    assert (found.refused, found.format) == ((), form)
    (row,) = found.rows
    return row


def events(path: Path, scalars: Scalars) -> Path:
    """An event file as PyTorch's SummaryWriter makes it, of tag, step, value and clock."""
    protos = pytest.importorskip("tensorboard.compat.proto.event_pb2")
    written = [protos.Event(file_version="brain.Event:2", wall_time=1.0)]
    for tag, step, value, clock in scalars:
        event = protos.Event(wall_time=clock, step=step)
        event.summary.value.add(tag=tag, simple_value=value)
        written.append(event)
    records = [event.SerializeToString() for event in written]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(struct.pack("<QI", len(each), 0) + each + bytes(4) for each in records))
    return path


def megatron(times: Mapping[int, float], start: float = 0.0) -> Scalars:
    scalars = [("iteration-time", step, seconds, start + step) for step, seconds in times.items()]
    return [
        *scalars,
        *(("lm loss", step, 10.0 - step / 8, start + step) for step in times),
        ("lm loss vs samples", 64, 9.9, 1.0),
    ]


def test_event_files_of_megatron_give_its_times_and_losses(tmp_path: Path) -> None:
    path = events(tmp_path / "tb" / "events.out.tfevents.1.node", megatron({1: 4.0, 2: 0.5, 3: 0.25}))
    for named in (path, path.parent):
        row = only(named, "tensorboard")
        assert (row.step_times_s, row.sec_per_it, row.losses) == ((4.0, 0.5, 0.25), 0.375, (9.875, 9.75, 9.625))


def test_event_files_that_pytorch_writes_are_read(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    for step in (1, 2, 3):
        writer.add_scalar("loss_metrics/global_avg_loss", 8.5 - step, step)
        writer.add_scalar("time_metrics/end_to_end(s)", 2.0 / step, step)
        writer.add_scalar("memory/max_reserved(GiB)", 10.0 + step, step)
        writer.add_text("note", "no scalar", step)
    writer.close()
    row = only(tmp_path, "tensorboard")
    assert (row.step_times_s[:2], row.losses, row.mem_gib) == ((2.0, 1.0), (7.5, 6.5, 5.5), 13.0)


def test_a_batch_that_grows_is_told_by_points_of_its_own(tmp_path: Path) -> None:
    """Megatron writes `batch-size` before the loss of its step, each as an event (training_log)."""
    scalars = [("batch-size", step, 32.0 if step < 3 else 64.0, float(step)) for step in (1, 2, 3, 4, 5)]
    path = events(tmp_path / "events.out.tfevents.1", [*scalars, *megatron({1: 4.0, 2: 0.5, 3: 0.5, 4: 0.25})])
    found = import_file(path, Asked(given=typed_cells({**CELLS, "gbs": ""})))
    assert [(row.gbs, row.step_times_s) for row in found.rows] == [(32, (4.0, 0.5)), (64, (0.5, 0.25))]


def test_a_folder_gives_a_run_for_each_folder_of_event_files_below_it(tmp_path: Path) -> None:
    runs = {"tb": 0.5, "tb/wide": 0.25, "tb/old/wide": 0.125}
    for folder, seconds in runs.items():
        events(tmp_path / folder / "events.out.tfevents.1", megatron({1: 4.0, 2: seconds}))
    events(tmp_path / "tb/wide/1650000000.5/events.out.tfevents.1", [])  # as of a Trainer's hyperparameters
    (tmp_path / "tb/notes").mkdir()
    named = sources_of([tmp_path / "tb"])
    rows = [import_file(path, Asked(given=typed_cells(CELLS)), source=name).rows for path, name in named.items()]
    assert {row.source: row.step_times_s[1] for (row,) in rows} == runs
    assert list(sources_of([tmp_path / "tb/notes"]).values()) == ["notes"], "what is no run is told by its import"


def test_a_run_that_was_started_again_counts_steps_as_they_were_made_last(tmp_path: Path) -> None:
    events(tmp_path / "events.out.tfevents.1", megatron({1: 4.0, 2: 0.5, 3: 0.5, 4: 0.5}))
    events(tmp_path / "events.out.tfevents.2", megatron({3: 6.0, 4: 0.25, 5: 0.25}, start=100.0))
    row = only(tmp_path, "tensorboard")
    assert row.step_times_s == (4.0, 0.5, 0.25, 0.25), "step 3 carries the second start-up"
    assert len(row.losses) == 5 and "started again before iteration 3" in (row.notes or "")


def test_an_event_file_that_is_being_written_is_read_up_to_its_last_whole_record(tmp_path: Path) -> None:
    path = events(tmp_path / "events.out.tfevents.1", megatron({1: 4.0, 2: 0.5}))
    path.write_bytes(path.read_bytes()[:-7])
    assert only(path, "tensorboard").step_times_s == (4.0, 0.5)


def test_an_event_file_of_any_size_is_read_without_its_images(tmp_path: Path) -> None:
    path = events(tmp_path / "events.out.tfevents.1", megatron({1: 4.0, 2: 0.5}))
    scalars, more = path.read_bytes(), events(tmp_path / "more", megatron({3: 0.25})).read_bytes()
    image = 2**40  # a hole in the file: nothing of it may be read
    with path.open("wb") as file:
        file.write(scalars + struct.pack("<QI", image, 0))
        file.seek(image, 1)
        file.write(bytes(4) + more)
    assert only(path, "tensorboard").step_times_s == (4.0, 0.5, 0.25)
    with path.open("r+b") as file:
        file.truncate(len(scalars) + image)  # the image is still being written
    assert only(path, "tensorboard").step_times_s == (4.0, 0.5)


@pytest.mark.parametrize(("mark", "times"), [("train/epoch", (2.5, 2.5)), ("val/accuracy", ())])
def test_steps_of_a_tracker_are_the_trainings_where_the_trainer_is_known(
    tmp_path: Path, mark: str, times: tuple[float, ...]
) -> None:
    """Hugging Face's Trainer tracks by its steps; a loop of one's own may call a loss alike and count epochs."""
    scalars = [(tag, step, 1.0, step * 2.5) for step in (10, 20, 30) for tag in ("train/loss", mark)]
    row = only(events(tmp_path / "events.out.tfevents.1", scalars), "tensorboard")
    assert row.step_times_s == times and len(row.losses) == 3
    assert ("by the clock" in (row.notes or "")) is bool(times)


def test_event_files_without_a_scalar_or_damaged_are_told(tmp_path: Path) -> None:
    path = events(tmp_path / "events.out.tfevents.1", [])
    with pytest.raises(TrimaranError, match="holds no scalar"):
        read(path)
    path.write_bytes(path.read_bytes() + struct.pack("<QI", 3, 0) + b"\xff\xff\xff" + bytes(4))
    with pytest.raises(TrimaranError, match="is damaged at byte"):
        read(path)
    whole = events(path, megatron({1: 4.0})).read_bytes()
    path.write_bytes(whole.replace(b"\x0a\x0eiteration-time", b"\x0a\x7fiteration-time"))
    with pytest.raises(TrimaranError, match="is damaged at byte"):
        read(path)
    events(path, [("loss/of/mine", 1, 2.0, 1.0)])
    (said,) = read(path).refused
    assert "no loss or time of a step is tracked under a name that is known (lm loss" in said


HISTORY: list[dict[str, object]] = [
    {
        "_step": n,
        "_runtime": 10.0 * n + 3,
        "_timestamp": 1e9 + 10 * n,
        "train/global_step": 5 * n,
        "train/loss": 4.0 / n,
    }
    for n in (1, 2, 3, 4)
]


def as_csv(rows: Sequence[Mapping[str, object]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


@pytest.mark.parametrize("form", ["lines", "list", "csv", "csv with an index"])
def test_a_history_of_weights_and_biases_is_timed_by_the_steps_that_the_trainer_counted(
    tmp_path: Path, form: str
) -> None:
    path = tmp_path / "history"
    rows = [*HISTORY, {"_step": 5, "_runtime": 90.0, "train/global_step": 20, "eval/loss": 3.0}]
    texts = {
        "lines": "".join(json.dumps(row) + "\n" for row in rows),
        "list": json.dumps(rows),
        "csv": as_csv(rows),
        "csv with an index": as_csv([{"": at, **row} for at, row in enumerate(rows)]),
    }
    path.write_text(texts[form])
    row = only(path, "wandb-history")
    assert (row.step_times_s, row.losses) == ((2.0, 2.0, 2.0), (4.0, 2.0, 4.0 / 3, 1.0))


@pytest.mark.parametrize("logged", [(1, 10), (1, 10, 20, 30), (1, 2, 3, 4), (110, 120, 130)])
def test_times_of_torchtitan_are_of_the_steps_that_an_interval_had(tmp_path: Path, logged: tuple[int, ...]) -> None:
    """It divides by the interval, though the first is of one step, and one behind an evaluation of what was left."""
    every = 1 if logged[:2] == (1, 2) else 10
    points = []
    for before, step in zip((0 if logged[0] == 1 else logged[0] - 10, *logged), logged, strict=False):
        made = 4 if every > 1 and step == logged[-1] and len(logged) > 2 else step - before
        seconds = 9.0 if step == 1 else 2.0
        figures = {"time_metrics/end_to_end(s)": made * seconds / every, "throughput(tps)": 4096 / seconds}
        points.append({"_step": step, "loss_metrics/global_avg_loss": 9.0 - step / 100, **figures})
    path = tmp_path / "history.jsonl"
    path.write_text("\n".join(map(json.dumps, points)))
    row = only(path, "wandb-history")
    assert row.step_times_s == pytest.approx([9.0 if step == 1 else 2.0 for step in logged])
    assert row.sec_per_it == pytest.approx(2.0)


def test_figures_that_megatron_bridge_tracks_are_the_rows(tmp_path: Path) -> None:
    """Its memory is in units of 10^9 bytes."""
    figures = {"iteration-time": 2.0, "lm loss": 9.0, "batch-size": 64, "throughput/tflops/device": 412.5}
    figures |= {"memory/mem-max-reserved-gigabytes": 64.2}
    path = tmp_path / "history.jsonl"
    path.write_text("\n".join(json.dumps({"_step": step, **figures}) for step in (1, 2, 3)))
    row = only(path, "wandb-history")
    assert (row.sec_per_it, row.tflops, row.mem_gib) == (2.0, 412.5, pytest.approx(64.2e9 / 2**30))


def test_a_batch_that_nanotron_tracks_in_tokens_is_not_one_of_sequences(tmp_path: Path) -> None:
    figures = {"time_per_iteration_ms": 2000.0, "global_batch_size": 65536, "lm_loss": 9.0}
    path = tmp_path / "history.jsonl"
    path.write_text("\n".join(json.dumps({"_step": step, **figures}) for step in (1, 2, 3)))
    row = only(path, "wandb-history")
    assert (row.gbs, row.step_times_s) == (64, (2.0, 2.0, 2.0))


@pytest.mark.parametrize("wrapped", [False, True], ids=["objects a line", "a list in one line"])
def test_a_history_is_read_however_long_its_line(tmp_path: Path, wrapped: bool) -> None:
    """As `json.dump` and `to_json` write one: it was refused for its length, above 64 KiB."""
    points = [{"_step": n, "_timestamp": 2.0 * n, "train/global_step": n, "train/loss": 9.0} for n in range(1, 2001)]
    path = tmp_path / "history.json"
    path.write_text(json.dumps(points) if wrapped else "\n".join(map(json.dumps, points)))
    assert len(path.read_text()) > 2**16
    row = only(path, "wandb-history")
    assert (row.sec_per_it, len(row.losses or ())) == (2.0, 2000)


def test_what_a_history_only_counts_by_what_was_logged_tells_no_time(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text("".join(json.dumps({k: v for k, v in row.items() if "global" not in k}) + "\n" for row in HISTORY))
    row = only(path, "wandb-history")
    assert row.sec_per_it is None and len(row.losses) == 4


@pytest.mark.parametrize("name", ["max_memory_reserved", "peak_memory_usage"])
def test_a_history_of_nemo_has_the_memory_that_it_tracks(tmp_path: Path, name: str) -> None:
    figures = {"train_step_timing in s": 2.0, "global_batch_size": 64, "TFLOPS_per_GPU": 85.8, name: 8 * 2**30}
    path = tmp_path / "history.csv"
    path.write_text(as_csv([{"_step": n, "reduced_train_loss": 9.0 - n, **figures} for n in (1, 2, 3)]))
    row = only(path, "wandb-history")
    assert (row.step_times_s, row.gbs, row.mem_gib, row.tflops) == ((2.0, 2.0, 2.0), 64, 8.0, 85.8)


def test_a_history_gives_the_times_that_a_trainer_tracks(tmp_path: Path) -> None:
    composer = [
        {
            "_step": n,
            "loss/train/total": 9.0 - n,
            "throughput/batches_per_sec": 0.5,
            "memory/peak_reserved_mem": 10.737418,
        }
        for n in (1, 2, 3)
    ]
    path = tmp_path / "history.csv"
    path.write_text(as_csv(composer))
    row = only(path, "wandb-history")
    assert (row.step_times_s, row.mem_gib) == ((2.0, 2.0, 2.0), pytest.approx(10.0)) and "window" in (row.notes or "")
    path.write_text(as_csv([{**row, "time/secs_per_step": 1.5} for row in composer]))
    row = only(path, "wandb-history")
    assert row.step_times_s == (1.5, 1.5, 1.5) and "window" not in (row.notes or "")


def test_rates_of_micro_batches_are_no_rates_of_batches(tmp_path: Path) -> None:
    """litgpt tracks micro-batches of all devices under the name that Composer has for batches."""
    path = tmp_path / "history.jsonl"
    line = {"_step": 1, "iter": 16, "step": 1, "loss": 8.5, "iter_time": 2.6, "throughput/batches_per_sec": 12.0}
    path.write_text("".join(json.dumps({**line, "_step": n, "iter": 16 * n}) + "\n" for n in (1, 2, 3)))
    (said,) = read(path).refused
    assert "no loss or time of a step is tracked under a name that is known" in said


def test_a_charts_export_is_of_one_run(tmp_path: Path) -> None:
    path = tmp_path / "chart.csv"
    path.write_text(
        '"Step","calm-1 - lm loss","calm-1 - lm loss__MIN","calm-1 - lm loss__MAX"\n1,9.5,9.5,9.5\n2,9.25,9.25,9.25\n'
    )
    assert only(path, "wandb-history").losses == (9.5, 9.25)
    path.write_text('"Step","calm-1 - lm loss","wild-2 - lm loss"\n1,9.5,9.5\n')
    (said,) = read(path).refused
    assert "holds 2 runs (calm-1, wild-2): export one at a time" in said


@pytest.mark.parametrize(
    "content",
    [
        '{"_step": 1, "lm loss": 1e999, "batch-size": 1e300}\n',
        '[{"_step": -1}]',
        "[" * 9000,
        '_step,lm loss\n"' + "x\n" * 90_000,
        '{"_step": "a"}',
        "Step,lm loss\n,,,\n",
    ],
)
def test_a_history_that_is_none_ends_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "history"
    path.write_text(content)
    try:
        found = read(path)
    except TrimaranError as error:
        assert "\n" not in str(error)
        return
    assert not found.rows and found.refused
    assert all("\n" not in said for said in found.refused)
