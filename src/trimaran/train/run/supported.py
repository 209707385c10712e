"""What this trainer trains: what the rules of layouts allow its stack, and nothing else."""

from __future__ import annotations

from typing import get_args

from trimaran.files.catalogue import load_stack
from trimaran.layout.rules import check_layout
from trimaran.nouns.cluster import Cluster
from trimaran.nouns.hardware.device import Device
from trimaran.nouns.hardware.link import Link
from trimaran.nouns.precision import Rate
from trimaran.protocol.job import TrainJob


def check_supported(job: TrainJob) -> None:
    """Raise TrimaranError with the sentence of the first rule that the job breaks.

    Who starts ranks has asked already, of the machine too; a job file may be anybody's.
    """
    layout = job.layout.model_copy(update={"stage_split": job.stage_split})
    device = Device(
        kind="gpu", peak_tflops=dict.fromkeys(get_args(Rate), 1.0), mem_gib=1.0, mem_bandwidth_gb_s=1.0,
        host_link_gb_s=1.0, host_mem_gb_s=1.0,
    )  # fmt: skip
    link = Link(bandwidth_gbps=1.0, latency_us=0.0)
    any_machine = Cluster(device=device, nodes=layout.devices, devices_per_node=1, intra=link, inter=link)
    check_layout(layout, job.workload, any_machine, load_stack("trimaran"))
