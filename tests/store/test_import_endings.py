"""Runs that somebody stopped on purpose ended well; what a stop does to the ranks is no failure of theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from test_import_logs import DEEPSPEED, only, read

CANCELLED = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2025-02-25T10:00:00"
# what torchrun and the ranks print on their way out
SIGNALLED = """W0225 10:00:00.100 7 torch/distributed/elastic/agent/server/api.py:719] Received {0} death signal, shutting down workers
Traceback (most recent call last):
  File "/usr/local/bin/torchrun", line 33, in <module>
    raise SignalException(f"Process {{os.getpid()}} got signal: {{sigval}}", sigval=sigval)
torch.distributed.elastic.multiprocessing.api.SignalException: Process 5836 got signal: {0}
srun: error: n1: task 0: Killed
"""  # noqa: E501
INTERRUPTED = """^CTraceback (most recent call last):
  File "pretrain_gpt.py", line 198, in <module>
    pretrain(train_valid_test_datasets_provider,
[rank1]: Traceback (most recent call last):
[rank1]:   File "pretrain_gpt.py", line 198, in <module>
KeyboardInterrupt
"""
TAGGED = "".join(f"[prterun-n1-629@1,1]<stderr>: {line}\n" for line in INTERRUPTED.splitlines())


@pytest.mark.parametrize(
    ("last", "note"),
    [
        (f"{CANCELLED} DUE TO TIME LIMIT ***\n{SIGNALLED.format(15)}", "Slurm's time limit ended the run"),
        (f"{CANCELLED} ***\n{SIGNALLED.format(15)}", "the run was cancelled"),
        (SIGNALLED.format(2), "a signal ended the run"),
        (INTERRUPTED, "Ctrl-C ended the run"),
        (TAGGED, "Ctrl-C ended the run"),
    ],
)
def test_a_run_that_somebody_stopped_is_as_good_as_any(tmp_path: Path, last: str, note: str) -> None:
    """Its traceback made it a failure, which no fit takes."""
    row = only(read(tmp_path, DEEPSPEED + last))
    assert (row.status, row.evidence) == ("ok", None) and note in (row.notes or "")


@pytest.mark.parametrize(
    ("last", "status"),
    [
        (f"Traceback (most recent call last):\n  File train.py\nValueError: bad\n{CANCELLED} ***", "fail"),
        (f"Traceback (most recent call last):\n  File train.py\nValueError: bad\n{INTERRUPTED}", "fail"),
        (f"srun: error: n1: task 5: Exited with exit code 255\n{CANCELLED} ***", "fail"),
        (f"{CANCELLED} DUE TO NODE FAILURE ***\n{SIGNALLED.format(15)}", "fail"),
        (f"{CANCELLED} ***\nslurmstepd: error: Detected 1 oom_kill event in StepId=7.0", "oom"),
        ("torch.OutOfMemoryError: CUDA out of memory.\n" + SIGNALLED.format(15), "oom"),
    ],
)
def test_what_failed_ahead_of_a_stop_is_the_end_of_the_run(tmp_path: Path, last: str, status: str) -> None:
    assert only(read(tmp_path, DEEPSPEED + last)).status == status
