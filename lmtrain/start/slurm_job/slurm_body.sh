# ---- from here on all these files are the same ---------------------------------------------------------------------

set -u                           # and not -e: exit codes are read here
log=$(readlink "/proc/$$/fd/2")  # this job's log, in which srun says what task failed first
step='' asked='' queued='' node='' left_out='' num_left_out=0 num_lost=0 ends_with=75
# One task of an array has the array's own number, by which Slurm would take all of them: this means this one alone.
id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
id=${id:-$SLURM_JOB_ID}

say() { echo "$(date '+%F %T') job $id: $*"; }

# A stop that reaches this script goes on to the tasks. It is sent until srun has ended, since a task that srun is only
# about to start hears nothing; USR1 asks politely however often it comes.
pass_on() {
  asked=$1
  [ -z "$step" ] || while kill -s USR1 "$step"; do sleep 5; done 2>/dev/null &
  queue_again 'COMPLETING TimeLimit'  # now, since Slurm kills this script too when it has waited for the tasks
}
trap 'pass_on INT' INT
trap 'pass_on TERM' TERM
trap 'pass_on USR1' USR1
trap 'pass_on USR2' USR2

# All tasks, until the last has ended: of each rank, or of each node, which starts its ranks. Signals wait outside (--block-signal) until lmtrain is there to hear them.
run_tasks() {
  from=$(stat -c %s "$log" 2>/dev/null || echo 0) before=$(stop_file)
  srun --nodes="$nodes" --ntasks="$tasks" --kill-on-bad-exit=1 ${left_out:+--exclude="$left_out"} "${of_srun[@]}" \
    "${container[@]}" env --block-signal=INT,TERM,USR1,USR2 "${lmtrain[@]}" pretrain "${words[@]}" &
  step=$!
  [ -z "$asked" ] || pass_on "$asked"
  until wait "$step"; code=$?; ! kill -0 "$step" 2>/dev/null; do :; done  # a signal ends `wait`, not srun
  step=''
}

# What ended the tasks: the exit code, and the node to blame. srun ends all tasks when one fails, and its own exit code
# is then mostly that of those that it ended (143). So its lines in the log are read: the first one says what happened.
# A task that lost another (76) may have ended before the one that knows why.
judge() {
  local where what found first=''
  node=''
  while read -r where what; do
    case $what in
      'Exited with exit code '*) found=${what##* } ;;
      Terminated* | Interrupt* | 'User defined signal'*) found=75 ;;  # a stop, before anybody could listen
      *) found=137 ;;                                                 # killed, crashed, or its node is gone
    esac
    if [ -z "$first" ]; then
      first=$found
      ((found < 128)) || node=$where
    elif ((first == 76 && found != 75 && found < 128)); then
      first=$found
    fi
  done < <(tail -c "+$((from + 1))" "$log" 2>/dev/null | sed -nE \
    -e 's/^srun: error: ([^ :]+): tasks? [^:]+: (.+)$/\1 \2/p' \
    -e 's/^srun: error: (Node failure) on ([^ ,]+).*$/\2 \1/p')
  code=${first:-$code}
  if ((code == 76)) && [ "$(stop_file)" != "$before" ] && grep -Eqs '"(hang|lost)":' "$run/stop.json"; then
    node=$(node_of "$(sed -nE 's/^ *"rank": ([0-9]+).*/\1/p' "$run/stop.json")")
  fi
}

# In which the run says whom it has lost. What is there before a start is of an earlier one.
stop_file() { stat -c '%i %y' "$run/stop.json" 2>/dev/null; }

# What shows that the run gets on: its newest checkpoint.
newest() { printf '%s\n' "$run"/checkpoints/step_* | grep -E '/step_[0-9]+$' | tail -n 1; }

# Where a rank was: each node has its share of them in turn.
node_of() {
  scontrol show hostnames "$SLURM_JOB_NODELIST" | grep -vxF "${left_out//,/$'\n'}" | sed -n "$(($1 / (ranks / nodes) + 1))p"
}

# Back into the queue, once, if the job's state is one of these.
queue_again() {
  local state said
  [ -z "$queued" ] && state=$(squeue --noheader --jobs="$id" --format='%A %T %r' | grep -E "^$SLURM_JOB_ID ($1)") || return
  queued=yes
  if is_in_vain "$state"; then
    ends_with=93
    say "out of time in start $((SLURM_RESTART_COUNT + 1)), and no start has saved anything: not queued again." \
      "Give it more --time, or set checkpoint.interval_steps"
  elif said=$(scontrol requeue "$id" 2>&1); then
    say "queued again"
  else
    say "could not be queued again: $said"
  fi
}

# Whether time has ended this start, which is the third or a later one of a run that has never saved.
is_in_vain() {
  ((${SLURM_RESTART_COUNT:-0} >= 2)) && [ -z "$(newest)" ] || return
  [[ $1 == *TimeLimit* ]] || { [ "$(stop_file)" != "$before" ] &&
    grep -Eqs '"cause": "(the end of the allocation|run\.time_limit=)' "$run/stop.json"; }
}

# A stop: queued again, unless Slurm ends this job for another reason than its time (scancel, preemption, a lost node).
stop() {
  queue_again 'RUNNING|COMPLETING TimeLimit'
  [ -n "$queued" ] || say "stopped, and not queued again from here: Slurm itself is ending this job"
  exit "$ends_with"
}

# srun takes the job's --cpus-per-task from here alone; in a container nobody can ask Slurm when the job will end.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
# A task that starts all ranks of its node has all CPUs that the job has there, even where it has more than it asked for.
if [ -n "$all_cpus" ] && [ -n "${SLURM_JOB_CPUS_PER_NODE:-}" ]; then
  SRUN_CPUS_PER_TASK=$(sed -E 's/\(x[0-9]+\)//g; s/,/\n/g' <<<"$SLURM_JOB_CPUS_PER_NODE" | sort -n | head -n 1)
  export SRUN_CPUS_PER_TASK
fi
end=$(squeue --noheader --jobs="$id" --format=%e) &&
  end=$(date +%s -d "${end:-none}" 2>/dev/null) && export SLURM_JOB_END_TIME="$end"

before=$(stop_file) saved=$(newest)
while [ -z "$asked" ]; do
  run_tasks
  judge
  if ((code == 0)); then
    say "done"
    exit 0
  elif ((code < 128 && code != 75 && code != 76)); then
    say "exit code $code: neither started nor queued again"
    exit "$code"
  elif ((code == 75)) || [ -n "$asked" ]; then
    stop
  fi
  [ "$(newest)" = "$saved" ] || num_lost=0 saved=$(newest)
  if (((num_lost += 1) > 3)); then  # the run itself counts up to three, and says more; but not what ended too early
    say "lost a task in $num_lost starts (exit code $code), and no checkpoint in between: neither started nor queued again"
    exit 93
  fi
  if [ -n "$node" ] && ((num_left_out < spare_nodes)); then
    left_out=${left_out:+$left_out,}$node
    ((num_left_out += 1))
  fi
  say "lost a task (exit code $code${node:+ on $node}), starts again${left_out:+ without $left_out}"
done
stop
