"""The course of a training: where it begins, when it saves, where it goes back, when it leaves before its end."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from trimaran.nouns.noun import TrimaranError
from trimaran.protocol.files import RunFile
from trimaran.protocol.notices import Notice, Tell
from trimaran.protocol.phases import Heartbeat, RankPhase
from trimaran.protocol.wishes import stop_signals
from trimaran.train.engine.trainer import Save, StepResult, Trainer
from trimaran.train.run.silence import stacks_before
from trimaran.train.run.trace import Trace

if TYPE_CHECKING:
    from trimaran.train.state.held import HeldSnapshots
    from trimaran.train.state.saver import Saver


# A checkpoint that is due by the clock waits until the one before stopped the training for less than 1 in so many
# seconds: for less than 2% of its time.
MOST_STALL = 50.0


class StopSignals:
    """Notes the signals that ask to save and leave; Ctrl-C comes to ranks that torchrun has started in a terminal."""

    def __init__(self) -> None:
        self.seen = False
        for number in stop_signals():
            signal.signal(number, self._note)
        stacks_before(self._note)  # the watch of a training asks for stacks by the scheduler's SIGUSR1

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.seen = True


class Course:
    """Begins a training anew or at its newest checkpoint, saves on the way, and leaves when it is told to."""

    def __init__(self, trainer: Trainer, stop: StopSignals | None, tell: Tell, heartbeat: Heartbeat) -> None:
        job, alive = trainer.job, heartbeat.beat
        self._trainer, self._stop, self._tell, self._heartbeat = trainer, stop, tell, heartbeat
        self._trace: Trace | None = None
        if job.trace_steps:
            on_gpu = trainer.device.type == "cuda"
            path = RunFile.TRACE.of(job.out_dir, trainer.mesh.world.index)
            self._trace = Trace(path, job.trace_steps, alive, on_gpu=on_gpu)
        self._every, self._every_s = job.train.checkpoint_every, 60.0 * job.train.checkpoint_minutes
        self._next_save = time.monotonic() + self._every_s
        self._hold_every_s = job.train.snapshot_seconds
        self._next_hold = time.monotonic() + self._hold_every_s
        self._saver: Saver | None = None
        self._held: HeldSnapshots | None = None
        self._saved_at = -1
        self._bad_steps = 0  # in a row; of a training that goes back, since its last checkpoint
        self._state_is_bad, self._why = False, ""
        self._folder = Path()
        if job.checkpoint_dir is None or not job.has_checkpoints:
            return
        # torch.distributed.checkpoint, a second of start-up that trials do not need
        from trimaran.train.state.held import HeldSnapshots
        from trimaran.train.state.resume import resume
        from trimaran.train.state.saver import Saver, saving_group

        self._folder = folder = Path(job.checkpoint_dir)
        if job.saves:
            group = saving_group(trainer.mesh.world.ranks)
            self._held = HeldSnapshots(folder, group)
            self._saver = Saver(trainer, folder, job.train.keep_checkpoints, group, tell, alive, self._held)
            if job.resume and (text := self._held.bring_back(folder, alive)):
                tell(Notice.BROUGHT_BACK, text=text)
            elif not job.resume:
                self._held.discard()
        if job.resume and resume(trainer, folder, tell, alive):
            self._saved_at = trainer.step_number
            # at the last step only the result is left to write: a kill may have come between the two
            if trainer.step_number > job.steps:
                raise TrimaranError(
                    f"train.steps is {job.steps}, and the checkpoint is of step {trainer.step_number}: raise steps"
                )

    def before(self) -> None:
        """Say with the next step whether this rank was told to leave and what its clock says, profile it where due."""
        if self._trace is not None:
            self._trace.before()
        self._trainer.save_wanted = Save.NO
        if self._saver is not None and self._trainer.mesh.world.index == 0:
            self._trainer.save_wanted = self._due(self._saver, time.monotonic())
        self._trainer.stop_wanted = self._stop is not None and self._stop.seen

    def _due(self, saver: Saver, now: float) -> Save:
        """What rank 0's clock says is to be done with the state of the next step."""
        if self._every is None and now >= self._next_save:
            return Save.WRITE
        return Save.HOLD if self._hold_every_s and now >= self._next_hold and saver.may_hold else Save.NO

    def after(self, result: StepResult) -> bool:
        """Save where a checkpoint is due; True where the training is to leave now.

        Raises TrimaranError once there were as many bad steps as end a training.
        """
        if self._trace is not None and self._trace.after():
            self._end_trace()
        went_back = self._trainer.job.checkpoint_dir is not None and self._take_bad(result)
        step = self._trainer.step_number
        if self._saver is not None and not went_back:
            if result.save == Save.WRITE or (self._every and step % self._every == 0):
                self._save(self._saver, step)
            elif result.save == Save.HOLD and not self._state_is_bad:
                self._hold(self._saver)
        if not result.stop or step >= self._trainer.job.steps:
            return False
        self._finish_saving()
        self._end_trace()
        self._tell(Notice.STOPPED, step=step)
        return True

    def finish(self) -> None:
        """Save the last step and wait until all is written. Raises TrimaranError where that step was bad."""
        self._end_trace()
        self._finish_saving()
        if self._state_is_bad:
            raise self._diverged()

    def _end_trace(self) -> None:
        """Write the trace of the steps that are being profiled; no rank waits in a step, or leaves, before all have."""
        if self._trace is not None and self._trace.running:
            with self._heartbeat.between_steps(RankPhase.PROFILE):
                self._trace.finish()
                self._trainer.mesh.world.meet(self._trainer.device)

    def _finish_saving(self) -> None:
        if self._saver is None:
            return
        if self._saved_at < self._trainer.step_number:
            self._save(self._saver, self._trainer.step_number)
        self._saver.finish()
        if self._held is not None and self._saved_at == self._trainer.step_number:
            self._held.discard()

    def _hold(self, saver: Saver) -> None:
        """Have the nodes hold the state as it is."""
        begin = time.monotonic()
        saver.save(Save.HOLD)
        self._held_or_saved(begin)

    def _held_or_saved(self, begin: float) -> float:
        """Put off the next snapshot; when what was begun then stopped the training no more."""
        end = time.monotonic()
        self._next_hold = end + max(self._hold_every_s, MOST_STALL * (end - begin))
        return end

    def _save(self, saver: Saver, step: int) -> None:
        """Save, unless that would put a state that has gone wrong in the place of one that has not."""
        begin = time.monotonic()
        saved = not self._state_is_bad and saver.save()
        end = self._held_or_saved(begin)
        self._next_save = end + max(self._every_s, MOST_STALL * (end - begin))
        if saved:
            self._saved_at = step
            if self._trainer.job.train.on_bad_loss == "go_back":
                self._bad_steps = 0
            return
        text = f"step {step} is not saved: it holds, or comes of, numbers that are not finite or a loss that is bad"
        self._tell(Notice.NOT_SAVED, step=step, text=text)

    def _take_bad(self, result: StepResult) -> bool:
        """Do what the recipe says of a bad step, and tell of it; whether the training went back."""
        train = self._trainer.job.train
        self._state_is_bad = result.bad is not None and train.on_bad_loss == "stop"
        if result.bad is None:
            if train.on_bad_loss != "go_back":
                self._bad_steps = 0
            return False
        self._bad_steps += 1
        self._why = result.bad
        step, back_to = self._trainer.step_number, None
        done = "its state is not saved" if self._state_is_bad else "its batch teaches nothing"
        if self._bad_steps >= train.bad_steps:
            done = "the training ends"
        elif train.on_bad_loss == "go_back" and (back_to := self._go_back()) is not None:
            done = f"goes back to step {back_to}, and on with the data behind step {step}"
        self._tell(Notice.BAD_LOSS, step=step, why=result.bad, done=done, back_to=back_to)
        if self._bad_steps >= train.bad_steps:
            if self._saver is not None:
                self._saver.finish()
            self._end_trace()
            raise self._diverged()
        return back_to is not None

    def _go_back(self) -> int | None:
        """Put the newest checkpoint's state in place, and leave out the data up to here; its step, None without one."""
        from trimaran.train.state.resume import resume

        trainer = self._trainer
        if self._saver is not None:
            self._saver.wait()
        behind = trainer.consumed_samples

        def tell(kind: Notice, /, **fields: object) -> None:
            if kind != Notice.RESUMED:  # which is told with the bad step
                self._tell(kind, **fields)

        with self._heartbeat.between_steps(RankPhase.RESUME):
            went_back = resume(trainer, self._folder, tell, self._heartbeat.beat)
            trainer.mesh.world.meet(trainer.device)
        if not went_back:
            return None
        if self._held is not None:
            self._held.discard()  # what is held is of the way that is left
        trainer.consumed_samples = behind
        self._saved_at = trainer.step_number
        return trainer.step_number

    def _diverged(self) -> TrimaranError:
        step, times = self._trainer.step_number, self._bad_steps
        kept = f"the checkpoint of step {self._saved_at} is kept" if self._saved_at >= 0 else "nothing was saved before"
        if self._trainer.job.train.on_bad_loss == "go_back":
            when = f"at step {step}, the {times}. bad step since the last checkpoint"
        else:
            when = f"from step {step - times + 1} on, {times} steps in a row"
        what = "the loss or its gradient is not finite" if "finite" in self._why else "the loss leaps"
        return TrimaranError(
            f"{what} {when} ({self._why}); {kept}: lower train.learning_rate, or clip, and go on with --resume"
        )
