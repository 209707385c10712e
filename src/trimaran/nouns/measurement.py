"""Measurement: what a run showed, one row; and the nouns that a row speaks of."""

from __future__ import annotations

from pydantic import Field, ValidationInfo, field_validator

from trimaran.nouns.columns import BY_NAME, Status
from trimaran.nouns.noun import Noun
from trimaran.nouns.recompute import recompute_cell

# Ends that say nothing of the layout: a node, or a process that serves the ranks, had gone.
NOT_OF_THE_LAYOUT: frozenset[Status] = frozenset({"lost"})
_WORDS = {column.name: column.choices for column in BY_NAME.values() if column.choices and column.name != "status"}


class Measurement(Noun):
    """One row of the table contract (see trimaran.nouns.columns), plus what the harness adds.

    A field that was not stated or not measured is None; those that a table may leave out (`ASSUMED`) have its default
    here, and are None where a log does not state them. Harness fields are empty in rows
    that come from published tables.
    """

    source: str | None = None
    section: str | None = None
    table: str | None = None
    row: str | None = None
    cluster: str | None = None
    stack: str | None = None
    system: str | None = None
    hardware: str | None = None
    nodes: int | None = None
    devices_per_node: int | None = None
    devices: int | None = None
    layers: int
    hidden: int
    ffn_hidden: int | None = None
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    attention: str | None = None
    mlp: str | None = None
    experts: int | None = None
    top_k: int | None = None
    shared_experts: int | None = None
    moe_ffn_hidden: int | None = None
    dense_layers: int | None = None
    capacity_factor: float | None = None
    seq_len: int
    vocab: int
    dp: int | None = None
    shard: int | None = None
    tp: int | None = 1
    pp: int | None = 1
    vpp: int | None = 1
    cp: int | None = 1
    cp_kind: str | None = None
    ep: int | None = None
    etp: int | None = None
    dispatcher: str | None = None
    ep_overlap: str | None = None
    offload: str | None = None
    compression: str | None = None
    local_steps: int | None = None
    expert_imbalance: float | None = None
    mbs: int
    gbs: int
    zero_stage: int | None = 0
    dp_kind: str | None = "all_reduce"
    recompute: str | None = "none"
    precision: str | None = "fp16"
    optimizer: str | None = "adam"
    schedule: str | None = "none"
    network_delay_ms: float | None = None
    network_gbps: float | None = None
    variant: str | None = None
    mem_gib: float | None = None
    sec_per_it: float | None = None
    tflops: float | None = None
    tokens_per_s_per_gpu: float | None = None
    status: Status = "ok"
    flops_formula: str | None = None
    date: str | None = None
    comparable_group: str | None = None
    quality: str = "ok"
    notes: str | None = None

    # What only the harness knows.
    trial_key: str | None = Field(default=None, description="hash of all that defines the trial")
    layout_label: str | None = Field(default=None, description="the layout in short notation, stage split included")
    model: str | None = Field(default=None, description="catalogue name or file of the model, or all of it as JSON")
    recipe: str | None = None
    sec_per_it_spread: float | None = Field(default=None, description="interquartile range of the timed steps, s")
    step_times_s: tuple[float, ...] = Field(default=(), description="every step's seconds, warm-up included")
    losses: tuple[float, ...] = Field(default=(), description="lm loss of every step, nats a token")
    mem_gib_per_rank: tuple[float, ...] = ()
    predicted_sec_per_it: float | None = Field(default=None, description="what the plan said before the run")
    predicted_mem_gib: float | None = None
    evidence: str | None = Field(default=None, description="last log lines, exit codes, stacks of a failed run")
    code_version: str | None = None
    machine: str | None = None
    libraries: dict[str, str] = Field(default_factory=dict)
    environment: dict[str, str] = Field(default_factory=dict)
    seed: int | None = None
    created_at: str | None = Field(default=None, description="UTC, ISO 8601")
    wall_s: float | None = Field(default=None, description="the trial's whole wall time, start-up included")
    others_share: float | None = Field(
        default=None, description="share of the cores' time, 0 to 1, that other programs took while it ran here"
    )

    @field_validator(*_WORDS)
    @classmethod
    def _check_word(cls, word: str | None, info: ValidationInfo) -> str | None:
        known = _WORDS[str(info.field_name)]
        if word is not None and word not in known:
            raise ValueError(f"expected one of {', '.join(known)}")
        return word

    @field_validator("recompute")
    @classmethod
    def _check_recompute(cls, word: str | None) -> str | None:
        return word if word is None else recompute_cell(word)

    @property
    def reason(self) -> str:
        """Why a run did not end well: the first line of its evidence."""
        return (self.evidence or "no evidence").strip().splitlines()[0]

    @property
    def variants(self) -> dict[str, str]:
        """The variant column as a mapping: `clock=2.2GHz;LD_PRELOAD=x` gives two entries."""
        parts = (part.split("=", 1) for part in (self.variant or "").split(";") if "=" in part)
        return {key.strip(): value.strip() for key, value in parts}
