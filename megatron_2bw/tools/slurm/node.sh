#!/usr/bin/env bash
# One node's part of a job, in its container if it has one: node.sh PYTHON SECONDS WORDS... runs torchrun with the
# words; a rank has the seconds to save after a signal.
# After a signal of Slurm its status is 0: torchrun then ends with status 1 also after a save, and srun would kill the
# nodes that are still saving.
python=$1 shutdown=(--shutdown-timeout "$2") signalled="" interrupted=1
shift 2
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2 # torchrun sends them on to the ranks
for name in TERM USR1 USR2; do
    # shellcheck disable=SC2064  # the name of now
    trap "signalled=1 interrupted=1; echo 'node.sh: Slurm has sent SIG$name'" "$name"
done

if ! "$python" - 2>/dev/null <<'EOF'; then # only newer versions of torchrun can give ranks longer than their 30 s
import importlib.util, pathlib
torchrun = pathlib.Path(importlib.util.find_spec("torch").origin).parent / "distributed" / "run.py"
raise SystemExit("--shutdown-timeout" not in torchrun.read_text())
EOF
    shutdown=()
    echo "node.sh: this torch's torchrun kills ranks 30 s after a signal; SHUTDOWN has no effect" >&2
fi
[[ -z $signalled ]] || exit 0
# A restart needs a store of its own. Its port is chosen long before rank 0 listens there: another process may take it.
[[ " $* " == *" --max-restarts 0 "* ]] || export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
"$python" -m torch.distributed.run "${shutdown[@]}" "$@" & # Slurm signals the whole process group, the command too
child=$!
while [[ -n $interrupted ]]; do # a trapped signal ends `wait` early
    interrupted="" exit_status=0
    wait "$child" || exit_status=$?
done
[[ -z $signalled ]] || exit 0
exit "$exit_status"
