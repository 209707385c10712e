"""The course of a training: where it begins, when it saves, and when it leaves before its end."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.exits import STOP_SIGNALS
from trimaran.protocol.files import RunFile
from trimaran.protocol.notices import Notice, Tell
from trimaran.train.engine.trainer import StepResult, Trainer
from trimaran.train.run.silence import stacks_before
from trimaran.train.run.trace import Trace

if TYPE_CHECKING:
    from trimaran.train.state.saver import Saver


# So many steps in a row whose loss or gradient is not finite end a training.
BAD_STEPS = 10


class StopSignals:
    """Notes the signals that ask to save and leave; Ctrl-C comes to ranks that torchrun has started in a terminal."""

    def __init__(self) -> None:
        self.seen = False
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)
        stacks_before(self._note)  # the watch of a training asks for stacks by the scheduler's SIGUSR1

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.seen = True


class Course:
    """Begins a training anew or at its newest checkpoint, saves on the way, and leaves when it is told to."""

    def __init__(self, trainer: Trainer, stop: StopSignals | None, tell: Tell, alive: Callable[[], None]) -> None:
        job = trainer.job
        self._trainer, self._stop, self._tell = trainer, stop, tell
        self._trace: Trace | None = None
        if job.trace_steps:
            on_gpu = trainer.device.type == "cuda"
            self._trace = Trace(RunFile.TRACE.of(job.out_dir, trainer.mesh.world.index), job.trace_steps, on_gpu=on_gpu)
        self._every = job.train.checkpoint_every
        self._saver: Saver | None = None
        self._saved_at = -1
        self._bad_steps = 0
        if job.checkpoint_dir is None or not (job.saves or job.resume):
            return
        # torch.distributed.checkpoint, a second of start-up that trials do not need
        from trimaran.train.state.resume import resume
        from trimaran.train.state.saver import Saver, saving_group

        folder = Path(job.checkpoint_dir)
        if job.saves:
            group = saving_group(trainer.mesh.world.ranks)
            self._saver = Saver(trainer, folder, job.train.keep_checkpoints, group, tell, alive)
        if job.resume and resume(trainer, folder, tell, alive):
            self._saved_at = trainer.step_number
            # at the last step only the result is left to write: a kill may have come between the two
            if trainer.step_number > job.steps:
                raise TrimaranError(
                    f"train.steps is {job.steps}, and the checkpoint is of step {trainer.step_number}: raise steps"
                )

    def before(self) -> None:
        """Say with the next step whether this rank was told to leave, and profile it where it is to be."""
        if self._trace is not None:
            self._trace.before()
        self._trainer.stop_wanted = self._stop is not None and self._stop.seen

    def after(self, result: StepResult) -> bool:
        """Save where a checkpoint is due; True where the training is to leave now.

        Raises TrimaranError once BAD_STEPS steps in a row were not finite.
        """
        if self._trace is not None:
            self._trace.after()
        step = self._trainer.step_number
        self._count_bad(result)
        if self._saver is not None and self._every and step % self._every == 0:
            self._save(self._saver, step)
        if not result.stop or step >= self._trainer.job.steps:
            return False
        self._finish_saving()
        self._tell(Notice.STOPPED, step=step)
        return True

    def finish(self) -> None:
        """Save the last step and wait until all is written. Raises TrimaranError where that step was not finite."""
        if self._trace is not None:
            self._trace.finish()
        self._finish_saving()
        if self._bad_steps:
            raise self._diverged()

    def _finish_saving(self) -> None:
        if self._saver is None:
            return
        if self._saved_at < self._trainer.step_number:
            self._save(self._saver, self._trainer.step_number)
        self._saver.finish()

    def _save(self, saver: Saver, step: int) -> None:
        """Save, unless that would put a state that has gone wrong in the place of one that has not."""
        if self._bad_steps == 0 and saver.save():
            self._saved_at = step
            return
        text = f"step {step} is not saved: it holds, or comes of, numbers that are not finite"
        self._tell(Notice.NOT_SAVED, step=step, text=text)

    def _count_bad(self, result: StepResult) -> None:
        job = self._trainer.job
        # under fp16 a gradient that is too large is in order: it lowers the loss scale
        finite = math.isfinite(result.loss) and (job.layout.precision == "fp16" or math.isfinite(result.grad_norm))
        self._bad_steps = 0 if finite or job.checkpoint_dir is None else self._bad_steps + 1
        if self._bad_steps >= BAD_STEPS:
            if self._saver is not None:
                self._saver.finish()
            raise self._diverged()

    def _diverged(self) -> TrimaranError:
        first = self._trainer.step_number - self._bad_steps + 1
        kept = f"the checkpoint of step {self._saved_at} is kept" if self._saved_at >= 0 else "nothing was saved before"
        return TrimaranError(
            f"the loss or its gradient is not finite from step {first} on, {self._bad_steps} steps in a row; {kept}: "
            f"lower train.learning_rate, or clip, and go on with --resume"
        )
