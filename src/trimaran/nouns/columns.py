"""The one list of table columns: predict, fit, import, store and report read and write these."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, get_args

from trimaran.nouns.dispatcher import DispatcherName
from trimaran.nouns.flops_formula import FlopsFormula
from trimaran.nouns.model import Mlp
from trimaran.nouns.precision import PRECISIONS
from trimaran.nouns.recompute import recompute_cell
from trimaran.nouns.spoken.printed import letters_of, number_printed, says_nothing, word_elsewhere
from trimaran.nouns.stack import (
    Compression,
    ContextParallelKind,
    DataParallelKind,
    ExpertOverlap,
    Offload,
    Optimizer,
    Schedule,
)
from trimaran.nouns.text import QUOTED, quoted, shortened, without_shield

Kind = Literal["text", "int", "float"]
Cell = str | int | float | None
Status = Literal["ok", "oom", "hang", "fail", "crash", "timeout", "lost", "not_run"]


# Cells whose values are kept: the rows of a long table differ in few of them.
_CELLS_KEPT = 4096


@dataclass(frozen=True, eq=False)  # there is one of each, and a cell is looked up by it
class Column:
    """One column: its cell type, unit, the default of a missing cell, and whether it must be there.

    `choices` are the words a text cell may hold, however a cell sets their letters and digits apart;
    trimaran.nouns.spoken.printed has what they are called elsewhere.
    `minimum` bounds a number from below (inclusive). `looks` is a pattern that a text cell must have something of, and
    `like` what such a cell is: a row shifted by a column is noticed by it. `word` reads a cell whose words may be put
    together, and raises ValueError for what is none.
    """

    name: str
    kind: Kind
    unit: str = ""
    default: Cell = None
    required: bool = False
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    looks: str = ""
    like: str = ""
    word: Callable[[str], str] | None = None
    says: str = ""

    @cached_property
    def words(self) -> Mapping[str, str]:
        """Its choices by their letters and digits in lower case."""
        return {letters_of(choice): choice for choice in self.choices}

    @property
    def is_free(self) -> bool:
        """Whether it holds any text."""
        return self.kind == "text" and not self.choices and self.word is None


COLUMNS: tuple[Column, ...] = (
    Column("source", "text", says="document or run that the row comes from"),
    Column("section", "text", says="heading above the table"),
    Column("table", "text", says="table in the source"),
    Column("row", "text", says="row in the table"),
    Column("cluster", "text", says="catalogue name or file"),
    Column("stack", "text", says="catalogue name or file"),
    Column("system", "text", says="the software in words, by which its stack may be told apart"),
    Column("hardware", "text", says="the hardware in words, by which its devices may be told apart"),
    Column("nodes", "int", "nodes", minimum=1, maximum=1e7, says="nodes used"),
    Column("devices_per_node", "int", "devices", minimum=1, maximum=1e5, says="devices used on each node"),
    Column("devices", "int", "devices", minimum=1, maximum=1e8, says="devices used; default DP x TP x CP x PP"),
    Column("layers", "int", required=True, minimum=1, maximum=1e5, says="transformer layers"),
    Column("hidden", "int", required=True, minimum=1, maximum=1e7, says="hidden size"),
    Column("ffn_hidden", "int", minimum=1, maximum=1e8, says="MLP width; default 4 x hidden"),
    Column("heads", "int", required=True, minimum=1, maximum=1e6, says="attention heads"),
    Column("kv_heads", "int", minimum=1, maximum=1e6, says="key-value heads; default heads"),
    Column("seq_len", "int", "tokens", required=True, minimum=1, maximum=1e8, says="sequence length"),
    Column("vocab", "int", "tokens", required=True, minimum=2, maximum=1e8, says="vocabulary; padded to 128 x TP"),
    Column("dp", "int", minimum=1, maximum=1e7, says="data-parallel degree; default devices / (TP x CP x PP)"),
    Column("tp", "int", default=1, minimum=1, maximum=1e7, says="tensor-parallel degree"),
    Column("pp", "int", default=1, minimum=1, maximum=1e7, says="pipeline-parallel degree"),
    Column("vpp", "int", default=1, minimum=1, maximum=1e5, says="model chunks per stage"),
    Column("cp", "int", default=1, minimum=1, maximum=1e7, says="context-parallel degree"),
    Column("mbs", "int", "sequences", required=True, minimum=1, maximum=1e8, says="micro-batch"),
    Column("gbs", "int", "sequences", required=True, minimum=1, maximum=1e9, says="global batch"),
    Column("zero_stage", "int", default=0, minimum=0, maximum=3, says="ZeRO stage"),
    Column(
        "dp_kind",
        "text",
        default="all_reduce",
        choices=get_args(DataParallelKind),
        says="how replicas agree",
    ),
    Column(
        "recompute",
        "text",
        default="none",
        word=recompute_cell,
        says="none, selective, full, every-2 (every second layer), or modules of Megatron-Core joined by + "
        "(core_attn+layernorm+mlp); unknown counts as none",
    ),
    Column(
        "precision",
        "text",
        default="fp16",
        choices=tuple(PRECISIONS),
        says="arithmetic; 16 bit keeps an fp32 master copy, bf16_pure does not; fp8 has one scale a tensor or "
        "as the stack says, fp8_rowwise one a row",
    ),
    Column("optimizer", "text", default="adam", choices=get_args(Optimizer), says="optimizer"),
    Column(
        "schedule",
        "text",
        default="none",
        choices=get_args(Schedule),
        says="pipeline schedule; none with PP > 1 means 1F1B",
    ),
    Column("network_delay_ms", "float", "ms", minimum=0, maximum=1e6, says="delay of the shaped network, one way"),
    Column("network_gbps", "float", "gigabit/s", minimum=1e-6, maximum=1e7, says="rate of the (shaped) network"),
    Column("variant", "text", says="environment, clock and software of the nodes, KEY=VALUE joined by ;"),
    Column("mem_gib", "float", "GiB", minimum=1e-6, maximum=1e6, says="memory as the stack's own tool reports it"),
    Column("sec_per_it", "float", "s", minimum=1e-9, maximum=1e9, says="seconds per iteration"),
    Column("tflops", "float", "TFLOP/s", minimum=0, maximum=1e9, says="per device, by flops_formula"),
    Column("tokens_per_s_per_gpu", "float", "tokens/s", minimum=0, maximum=1e12, says="throughput per device"),
    Column(
        "status",
        "text",
        default="ok",
        choices=get_args(Status),
        says="how the run ended",
    ),
    Column(
        "flops_formula",
        "text",
        choices=get_args(FlopsFormula),
        says="the calculator behind tflops",
    ),
    Column("date", "text", looks=r"\d{4}|\d\d[./-]\d\d", like="a date such as 2022-02-25", says="day of the run"),
    Column("comparable_group", "text", says="same code, model and day; rank only inside a group"),
    Column(
        "quality",
        "text",
        default="ok",
        looks=r"^[A-Za-z_ ]{1,40}$",
        like="a word such as ok or suspect",
        says="ok and corrected are fit for fitting",
    ),
    Column("notes", "text", says="anything else; how the software was run is read from it"),
)

# Behind the columns above where a table has them: what the first tables' models had no need to say, and in tables of
# runs made here all of the layout and the model, of which the others tell a part.
FURTHER_COLUMNS: tuple[Column, ...] = (
    Column("head_dim", "int", minimum=1, maximum=1e6, says="features of a head; default hidden / heads"),
    Column(
        "attention",
        "text",
        choices=("mha", "gqa", "mla"),
        says="a key-value head for each head, or for several (state kv_heads); mla: latent attention",
    ),
    Column("mlp", "text", choices=get_args(Mlp), says="kind of MLP; default the model's, gelu where no model is known"),
    Column("experts", "int", minimum=0, maximum=1e6, says="routed experts of a layer; empty: a dense MLP"),
    Column("top_k", "int", minimum=0, maximum=1e6, says="routed experts that a token goes to"),
    Column("shared_experts", "int", minimum=0, maximum=1e6, says="experts that every token goes to"),
    Column("moe_ffn_hidden", "int", minimum=0, maximum=1e8, says="inner width of one expert"),
    Column("dense_layers", "int", minimum=0, maximum=1e5, says="first layers, which have a dense MLP"),
    Column(
        "capacity_factor",
        "float",
        minimum=1e-6,
        maximum=1e6,
        says="tokens that an expert takes at most, of its even share; empty: no token is dropped",
    ),
    Column(
        "shard",
        "int",
        minimum=1,
        maximum=1e7,
        says="replicas that share out what ZeRO shards; empty: dp where zero_stage > 0, else 1",
    ),
    Column(
        "cp_kind",
        "text",
        choices=get_args(ContextParallelKind),
        says="how ranks that share a sequence exchange keys and values; empty: ring",
    ),
    Column("ep", "int", minimum=1, maximum=1e7, says="expert-parallel degree; empty: 1"),
    Column("etp", "int", minimum=1, maximum=1e7, says="tensor-parallel degree of the experts; empty: tp"),
    Column(
        "dispatcher",
        "text",
        choices=get_args(DispatcherName),
        says="how tokens come to the ranks of their experts; empty: alltoall",
    ),
    Column(
        "ep_overlap",
        "text",
        choices=get_args(ExpertOverlap),
        says="what hides the exchange of tokens: shared experts, or another micro-batch (batch); empty: none",
    ),
    Column(
        "offload",
        "text",
        choices=get_args(Offload),
        says="what lies in the host's memory: optimizer (states), weights (with gradients and states), activations; "
        "empty: none",
    ),
    Column(
        "compression",
        "text",
        choices=get_args(Compression),
        says="how replicas send each other gradients in fewer bytes, which changes the result: fp16, int8 or powersgd "
        "(factors of rank 4), with error feedback; empty: none",
    ),
    Column(
        "local_steps",
        "int",
        "steps",
        minimum=0,
        maximum=1e6,
        says="steps that replicas make apart before they agree, which changes the result (DiLoCo); empty: 0, each step",
    ),
    Column(
        "expert_imbalance",
        "float",
        minimum=1.0,
        maximum=1e6,
        says="tokens that the busiest rank's experts are sent, over the mean; empty: 1",
    ),
    Column("layout_label", "text", says="the whole layout in short notation; blank cells of a layout follow from it"),
    Column("model", "text", says="catalogue name, file or JSON of the model; blank cells of its shape follow from it"),
)
BY_NAME: Mapping[str, Column] = {column.name: column for column in (*COLUMNS, *FURTHER_COLUMNS)}
# Columns whose default says something of the run: a table leaves them out where they are as usual, a log that does not
# state them says nothing, and its row leaves them blank.
ASSUMED: tuple[str, ...] = tuple(
    column.name for column in COLUMNS if column.default is not None and column.name not in ("status", "quality")
)
# What a run showed of itself.
FIGURES = ("mem_gib", "sec_per_it", "tflops", "tokens_per_s_per_gpu")
# Required columns that need not be there where another one gives them.
_FOLLOWS_FROM = {"layers": "model", "hidden": "model", "heads": "model", "vocab": "model", "mbs": "layout_label"}
FIT_QUALITIES = frozenset({"ok", "corrected"})


@lru_cache(_CELLS_KEPT)
def parse_cell(column: Column, text: str) -> Cell:
    """The typed value of one cell; a blank gives the column's default.

    Raises ValueError with a sentence that names the column, the value and what is expected.
    """
    text = text.strip()
    if says_nothing(text, none_is_a_word=column.is_free or "none" in column.words or bool(column.word)):
        return column.default
    if column.kind == "text":
        return _parse_word(column, without_shield(text))
    try:
        number = float(text)
    except ValueError:
        printed = number_printed(column.name, column.unit, text)
        if printed is None:
            raise ValueError(f"{column.name} is {quoted(text)}, expected a number{_unit(column)}") from None
        number = printed
    return _checked(column, number, text)


@lru_cache(_CELLS_KEPT, typed=True)
def check_cell(column: Column, value: Cell) -> Cell:
    """As `parse_cell`, for a cell that is typed already; None gives the column's default."""
    if value is None:
        return column.default
    if isinstance(value, str) or column.kind == "text":
        return parse_cell(column, str(value))
    return _checked(column, value, None)


def _checked(column: Column, number: float, printed: str | None) -> Cell:
    """The number, or ValueError with what is wrong with it, which quotes it as it is printed."""
    if not math.isfinite(number):
        wrong = "expected a finite number"
    elif column.kind == "int" and number != int(number):
        wrong = "expected a whole number"
    elif column.minimum is not None and number < column.minimum:
        wrong = f"below the least possible {column.minimum:g}"
    elif column.maximum is not None and number > column.maximum:
        wrong = f"above the most believable {column.maximum:g}"
    else:
        return int(number) if column.kind == "int" else number
    text = printed or (f"{number:.10g}" if isinstance(number, float) else str(number))
    shown = shortened(text, QUOTED) if math.isfinite(number) else quoted(text)
    raise ValueError(f"{column.name} is {shown}, {wrong}{_unit(column)}")


def _parse_word(column: Column, text: str) -> str:
    elsewhere = word_elsewhere(column.name, text)
    if column.word is not None:
        return column.word(elsewhere or text)
    if not column.choices:
        if column.looks and not re.search(column.looks, text):
            raise ValueError(f"{column.name} is {quoted(text)}, expected {column.like}: is a cell missing or shifted?")
        return sys.intern(text)  # a long table says the same names in every row
    word = column.words.get(letters_of(text)) or elsewhere
    if word is None:
        raise ValueError(f"{column.name} is {quoted(text)}, expected one of {', '.join(column.choices)}")
    return word


def _unit(column: Column) -> str:
    return f" of {column.unit}" if column.unit else ""


def missing_required(names: Iterable[str]) -> list[str]:
    """Required columns that are neither among `names` nor follow from one that is."""
    present = set(names)
    return [c.name for c in COLUMNS if c.required and not present & {c.name, _FOLLOWS_FROM.get(c.name)}]
