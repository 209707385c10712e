"""Becomes a rank that sits on a node of the virtual switch.

Run by file name as `python -I -S enter.py SEATS COMMAND...` with nothing of Trimaran imported. SEATS is JSON:
`namespaces` (a file of each node's network namespace), `addresses`, `device`, `port`, `rendezvous_fd`, the variable
that names the launcher's bound socket, and by rank: `nodes`, the node that it sits on, `slots`, its number there, and
`paces`, the file of the control group that keeps it slow (empty: none). RANK says which rank this is.
"""

import ctypes
import json
import os
import sys

CLONE_NEWNET = 0x40000000


def main() -> None:
    """Enter the node's namespace, point torch.distributed at it, and turn into the command."""
    seats, command = json.loads(sys.argv[1]), sys.argv[2:]
    rank, nodes = int(os.environ["RANK"]), seats["nodes"]
    node = nodes[rank]
    if seats["paces"][rank]:
        with open(seats["paces"][rank], "w") as processes:  # noqa: PTH123 - nothing is imported that is not needed
            processes.write("0")
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(seats["namespaces"][node], os.O_RDONLY)
    if libc.setns(namespace, CLONE_NEWNET):
        sys.exit(f"node {node}'s network cannot be entered: {os.strerror(ctypes.get_errno())}")
    os.close(namespace)
    held = os.environ.pop(seats["rendezvous_fd"], None)
    if held is not None:
        os.close(int(held))  # a socket of the host's network
    os.environ.update(
        MASTER_ADDR=seats["addresses"][nodes[0]],
        MASTER_PORT=str(seats["port"]),
        GLOO_SOCKET_IFNAME=seats["device"] if len(set(nodes)) > 1 else "lo",
        LOCAL_RANK=str(seats["slots"][rank]),
        LOCAL_WORLD_SIZE=str(nodes.count(node)),
    )
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
