"""Claims about what a row keeps of a run: all of its layout and its model, through store, table, log and fit."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from store_rows import LAYOUT, LLAMA, WORKLOAD
from table_text import table_text
from trimaran.bench.trial.trial import Trial
from trimaran.cli.app import app
from trimaran.cost.fit.fit_rows import observation
from trimaran.cost.table.predict_table import predict_table
from trimaran.files.catalogue import catalogue_names, dump_toml, load_model
from trimaran.files.row_nouns import measured_workload, nouns_of, run_cells
from trimaran.files.row_table import parse_table, read_table
from trimaran.layout.layout import Layout
from trimaran.nouns.attention import RotaryScaling
from trimaran.nouns.measurement import Measurement
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.precision import PRECISIONS
from trimaran.nouns.stack import FOLDED, Schedule
from trimaran.nouns.workload import Workload
from trimaran.store import Store, export_csv
from trimaran.store.compare import compare
from trimaran.store.importers.formats import Asked, import_file

MEGATRON_LINE = "iteration 1/ 1 | elapsed time per iteration (ms): 500.0 | global batch size: 16 | lm loss: 9.0 |\n"
CSV_HEADER = "cluster,stack,seq_len,mbs,gbs,dp,tp,model"


def stored(row: Measurement, path: Path) -> Measurement:
    """The row as a store gives it back to whoever opens it next."""
    with Store(path) as store:
        store.add(row)
    with Store(path) as store:
        return store.measurements()[-1]


def tabled(row: Measurement) -> Measurement:
    """The row as a table gives it back."""
    (read,) = parse_table(table_text([row]), "table").rows
    assert read.measurement is not None, read.error
    return read.measurement


def test_a_trials_row_gives_back_its_layout_and_its_model(row: Measurement, tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    assert stored(row, path) == row
    with Store(path) as store:
        export_csv(store.measurements(), tmp_path / "s.csv")
    (exported,) = read_table(tmp_path / "s.csv").measurements
    imported = import_file(tmp_path / "s.csv", Asked())
    assert not imported.refused and not imported.unread
    for kept in (row, stored(row, tmp_path / "again.sqlite"), exported, *imported.rows):
        nouns = nouns_of(kept.model_copy(update={"cluster": str(tmp_path / "here.toml")}))
        assert (nouns.layout, nouns.workload) == (LAYOUT, WORKLOAD)


def test_a_fit_to_a_store_is_to_the_run_that_was_measured(row: Measurement, tmp_path: Path) -> None:
    kept = stored(row, tmp_path / "s.sqlite").model_copy(update={"cluster": str(tmp_path / "here.toml")})
    seen, _ = observation(kept)
    assert (seen.layout, seen.case.workload.model) == (LAYOUT, LLAMA)
    files = ["--cluster", str(tmp_path / "here.toml"), "-o", str(tmp_path / "fitted.toml")]
    done = CliRunner().invoke(app, ["fit", str(tmp_path / "s.sqlite"), *files])
    assert done.exit_code == 0 and "fitted to 1 rows" in done.output, done.output


def test_a_prediction_of_an_exported_row_is_of_its_whole_layout(row: Measurement, tmp_path: Path) -> None:
    kept = row.model_copy(update={"cluster": str(tmp_path / "here.toml")})
    plain = {"layout_label": "dp2,tp2,pp2,mbs1,recompute-full,bf16"}
    (whole, other) = predict_table(parse_table(table_text([kept, kept.model_copy(update=plain)]), "two"))
    assert whole.estimate is not None and other.estimate is not None, (whole.error, other.error)
    assert whole.estimate.sec_per_it != other.estimate.sec_per_it


def test_trimarans_own_log_gives_back_its_layout_and_its_model(row: Measurement, trial: Trial, tmp_path: Path) -> None:
    log = Path(trial.job.out_dir) / "log.jsonl"
    log.write_text("".join(json.dumps({"iteration": n, "sec_per_it": 0.5, "global_batch": 16}) + "\n" for n in (1, 2)))
    (imported,) = import_file(log, Asked(given={"cluster": str(tmp_path / "here.toml")})).rows
    nouns = nouns_of(stored(imported, tmp_path / "s.sqlite"))
    assert (nouns.layout, nouns.workload) == (LAYOUT, WORKLOAD)


def test_a_log_imported_with_a_model_file_keeps_that_model(tmp_path: Path) -> None:
    dump_toml(LLAMA, tmp_path / "llama.toml")
    log = tmp_path / "run.log"
    log.write_text(MEGATRON_LINE)
    stated = ["--model", str(tmp_path / "llama.toml"), "--cluster", "dgx-h100", "--set", "seq_len=64"]
    into = ["--into", str(tmp_path / "s.sqlite"), "--set", "layout_label=dp2,mbs1,bf16", "--set", "optimizer=adam"]
    done = CliRunner().invoke(app, ["import", str(log), *into, *stated])
    assert done.exit_code == 0, done.output
    with Store(tmp_path / "s.sqlite") as store:
        (imported,) = store.measurements()
    assert nouns_of(imported).workload.model == LLAMA


@st.composite
def models(draw: st.DrawFn) -> Model:
    heads = draw(st.sampled_from((1, 2, 4, 6)))
    sizes = {
        "heads": heads,
        "kv_heads": draw(st.sampled_from([n for n in (0, 1, 2, 3) if n == 0 or heads % n == 0])),
        "head_dim": draw(st.sampled_from((0, 2, 8))),
        "hidden": heads * draw(st.sampled_from((2, 8, 16))),
        "ffn_hidden": draw(st.integers(0, 100)),
        "layers": draw(st.integers(1, 12)),
        "vocab": draw(st.integers(2, 100_000)),
        "max_positions": draw(st.integers(64, 4096)),
    }
    kinds = {
        "name": draw(st.one_of(st.text(max_size=12), st.sampled_from(("gpt2-124m", "bloom-176b")))),
        "tied_embedding": draw(st.booleans()),
        "positions": draw(st.sampled_from(("learned", "rotary", "alibi"))),
        "rotary_theta": draw(st.floats(1e-3, 1e7)),
        "rotary_scaling": draw(
            st.none()
            | st.builds(
                RotaryScaling,
                factor=st.floats(1, 64),
                low_freq_factor=st.just(1.0),
                high_freq_factor=st.floats(1.5, 8),
                original_max_positions=st.integers(1, 8192),
            )
        ),
        "norm": draw(st.sampled_from(("layernorm", "rmsnorm"))),
        "norm_epsilon": draw(st.floats(1e-12, 1e-3)),
        "mlp": draw(st.sampled_from(("gelu", "swiglu"))),
        "activation": draw(st.sampled_from(("gelu", "gelu_tanh"))),
        "bias": draw(st.booleans()),
        "embedding_norm": draw(st.booleans()),
        "head": draw(st.sampled_from(("vocabulary", "classifier"))),
        "dropout": draw(st.sampled_from((0.0, 0.1))),
    }
    return Model.model_validate(sizes | kinds)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    pp, fully_sharded = draw(st.integers(1, 4)), draw(st.booleans())
    schedule = draw(st.sampled_from(get_args(Schedule))) if pp > 1 else "none"
    # a folded schedule is said to mean two chunks a rank: a rule refuses another number
    vpp = 1 if pp == 1 else 2 if schedule in FOLDED else draw(st.integers(1, 3))
    recompute = draw(st.sampled_from(("none", "selective", "full")))
    split = st.lists(st.integers(1, 3), min_size=pp * vpp, max_size=pp * vpp)
    return Layout.model_validate(
        {
            "dp": draw(st.integers(1, 8)),
            "tp": draw(st.integers(1, 4)),
            "pp": pp,
            "vpp": vpp,
            "mbs": draw(st.integers(1, 4)),
            "zero_stage": 3 if fully_sharded else draw(st.integers(0, 2)),
            "dp_kind": "fully_sharded" if fully_sharded else draw(st.sampled_from(("all_reduce", "parameter_server"))),
            "sequence_parallel": draw(st.booleans()),
            "recompute": recompute,
            "recompute_every": draw(st.integers(1, 4)) if recompute == "full" else 1,
            "precision": draw(st.sampled_from(tuple(PRECISIONS))),
            "schedule": schedule,
            "stage_split": tuple(draw(split)) if draw(st.booleans()) else (),
            "placement": draw(st.permutations(("tp", "dp", "pp"))),
        }
    )


@pytest.fixture(scope="module")
def one_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store(tmp_path_factory.mktemp("whole") / "s.sqlite") as store:
        yield store


COMPUTED = [load_model(name) for name in catalogue_names("models")]


@given(model=models() | st.sampled_from(COMPUTED), layout=layouts())
@settings(max_examples=100, deadline=None)
def test_every_layout_and_model_comes_back_from_store_and_table(one_store: Store, model: Model, layout: Layout) -> None:
    workload = Workload(model=model, seq_len=64, global_batch=16)
    where = {"cluster": "dgx-h100", "stack": "trimaran", "devices": layout.devices}
    made = Measurement.model_validate({**where, **run_cells(workload, layout), "trial_key": "k"})
    one_store.add(made)
    read = one_store.trial("k")
    assert read == made
    for kept in (made, read, tabled(made)):
        nouns = nouns_of(kept)
        assert (nouns.layout, nouns.workload) == (layout, workload)


def test_a_catalogue_model_is_kept_by_its_name(trial: Trial) -> None:
    bloom = load_model("bloom-176b")
    assert run_cells(WORKLOAD.model_copy(update={"model": bloom}), LAYOUT)["model"] == "bloom-176b"
    shallow = bloom.model_copy(update={"layers": 4})
    assert json.loads(str(run_cells(WORKLOAD.model_copy(update={"model": shallow}), LAYOUT)["model"]))["layers"] == 4


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("tp", 4, "tp is 4, but layout_label"),
        ("precision", "fp16", "precision is fp16, but layout_label"),
        ("recompute", "none", "says full: correct the wrong one"),
        ("dp", 1, "but devices is 8"),
        ("layout_label", "dp2,tp2,mbs1,warp9", "'warp9' is not understood"),
        ("model", '{"layers": 2}', "model: hidden: Field required"),
        ("model", '{"layers": ', "model: Invalid JSON"),
        ("optimizer", "lion", "optimizer: Input should be 'adam' or 'sgd' (it is 'lion')"),
    ],
)
def test_a_row_that_contradicts_its_layout_or_names_what_is_not_known_is_refused_in_one_line(
    row: Measurement, column: str, value: object, says: str
) -> None:
    changed = {column: value} | ({"devices": None} if column == "tp" else {})
    with pytest.raises(TrimaranError) as error:
        nouns_of(row.model_copy(update=changed), "dgx-h100")
    assert says in str(error.value) and "\n" not in str(error.value)


def rows_of(text: str) -> list[Measurement]:
    table = parse_table(text, "t")
    assert not [row.error for row in table.rows if row.error]
    return table.measurements


def test_a_table_that_names_its_model_needs_no_column_of_its_shape() -> None:
    (read,) = rows_of(f"{CSV_HEADER}\ndgx-h100,trimaran,2048,1,8,2,4,bloom-176b\n")
    bloom = load_model("bloom-176b")
    assert (read.layers, read.hidden, read.ffn_hidden, read.vocab) == (70, 14336, 4 * 14336, bloom.vocab)
    assert nouns_of(read).workload.model == bloom


def test_stated_columns_override_the_named_model_and_what_it_derives_follows() -> None:
    header = f"{CSV_HEADER},layers,hidden,heads,ffn_hidden,kv_heads,vocab"
    cells = "dgx-h100,trimaran,2048,1,8,2,4"
    shallow, narrow, llama = (
        nouns_of(read).workload.model
        for read in rows_of(
            f"{header}\n{cells},bloom-176b,4,,,,,\n{cells},bloom-176b,,2048,16,,,\n{cells},llama3-8b,,2048,16,,,512\n"
        )
    )
    bloom, llama3 = load_model("bloom-176b"), load_model("llama3-8b")
    assert shallow == bloom.model_copy(update={"layers": 4})
    assert (narrow.ffn_hidden, narrow.kv_heads, narrow.head_dim) == (4 * 2048, 16, 128)
    assert (narrow.positions, narrow.embedding_norm, narrow.layers) == ("alibi", True, 70)
    # its MLP and key-value heads are sizes of their own
    assert (llama.ffn_hidden, llama.kv_heads, llama.head_dim, llama.vocab) == (14336, 8, 128, 512)
    assert (llama.norm, llama.mlp, llama.rotary_theta) == (llama3.norm, llama3.mlp, llama3.rotary_theta)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("bloom-176", "did you mean 'bloom-176b'?"),
        ("absent.toml", "absent.toml cannot be read"),
        ("", "layers is empty, and it has no default"),
    ],
)
def test_a_model_that_is_not_known_refuses_its_row_and_the_others_go_on(model: str, says: str) -> None:
    cells = "dgx-h100,trimaran,2048,1,8,2,4"
    table = parse_table(f"{CSV_HEADER}\n{cells},{model}\n{cells},gpt2-124m\n", "t")
    error = table.rows[0].error
    assert error is not None and error.startswith("row 1: ") and says in error and "\n" not in error
    assert len(table.measurements) == 1


def test_columns_that_a_label_states_may_be_blank() -> None:
    text = f'cluster,stack,model,seq_len,gbs,layout_label\ndgx-h100,trimaran,gpt2-124m,1024,8,"{LAYOUT}"\n'
    (read,) = rows_of(text.replace(",split3-5", ""))
    assert (read.dp, read.precision, read.recompute, read.mbs) == (2, "bf16", "full", 1)
    assert nouns_of(read).layout == LAYOUT.model_copy(update={"stage_split": ()})


def test_a_third_optimizer_is_refused_in_every_way_in(row: Measurement, tmp_path: Path) -> None:
    def refused(said: str | None) -> None:
        assert said is not None and "\n" not in said.strip()
        assert all(word in said for word in ("optimizer", "lion", "adam", "sgd")), said

    text = io.StringIO()
    cells = next(csv.DictReader(io.StringIO(table_text([row])))) | {"optimizer": "lion"}
    writer = csv.DictWriter(text, fieldnames=list(cells))
    writer.writeheader()
    writer.writerow(cells)
    refused(parse_table(text.getvalue(), "t").rows[0].error)
    (tmp_path / "t.csv").write_text(text.getvalue())
    refused(import_file(tmp_path / "t.csv", Asked()).refused[0])
    stated = CliRunner().invoke(
        app, ["import", str(tmp_path / "t.csv"), "--into", str(tmp_path / "i.sqlite"), "--set", "optimizer=lion"]
    )
    refused(str(stated.exception))
    log = tmp_path / "run.log"
    log.write_text("  optimizer ................................ lion\n" + MEGATRON_LINE)
    given = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 256, "seq_len": 32, "mbs": 1}
    refused(import_file(log, Asked(given=given)).refused[0])
    with pytest.raises(ValueError, match="expected one of adam, sgd"):
        Measurement.model_validate(row.model_dump() | {"optimizer": "lion"})
    stored(row, tmp_path / "s.sqlite")
    with sqlite3.connect(tmp_path / "s.sqlite") as other:
        other.execute("UPDATE measurement SET optimizer = 'lion'")
    with pytest.raises(TrimaranError) as error, Store(tmp_path / "s.sqlite") as store:
        store.measurements()
    refused(str(error.value))


def test_runs_that_differ_in_sequence_parallelism_alone_are_told_apart(row: Measurement) -> None:
    other = row.model_copy(update={"layout_label": str(row.layout_label).replace(",sp", "")})
    assert set(compare(row, other).differs) == {"layout_label"}


def test_a_row_is_of_the_workload_whose_model_it_is_whatever_it_is_called(row: Measurement) -> None:
    def with_model(**fields: object) -> Workload:
        return WORKLOAD.model_copy(update={"model": Model.model_validate(LLAMA.model_dump() | fields)})

    assert measured_workload(row, WORKLOAD)
    assert measured_workload(row, with_model(name="renamed"))
    assert not measured_workload(row, with_model(mlp="gelu"))
    assert not measured_workload(row, with_model(layers=4))
    assert measured_workload(row.model_copy(update={"model": None}), with_model(mlp="gelu"))


@pytest.mark.parametrize("name", ["adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_4bit", "OneBitAdam", "adam_mini"])
def test_a_log_of_an_optimizer_with_other_moments_is_no_row_of_adam(tmp_path: Path, name: str) -> None:
    """Its memory, of a quarter of the moments, was stored as Adam's."""
    log = tmp_path / "run.log"
    log.write_text(f"  optimizer ................................ {name}\n" + MEGATRON_LINE)
    given = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 256, "seq_len": 32, "mbs": 1}
    (said,) = import_file(log, Asked(given=given)).refused
    assert all(word in said for word in ("optimizer", name.lower(), "adam", "sgd")), said
