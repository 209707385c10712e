"""Which tool a file of a measured link is of, and what it says."""

from __future__ import annotations

from pathlib import Path

from trimaran.nouns.noun import TrimaranError
from trimaran.store.importers.links import iperf3, nccl_tests
from trimaran.store.importers.links.measured_link import MeasuredLink
from trimaran.store.importers.text import clean, decoded

TOOLS = (nccl_tests.NAME, iperf3.NAME)


def recognises(text: str) -> bool:
    """Whether a text is what a tool that measures links has written."""
    return nccl_tests.recognises(text) or iperf3.recognises(text)


def read_link(path: Path, form: str = "auto") -> MeasuredLink:
    """The link that a file measures; `form` names the tool. Raises TrimaranError where it tells none."""
    text = clean(decoded(path))
    if form not in ("auto", *TOOLS):
        raise TrimaranError(
            f"--as {form} is of runs, and {path} goes into a cluster: it is auto or {' or '.join(TOOLS)}"
        )
    if form == nccl_tests.NAME or (form == "auto" and nccl_tests.recognises(text)):
        if not text.lstrip().startswith("{"):
            return nccl_tests.read(text, path)
        return nccl_tests.read_json(_json(text, path), path)
    if form == iperf3.NAME or iperf3.recognises(text):
        return iperf3.read(_json(text, path), path)
    raise TrimaranError(f"{path} measures no link: give the output of nccl-tests, or of iperf3 --json")


def _json(text: str, path: Path) -> object:
    content = iperf3.content_of(text, path)
    if not isinstance(content, dict):
        raise TrimaranError(f"{path} holds {type(content).__name__}, expected the object that the tool writes")
    return content
