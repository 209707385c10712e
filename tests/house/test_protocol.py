"""Claims about what ranks and their watchers agree on: each word is in one place, or held equal to it here."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from trimaran.bench.launch.network import enter, switch
from trimaran.bench.launch.slurm import node
from trimaran.files.catalogue import load_stack
from trimaran.nouns.noun import TrimaranError
from trimaran.nouns.variant import Variant
from trimaran.protocol import exits, rank_process
from trimaran.protocol.environment import GLOO_INTERFACE, PLACE, RENDEZVOUS_FD, TORCHRUN, computing
from trimaran.study.training.stopping import TrainingStoppedError
from trimaran.train.model.mixture.blocks import ROWS
from trimaran.train.model.vocabulary import CHUNK_TOKENS, GPU_CHUNK_TOKENS

BY_FILE_NAME = [Path(str(program.__file__)) for program in (rank_process, node, enter, switch)]


def words(program: Path) -> set[str]:
    """String literals and keywords of a program that look like environment variables."""
    nodes = list(ast.walk(ast.parse(program.read_text())))
    literals = {each.value for each in nodes if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    literals |= {each.arg for each in nodes if isinstance(each, ast.keyword) and each.arg}
    return {word for word in literals if word.isupper() and word.replace("_", "").isalpha()}


@pytest.mark.parametrize("program", BY_FILE_NAME, ids=lambda path: path.name)
def test_programs_that_run_by_file_name_need_nothing_but_python(program: Path) -> None:
    for statement in ast.walk(ast.parse(program.read_text())):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            names = (
                [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else [statement.module]
            )
            assert {str(name).partition(".")[0] for name in names} <= sys.stdlib_module_names


def test_they_call_the_variables_of_a_place_as_the_protocol_does() -> None:
    place = {*PLACE, GLOO_INTERFACE}
    assert place <= words(BY_FILE_NAME[1]), "the Slurm node's program tells its rank the whole place"
    ours = {word for word in words(BY_FILE_NAME[1]) if not word.startswith(("SLURM", "TRIMARAN_LOST"))}
    assert ours == place | {TORCHRUN}
    assert words(BY_FILE_NAME[2]) <= place


def test_they_leave_with_the_statuses_of_the_protocol() -> None:
    assert rank_process.LAUNCHER_GONE == exits.LAUNCHER_GONE
    assert node.SWEEP_GONE == exits.SWEEP_GONE


def test_the_command_line_leaves_as_its_ranks_do() -> None:
    assert (TrimaranError.exit_status, TrainingStoppedError.exit_status) == (exits.USER_ERROR, exits.STOPPED) == (2, 75)


@pytest.mark.parametrize("name", [*PLACE, RENDEZVOUS_FD])
def test_no_variant_may_set_what_tells_a_rank_its_place(name: str) -> None:
    with pytest.raises(ValueError, match="set by the harness"):
        Variant(environment={name: "1"})


def test_threads_are_told_by_the_variable_that_variants_speak_of() -> None:
    assert computing(3).items() >= Variant(environment={"OMP_NUM_THREADS": "3"}).environment.items()


@pytest.mark.parametrize(
    ("content", "noted"), [('{"kind": "oom"}', True), ('{"kind": "other"}', False), ("[1]", False), ("\x00{", False)]
)
def test_a_note_of_memory_that_ran_out_is_read_whatever_lies_there(tmp_path: Path, content: str, noted: bool) -> None:
    file = tmp_path / "error.0.json"
    assert not exits.noted_out_of_memory(file)
    file.write_text(content)
    assert exits.noted_out_of_memory(file) is noted
    exits.note_out_of_memory(file, "no memory is left")
    assert exits.noted_out_of_memory(file)


def test_the_cost_model_counts_logits_by_the_chunks_that_the_trainer_makes() -> None:
    stack = load_stack("trimaran")
    assert stack.experts_block_rows == ROWS
    assert (stack.loss_chunk_cpu_tokens, stack.loss_chunk_gpu_tokens) == (CHUNK_TOKENS, GPU_CHUNK_TOKENS)
