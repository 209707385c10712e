"""Becomes a rank that sits on a node of the virtual switch.

Run by file name as `python -I -S enter.py SEATS COMMAND...` with nothing of Trimaran imported. SEATS is JSON:
`namespaces` (a file of each node's network namespace), `addresses`, `ranks_per_node`, `device`, `port`, and
`rendezvous_fd`, the variable that names the launcher's bound socket. RANK says which node this rank sits on.
"""

import ctypes
import json
import os
import sys

CLONE_NEWNET = 0x40000000


def main() -> None:
    """Enter the node's namespace, point torch.distributed at it, and turn into the command."""
    seats, command = json.loads(sys.argv[1]), sys.argv[2:]
    rank, world, per_node = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), seats["ranks_per_node"]
    node = rank // per_node
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(seats["namespaces"][node], os.O_RDONLY)
    if libc.setns(namespace, CLONE_NEWNET):
        sys.exit(f"node {node}'s network cannot be entered: {os.strerror(ctypes.get_errno())}")
    os.close(namespace)
    held = os.environ.pop(seats["rendezvous_fd"], None)
    if held is not None:
        os.close(int(held))  # a socket of the host's network
    os.environ.update(
        MASTER_ADDR=seats["addresses"][0],
        MASTER_PORT=str(seats["port"]),
        GLOO_SOCKET_IFNAME=seats["device"] if len(seats["addresses"]) > 1 else "lo",
        LOCAL_RANK=str(rank % per_node),
        LOCAL_WORLD_SIZE=str(min(per_node, world - node * per_node)),
    )
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
