"""Environment variables by which ranks learn their place and find each other: torchrun's names, and Trimaran's."""

from __future__ import annotations

RANK, LOCAL_RANK = "RANK", "LOCAL_RANK"
WORLD_SIZE, LOCAL_WORLD_SIZE = "WORLD_SIZE", "LOCAL_WORLD_SIZE"
MASTER_ADDR, MASTER_PORT = "MASTER_ADDR", "MASTER_PORT"
# All that tells a rank its place; `trimaran.nouns.variant` keeps variants from setting them.
PLACE = (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT)

# Where rank 0 finds the bound socket of the port at which ranks meet: the number of its file descriptor.
RENDEZVOUS_FD = "TRIMARAN_RENDEZVOUS_FD"

# torchrun sets these. Where the second is "True" ranks meet in torchrun's own store, under another prefix after each
# restart; there is none behind etcd, and where TORCH_DISABLE_SHARE_RDZV_TCP_STORE is set.
TORCHRUN_RESTARTS, TORCHRUN_STORE = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"
# How the names of all of torchrun's begin.
TORCHRUN = "TORCHELASTIC_"

# The name of a rank's node, where its launcher knows it; Slurm's own variable for it.
NODE, SLURM_NODE = "TRIMARAN_NODE", "SLURMD_NODENAME"

# Which GPUs of its node a process sees, as CUDA reads it.
SHOWN_GPUS = "CUDA_VISIBLE_DEVICES"

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
LOOPBACK_INTERFACE, LOOPBACK = "lo", "127.0.0.1"


def computing(threads: int) -> dict[str, str]:
    """What makes a rank compute on `threads` threads, and leave its stacks in stderr when it crashes."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONFAULTHANDLER": "1"}
