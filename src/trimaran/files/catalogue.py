"""Nouns from and to files: TOML, JSON, Hugging Face config, by path or catalogue name."""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from trimaran.files.hugging_face_config import model_from_config
from trimaran.files.user_file import NOUN_BYTES, file_text, from_home, read_json, read_toml
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.faults import Faults
from trimaran.nouns.hardware.device import Device
from trimaran.nouns.hardware.node_group import GroupLink, NodeGroup
from trimaran.nouns.model import Model
from trimaran.nouns.noun import TrimaranError, first_error
from trimaran.nouns.spoken.printed import letters_of
from trimaran.nouns.stack import Stack
from trimaran.nouns.text import QUOTED, quoted, shortened

N = TypeVar("N", bound=BaseModel)
CATALOG = package_files("trimaran") / "catalog"
# Names of the catalogue that are like one which it lacks.
MOST_NAMED = 8


@cache
def catalogue_names(kind: str) -> tuple[str, ...]:
    """All names of one kind: `models`, `devices`, `clusters`, `stacks`, `faults`, `recipes` or `imports`."""
    folder = CATALOG / kind
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def load_model(name_or_path: str) -> Model:
    """A Model by catalogue name, TOML file, or Hugging Face `config.json`, or the folder that holds one.

    Raises TrimaranError naming the file and the key that is wrong or missing, or the names that are like the given one.
    """
    if looks_like_path(name_or_path):
        _refuse_name_of_hub(name_or_path)
        config = Path(name_or_path) / "config.json"
        name_or_path = str(config) if config.exists() else name_or_path
    table, source = _table("models", name_or_path)
    if "model_type" not in table and "architectures" in table:
        raise TrimaranError(
            f"{source}: key 'model_type' is missing, which says of what family a config.json is: add it"
        )
    if "model_type" in table:
        try:
            return model_from_config(table, source)
        except ValidationError as error:
            raise TrimaranError(f"{source}: {first_error(error)}") from None
    return validate(Model, table, source)


def load_device(name_or_path: str) -> Device:
    """A Device by catalogue name or TOML file."""
    table, source = _table("devices", name_or_path)
    return validate(Device, table, source)


def load_cluster(name_or_path: str) -> Cluster:
    """A Cluster by catalogue name or TOML file; its device may be a name or a table."""
    table, source = _table("clusters", name_or_path)
    return cluster_from(table, source, Path(name_or_path).parent)


def cluster_text(name_or_path: str) -> str:
    """The text of a cluster's TOML file as it stands, by catalogue name or path."""
    _, source = _table("clusters", name_or_path)
    path = Path(name_or_path) if looks_like_path(name_or_path) else CATALOG / "clusters" / f"{name_or_path}.toml"
    return file_text(path, source, NOUN_BYTES, "give a TOML file")


def load_faults(name_or_path: str) -> Faults:
    """Faults by catalogue name or TOML file."""
    table, source = _table("faults", name_or_path)
    return validate(Faults, {"name": Path(name_or_path).stem, **table}, source)


def load_stack(name_or_path: str) -> Stack:
    """A Stack by catalogue name or TOML file, which may say that it `extends` another."""
    table, source = _table("stacks", name_or_path)
    if not looks_like_path(name_or_path):
        return stack_from(table, source, None, name_or_path)
    path = Path(name_or_path).resolve()
    return stack_from(table, source, path.parent, str(path))


def stack_from(table: Mapping[str, Any], source: str, folder: Path | None = None, name: str = "this stack") -> Stack:
    """The Stack of a table: what it leaves out is as in the stack that it `extends`, and in the one that this extends.

    A path counts from `folder`, that of the file which says it. Raises TrimaranError, naming `source`, also where
    stacks extend each other in a circle.
    """
    facts, chain = dict(table), [name]
    while (like := facts.pop("extends", None)) is not None:
        if not isinstance(like, str):
            raise TrimaranError(f"{source}: extends is {like!r}, expected the catalogue name or file of one stack")
        if looks_like_path(like):
            like = str(Path(named_from(like, folder or Path())).resolve())
        if like in chain:
            raise TrimaranError(f"{source}: {' extends '.join([*chain, like])}, which is a circle: leave one out")
        chain.append(like)
        folder = Path(like).parent if looks_like_path(like) else None
        # what rows of the other one are read as speaks of that one alone
        facts = {name: fact for name, fact in _table("stacks", like)[0].items() if name != "noted"} | facts
    return validate(Stack, facts, source)


def dump_toml(noun: BaseModel, path: str | Path) -> None:
    """Write a noun as TOML, atomically: the file is either the old one or the new one, whole."""
    import tomli_w

    write_atomically(path, tomli_w.dumps(_without_none(noun.model_dump(mode="json"))))


def write_atomically(path: str | Path, text: str) -> None:
    """Write text to a temporary file beside `path`, then rename it into place.

    Raises TrimaranError when the file cannot be written (no space, no permission).
    """
    target = Path(path)
    temporary: str | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(target)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        reason = error.strerror or str(error)
        raise TrimaranError(f"{target} cannot be written: {reason}; free space or choose another path") from None


def require_room(path: str | Path, size_bytes: int) -> None:
    """Raise TrimaranError where a file of so many bytes cannot be written now: asked ahead of what takes minutes.

    The nearest folder of the path that is there is tried, and nothing is left in it.
    """
    folder = next(parent for parent in Path(path).absolute().parents if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(size_bytes))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        reason = error.strerror or str(error)
        raise TrimaranError(f"{path} cannot be written: {reason}; free space or choose another path") from None


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_none(inner) for inner in value]
    return value


def cluster_from(table: Mapping[str, Any], source: str, folder: Path) -> Cluster:
    """The Cluster of a table; its device and its faults may be a name, a file's path from `folder`, or a table.

    A network that is shaped inside one machine is stated by a recipe, which makes the machine's devices its nodes: on
    top of a cluster of any other form, its delays would not be those of the cluster's links. Raises TrimaranError,
    naming `source`.
    """
    if "shaped" in table:
        raise TrimaranError(
            f"{source}: shaped is no section of a cluster, whose links are intra and inter: state the network as "
            f"[[sweep.networks]] of a recipe"
        )
    resolved = _resolved(table, folder)
    return _grouped(resolved, source, folder) if table.get("groups") else validate(Cluster, resolved, source)


def _resolved(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A table with its device and its faults in place of their names."""
    resolved = dict(table)
    for field, load in (("device", load_device), ("faults", load_faults)):
        if isinstance(named := table.get(field), str):
            resolved[field] = load(named_from(named, folder))
    return resolved


def _called(section: Mapping[str, Any], field: str) -> str:
    """What a section of a file calls itself, behind its place there: `, ohio`, or `, between ohio and virginia`."""
    name = section.get(field)
    if isinstance(name, str) and name:
        return f", {shortened(name, QUOTED)}"
    if isinstance(name, list) and len(name) == 2 and all(isinstance(end, str) for end in name):
        return f", {field} {shortened(' and '.join(name), QUOTED)}"
    return ""


def _grouped(table: dict[str, Any], source: str, folder: Path) -> Cluster:
    """The Cluster of a table with groups: what a group leaves out of its nodes is as the table states it for all."""
    stated = {name: table.get(name, []) for name in ("groups", "links")}
    for name, sections in stated.items():
        if not isinstance(sections, list) or not all(isinstance(section, dict) for section in sections):
            raise TrimaranError(f"{source}: {name} is {quoted(sections)}, expected sections [[{name}]]")
    common = {name: table[name] for name in NodeGroup.model_fields if name in table and name not in ("name", "nodes")}
    groups = [
        validate(NodeGroup, {**common, **_resolved(group, folder)}, f"{source}: groups {place}{_called(group, 'name')}")
        for place, group in enumerate(stated["groups"], 1)
    ]
    links = [
        validate(GroupLink, link, f"{source}: links {place}{_called(link, 'between')}")
        for place, link in enumerate(stated["links"], 1)
    ]
    apart = {*common, "groups", "links", "nodes"}
    others = {name: value for name, value in table.items() if name not in apart}
    try:
        cluster = Cluster.of_groups(groups, links, **others)
    except ValidationError as error:
        raise TrimaranError(f"{source}: {first_error(error)}") from None
    if table.get("nodes", cluster.nodes) != cluster.nodes:
        raise TrimaranError(f"{source}: nodes is {table['nodes']}, but the groups state theirs: leave it out")
    return cluster


def validate(noun: type[N], table: Any, source: str) -> N:
    """The noun of a table. Raises TrimaranError naming `source` and the field."""
    try:
        return noun.model_validate(table)
    except ValidationError as error:
        raise TrimaranError(f"{source}: {first_error(error)}") from None


def looks_like_path(name: str) -> bool:
    """Whether a name is a file's path, and not a catalogue name."""
    return "/" in name or os.sep in name or name.endswith((".toml", ".json"))


def whole_path(stated: str, folder: Path) -> str:
    """A path that a file states, from the folder of that file: ranks and programs start in folders of their own."""
    return str((folder / from_home(stated)).absolute())


def named_from(name_or_path: str, folder: Path) -> str:
    """What a file states by catalogue name or path: the name, or the whole path."""
    return whole_path(name_or_path, folder) if looks_like_path(name_or_path) else name_or_path


def _table(kind: str, name_or_path: str) -> tuple[dict[str, Any], str]:
    """The raw table behind a catalogue name or path, and how to call it in an error."""
    singular = kind.removesuffix("s")
    if looks_like_path(name_or_path):
        return read_table(Path(name_or_path), f"{singular} {name_or_path}")
    if name_or_path in catalogue_names(kind):
        table = read_toml(CATALOG / kind / f"{name_or_path}.toml", f"{singular} {name_or_path}")
        return {"name": name_or_path, **table}, f"{singular} {name_or_path}"
    raise TrimaranError(unknown_name(kind, name_or_path))


@cache
def catalogue_name(kind: str, text: str) -> str:
    """The catalogue's name that a table's cell spells, however its words are set apart; else the cell as it stands.

    `Llama-2-7B` is llama2-7b, `DGX-H100` dgx-h100, and Hugging Face's `meta-llama/Llama-2-7b-hf`, where no file is
    called so, llama2-7b too.
    """
    if looks_like_path(text) and (os.path.lexists(text) or kind != "models" or text.count("/") != 1):
        return text
    letters = letters_of(text.rpartition("/")[2].removesuffix("-hf"))
    return next((name for name in catalogue_names(kind) if letters_of(name) == letters), text)


def unknown_name(kind: str, name: str, way_out: str = "") -> str:
    """What is wrong with a name of that kind that the catalogue lacks, and what it may have been meant to be.

    Where nothing is close to it, `way_out` stands in place of all names that there are.
    """
    close = _close_names(kind, name)
    hint = f"did you mean {close[0]!r}?" if close else way_out or f"it has {', '.join(catalogue_names(kind))}."
    if others := close[1:MOST_NAMED]:
        hint += f" Others like it: {', '.join(others)}."
    singular = kind if kind == "faults" else kind.removesuffix("s")
    return f"{singular} {name!r} is not in the catalogue: {hint} {_as_file(kind, name)}"


def _as_file(kind: str, name: str) -> str:
    """How a file is given in place of a name; a folder that a model was downloaded to is told by its name here."""
    try:
        is_folder = kind == "models" and Path(name, "config.json").is_file()
    except OSError:  # of a name that is longer than a folder's may be
        is_folder = False
    if is_folder:
        return f"The folder of that name here is given as ./{name}."
    of_models = "; any other model's own config.json serves" if kind == "models" else ""
    return f"A file's path ends in .toml or .json{of_models}."


def _close_names(kind: str, name: str) -> list[str]:
    """The catalogue's names that a name may have been meant to be, the likeliest first; none where nothing is close."""
    names = catalogue_names(kind)
    spelled, lower = catalogue_name(kind, name), name.lower()  # the catalogue's names have no capitals
    if spelled in names:
        return [spelled]
    longer = sorted((known for known in names if lower and lower in known), key=len)
    if longer:
        return longer
    first = difflib.get_close_matches(lower, names, n=1, cutoff=0.6)
    if not first and kind == "clusters" and lower in catalogue_names("devices"):
        return sorted((known for known in names if _table(kind, known)[0].get("device") == lower), key=len)
    return first and list(dict.fromkeys([*first, *difflib.get_close_matches(lower, names, n=MOST_NAMED, cutoff=0.75)]))


def _refuse_name_of_hub(name: str) -> None:
    """Raise TrimaranError where a path is no file's and is as Hugging Face calls models: `meta-llama/Llama-2-7b`."""
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith((".toml", ".json")):
        return
    owner, _, model = name.partition("/")
    if os.path.lexists(name) or os.path.lexists(owner) or not model:
        return
    spelled = catalogue_name("models", name)
    known = f"{spelled!r} of the catalogue, or " if spelled in catalogue_names("models") else ""
    raise TrimaranError(
        f"model {name}: there is no such file, and nothing is fetched from Hugging Face: give {known}the path of a "
        f"config.json that was downloaded"
    )


def read_table(path: Path, source: str) -> tuple[dict[str, Any], str]:
    """The raw table of a TOML or JSON file, and how to call it in an error."""
    if path.suffix != ".json":
        return {"name": path.stem, **read_toml(path, source)}, source
    table = read_json(path, source)
    if not isinstance(table, dict):
        raise TrimaranError(f"{source} holds {type(table).__name__}, expected an object of fields")
    return table, source
