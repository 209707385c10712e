from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pool import Pool
from reference import Reference
from shapes import SMALL
from small_disk import mounted
from trimaran.layout.layout import resolve_split
from trimaran.layout.notation import parse_layout
from trimaran.nouns.model import Model
from trimaran.nouns.stack import Optimizer, Stack
from trimaran.nouns.workload import Workload
from trimaran.protocol.job import DataJob, TrainJob
from trimaran.recipe.data_settings import DataSettings
from trimaran.recipe.train_settings import TrainSettings
from trimaran.train.programs.tokenise import prepare

STACK = Stack(name="trimaran", uneven_stages=True, head_weighted_stages=True)

JobMaker = Callable[..., TrainJob]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Models of this size gain nothing from threads, which beside other programs wait for each other for seconds."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real text as bytes that no commit changes: of another batch some expert is chosen by no more than round-off."""
    data = DataSettings(paths=(str(Path(__file__).parents[2] / "LICENSE"),))
    return prepare(DataJob(data=data, vocab=300, cache_dir=str(tmp_path_factory.mktemp("cache"))))


@pytest.fixture(scope="session")
def make_job(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> JobMaker:
    def make(
        layout: str,
        *,
        model: Model = SMALL,
        global_batch: int = 24,
        steps: int = 20,
        optimizer: Optimizer = "adam",
        **train: object,
    ) -> TrainJob:
        workload = Workload(model=model, seq_len=16, global_batch=global_batch, optimizer=optimizer)
        parsed = parse_layout(layout)
        return TrainJob(
            workload=workload,
            layout=parsed,
            stage_split=resolve_split(parsed, workload, STACK),
            train=TrainSettings.model_validate({"steps": steps, **train}),
            data_dir=str(data_dir),
            out_dir=str(tmp_path_factory.mktemp("out")),
            steps=steps,
        )

    return make


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a file system with room for so many MiB, under a name of its own or the one that is given."""
    with contextlib.ExitStack() as disks:

        def mount(size_mib: int, name: str | None = None) -> Path:
            return disks.enter_context(mounted(tmp_path / (name or f"disk{size_mib}"), f"{size_mib}m"))

        yield mount


@pytest.fixture(scope="session")
def reference(pool: Pool, make_job: JobMaker) -> Reference:
    return Reference(pool, make_job)
