# shellcheck shell=bash
# Sourced by the job scripts: trains in a Slurm job, saves before the time limit, queues the job again, and keeps a
# status file.
#
# Invariant: a job ends with a word in its status file, and each new start continues from the last checkpoint.
#
#   train KIND FLAGS...        a gpt or bert: of MODEL or PLAN, PRECISION and DATA_ARGS, then the caller's flags
#   run_job ENTRY FLAGS...     the entry script of that name; all flags are the caller's
#
# Variables; all have defaults, except the first on nodes without GPUs:
#   PROCESSES_PER_NODE   default: one per GPU
#   CHECKPOINTS          folder of the checkpoints; `none`: save nothing, start from the beginning each time
#   SAVE_INTERVAL        iterations between checkpoints (default: the plan's, or 1000)
#   LOGS                 folder of status.json and of a log for each start and node
#   MEGATRON_2BW         the clone, or the folder in which the package is installed
#   PYTHON               the ranks' Python
#   PREAMBLE             a file that this shell sources first: modules, exported variables; all ranks get its environment
#   SRUN_ARGS            more words of srun before the command, split as by a shell: a container (--container-image=...)
#   JOB_PYTHON           the Python of this shell, outside a container (default: PYTHON)
#   MASTER_ADDR, MASTER_PORT   where the nodes meet
#   RESTARTS, SHUTDOWN   of all ranks inside the job after a failure; seconds that a rank has to save after the signal:
#                        keep them below the job's --signal=B:TERM@SECONDS

if [[ -z ${SLURM_JOB_ID:-} ]]; then
    echo "$(basename "$0"): error: this is no Slurm job: submit it with sbatch, or run megatron-2bw train" >&2
    exit 2
fi
preamble=0
if [[ -r ${PREAMBLE:-} ]]; then
    set +eu # modules and activate scripts are not written for these
    # shellcheck source=/dev/null
    source "$PREAMBLE"
    preamble=$?
    set -eu
fi
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=${VIRTUAL_ENV:-$MEGATRON_2BW/.venv}/bin/python
    [[ -x $PYTHON ]] || PYTHON=$(command -v python3)
fi
JOB_PYTHON=${JOB_PYTHON:-$(command -v "$PYTHON" || command -v python3)}
PROCESSES_PER_NODE=${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
if [[ -z ${CHECKPOINTS:-} ]]; then
    name=${MODEL:-${PLAN:-$SLURM_JOB_NAME}}
    CHECKPOINTS=$PWD/checkpoints/$(basename "$name" .json)
fi
LOGS=${LOGS:-$PWD/logs/$SLURM_JOB_NAME-$SLURM_JOB_ID}
START=${SLURM_RESTART_COUNT:-0} # how often Slurm started this job before
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mkdir -p "$LOGS"

slurm_tool() { # slurm_tool FILE ...: a program of this folder, which MEGATRON_2BW may have in another clone than the installed one
    PYTHONPATH=$MEGATRON_2BW${PYTHONPATH:+:$PYTHONPATH} "$JOB_PYTHON" "$MEGATRON_2BW/megatron_2bw/tools/slurm/$1" "${@:2}"
}

status() { # status COMMAND ...: the only writer of status.json
    slurm_tool status.py "$1" --file "$LOGS/status.json" --job "$SLURM_JOB_ID" \
        --start "$START" --checkpoints "$CHECKPOINTS" "${@:2}"
}

fail() { # fail MESSAGE: the user must change something; nothing has run yet
    echo "$SLURM_JOB_NAME: error: $*" >&2
    status end --refused "$*" >/dev/null || true
    exit 2
}

three_times() { # three_times COMMAND ...: until it succeeds; the controller may be busy
    local try
    for try in 1 2 3; do
        "$@" && return
        [[ $try == 3 ]] || sleep 1
    done
    return 1
}

slurm_says() { # JobState=... Reason=... Restarts=...; asked again when the controller does not answer
    local said="" try
    for try in 1 2 3; do
        said=$(scontrol --oneliner show job "$SLURM_JOB_ID" 2>&1) || said="try $try: $said"
        [[ $said != *JobState=* ]] || break
        echo "$SLURM_JOB_NAME: scontrol does not tell the job's state, $said" >&2
        sleep 1
    done
    echo "$said "
}

# Slurm's signals to this shell: that of --signal while the job runs; and the last one before the kill, at the time
# limit, at a cancellation, or when Slurm has queued the job again for another reason.
on_signal() {
    interrupted=1
    case $(slurm_says) in
        *Reason=TimeLimit*) last_signal --signalled ;;
        *" Restarts=$((START + 1)) "*) last_signal --requeued ;;
        *JobState=COMPLETING* | *JobState=CANCELLED*) last_signal --cancelled ;;
        *)
            signalled=--signalled
            echo "$SLURM_JOB_NAME: Slurm asks the job to end; saving"
            if [[ -n $step ]]; then signal_ranks; else unsent=1; fi
            ;;
    esac
}

signal_ranks() { # the steps, not this shell. If that fails, Slurm still signals them when the job's time is over
    three_times scancel --signal="$exit_signal" "$SLURM_JOB_ID" ||
        echo "$SLURM_JOB_NAME: scancel cannot tell the ranks to save" >&2
}

last_signal() { # with a status file that is right if the kill precedes the end of the save
    signalled=$1
    status late "$1" || true # it has reported why; the ranks are saving
}

saved_iteration() { # of the newest checkpoint; nothing without one
    cat "$CHECKPOINTS/latest_checkpointed_iteration.txt" 2>/dev/null || true
}

claim_checkpoints() { # two jobs that save to one folder would mix their checkpoints
    local owner found
    mkdir -p "$CHECKPOINTS"
    owner=$(cat "$CHECKPOINTS/slurm_job" 2>/dev/null || true)
    if [[ $owner =~ ^[0-9]+$ && $owner != "$SLURM_JOB_ID" ]]; then
        found=$(three_times running "$owner" | tail -n 1) ||
            fail "squeue does not tell whether job $owner still saves to $CHECKPOINTS: ${found:-it says nothing}"
        [[ -z $found ]] ||
            fail "job $owner is saving to $CHECKPOINTS; wait for it, or give CHECKPOINTS=another folder"
    fi
    echo "$SLURM_JOB_ID" >"$CHECKPOINTS/slurm_job.$SLURM_JOB_ID"
    mv "$CHECKPOINTS/slurm_job.$SLURM_JOB_ID" "$CHECKPOINTS/slurm_job"
}

running() { # running JOB: prints it if it may still save; status 1 and squeue's error if Slurm does not answer
    local found
    if found=$(squeue --noheader --format=%i --states=RUNNING,COMPLETING,SUSPENDED --jobs "$1" 2>&1); then
        grep --word-regexp "$1" <<<"$found" || echo
    elif [[ $found == *"Invalid job id"* ]]; then # Slurm has forgotten it
        echo
    else
        echo "$found"
        return 1
    fi
}

train() {
    local kind=$1 quoted flags save=()
    shift
    check_allocation
    if [[ -z ${PLAN:-} && -z ${PRECISION:-} ]]; then
        PRECISION=$([[ -n ${SLURM_GPUS_ON_NODE:-} ]] && echo bf16 || echo fp32)
    fi
    [[ $CHECKPOINTS == none || -n ${SAVE_INTERVAL:-} ]] || save=(--save)
    # Bash loses the status of a process substitution now and then; words as a shell quotes them need none.
    quoted=$(slurm_tool job_flags.py --kind "$kind" \
        --model "${MODEL:-}" --plan "${PLAN:-}" --precision "${PRECISION:-}" --data="${DATA_ARGS:-}" \
        --servers "$SLURM_JOB_NUM_NODES" --processes "$PROCESSES_PER_NODE" "${save[@]}") ||
        fail "${quoted:-job_flags.py has failed; what it says is above}"
    eval "flags=($quoted)"
    run_job "pretrain_${kind}_2bw.py" "${flags[@]}" "$@"
}

check_allocation() {
    [[ -z ${PREAMBLE:-} || -r $PREAMBLE ]] || fail "PREAMBLE=$PREAMBLE: there is no such file to read"
    [[ $preamble == 0 ]] || fail "PREAMBLE=$PREAMBLE has ended with status $preamble"
    # A job submitted from inside an array inherits the array's variable; ask Slurm.
    [[ -z ${SLURM_ARRAY_JOB_ID:-} || $(slurm_says) != *ArrayJobId=* ]] ||
        fail "sbatch --array: a job of an array cannot queue itself again; submit each as a job of its own"
    [[ -n $PROCESSES_PER_NODE ]] ||
        fail "no GPUs in this allocation: give sbatch --gpus-per-node=N, or PROCESSES_PER_NODE=N to train on the CPU"
    [[ $PROCESSES_PER_NODE =~ ^[1-9][0-9]*$ ]] || fail "PROCESSES_PER_NODE=$PROCESSES_PER_NODE: give a number"
}

check_flags() {
    local word before=""
    exit_signal=TERM # after which the ranks save
    for word in "$@"; do
        [[ ! $word =~ ^--(save|load)(=|$) ]] || fail "${word%%=*}: give CHECKPOINTS=folder, which a restarted job loads"
        [[ $before != --exit-signal ]] || exit_signal=$word
        [[ $word != --exit-signal=* ]] || exit_signal=${word#*=}
        before=$word
    done
}

run_job() {
    local entry=$1 hosts exit_status=0 checkpoints=() before quoted srun_args
    shift
    check_allocation
    check_flags "$@"
    quoted=$(xargs --no-run-if-empty printf '%q ' <<<"${SRUN_ARGS:-}" 2>/dev/null) ||
        fail "SRUN_ARGS=$SRUN_ARGS: its quotes do not match"
    eval "srun_args=($quoted)"
    if [[ $CHECKPOINTS != none ]]; then
        claim_checkpoints
        checkpoints=(--save "$CHECKPOINTS" --load "$CHECKPOINTS" --exit-signal-handler)
        [[ " $*" == *" --save-interval"[\ =]* ]] || checkpoints+=(--save-interval "${SAVE_INTERVAL:-1000}")
    fi
    mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    before=$(saved_iteration)
    signalled="" step="" interrupted="" unsent=""
    trap on_signal TERM USR1 USR2
    status start || exit 1
    if [[ -z $signalled ]]; then # --cpu-bind: torchrun's ranks may use all of the node's cores, not only the first
        srun --kill-on-bad-exit=1 --cpu-bind=none --output="$LOGS/start-$START-node-%n-%N.log" "${srun_args[@]}" \
            bash "$MEGATRON_2BW/megatron_2bw/tools/slurm/node.sh" "$PYTHON" "${SHUTDOWN:-100}" \
            --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$PROCESSES_PER_NODE" \
            --max-restarts "${RESTARTS:-3}" \
            --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID-$START" \
            --rdzv-endpoint "${MASTER_ADDR:-${hosts[0]}}:${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}" \
            "$MEGATRON_2BW/$entry" "${checkpoints[@]}" "$@" &
        step=$! interrupted=1
        [[ -z $unsent ]] || signal_ranks # the signal came between the start of srun and the line above
        while [[ -n $interrupted ]]; do # a trapped signal ends `wait` early
            interrupted="" exit_status=0
            wait "$step" || exit_status=$?
        done
    fi
    finish "$exit_status" "$before"
}

finish() { # finish EXIT_STATUS SAVED_BEFORE: decide what happened, and exit or start again
    trap '' TERM USR1 USR2 # a requeue ends this shell
    local verdict
    # shellcheck disable=SC2086  # no word if there was no signal
    verdict=$(status end --exit-status "$1" $signalled) || true # it has reported why, such as a full quota
    if [[ -z $verdict && $signalled == --signalled && $(saved_iteration) != "$2" ]]; then
        echo "$SLURM_JOB_NAME: no word from status.py; it has saved after the signal, so it is queued again" >&2
        verdict=requeue
    fi
    case $verdict in
        completed) exit 0 ;;
        requeue)
            three_times scontrol requeue "$SLURM_JOB_ID" && exit 0
            status late --signalled --reason "saved, but scontrol requeue has failed: submit it again" || true
            ;;
    esac
    exit 1
}
