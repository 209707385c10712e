"""Files of measured links, as nccl-tests and iperf3 write them, for tests that know what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SIZES = [8 * 4**power for power in range(14)]
FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "sendrecv": lambda n: 1.0,
    "broadcast": lambda n: 1.0,
}


def rank_lines(hosts: Sequence[str], per_host: int) -> str:
    return "".join(
        f"#  Rank {rank:2d} Group  0 Pid {4000 + rank:6d} on {hosts[rank // per_host]:>10} device {rank % per_host:2d} "
        f"[0000:{rank:02x}:00] NVIDIA H100 80GB HBM3\n"
        for rank in range(len(hosts) * per_host)
    )


def nccl_table(
    operation: str = "all_reduce",
    hosts: Sequence[str] = ("node1", "node2"),
    per_host: int = 8,
    start_us: float = 40.0,
    bus_gb_s: float = 90.0,
    sizes: Sequence[int] = SIZES,
    wrong: int = 0,
    named: bool = True,
    debug: bool = False,
) -> str:
    """What nccl-tests 2.17 prints of a link that starts and sends as stated; `debug`: under NCCL_DEBUG=INFO."""
    ranks = len(hosts) * per_host
    factor = FACTORS[operation](ranks)
    redop = "sum" if operation in ("all_reduce", "sendrecv") else "none"
    root = 0 if operation == "broadcast" else -1
    info = f"{hosts[0]}:4000:4100 [0] NCCL INFO Channel 00/16 :    0   1   2   3\n" * 3 if debug else ""
    lines = [
        "# nccl-tests version 2.17.6 nccl-headers=22807 nccl-library=22807\n" if named else "",
        f"# Collective test starting: {operation}_perf\n" if named else "",
        "# nThread 1 nGpus 1 minBytes 8 maxBytes 536870912 step: 4(factor) warmup iters: 1 iters: 20 agg iters: 1 "
        "validation: 1 graph: 0\n#\n# Using devices\n",
        rank_lines(hosts, per_host),
        info,
        f"#\n#{'out-of-place':>74}{'in-place':>31}          \n",
        "#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw"
        "  #wrong \n",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)"
        "         \n",
    ]
    for size in sizes:
        time = start_us + size * factor / bus_gb_s / 1e3
        algbw = size / time / 1e3
        body = f"  {time:7.7g}  {algbw:6.6g}  {algbw * factor:6.6g}  {wrong:6d}"
        lines.append(f"{size:12d}  {size // 4:12d}  {'float':>8}  {redop:>6}  {root:6d}{info}{body}{body}\n")
    lines.append(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}\n# Avg bus bandwidth    : 12.3 \n#\n")
    return "".join(lines)


def nccl_json(hosts: Sequence[str], per_host: int, start_us: float, bus_gb_s: float) -> dict[str, Any]:
    """What the same of an all_reduce is in the file of `-J`."""
    ranks = len(hosts) * per_host
    factor = FACTORS["all_reduce"](ranks)
    results = []
    for size in SIZES:
        time = start_us + size * factor / bus_gb_s / 1e3
        figures = {"time": time, "alg_bw": size / time / 1e3, "bus_bw": factor * size / time / 1e3, "nwrong": 0.0}
        results.append(
            {"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": "    -1",
             "out_of_place": figures, "in_place": figures}
        )  # fmt: skip
    devices = [
        {"rank": rank, "group": 0, "pid": rank, "hostname": hosts[rank // per_host], "device": rank % per_host}
        for rank in range(ranks)
    ]
    return {
        "version": 1, "args": ["./build/all_reduce_perf", "-b", "8", "-J", "out.json"], "env": ["PATH=/bin"],
        "nccl_version": 22807, "config": {"nthreads": 1, "ngpus": 1, "devices": devices}, "results": results,
        "out_of_bounds": {"count": 0, "okay": "true"}, "errors": [],
    }  # fmt: skip


def iperf3_json(
    there_gbps: float = 1.1,
    back_gbps: float | None = None,
    round_trip_us: float = 22000,
    client: str = "ohio-1",
    server: str = "virginia-4",
    streams: int = 1,
    reverse: bool = False,
) -> dict[str, Any]:
    """What iperf3 3.12 --json writes; `back_gbps` makes it a --bidir, `reverse` a -R."""

    def summed(gbps: float) -> dict[str, Any]:
        return {
            "start": 0,
            "end": 10.02,
            "seconds": 10.02,
            "bytes": int(gbps * 1.2525e9),
            "bits_per_second": gbps * 1e9,
        }

    rtt = {} if reverse else {"max_rtt": 3 * round_trip_us, "min_rtt": round_trip_us, "mean_rtt": 2 * round_trip_us}
    each = {"sender": {**summed(there_gbps / streams), **rtt, "sender": not reverse}, "receiver": summed(there_gbps)}
    end = {"streams": [each] * streams, "sum_sent": summed(there_gbps * 1.02), "sum_received": summed(there_gbps)}
    if back_gbps is not None:
        end["sum_sent_bidir_reverse"] = summed(back_gbps * 1.02)
        end["sum_received_bidir_reverse"] = summed(back_gbps)
    test = {"protocol": "TCP", "num_streams": streams, "reverse": int(reverse), "bidir": int(back_gbps is not None)}
    connected = {
        "socket": 5,
        "local_host": "10.0.0.1",
        "local_port": 40000,
        "remote_host": "10.1.0.4",
        "remote_port": 5201,
    }
    return {
        "start": {
            "connected": [connected] * streams, "version": "iperf 3.12", "test_start": {**test, "target_bitrate": 0},
            "system_info": f"Linux {client} 5.15.0-91-generic #101-Ubuntu SMP x86_64",
            "connecting_to": {"host": server, "port": 5201},
        },
        "intervals": [{"streams": [], "sum": summed(there_gbps)}],
        "end": end,
    }  # fmt: skip
