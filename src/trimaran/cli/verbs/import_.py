"""`trimaran import`: logs and tables of others into a store, links into a cluster file, configurations as layouts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimaran.cli.options import ClusterOption, FormatOption, OutputFormat, StackOption
from trimaran.cli.terminal import tell, tell_each

if TYPE_CHECKING:
    from trimaran.nouns.columns import Cell
    from trimaran.planner.configs.resolve import Given
    from trimaran.store.importers.draft import Accept
    from trimaran.store.importers.formats import Asked, Imported


class Repairs(StrEnum):
    """What to do with a repair that the figures of a row support."""

    keep = "keep"
    accept = "accept"
    ask = "ask"


class ImportFormat(StrEnum):
    """What a file is."""

    auto = "auto"
    megatron = "megatron"
    deepspeed = "deepspeed"
    torchtitan = "torchtitan"
    nanotron = "nanotron"
    nemo = "nemo"
    olmo_core = "olmo-core"
    composer = "composer"
    nanogpt = "nanogpt"
    hugging_face = "hugging-face"
    wandb = "wandb"
    wandb_history = "wandb-history"
    tensorboard = "tensorboard"
    trimaran = "trimaran"
    csv = "csv"
    markdown = "markdown"
    nccl_tests = "nccl-tests"
    iperf3 = "iperf3"


def import_(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Logs, Markdown documents, CSV tables, or folders of TensorBoard's runs; or measured links.",
            metavar="[FILE...]",
        ),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(
            "--into",
            help="Store to add the rows to; or a cluster's .toml, to write links into that nccl-tests or iperf3 --json "
            "measured.",
            metavar="STORE.sqlite",
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            help="Which link of the cluster was measured: intra, inter, a group, or two groups as FROM,TO. Default: as "
            "the hosts tell."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="In place of FILEs: Megatron-LM's arguments, a torchtitan, DeepSpeed or Primus configuration, "
            "or a NeMo recipe, read as a layout; says what it would cost on --cluster.",
            metavar="FILE",
        ),
    ] = None,
    source_format: Annotated[ImportFormat, typer.Option("--as", help="What the files are.")] = ImportFormat.auto,
    profile: Annotated[
        str | None, typer.Option(help="What the files do not state: a shipped profile's name or a TOML file.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model: catalogue name, TOML file or config.json.")] = None,
    cluster: ClusterOption = None,
    stack: StackOption = None,
    layout: Annotated[
        str | None, typer.Option("--layout", help="Layout that the files do not state: dp8,tp4,mbs1,bf16.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="What the files do not state: gbs=512, with --config also mbs=4. Repeatable."),
    ] = None,
    repairs: Annotated[
        Repairs, typer.Option(help="Rows that contradict themselves: keep them flagged, accept the repairs, or ask.")
    ] = Repairs.keep,
    gbs: Annotated[int | None, typer.Option(help="With --config: global batch, sequences a step.")] = None,
    seq: Annotated[
        int | None, typer.Option("--seq-len", "--seq", help="With --config: sequence length, tokens.")
    ] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="With --config: devices that it runs on.")] = None,
    form: FormatOption = OutputFormat.table,
) -> None:
    """Read logs and tables into a store, what is doubtful flagged; or price a configuration of another trainer.

    Into a cluster's .toml it writes links that nccl-tests or iperf3 --json measured; --cluster begins a new one.

    Example: trimaran import prequel.md --into published.sqlite
    """
    from trimaran.nouns.noun import TrimaranError

    if config is not None:
        if files or into:
            raise TrimaranError("--config is read alone: import logs and tables by another command")
        of_logs = {"--profile": profile, "--link": link, "--layout": layout, "--repairs": repairs is not Repairs.keep}
        if option := next((option for option, value in of_logs.items() if value), None):
            raise TrimaranError(f"{option} is of logs and tables, and --config is a configuration: leave it out")
        asked = {"gbs": gbs, "seq_len": seq, "devices": devices}
        _price(config, source_format, form, _of_config(cluster, model, stack, asked, set_ or []))
        return
    if not files or into is None:
        missing = "FILE" if not files else "--into STORE.sqlite"
        raise TrimaranError(f"{missing} is missing: name files and a store, or a configuration by --config")
    sizes = {"--gbs": gbs, "--seq-len": seq, "--devices": devices}
    for option, size in sizes.items():
        if size is not None:
            raise TrimaranError(
                f"{option} {size} is of a configuration, and no --config is named: what files do not state is stated "
                f"by --set, as --set {option.removeprefix('--').replace('-', '_')}={size}"
            )
    if into.suffix == ".toml":
        beside = {"--profile": profile, "--model": model, "--stack": stack, "--layout": layout, "--set": set_}
        beside["--repairs"] = None if repairs is Repairs.keep else repairs.value
        if stated_beside := [option for option, value in beside.items() if value]:
            raise TrimaranError(f"{stated_beside[0]} is of runs, and links go into {into}: leave it out")
        _write_links(files, into, cluster, link, source_format, form)
        return
    if link is not None:
        raise TrimaranError(f"--link names a link of a cluster, and --into {into} is a store: name a .toml")
    given = _given(model, cluster, stack, [*([f"layout_label={layout}"] if layout else []), *(set_ or [])])
    _import_runs(files, into, given, profile, repairs, source_format, form)


def _import_runs(
    files: list[Path],
    into: Path,
    given: dict[str, Cell],
    profile: str | None,
    repairs: Repairs,
    source_format: ImportFormat,
    form: OutputFormat,
) -> None:
    """Add the rows of all files that can be read to a store, and tell of each file what became of it."""
    from trimaran.nouns.noun import TrimaranError
    from trimaran.report.tables import Field, render
    from trimaran.store import Store
    from trimaran.store.importers.formats import Asked, sources_of
    from trimaran.store.importers.profile import load_profile
    from trimaran.store.importers.same_run import as_begun, mark_ranks

    stated = load_profile(profile) if profile is not None else None
    names = sources_of(files)
    read, failed = _read_each(names, Asked(stated, given, _accept(repairs)), source_format)
    # all files are read before the first row is stored, so that a mistake in what is stated of them leaves no store
    with Store(into) as store:
        keys = store.keys()
        read = {path: replace(each, rows=as_begun(each.rows, keys)) for path, each in read.items()}
        stored = store.showing(row for imported in read.values() for row in imported.rows)
        marked = mark_ranks([each.rows for each in read.values()], [each.ended for each in read.values()], stored)
        read = {path: replace(each, rows=rows) for (path, each), rows in zip(read.items(), marked, strict=True)}
        added = [store.add_new(imported.rows) for imported in read.values()]
    for path, imported in read.items():
        _tell(names[path], imported)
    tell_each([f"not imported: {reason}" for reason in failed.values()])
    lines = [_record(names[path], read[path], count) for path, count in zip(read, added, strict=True)]
    columns = ("file", "format", "profile", "rows", "added", "refused", "flagged")
    fields = [Field(name, name.capitalize(), left=name not in ("rows", "added", "refused")) for name in columns]
    tell(render(lines, fields, form.value))
    if failed:
        names_of_failed = ", ".join(names[path] for path in failed)
        raise TrimaranError(
            f"{len(failed)} of {len(read) + len(failed)} files are not imported, for what is said above, and the "
            f"others are: {names_of_failed}"
        )


def _read_each(
    names: dict[Path, str], asked: Asked, source_format: ImportFormat
) -> tuple[dict[Path, Imported], dict[Path, str]]:
    """What was read of each file, and of those that cannot be read why; raises TrimaranError where there is no row."""
    from trimaran.nouns.noun import TrimaranError
    from trimaran.store.importers.formats import import_file

    read: dict[Path, Imported] = {}
    failed: dict[Path, str] = {}
    for path, name in names.items():
        try:
            read[path] = import_file(path, asked, source_format.value, name if path.is_dir() else "")
        except TrimaranError as error:
            if len(names) == 1:
                raise
            failed[path] = str(error)
    if not any(imported.rows for imported in read.values()):
        reasons = [*failed.values(), *(reason for imported in read.values() for reason in imported.refused)]
        files = ", ".join(names.values())
        raise TrimaranError(f"no row of {files} can be imported; the first: {(reasons or ['it has none'])[0]}")
    return read, failed


def _price(
    config: Path,
    source_format: ImportFormat,
    form: OutputFormat,
    given: Given,
) -> None:
    from trimaran.planner.configs.cost import cost_of
    from trimaran.report.configured import answer

    tell(answer(cost_of(config, source_format.value, given), form.value))


def _of_config(
    cluster: str | None, model: str | None, stack: str | None, sizes: dict[str, int | None], pairs: list[str]
) -> Given:
    """What options say beside a configuration; --set states a size that has no option, or that of one."""
    from trimaran.nouns.noun import TrimaranError
    from trimaran.planner.configs.resolve import SHAPE, Given

    if cluster is None:
        raise TrimaranError("--cluster is missing: state where the configuration is to run")
    known = ("mbs", *sizes, *SHAPE)
    found: dict[str, int] = {name: value for name, value in sizes.items() if value is not None}
    for pair in pairs:
        name, _, value = (word.strip() for word in pair.partition("="))
        if name not in known:
            raise TrimaranError(f"--set {pair!r}: of a configuration {', '.join(known)} can be set, as --set mbs=4")
        if not (value.isascii() and value.isdecimal() and 0 < int(value[:12]) < 10**9):
            raise TrimaranError(f"--set {pair!r}: {name} is a whole number from 1 on")
        if found.setdefault(name, int(value)) != int(value):
            raise TrimaranError(f"--set {pair!r} and {name} {found[name]} contradict each other: leave one out")
    shape = {name: value for name, value in found.items() if name in SHAPE}
    return Given(
        cluster, model, stack, found.get("gbs"), found.get("seq_len"), found.get("devices"), found.get("mbs"), shape
    )


def _write_links(
    files: list[Path],
    into: Path,
    cluster: str | None,
    link: str | None,
    source_format: ImportFormat,
    form: OutputFormat,
) -> None:
    from trimaran.report.tables import Field, render
    from trimaran.store.importers.links.into_cluster import import_links

    written = import_links(files, into, cluster, link, source_format.value)
    tell_each([f"{each.file}: {remark}" for each in written for remark in each.remarks])
    names = (
        "file",
        "tool",
        "link",
        "bandwidth_gbps",
        "latency_us",
        "bandwidth_gbps_before",
        "latency_us_before",
        "said",
    )
    records = [{name: getattr(each, name) for name in names} for each in written]
    fields = [Field(name, name.replace("_", " ").capitalize()) for name in names]
    rendered = render(records, fields, form.value)
    tell("\n".join(f"{into}: {each.sentence}" for each in written) if form is OutputFormat.table else rendered)


def _given(model: str | None, cluster: str | None, stack: str | None, pairs: list[str]) -> dict[str, Cell]:
    from trimaran.files.catalogue import load_cluster, load_model, load_stack
    from trimaran.files.row_nouns import model_cell
    from trimaran.nouns.noun import TrimaranError
    from trimaran.store.importers.profile import typed_cells

    cells: dict[str, str | int | float] = {}
    if model is not None:
        cells["model"] = model_cell(load_model(model))
    if cluster is not None:
        cells |= {"cluster": cluster, "devices_per_node": load_cluster(cluster).devices_per_node}
    if stack is not None:
        load_stack(stack)
        cells["stack"] = stack
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise TrimaranError(f"--set {pair!r} is not COLUMN=VALUE: write it as gbs=512")
        cells[name.strip()] = value.strip()
    try:
        return typed_cells(cells)
    except ValueError as error:
        raise TrimaranError(f"--set: {error}") from None


def _accept(repairs: Repairs) -> Accept:
    return _ask if repairs is Repairs.ask else lambda proposal: repairs is Repairs.accept


def _ask(proposal: str) -> bool:
    from trimaran.nouns.noun import TrimaranError
    from trimaran.nouns.text import printable

    try:
        return typer.confirm(printable(proposal), err=True)
    except typer.Abort:
        raise TrimaranError("no answer, so nothing is imported: --repairs keep or accept asks nothing") from None


def _tell(name: str, imported: Imported) -> None:
    """What was not taken as it stands, on the error stream."""
    tell_each([f"{name}: {remark}" for remark in imported.remarks])
    tell_each([f"{name}: refused {reason}" for reason in imported.refused])
    if imported.unread:
        tell_each([f"{name}: columns not read: {', '.join(imported.unread)}"])
    tell_each([f"{name}: kept {proposal} (--repairs accept)" for proposal in imported.proposals])


def _record(name: str, imported: Imported, added: int) -> dict[str, object]:
    flagged = Counter(row.quality for row in imported.rows if row.quality != "ok")
    return {
        "file": name,
        "format": imported.format,
        "profile": imported.profile or None,
        "rows": len(imported.rows),
        "added": added,
        "refused": len(imported.refused),
        "flagged": ", ".join(f"{count} {quality}" for quality, count in sorted(flagged.items())) or None,
        "proposals": list(imported.proposals),
    }
