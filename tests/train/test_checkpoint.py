"""Checkpoints: go on anywhere, bit for bit where nothing changed, and never on damaged files."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pool import Pool, Run
from reference import Reference
from shapes import SMALL, as_deep_as
from trimaran.layout.notation import parse_layout
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.workload import RampUp
from trimaran.protocol.job import TrainJob
from trimaran.protocol.phases import Heartbeat, RankPhase
from trimaran.train.comm.group import GroupFactory
from trimaran.train.comm.mesh import build_mesh
from trimaran.train.engine.trainer import Trainer
from trimaran.train.model.weight import drawn
from trimaran.train.run.course import Course
from trimaran.train.run.first_weights import first_weights
from trimaran.train.run.samples import open_data
from trimaran.train.state import checkpoint_writer, manifest
from trimaran.train.state.manifest import folder_name, read_manifest, saved_steps
from trimaran.train.state.pieces import state_pieces
from trimaran.train.state.resume import resume
from trimaran.train.state.saver import Saver

Maker = Callable[..., TrainJob]


@pytest.fixture
def train(pool: Pool, make_job: Maker, tmp_path: Path) -> Callable[..., Run]:
    """Train up to `steps` of 6, saving into one folder, or going on from it."""

    def run(layout: str, steps: int, *, resume: bool = False, **changes: object) -> Run:
        settings = {"steps": 6, "checkpoint_every": 2, "seed": 1234} | changes
        job = make_job(layout, **settings)
        update = {"steps": steps, "checkpoint_dir": str(tmp_path), "resume": resume}
        return pool.run(job.model_copy(update=update))

    return run


PAIRS = (
    ("dp2,tp2,pp2,mbs6,zero1", "pp4,mbs8,split3-1-3-1"),
    ("cp2,tp2,mbs12,zero1,sp", "dp4,shard2,mbs6,zero3"),
)
MORE_PAIRS = (
    ("dp2,tp2,pp2,mbs6", "dp3,tp2,mbs8,zero2"),
    ("dp4,tp2,mbs6,zero3", "tp8,mbs24"),
    ("tp8,mbs24", "dp4,tp2,mbs6,zero3"),
    ("dp4,shard2,cp2,mbs6,zero2", "dp2,mbs12"),
    ("dp8,mbs3", "dp1,mbs24"),
    ("cp2,mbs24", "dp2,mbs12"),
    ("dp2,mbs12", "cp2,mbs24,cp-ulysses"),
    ("dp2,cp2,pp2,mbs6", "dp4,shard2,tp2,mbs6,zero1"),
    ("cp8,mbs24,cp-all_gather,zero1", "dp2,shard1,cp4,mbs6,zero3"),
    ("dp3,mbs8,zero3", "dp2,pp3,mbs4"),
    ("tp2,pp4,mbs8,gpipe", "dp2,tp4,mbs12,zero1"),
    ("pp2,vpp2,mbs4", "dp2,tp2,pp2,mbs6,ps"),
    ("dp2,tp2,pp2,mbs6,ps", "dp2,tp2,pp2,mbs6"),
    ("dp2,tp3,mbs12,zero2", "pp2,vpp2,dp2,mbs3"),
    ("dp8,mbs3,fsdp", "tp2,mbs24,sp"),
    ("dp1,mbs24", "dp6,mbs2,zero3"),
)


@pytest.mark.parametrize(
    ("written_on", "read_on"), [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.proof) for pair in MORE_PAIRS)]
)
def test_a_checkpoint_goes_on_on_any_layout(
    reference: Reference, train: Callable[..., Run], written_on: str, read_on: str
) -> None:
    model = max((as_deep_as(parse_layout(one), SMALL) for one in (written_on, read_on)), key=lambda one: one.layers)
    undisturbed = reference.run(model, steps=6)
    train(written_on, 4, model=model)
    resumed = train(read_on, 6, model=model, resume=True)
    assert [notice["step"] for notice in resumed.of_kind("resumed")] == [4]
    assert resumed.losses == pytest.approx(undisturbed.losses[4:], rel=1e-5)
    assert resumed.grad_norms == pytest.approx(undisturbed.grad_norms[4:], rel=1e-3)


@pytest.mark.parametrize(
    "layout",
    [
        "dp2,tp2,pp2,mbs6,zero1",
        "dp2,mbs6,bf16,zero3",
        "dp1,mbs24",
        *(pytest.param(layout, marks=pytest.mark.proof)
          for layout in ("tp2,pp2,mbs6,fp16", "dp4,shard2,cp2,mbs6,zero1", "dp2,tp2,pp2,mbs6,local3",
                         "dp4,shard2,mbs6,zero3,local3,compress-fp16")),
    ],
)  # fmt: skip
def test_the_same_layout_goes_on_bit_for_bit(
    train: Callable[..., Run], pool: Pool, make_job: Maker, layout: str
) -> None:
    model = as_deep_as(parse_layout(layout), SMALL)
    undisturbed = pool.run(make_job(layout, model=model, steps=6))
    train(layout, 4, model=model)
    assert train(layout, 6, model=model, resume=True).losses == undisturbed.losses[4:]


def test_a_ramp_up_goes_on_where_it_was(pool: Pool, make_job: Maker, tmp_path: Path) -> None:
    """Batches of 12, 12, 12, 24, ...: the checkpoints lie at steps 2 and 4, before and after the batch has grown."""
    job = make_job("dp2,mbs6", steps=6, checkpoint_every=2)
    ramp = RampUp(start=12, increment=12, samples=36)
    workload = job.workload.model_copy(update={"ramp_up": ramp})
    job = job.model_copy(update={"workload": workload, "checkpoint_dir": str(tmp_path), "resume": True})
    undisturbed = pool.run(job).losses
    assert read_manifest(tmp_path / "step-00000004").consumed_samples == 3 * 12 + 24
    for step in (4, 2):
        for later in range(step + 2, 8, 2):
            shutil.rmtree(tmp_path / folder_name(later))
        assert pool.run(job).losses == undisturbed[step:]


def damage(path: Path, at: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(
    "how",
    ["flipped tensor", "cut",
     *(pytest.param(how, marks=pytest.mark.proof)
       for how in ("flipped header", "flipped manifest", "flipped sum", "gone"))],
)  # fmt: skip
def test_a_damaged_checkpoint_is_told_of_and_the_one_before_it_used(
    train: Callable[..., Run], tmp_path: Path, how: str
) -> None:
    first = train("dp2,mbs12", 6)
    newest = tmp_path / "step-00000006"
    file = newest / "rank-00001.safetensors"
    if how == "gone":
        file.unlink()
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        name, at = {
            "flipped tensor": (file.name, 0.7),
            "flipped header": (file.name, 0.0001),
            "flipped manifest": ("manifest.json", 0.5),
            "flipped sum": ("SHA256SUMS", 0.3),
        }[how]
        damage(newest / name, at)
    resumed = train("dp2,mbs12", 6, resume=True)
    (told,) = resumed.of_kind("damaged")
    assert told["step"] == 6 and "is passed over" in told["text"]
    assert resumed.of_kind("resumed")[0]["step"] == 4
    assert resumed.losses == first.losses[4:]
    assert saved_steps(tmp_path)[0] == 6 and train("dp2,mbs12", 8, resume=True).of_kind("resumed")[0]["step"] == 6


def test_where_no_checkpoint_is_whole_the_training_is_refused(train: Callable[..., Run], tmp_path: Path) -> None:
    train("dp1,mbs24", 2)
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    (refused,) = train("dp1,mbs24", 4, resume=True).of_kind("refused")
    assert "none of the 1 in" in refused["text"]


def test_a_training_that_saves_nothing_goes_on_from_what_is_there(train: Callable[..., Run], tmp_path: Path) -> None:
    train("dp2,mbs12", 2)
    resumed = train("dp2,mbs12", 4, resume=True, checkpoint_every=0)
    assert resumed.of_kind("resumed")[0]["step"] == 2 and len(resumed.losses) == 2
    assert saved_steps(tmp_path) == [2] and not resumed.of_kind("saved")


def test_the_newest_are_kept_and_nothing_else_is_left(train: Callable[..., Run], tmp_path: Path) -> None:
    train("dp2,tp2,mbs12", 8, model=SMALL)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000004", "step-00000006", "step-00000008"]
    newest = tmp_path / "step-00000008"
    subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=newest, check=True)
    manifest = read_manifest(newest)
    assert (manifest.step, manifest.consumed_samples) == (8, 8 * 24)
    assert manifest.tensors["weights/embedding.tokens"].shape == (SMALL.vocab, SMALL.hidden)
    # every element once, spread over the ranks
    saved = sum(c for t in manifest.tensors.values() for c in (elements(chunk.sizes) for chunk in t.chunks))
    assert saved == 3 * SMALL.parameters - 3 * SMALL.hidden * (-SMALL.vocab % 128)
    sizes = [(newest / name).stat().st_size for name in manifest.files]
    assert len(sizes) == 4 and max(sizes) < 1.5 * min(sizes)


def test_what_a_killed_training_left_is_removed_by_the_next(train: Callable[..., Run], tmp_path: Path) -> None:
    train("dp1,mbs24", 2)
    for left_over in ("saving-step-00000004", "old-step-00000001"):
        shutil.copytree(tmp_path / "step-00000002", tmp_path / left_over)
    train("dp1,mbs24", 3, resume=True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def elements(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"seed": 7}, "train.seed is 7, the checkpoint has 1234"),
        ({"model": SMALL.model_copy(update={"layers": 4})}, "workload.model.layers is 4, the checkpoint has 8"),
    ],
    ids=["seed", "model"],
)
def test_another_recipe_is_refused_with_both_values(
    train: Callable[..., Run], changes: dict[str, object], sentence: str
) -> None:
    train("dp1,mbs24", 2)
    (refused,) = train("dp1,mbs24", 4, resume=True, **changes).of_kind("refused")
    assert sentence in refused["text"]


def test_another_name_is_no_other_model(train: Callable[..., Run]) -> None:
    train("dp1,mbs24", 2)
    renamed = SMALL.model_copy(update={"name": "folder-that-was-moved"})
    (resumed,) = train("dp1,mbs24", 4, resume=True, model=renamed).of_kind("resumed")
    assert resumed["step"] == 2 and resumed["changed"] == ()


def test_a_checkpoint_that_cannot_be_written_is_told_of_and_the_training_goes_on(
    train: Callable[..., Run], small_disk: Callable[..., Path], tmp_path: Path
) -> None:
    small_disk(1, "saving-step-00000004")
    run = train("dp2,mbs12", 6)
    assert len(run.losses) == 6
    (told,) = run.of_kind("not_saved")
    assert told["step"] == 4 and "the training goes on" in told["text"]
    assert saved_steps(tmp_path) == [6, 2]


@pytest.mark.parametrize("step", [3, 4], ids=["between two", "in the place of one"])
def test_a_pipe_under_the_name_of_a_checkpoint_is_none(train: Callable[..., Run], tmp_path: Path, step: int) -> None:
    train("dp1,mbs24", 2)
    os.mkfifo(tmp_path / folder_name(step))
    run = train("dp1,mbs24", 4, resume=True)
    assert run.of_kind("resumed")[0]["step"] == 2 and not run.of_kind("damaged")
    assert saved_steps(tmp_path) == [4, 2] and not list(tmp_path.glob("old-*"))


def alone(job: TrainJob) -> Trainer:
    """A trainer of one rank, in this process."""
    device = torch.device("cpu")
    mesh = build_mesh(job.layout, 0, range(1), GroupFactory(device))
    assert mesh is not None
    return Trainer(job, mesh, open_data(job)[0], device, drawn(job.train.seed))


def test_all_that_is_read_of_a_checkpoint_is_a_sign_of_life(
    make_job: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job("dp1,mbs24", steps=1).model_copy(update={"checkpoint_dir": str(tmp_path), "resume": True})
    trainer = alone(job)
    heartbeat = Heartbeat(tmp_path / "heartbeat")
    heartbeat.enter(RankPhase.RESUME)
    course = Course(trainer, None, lambda kind, /, **fields: None, heartbeat)
    trainer.step()
    course.finish()

    block, signs = 1 << 12, list[str]()
    monkeypatch.setattr(heartbeat, "beat", lambda: signs.append("alive"))
    monkeypatch.setattr(manifest, "_READ_BYTES", block)
    Course(alone(job.model_copy(update={"steps": 2})), None, lambda kind, /, **fields: None, heartbeat)
    saved = tmp_path / "step-00000001"
    written = read_manifest(saved)
    blocks = sum(
        -(-(saved / name).stat().st_size // block) for name in ("manifest.json", "tokenizer.json", *written.files)
    )
    assert len(signs) == blocks + len(written.tensors)

    signs.clear()
    begun = job.model_copy(update={"train": job.train.model_copy(update={"init_from": str(saved)})})
    mesh = build_mesh(job.layout, 0, range(1), GroupFactory(torch.device("cpu")))
    assert mesh is not None
    first = first_weights(begun, lambda: signs.append("alive"))
    made = Trainer(begun, mesh, open_data(begun)[0], torch.device("cpu"), first)
    assert len(signs) == blocks + len(made.flat.places)


def test_steps_go_on_while_a_checkpoint_is_written_and_do_not_change_it(
    make_job: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, later = (alone(make_job("dp1,mbs24", steps=6)) for _ in range(2))
    disk_is_free, write = threading.Event(), checkpoint_writer._write_safetensors

    def write_once_free(*arguments: Any) -> str:
        assert disk_is_free.wait(100)
        return write(*arguments)

    monkeypatch.setattr(checkpoint_writer, "_write_safetensors", write_once_free)
    saver = Saver(trainer, tmp_path, 3, None, lambda kind, /, **fields: None)
    trainer.step()
    saver.save()
    losses = [trainer.step().loss for _ in range(3)]
    assert saved_steps(tmp_path) == [], "the steps waited for the disk"
    disk_is_free.set()
    saver.finish()
    assert resume(later, tmp_path, lambda kind, /, **fields: None) and later.step_number == 1
    assert [later.step().loss for _ in range(3)] == losses


def test_a_tokenizer_of_any_size_lies_beside_the_weights(make_job: Maker, tmp_path: Path) -> None:
    """One of more than 64 MiB kept every checkpoint from being written."""
    data = tmp_path / "data"
    job = make_job("dp1,mbs24", steps=6)
    shutil.copytree(job.data_dir, data)
    with (data / "tokenizer.json").open("r+b") as file:
        file.truncate(65 << 20)
    trainer = alone(job.model_copy(update={"data_dir": str(data)}))
    saver = Saver(trainer, tmp_path / "checkpoints", 1, None, lambda kind, /, **fields: None)
    trainer.step()
    saver.save()
    saver.finish()
    saved = tmp_path / "checkpoints" / folder_name(1)
    assert (saved / "tokenizer.json").stat().st_size == 65 << 20
    manifest.verify(saved)


def test_an_old_checkpoint_that_cannot_be_removed_ends_no_training(make_job: Maker, tmp_path: Path) -> None:
    trainer, told = alone(make_job("dp1,mbs24", steps=6)), []
    saver = Saver(trainer, tmp_path, 1, None, lambda kind, /, **fields: told.append(kind))
    trainer.step()
    saver.save()
    saver.wait()
    (tmp_path / "old-step-00000001" / "busy").mkdir(parents=True)  # its name is taken
    trainer.step()
    saver.save()
    saver.finish()
    assert told == ["saved", "saved"] and saved_steps(tmp_path)[0] == 2


def test_numbers_that_are_not_finite_are_found_without_a_copy_of_the_state(make_job: Maker, tmp_path: Path) -> None:
    trainer = alone(make_job("dp1,mbs24", steps=6))
    saver = Saver(trainer, tmp_path, 1, None, lambda kind, /, **fields: None)
    pieces = state_pieces(trainer, saving=True)

    class Largest(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(found):
                self.made = max(self.made, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
            return found

    with Largest() as largest:
        assert saver._all_finite(pieces)
    assert largest.made <= 2
    for value in (torch.nan, torch.inf, -torch.inf):
        kept = pieces[3].tensor.view(-1)[0].clone()
        pieces[3].tensor.view(-1)[0] = value
        assert not saver._all_finite(pieces)
        pieces[3].tensor.view(-1)[0] = kept


def test_copying_the_state_gives_signs_of_life(make_job: Maker, tmp_path: Path) -> None:
    """Of a rank with tens of gigabytes the copy, and more so the pages that it is made in, take longer than a step."""
    trainer, signs = alone(make_job("dp1,mbs24", steps=6)), list[str]()
    saver = Saver(trainer, tmp_path, 1, None, lambda kind, /, **fields: None, lambda: signs.append("alive"))
    pieces = state_pieces(trainer, saving=True)
    saver._stage(pieces)
    assert len(signs) >= 2 * len(pieces)
    signs.clear()
    saver._stage(pieces)
    assert len(signs) >= len(pieces)


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.safetensors"])
def test_a_hostile_checkpoint_runs_no_code(train: Callable[..., Run], tmp_path: Path, name: str) -> None:
    mark = tmp_path / "ran"
    evil = pickle.dumps(Payload(mark))
    pickle.loads(evil)
    mark.unlink()  # only now
    train("dp1,mbs24", 2)
    newest = tmp_path / "step-00000002"
    for written in (name, ".metadata"):
        (newest / written).write_bytes(evil)
    sums = ["sha256sum", "manifest.json", "rank-00000.safetensors"]
    (newest / "SHA256SUMS").write_bytes(subprocess.run(sums, cwd=newest, check=True, capture_output=True).stdout)
    assert train("dp1,mbs24", 4, resume=True).of_kind("refused")
    assert not mark.exists()


def sums_made_to_fit(checkpoint: Path) -> None:
    names = [path.name for path in checkpoint.iterdir() if path.name != "SHA256SUMS"]
    fitting = subprocess.run(["sha256sum", *names], cwd=checkpoint, check=True, capture_output=True).stdout
    (checkpoint / "SHA256SUMS").write_bytes(fitting)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"state": {}}, "state.updates is missing"),
        ({"tensors": {}}, "it has no tensor"),
        ({"state": {"updates": -1}}, "-1"),
    ],
)
def test_a_checkpoint_whose_sums_fit_but_whose_state_is_empty_is_refused_by_name(
    train: Callable[..., Run], tmp_path: Path, change: dict[str, object], says: str
) -> None:
    train("dp1,mbs24", 2)
    newest = tmp_path / "step-00000002"
    changed = json.loads((newest / "manifest.json").read_text()) | change
    (newest / "manifest.json").write_text(json.dumps(changed))
    sums_made_to_fit(newest)
    (told,) = train("dp1,mbs24", 4, resume=True).of_kind("refused")
    assert says in told["text"] and str(newest) in told["text"]


def test_a_checkpoint_that_finds_no_room_is_told_and_the_one_before_stays(
    make_job: Maker, small_disk: Callable[..., Path]
) -> None:
    trainer, disk = alone(make_job("dp1,mbs24", steps=6)), small_disk(4)
    told: list[str] = []
    saver = Saver(trainer, disk, 3, None, lambda kind, /, **fields: told.append(str(fields.get("text"))))
    trainer.step()
    saver.save()
    trainer.step()
    saver.save()
    with pytest.raises(TrimaranError, match=r"step 2 could not be written: .*No space left") as error:
        saver.finish()
    assert "\n" not in str(error.value) and "the training goes on" in told[-1]
    assert [path.name for path in disk.iterdir()] == ["step-00000001"]
    manifest.verify(disk / "step-00000001")
