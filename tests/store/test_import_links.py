"""Links that nccl-tests and iperf3 measured come into a cluster's file, and nothing else of it is touched."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command import run
from link_files import iperf3_json, nccl_json, nccl_table
from trimaran.files.catalogue import load_cluster
from trimaran.files.toml_edit import set_values, with_values
from trimaran.nouns.noun import TrimaranError
from trimaran.store.importers.links.into_cluster import WrittenLink, import_links
from trimaran.store.importers.links.measured_link import StartUp
from trimaran.store.importers.links.read_links import read_link

FLAT = """# our cluster
device = "h100-sxm"   # of 2023
nodes = 4
devices_per_node = 8

[intra]  # NVLink
bandwidth_gbps = 3600  # each way
latency_us = 2

[inter]
bandwidth_gbps = 3200
latency_us = 4.0
"""
GROUPS = """device = "v100-sxm2-16gb"
devices_per_node = 1
intra = { bandwidth_gbps = 100, latency_us = 5 }

[[groups]]  # in the east
name = "ohio"
nodes = 3
inter = { bandwidth_gbps = 5, latency_us = 1000 }  # as sold

[[groups]]
name = "virginia"
nodes = 2
inter = { bandwidth_gbps = 8, latency_us = 500 }

[[links]]
between = ["ohio", "virginia"]
bandwidth_gbps = 1.12  # at night
latency_us = 11000
"""


def into(tmp_path: Path, cluster: str | None, *files: object, **options: str) -> list[WrittenLink]:
    if cluster is not None:
        (tmp_path / "mine.toml").write_text(cluster)
    paths = []
    for number, content in enumerate(files):
        paths.append(tmp_path / f"{number}.txt")
        paths[-1].write_text(content if isinstance(content, str) else json.dumps(content, indent=1))
    return import_links(paths, tmp_path / "mine.toml", **options)


def refusal(tmp_path: Path, cluster: str, *files: object, **options: str) -> str:
    with pytest.raises(TrimaranError) as error:
        into(tmp_path, cluster, *files, **options)
    assert (tmp_path / "mine.toml").read_text() == cluster, "a refused import leaves the file as it was"
    return str(error.value)


def test_a_table_of_nccl_tests_gives_bandwidth_and_delay_of_the_link_between_nodes(tmp_path: Path) -> None:
    (written,) = into(tmp_path, FLAT, nccl_table(start_us=60, bus_gb_s=90))
    cluster = load_cluster(str(tmp_path / "mine.toml"))
    assert (cluster.inter.bandwidth_gbps, cluster.all_reduce_gb_s) == (720, 90)
    # up and down a tree of two nodes: 2 x (7 hops of 2 us inside, 1 between)
    assert cluster.inter.latency_us == pytest.approx(60 / 2 - 7 * 2)
    assert (written.link, written.bandwidth_gbps_before, written.latency_us_before) == ("inter", 3200, 4)
    assert "all_reduce_perf, 2 hosts of 8, 14 sizes met within 0% on average" in written.sentence
    text = (tmp_path / "mine.toml").read_text()
    assert cluster.intra.bandwidth_gbps == 3600 and len(text.splitlines()) == len(FLAT.splitlines()) + 1
    assert all(comment in text for comment in re.findall("#.*", FLAT))


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "sendrecv", "broadcast"])
def test_every_operation_gives_the_same_bandwidth_and_one_hosts_devices_have_the_link_inside(
    tmp_path: Path, operation: str, debug: bool
) -> None:
    table = nccl_table(operation, hosts=("1a2b3c",), bus_gb_s=200, start_us=14, debug=debug)
    (written,) = into(tmp_path, FLAT, table)
    hops = {"all_reduce": 14, "all_gather": 7, "sendrecv": 1, "broadcast": 7}[operation]
    assert (written.link, written.bandwidth_gbps) == ("intra", 1600)
    assert written.latency_us == pytest.approx(14 / hops, rel=1e-3)


def test_the_program_is_told_by_the_columns_where_the_output_of_older_versions_names_none(tmp_path: Path) -> None:
    (written,) = into(tmp_path, FLAT, nccl_table(named=False))
    assert written.said.startswith("all_reduce_perf")
    said = refusal(tmp_path, FLAT, nccl_table("all_gather", named=False))
    assert "does not say which program ran" in said and "all_gather_perf, alltoall_perf" in said


def test_a_table_of_nccl_tests_before_its_column_root_says_the_same(tmp_path: Path) -> None:
    """Times of whole microseconds were taken for the root, and what stood behind them for wrong results."""
    table = nccl_table(hosts=("node1",), start_us=14, bus_gb_s=20).replace("redop    root", "redop")
    older = re.sub(r"(sum +)-1 ", r"\1", table)
    whole = re.sub(r"(sum +\d{5})\.\d+ ", r"\1 ", older)
    assert whole != older, "times of the largest sizes are printed in whole microseconds"
    (written,) = into(tmp_path, FLAT, whole)
    assert written.bandwidth_gbps == pytest.approx(160, rel=1e-3) and written.link == "intra"


def test_json_of_nccl_tests_says_the_same_as_its_table(tmp_path: Path) -> None:
    hosts = ("node1", "node2")
    (table,) = into(tmp_path, FLAT, nccl_table(hosts=hosts, start_us=33, bus_gb_s=77))
    (found,) = into(tmp_path, FLAT, nccl_json(hosts, 8, 33, 77))
    assert (found.bandwidth_gbps, found.latency_us, found.said) == (table.bandwidth_gbps, table.latency_us, table.said)


@settings(max_examples=60, deadline=None)
@given(
    hop=st.floats(5, 5000), inside=st.floats(0, 5), hosts=st.integers(2, 64), per_host=st.integers(1, 16),
    passes=st.sampled_from([1, 2]),
)  # fmt: skip
def test_a_delay_is_the_one_from_which_the_cost_model_counts_the_same_start(
    hop: float, inside: float, hosts: int, per_host: int, passes: int
) -> None:
    ranks = hosts * per_host
    borders = min(hosts, ranks - 1)
    start = passes * ((ranks - 1 - borders) * inside + borders * hop)
    if passes == 2:
        start = min(start, 2 * ((per_host - 1) * inside + (hosts - 1).bit_length() * hop))
    assert StartUp(start, passes, hosts, per_host).latency_us(inside) == pytest.approx(hop)


def test_an_iperf3_test_writes_the_link_of_the_groups_that_its_hosts_name(tmp_path: Path) -> None:
    (written,) = into(tmp_path, GROUPS, iperf3_json(0.8765, streams=4))
    cluster = load_cluster(str(tmp_path / "mine.toml"))
    (link,) = cluster.links
    assert (link.bandwidth_gbps, link.latency_us, link.one_way) == (0.8765, 11000, False)
    assert written.sentence.startswith(
        "link ohio - virginia is 0.8765 Gbit/s and 11000 us, was 1.12 Gbit/s and 11000 us"
    )
    assert "# at night" in (tmp_path / "mine.toml").read_text()


def test_ways_that_differ_become_a_link_each(tmp_path: Path) -> None:
    into(tmp_path, GROUPS, iperf3_json(0.9, back_gbps=0.4))
    links = load_cluster(str(tmp_path / "mine.toml")).links
    assert [(link.between, link.bandwidth_gbps, link.one_way) for link in links] == [
        (("ohio", "virginia"), 0.9, True), (("virginia", "ohio"), 0.4, True),
    ]  # fmt: skip
    # a test of one way leaves the other; the client stands in virginia
    again = (tmp_path / "mine.toml").read_text()
    into(tmp_path, again, iperf3_json(0.45, client="virginia-2", server="ohio-1"))
    assert [link.bandwidth_gbps for link in load_cluster(str(tmp_path / "mine.toml")).links] == [0.9, 0.45]


def test_two_tests_each_of_one_way_are_put_together(tmp_path: Path) -> None:
    reverse = iperf3_json(0.5, reverse=True)
    into(tmp_path, GROUPS, iperf3_json(1.0, round_trip_us=30000), reverse)
    links = load_cluster(str(tmp_path / "mine.toml")).links
    assert [(link.bandwidth_gbps, link.latency_us) for link in links] == [(1.0, 15000), (0.5, 15000)]
    assert "both measure link ohio - virginia" in refusal(tmp_path, GROUPS, iperf3_json(), iperf3_json())


def test_a_link_may_be_stated_and_a_missing_one_is_added(tmp_path: Path) -> None:
    alone = GROUPS.partition("[[links]]")[0]
    test = iperf3_json(0.7, client="a", server="b")
    assert "host a names no group" in refusal(tmp_path, alone, test)
    assert "did you mean 'virginia'?" in refusal(tmp_path, alone, test, link="ohio,virgina")
    into(tmp_path, alone, test, link="ohio,virginia")
    assert load_cluster(str(tmp_path / "mine.toml")).links[0].bandwidth_gbps == 0.7
    (written,) = into(tmp_path, GROUPS, test, link="ohio")
    assert written.link == "inter of ohio"
    assert load_cluster(str(tmp_path / "mine.toml")).groups[0].inter.bandwidth_gbps == 0.7
    assert "# as sold" in (tmp_path / "mine.toml").read_text()


def test_a_new_cluster_begins_as_one_of_the_catalogue(tmp_path: Path) -> None:
    into(tmp_path, None, nccl_table(), like="dgx-h100")
    cluster, like = load_cluster(str(tmp_path / "mine.toml")), load_cluster("dgx-h100")
    assert (cluster.name, cluster.inter.bandwidth_gbps) == ("mine", 720)
    kept = {"name": "", "inter": like.inter, "all_reduce_gb_s": 0}
    assert cluster.model_copy(update=kept) == like.model_copy(update=kept)
    with pytest.raises(TrimaranError, match=r"mine.toml exists.*leave --cluster out"):
        into(tmp_path, None, nccl_table(), like="dgx-h100")
    (tmp_path / "mine.toml").unlink()
    with pytest.raises(TrimaranError, match=r"does not exist: name the cluster .* by --cluster"):
        into(tmp_path, None, nccl_table())


def test_large_sizes_alone_keep_the_delay_of_the_file_and_say_so(tmp_path: Path) -> None:
    (written,) = into(tmp_path, FLAT, nccl_table(start_us=10, sizes=[2**28, 2**30, 2**32]))
    assert (written.latency_us, written.bandwidth_gbps) == (4, 720)
    assert "sizes from 256 MiB tell no delay" in written.remarks[0]


def test_fewer_devices_than_a_nodes_are_told(tmp_path: Path) -> None:
    (written,) = into(tmp_path, FLAT, nccl_table(per_host=1))
    assert "1 of a node's 8 devices ran" in written.remarks[0]


WRONG = {
    "wrong results": (nccl_table(wrong=7), "has 7 wrong results"),
    "one size": (nccl_table(sizes=[2**30]), "has one size, 1 GiB"),
    "no time": (re.sub(r"(-1 +)[\d.]+", r"\g<1>0.00", nccl_table()), "has a time of 0 us, so no bandwidth"),
    "small sizes": (nccl_table(sizes=[8, 64]), "run larger sizes, as -e 1G"),
    "one device": (nccl_table(hosts=("a",), per_host=1), "ran on one device of a"),
    "no ranks": (re.sub(r"#  Rank.*\n", "", nccl_table()), "give the whole output"),
    "cut table": (nccl_table().partition("(us)")[0], "has no row of sizes and times"),
    "two tables": (nccl_table() * 2, "holds 2 tables"),
    "no table": (nccl_table().replace("redop", "op"), "measures no link"),
    "more ranks": (nccl_table(per_host=16), "devices_per_node = 8"),
    "sends of a few": (nccl_table("sendrecv"), "sends to the next host from one alone"),
    "cut nccl json": (json.dumps(nccl_json(("a", "b"), 1, 9, 9))[:-500], "is not whole JSON"),
    "nccl without devices": ({**nccl_json(("a", "b"), 1, 9, 9), "config": {}}, "lacks what nccl-tests writes"),
    "cut json": (json.dumps(iperf3_json(), indent=1)[:-90], "is not whole JSON"),
    "error": ({"start": {}, "intervals": [], "end": {}, "error": "unable to connect to server"}, "unable to connect"),
    "no end": ({**iperf3_json(), "end": {}}, "cut off"),
    "nothing arrived": (iperf3_json(0.0), "no byte arrived from 10.0.0.1 to 10.1.0.4"),
    "neither": ("once upon a time", "measures no link"),
    "of runs": ("[1, 2]", "measures no link"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_tells_no_link_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    content, said = WRONG[case]
    message = refusal(tmp_path, FLAT, content)
    assert said in message and "\n" not in message


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        (GROUPS.replace("[[links]]", "[[link]]"), "'link' is not known: did you mean 'links'?"),
        (GROUPS.partition("[[links]]")[0].replace("[[groups]]  # in", "links = 5\n[[groups]]  # in"), "links is 5"),
        (GROUPS.replace('between = ["ohio", "virginia"]', 'between = "ohio"'), "links 1"),
        (FLAT.replace("nodes = 4", "nodes = -4"), "nodes"),
        ("device = ", "not valid TOML"),
    ],
)
def test_a_file_that_is_no_cluster_is_refused_as_it_is_everywhere(tmp_path: Path, cluster: str, said: str) -> None:
    assert said in refusal(
        tmp_path, cluster, iperf3_json(), link="inter" if cluster.startswith("#") else "ohio,virginia"
    )


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 4000), inserted=st.text(max_size=8), where=st.integers(0, 4000), which=st.integers(0, 2))
def test_damaged_files_are_read_or_refused_and_never_worse(
    tmp_path_factory: pytest.TempPathFactory, cut: int, inserted: str, where: int, which: int
) -> None:
    whole = (nccl_table(), json.dumps(iperf3_json()), json.dumps(nccl_json(("a", "b"), 2, 9, 9)))[which]
    path = tmp_path_factory.getbasetemp() / "damaged.txt"
    path.write_text((whole[:where] + inserted + whole[where:])[: len(whole) - cut], encoding="utf-8")
    with contextlib.suppress(TrimaranError):
        found = read_link(path)
        assert found.there_gbps is None or found.there_gbps > 0


def changed_iperf3(section: str, **fields: object) -> dict[str, object]:
    test = iperf3_json()
    test["start"][section] = {**test["start"].get(section, {}), **fields}
    return test


def test_tests_of_something_else_than_a_link_are_refused(tmp_path: Path) -> None:
    assert "run it over TCP" in refusal(tmp_path, FLAT, changed_iperf3("test_start", protocol="UDP"))
    assert "held to 0.1 Gbit/s" in refusal(tmp_path, FLAT, changed_iperf3("test_start", target_bitrate=10**8))
    assert "of iperf3's server" in refusal(tmp_path, FLAT, changed_iperf3("accepted_connection", host="a"))
    test = iperf3_json()
    test["start"]["connected"][0]["remote_host"] = "127.0.0.1"
    assert "one host: run it between two" in refusal(tmp_path, FLAT, test)
    assert "--link intra is between devices of a node" in refusal(tmp_path, FLAT, iperf3_json(), link="intra")
    assert "tells no delay" in refusal(tmp_path, FLAT.partition("[inter]")[0], iperf3_json(reverse=True))


def test_a_stream_of_events_is_read_too(tmp_path: Path) -> None:
    test = iperf3_json(0.6)
    events = [{"event": name, "data": test[name]} for name in ("start", "end")]
    (written,) = into(tmp_path, FLAT, "\n".join(map(json.dumps, events)))
    assert (written.link, written.bandwidth_gbps) == ("inter", 0.6)


def test_a_file_in_a_form_of_its_own_is_changed_in_place_too(tmp_path: Path) -> None:
    odd = tomllib.loads(GROUPS)
    inline = ", ".join(
        f'{{ name = "{group["name"]}", nodes = {group["nodes"]}, inter = {{ bandwidth_gbps = 5, latency_us = 9 }} }}'
        for group in odd["groups"]
    )
    text = (
        GROUPS.partition("[[groups]]")[0] + f"groups = [{inline}]  # mine\n[[links]]" + GROUPS.partition("[[links]]")[2]
    )
    (written,) = into(tmp_path, text, iperf3_json(2.0), link="virginia")
    assert not written.remarks and "# mine" in (tmp_path / "mine.toml").read_text()
    assert load_cluster(str(tmp_path / "mine.toml")).groups[1].inter.bandwidth_gbps == 2.0


PLACES = [
    ("inter", "bandwidth_gbps"), ("intra", "latency_us"), ("all_reduce_gb_s",), ("groups", 0, "inter", "latency_us"),
    ("groups", 1, "inter", "bandwidth_gbps"), ("groups", 1, "region"), ("links", 0, "one_way"),
    ("links", 1, "latency_us"),
]  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([FLAT, GROUPS]),
    st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from([1.5, 12000, True, 'a "b"'])), max_size=5),
)
def test_a_text_that_was_changed_says_what_was_set_and_keeps_every_comment(
    text: str, values: list[tuple[tuple[str | int, ...], float | str]]
) -> None:
    if text is FLAT:
        values = [(place, value) for place, value in values if place[0] not in ("groups", "links")]
    changed = set_values(text, values)
    assert tomllib.loads(changed) == with_values(tomllib.loads(text), values)
    assert re.findall(r"#.*", changed) == re.findall(r"#.*", text)


def test_the_command_says_in_one_line_what_it_wrote(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(GROUPS)
    (tmp_path / "test.json").write_text(json.dumps(iperf3_json(0.5)))
    done = run("import", "test.json", "--into", "mine.toml", cwd=tmp_path)
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 1)
    assert done.stdout.startswith("mine.toml: link ohio - virginia is 0.5 Gbit/s and 11000 us, was 1.12 Gbit/s")
    for options, said in (
        (("--into", "s.sqlite"), "measures a link, and no run: import it --into a cluster's .toml"),
        (("--into", "mine.toml", "--set", "gbs=8"), "--set is of runs"),
    ):
        done = run("import", "test.json", *options, cwd=tmp_path)
        assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("encode", [gzip.compress, lambda raw: raw.decode().encode("utf-16-le")])
def test_a_measured_link_that_gzip_packed_or_windows_wrote_is_read(
    tmp_path: Path, encode: Callable[[bytes], bytes]
) -> None:
    for name, text in (("plain.txt", nccl_table().encode()), ("encoded", encode(nccl_table().encode()))):
        (tmp_path / name).write_bytes(text)
    plain, encoded = (read_link(tmp_path / name) for name in ("plain.txt", "encoded"))
    assert (encoded.there_gbps, encoded.start_up) == (plain.there_gbps, plain.start_up)
