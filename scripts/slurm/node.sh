#!/usr/bin/env bash
# One node's part of a job: runs its arguments, torchrun. After a SIGTERM of Slurm its status is 0:
# torchrun then ends with status 1 also after a save, and srun would kill the nodes that are still saving.
signalled="" interrupted=1
trap 'signalled=1 interrupted=1; echo "node.sh: Slurm has sent SIGTERM"' TERM
"$@" & # Slurm signals the whole process group, the command too
child=$!
while [[ -n $interrupted ]]; do # a trapped signal ends `wait` early
    interrupted="" exit_status=0
    wait "$child" || exit_status=$?
done
[[ -z $signalled ]] || exit 0
exit "$exit_status"
