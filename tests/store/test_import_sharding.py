"""How ranks share weights and sequences, by what trainers' logs say of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from test_import_logs import LLAMA, NANOTRON, TITAN, only, read
from test_import_trainings import megatron

WILD = Path(__file__).parent / "logs" / "wild"
OLMO = (WILD / "olmo_core_config.txt").read_text()


@pytest.mark.parametrize(
    "mesh",
    [
        "Building 3-D device mesh with ['dp_replicate', 'dp_shard', 'tp'], [2, 2, 2]",
        "Building device mesh with parallelism: pp=1, dp_replicate=2, dp_shard=2, cp=1, tp=2, ep=1",
    ],
)
def test_replicas_of_torchtitan_that_share_among_a_part_are_stored_so(tmp_path: Path, mesh: str) -> None:
    """They were stored as sharing among all."""
    text = TITAN.replace("Building 3-D device mesh with ['pp', 'dp_shard', 'tp'], [1, 4, 2]", mesh)
    row = only(read(tmp_path, text, **LLAMA))
    assert (row.dp, row.shard, row.zero_stage, row.devices) == (4, 2, 3, 8)
    assert only(read(tmp_path, TITAN, **LLAMA)).shard is None


@pytest.mark.parametrize(
    ("options", "stage"),
    [
        ("<FSDPOption.FULL_SHARD: 'full_shard'>, <FSDPOption.AUTO_WRAP: 'auto_wrap'>", 3),
        ("<FSDPOption.AUTO_WRAP: 'auto_wrap'>, <FSDPOption.SHARD_GRAD_OP: 'shard_grad_op'>", 2),
        ("<FSDPOption.HYBRID_SHARD: 'hybrid_shard'>", None),
        ("", None),
    ],
)
def test_what_replicas_of_a_trainer_share_under_fsdp_is_stored(tmp_path: Path, options: str, stage: int | None) -> None:
    """Its arguments name it where a script prints them, and nothing of it was read."""
    arguments = f"TrainingArguments(\nbf16=True,\nfsdp=[{options}],\nfsdp_config={{'xla': False}},\n"
    header = "***** Running training *****\n  Total optimization steps = 10\n"
    text = arguments + header + "{'train_runtime': 20.0, 'train_steps_per_second': 0.5}\n"
    (row,) = read(tmp_path, text, **LLAMA, mbs=1, gbs=8, seq_len=1024).rows
    assert (row.zero_stage, row.dp_kind) == (stage, stage and "fully_sharded")


@pytest.mark.parametrize(
    ("said", "kind"),
    [("", "all_gather"), ("'allgather'", "all_gather"), ("'alltoall'", "ring"), ('"alltoall"', "ring")],
)
def test_how_ranks_of_torchtitan_share_a_sequence_is_stored(tmp_path: Path, said: str, kind: str) -> None:
    """Each was stored as a ring, which torchtitan makes only where it is asked to."""
    mesh = "Building 3-D device mesh with ['dp_shard', 'cp', 'tp'], [2, 2, 2]"
    config = f"[titan] 2025-01-01 10:00:00,000 - root - INFO - {{'context_parallel_rotate_method': {said}}}\n"
    text = TITAN.replace("Building 3-D device mesh with ['pp', 'dp_shard', 'tp'], [1, 4, 2]", mesh)
    assert [row.cp_kind for row in read(tmp_path, (config if said else "") + text, **LLAMA).rows] == [kind]
    (alone,) = read(tmp_path, config + TITAN, **LLAMA).rows
    assert (alone.cp, alone.cp_kind) == (1, None)


@pytest.mark.parametrize(
    ("said", "shard"),
    [("num_replicas=None", 4), ("num_replicas=2", 8), ("num_replicas=None, shard_degree=2", 2)],
)
def test_replicas_of_olmo_core_that_share_among_a_part_are_stored_so(tmp_path: Path, said: str, shard: int) -> None:
    """Its default is a replica on each of the nodes, here of 8 devices under TP 2; nothing of it was stored."""
    text = OLMO.replace("(name='fsdp', ", "(name='hsdp', ").replace("num_replicas=None", said)
    row = only(read(tmp_path, text))
    assert (row.dp, row.shard, row.zero_stage, row.dp_kind) == (16, shard, 3, "fully_sharded")


def test_ranks_of_olmo_core_that_share_a_sequence_are_stored_so(tmp_path: Path) -> None:
    """They were stored as replicas."""
    cp = "cp_config=TransformerContextParallelConfig(degree=4, load_balancer='zig_zag', head_stride=1),\n"
    row = only(read(tmp_path, OLMO.replace("ep_config=None", cp + "ep_config=None")))
    assert (row.dp, row.cp, row.tp, row.devices) == (4, 4, 2, 32)


@pytest.mark.parametrize(
    ("style", "kind"),
    [
        ("load_balancer='zig_zag', head_stride=1", "ring"),
        ("load_balancer='llama3', head_stride=4", "all_gather"),
        ("\n    ring=RingContextParallelStyle(load_balancer='llama3', head_stride=4),\n    uly=None,\n", "all_gather"),
        ("\n    ring=None,\n    uly=UlyssesContextParallelStyle(),\n", "ulysses"),
    ],
)
def test_how_ranks_of_olmo_core_share_a_sequence_is_stored(tmp_path: Path, style: str, kind: str) -> None:
    """A nested style takes several lines, whose ranks were stored as replicas; each kind was stored as a ring."""
    degree = "\n    degree=4, " if style[0] == "\n" else "degree=4, "
    cp = f"cp_config=TransformerContextParallelConfig({degree}{style}),\n"
    row = only(read(tmp_path, OLMO.replace("ep_config=None", cp + "ep_config=None")))
    assert (row.dp, row.cp, row.cp_kind, row.devices) == (4, 4, kind, 32)


@pytest.mark.parametrize(
    ("said", "schedule", "chunks"),
    [
        ("schedule='1F1B', style=None, split_points=None", "1f1b", 1),
        ("schedule='Interleaved1F1B', style=None, split_points=None", "interleaved", 2),
        ("schedule='Interleaved1F1B', split_points=[2, 6, 10, 14, 18, 22, 26]", "interleaved", 4),
        ("schedule='ZBVZeroBubble', style='v', split_points=None", "zbv", 2),
    ],
)
def test_a_pipeline_of_olmo_core_is_stored_with_its_schedule_and_chunks(
    tmp_path: Path, said: str, schedule: str, chunks: int
) -> None:
    """Each was stored as 1F1B of one chunk a rank."""
    pp = f"pp_config=TransformerPipelineParallelConfig(degree=2, {said}),\n"
    row = only(read(tmp_path, OLMO.replace("ep_config=None", pp + "ep_config=None")))
    assert (row.dp, row.pp, row.schedule, row.vpp) == (8, 2, schedule, chunks)


def test_a_schedule_of_olmo_core_that_no_word_says_refuses_the_row(tmp_path: Path) -> None:
    pp = "pp_config=TransformerPipelineParallelConfig(degree=2, schedule='LoopedBFS', style=None),\n"
    (refused,) = read(tmp_path, OLMO.replace("ep_config=None", pp + "ep_config=None")).refused
    assert "the pipeline schedule is LoopedBFS: only 1F1B, GPipe" in refused


def test_optimizers_of_megatron_in_several_instances_share_among_a_part(tmp_path: Path) -> None:
    arguments = {"world_size": "64", "data_parallel_size": "8", "num_distributed_optimizer_instances": "2"}
    assert {(row.dp, row.shard, row.zero_stage) for row in read(tmp_path, megatron(**arguments)).rows} == {(8, 4, 1)}
    arguments["num_distributed_optimizer_instances"] = "1"
    assert {row.shard for row in read(tmp_path, megatron(**arguments)).rows} == {None}


ENGINE = "pp_engine=<nanotron.parallel.pipeline_parallel.engine.{}PipelineEngine object at 0x7fcc5c65c910>,\n"


@pytest.mark.parametrize(
    ("engine", "schedule"), [("OneForwardOneBackward", "1f1b"), ("AllForwardAllBackward", "gpipe")]
)
def test_nanotron_states_its_schedule_its_context_parallelism_and_what_it_sums_in(
    tmp_path: Path, engine: str, schedule: str
) -> None:
    """Ranks of a sequence were none, each pipeline 1F1B, and weights in 16 bit alone had a master copy."""
    said = ENGINE.format(engine) + "context_parallel_size=4,\naccumulate_grad_in_fp32=False,\ndtype=torch.bfloat16,\n"
    row = only(read(tmp_path, said + NANOTRON))
    assert (row.dp, row.tp, row.pp, row.cp, row.cp_kind, row.devices) == (2, 2, 2, 4, "all_gather", 32)
    assert (row.schedule, row.precision) == (schedule, "bf16_pure")
    row = only(
        read(tmp_path, said.replace("size=4", "size=1").replace("False", "True") + NANOTRON.replace("pp=2", "pp=1"))
    )
    assert (row.cp, row.cp_kind, row.schedule, row.precision) == (1, None, "none", "bf16")


def test_ranks_of_experts_of_nanotron_give_no_row(tmp_path: Path) -> None:
    """Where experts were stated, each rank was stored as holding all of them, on too few devices."""
    given = {"experts": 8, "top_k": 2, "moe_ffn_hidden": 64}
    (refused,) = read(tmp_path, "expert_parallel_size=4,\n" + NANOTRON, **given).refused
    assert "expert_parallel_size is 4: ranks of experts are beside replicas" in refused
    row = only(read(tmp_path, "expert_parallel_size=1,\n" + NANOTRON, **given))
    assert (row.experts, row.devices) == (8, 8)
