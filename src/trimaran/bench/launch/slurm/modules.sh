#!/bin/bash
# Loads modules on the node that it runs on, and becomes a command: bash -l modules.sh FOLDER MODULE... -- COMMAND...
# A login shell knows `module`; its words are arguments, and nothing of a sweep is read as shell. Where a module cannot
# be loaded, or the command not be run, the rank has refused (status 2), which is written down as node.py does:
# exit.RANK, and why in stderr.RANK.
folder=$1
shift
modules=()
while [ "$1" != -- ]; do
    modules+=("$1")
    shift
done
shift
said="$folder/modules.$SLURM_PROCID"
if module load "${modules[@]}" 2>"$said"; then
    rm -f "$said"
    shopt -s execfail
    exec "$@"
    words="$1 cannot be run on node $SLURMD_NODENAME (python of [sweep.slurm])"
else
    words="module load ${modules[*]} failed on node $SLURMD_NODENAME: $(tr '\n' ' ' <"$said")(modules of [sweep.slurm])"
fi
echo "trimaran: $words" >"$folder/stderr.$SLURM_PROCID"
echo '{"code": 2, "oom": false, "asked_to_end": false}' >"$folder/.exit.$SLURM_PROCID"
mv "$folder/.exit.$SLURM_PROCID" "$folder/exit.$SLURM_PROCID"
