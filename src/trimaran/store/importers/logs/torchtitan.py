"""Logs of torchtitan: `step:  4  loss:  7.62585  ...  memory: 66.91GiB(37.51%)  tps: 10,050  tflops: 314.71`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from trimaran.nouns.columns import Cell
from trimaran.store.importers.draft import Draft
from trimaran.store.importers.logs.steps import LogReading, Step, drafts_of_trainings, mixture
from trimaran.store.importers.logs.torchtitan_model import is_built, model_of
from trimaran.store.importers.text import clock_of, loss_of, number_of

# A step of training, not `validate step: ...` of the evaluation behind it.
_STEP = re.compile(
    r"(?<!validate )step:\s{1,9}(\d{1,9})\s{1,9}loss:\s{1,9}(\S{1,30})\s.{0,80}?"
    r"memory:\s{1,9}(\d{1,6}\.\d{1,6})GiB\S{0,20}\s{1,9}(?:tps|wps):\s{1,9}([\d,]{1,20})(?:\s{1,9}tflops:\s{1,9}([\d,.]{1,20}))?"
)
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) - ")
_RANK = re.compile(r"\[rank(\d{1,7})\]")
_MESH = re.compile(r"Building \d-D device mesh with \[([^\]]{1,200})\], \[([^\]]{1,200})\]")
# since v0.2.1, torchtitan/distributed/parallel_dims.py, line 129
_DEGREES = re.compile(r"Building device mesh with parallelism: (.{1,200})")
_DEGREE = re.compile(r"\b([a-z_]{2,20})=(\d{1,8})\b")
_BATCHES = re.compile(
    r"local batch size:? (\d{1,9}), global batch size:? (\d{1,9}),.{0,80}?sequence length:? (\d{1,9})"
)
# since August 2026 (pytorch/torchtitan, pull request 4121); a step of -1 tokens is one of its micro-batches
_TOKENS = re.compile(
    r"tokens/microbatch/dp-rank (\d{1,12}), tokens/train-step (-?\d{1,15}), gradient accumulation steps (\d{1,9}), "
    r"sequence length (\d{1,9})"
)
_PLANNED = re.compile(r"\bTrainer is initialized with .{0,300}?total steps (\d{1,9})\b")
# What ranks without the last stage of a pipeline print as their loss (torchtitan 0.2.2, train.py, line 525).
_NO_LOSS = -1.0
# torchtitan/distributed/activation_checkpoint.py: by the mode's name, by the class of the policy since June 2026
_RECOMPUTE = re.compile(r"Applied (\w{1,60}) activation checkpointing|Selected \S{1,20} (budget) option")
_RECOMPUTED = {"full": "full", "FullAC": "full", "selective": "selective", "SelectiveAC": "selective"}
# torchtitan/distributed/pipeline_parallel.py, _build_pipeline_schedule: `with 8 microbatches and 4 stages`
_PIPELINE = re.compile(
    r"Using pipeline schedule (\w{1,40})\s{1,40}with (\d{1,6})(?: microbatches)? and (\d{1,6}) stages"
)
_SCHEDULES = {
    "1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved", "zbvzerobubble": "zbv",
    "dualpipev": "dualpipev",
}  # fmt: skip
_BUILT = re.compile(r"size: [\d,]{1,20} total parameters")
# How ranks that share a sequence meet all keys, where a configuration is printed; they gather them by default, and in
# 0.3 always (torchtitan/config/job_config.py, 0.2.2; torchtitan/distributed/context_parallel/api.py, 0.3.0).
_ROTATED = re.compile(r"\bcontext_parallel_rotate_method[\"']?[:=] ?[\"'](allgather|alltoall)[\"']")
_CONTEXT_KINDS: dict[str, Cell] = {"allgather": "all_gather", "alltoall": "ring"}
_REPLICAS = re.compile(r"Applied (?:DDP|HSDP|FSDP|fully_shard) to the model")
# torchtitan/components/quantization/float8.py and mx.py: linear layers; experts alone stay what the rest is
_NARROW = re.compile(
    r"(Float8 tensorwise scaled training active|Float8 training active with recipe (?:tensorwise|rowwise)"
    r"|MX training active with recipe mxfp8|Converted Linear layers to (?:MXFP8|NVFP4)Linear"
    r"|Converted modules to use dynamic mxfp8)"
)
# Parameters of experts, which a mixture alone has.
_SPARSE = re.compile(r"Total parameter count: dense [\d,]{1,20}, sparse ([\d,]{1,20}), active")
# A colour whose escape character was lost on the way into a page.
_LOST_COLOUR = re.compile(r"\[\d{1,3}m")


def recognises(text: str) -> bool:
    """Whether the text holds lines of torchtitan's training log, or of its start where no step was reached."""
    return any("[titan]" in line or _line_of_step(line) for line in text.split("\n"))


def read(text: str, given: Mapping[str, Cell]) -> list[Draft]:
    """The rows of one log, which may hold several trainings.

    Tokens a second and device give Sec/it, or the lines' own clock where they cannot.
    """
    lines = text.split("\n")
    trainings = [_begun(0)]
    built: dict[str, Cell] = {}  # what the mesh was built as since the last step, ahead of the model
    for at, line in enumerate(lines):
        training = trainings[-1]
        if match := _line_of_step(line):
            number = int(match[1])
            if number not in training.logged or loss_of(training.logged[number][0][2]) == _NO_LOSS:
                training.logged[number] = match, clock_of(_STAMP.search(line))
            training.reading.after, built = at + 1, {}
            rank, memory = int(of[1]) if (of := _RANK.search(line)) else 0, training.reading.mem_gib_by_rank
            memory[rank] = max(float(match[3]), memory.get(rank, 0.0))
            continue
        degrees = _degrees_of(line)
        model = model_of(lines, at)
        known = training.reading.cells
        other = any(known.get(name, size) != size for name, size in degrees.items())
        if training.logged and (model or other or is_built(line)):
            # every rank tells of its start, before the first of them tells of a step
            training = _begun(at)
            trainings.append(training)
            training.reading.cells |= built
        built = degrees or built
        training.reading.cells |= degrees
        training.pipeline = _PIPELINE.search(line) or training.pipeline
        training.tokens = _TOKENS.search(line) or training.tokens
        if model is not None:
            training.reading.cells |= model[0]
            training.reading.mixture = model[1] or training.reading.mixture
        else:
            _setting(training.reading, line)
    for training in trainings:
        training.finish(given)
    return drafts_of_trainings([training.reading for training in trainings], lines, given)


@dataclass
class _Training:
    """One training of a log, and the first line of each of its steps with the clock of that line."""

    reading: LogReading
    logged: dict[int, tuple[re.Match[str], float | None]] = field(default_factory=dict)
    pipeline: re.Match[str] | None = None
    tokens: re.Match[str] | None = None

    def finish(self, given: Mapping[str, Cell]) -> None:
        """Make steps of its lines."""
        reading = self.reading
        if reading.cells.get("pp", 1) != 1:
            self._cut_batch()
        if self.tokens is not None:
            self._batch_of_tokens(self.tokens)
        if reading.cells.get("cp", 1) == 1:
            reading.cells.pop("cp_kind", None)
        else:
            reading.guesses["cp_kind"] = "all_gather"
        tokens = _tokens_per_device(reading.cells, given)
        if tokens is None and self.logged:
            reading.notes.append("sec_per_it from the clock of the log's lines, evaluations and checkpoints included")
        previous: tuple[int, float] | None = None
        gbs = reading.cells.get("gbs")
        for number, (match, clock) in sorted(self.logged.items()):
            tps = number_of(match[4])
            seconds = tokens / tps if tokens and tps else None
            if tokens is None and previous is not None and clock is not None:
                seconds = (clock - previous[1]) / (number - previous[0]) or None
            previous = (number, clock) if clock is not None else previous
            reading.steps.append(
                Step(
                    iteration=number,
                    sec_per_it=seconds if seconds and seconds > 0 else None,
                    gbs=gbs if isinstance(gbs, int) else None,
                    loss=None if loss_of(match[2]) == _NO_LOSS else loss_of(match[2]),
                    tflops=number_of(match[5]),
                    tokens_per_s_per_device=tps,
                )
            )

    def _cut_batch(self) -> None:
        """State what the line of a pipeline does: its schedule, chunks, and the size of which it cuts micro-batches."""
        cells, local = self.reading.cells, self.reading.cells.pop("mbs", None)
        if self.pipeline is None:
            return
        name, micro_batches, stages = self.pipeline[1], int(self.pipeline[2]), int(self.pipeline[3])
        pp = cells.get("pp")
        if name.lower() not in _SCHEDULES:
            self.reading.refusal = f"the pipeline schedule is {name}: only {', '.join(_SCHEDULES)} can be said in a row"
            return
        cells["schedule"] = _SCHEDULES[name.lower()]
        if isinstance(pp, int) and stages and stages % pp == 0:
            cells["vpp"] = stages // pp
        if isinstance(local, int) and micro_batches and local % micro_batches == 0:
            cells["mbs"] = local // micro_batches

    def _batch_of_tokens(self, tokens: re.Match[str]) -> None:
        """State the batch that is said in tokens, as far as whole sequences make it up."""
        micro, step, accumulated, length = (int(tokens[group]) for group in range(1, 5))
        dp = self.reading.cells.get("dp")
        if step < 0 and isinstance(dp, int):
            step = micro * accumulated * dp * (int(self.pipeline[2]) if self.pipeline is not None else 1)
        sizes = {"mbs": micro, "gbs": step}
        self.reading.cells["seq_len"] = length
        self.reading.cells |= {
            name: size // length for name, size in sizes.items() if length > 0 and size > 0 and size % length == 0
        }


def _begun(at: int) -> _Training:
    """A training that starts in the line `at`."""
    return _Training(LogReading(guesses={"stack": "torchtitan"}, formula="model_flops", begin=at, after=at))


def _line_of_step(line: str) -> re.Match[str] | None:
    if "tps:" not in line and "wps:" not in line:
        return None
    return _STEP.search(_LOST_COLOUR.sub("", line))


def _degrees_of(line: str) -> dict[str, Cell]:
    """What a line states of the mesh and of how its ranks share sequences, as columns; empty where it states none."""
    if mesh := _MESH.search(line):
        names = [name.strip(" '\"") for name in mesh[1].split(",")]
        sizes = [int(size) if size.strip().isdecimal() and len(size) < 9 else 1 for size in mesh[2].split(",")]
        return _degrees(dict(zip(names, sizes, strict=False)))
    if stated := _DEGREES.search(line):
        return _degrees({name: int(size) for name, size in _DEGREE.findall(stated[1])})
    rotated = _ROTATED.search(line) if "rotate_method" in line else None
    return {"cp_kind": _CONTEXT_KINDS[rotated[1]]} if rotated else {}


def _setting(reading: LogReading, line: str) -> None:
    """What a line says of how the model was set up."""
    if planned := _PLANNED.search(line):
        reading.planned = int(planned[1])
    if recompute := _RECOMPUTE.search(line):
        _recompute(reading, recompute[1] or recompute[2])
    elif _BUILT.search(line):
        reading.guesses.setdefault("recompute", "none")  # it would say behind this line that it is applied
    elif batches := _BATCHES.search(line):
        reading.cells |= {"mbs": int(batches[1]), "gbs": int(batches[2]), "seq_len": int(batches[3])}
    elif narrow := _NARROW.search(line):
        kinds = {"nvfp4": "nvfp4", "mxfp8": "mxfp8", "rowwise": "fp8_rowwise"}
        reading.cells["precision"] = next((kinds[word] for word in kinds if word in narrow[1].lower()), "fp8")
    elif "Applied DDP to the model" in line:
        reading.cells |= {"dp_kind": "all_reduce", "zero_stage": 0}
    elif "Compiling each TransformerBlock with torch.compile" in line:
        # a stack reads the words, and by the day which release they are of
        stamp = _STAMP.search(line)
        reading.cells |= {"system": "torch.compile", "date": stamp[1][:10] if stamp else None}
    elif "Applied CPU Offloading to the model" in line:
        reading.cells["offload"] = "weights"
    elif (sparse := _SPARSE.search(line)) and sparse[1] != "0":
        reading.mixture = mixture("count of sparse parameters", sparse[1])
    elif _REPLICAS.search(line):
        reading.cells |= {"dp_kind": "fully_sharded", "zero_stage": 3}


def _recompute(reading: LogReading, policy: str) -> None:
    """State the policy of recompute; one that no word says leaves it open, whatever another rank has printed."""
    if policy in _RECOMPUTED:
        reading.cells["recompute"] = _RECOMPUTED[policy]
    else:
        reading.guesses["recompute"] = None
        reading.notes.append("activations are computed again by a policy that no word of recompute says")


def _degrees(degree: Mapping[str, int]) -> dict[str, Cell]:
    """Degrees by the mesh's names as columns; with experts, `dp_shard` is cut into what they share and what not.

    So it is in torchtitan v0.2.0, torchtitan/distributed/parallel_dims.py, _build_mesh_with_ep.
    """
    shard = math.prod(degree.get(f"dp_shard{part}", 1) for part in ("", "_cp", "_mod_ep", "_in_ep"))
    cells: dict[str, Cell] = {name: degree.get(name, 1) for name in ("tp", "pp", "cp")}
    cells["dp"] = degree.get("dp_replicate", 1) * shard * degree.get("dp", 1)
    if degree.get("ep", 1) > 1:
        cells["ep"] = degree["ep"]
    if shard > 1:
        cells |= {"dp_kind": "fully_sharded", "zero_stage": 3}
    if shard > 1 and degree.get("dp_replicate", 1) > 1:
        cells["shard"] = shard
    return cells


def _tokens_per_device(stated: Mapping[str, Cell], given: Mapping[str, Cell]) -> float | None:
    """Tokens that one step takes of one device, where batch, sequence and degrees are known."""
    known = {**given, **stated}
    gbs, seq_len, devices, dp = (known.get(name) for name in ("gbs", "seq_len", "devices", "dp"))
    if isinstance(dp, int):
        others = [known.get(name, 1) for name in ("tp", "pp", "cp")]
        devices = dp * math.prod(size for size in others if isinstance(size, int))
    if isinstance(gbs, int) and isinstance(seq_len, int) and isinstance(devices, int) and devices > 0:
        return gbs * seq_len / devices
    return None
