#!/bin/bash
# How training scales: the same run on 1, 2, 4, 8, ... and at last N ranks with the batch of each rank fixed (weak
# scaling). make puts it next to tools/launch as tools/bench_scaling.
set -uo pipefail
build=$(dirname "$0")/..

usage() {
  cat <<END
Usage: bench_scaling [--ranks=N] [OPTION...]
How training scales: the same run on 1, 2, 4, 8, ... and at last N ranks of this machine, the batch of each rank fixed.
Prints tokens a second, the time of a step, the efficiency (tokens a second and rank over those of one rank alone), the
bytes that a rank sends in a step, and the ledger's peak on a rank.

      --device=DEVICE   ./train's: cpu starts the ranks by mpirun, as where there is no GPU
      --ranks=N         The largest number of ranks (default: as many as there are GPUs, else 4)

All else goes to ./train (./train --help): --model, --batch, --seq-len, --zero, --vocab-parallel, ... --steps is 30 unless
it is given, and nothing is validated or sampled. tools/launch starts ranks on GPUs.

  tools/bench_scaling --model llama-1b --batch 4 --seq-len 4096
  tools/bench_scaling --ranks 2 --device cpu --model llama-tiny
END
}

fail() {
  echo "lce: $*" >&2
  exit 1
}

gpus=(/dev/nvidia[0-9]*)
[ -e "${gpus[0]}" ] || gpus=()
max=${#gpus[@]} device=cuda options=()
[ "$max" -gt 0 ] || max=4 device=cpu
while [ $# -gt 0 ]; do
  case $1 in
  --help | -\?) usage && exit ;;
  --ranks) max=${2-} && shift ;;
  --ranks=*) max=${1#*=} ;;
  # What a timed run has no use for, or would take from the run before it.
  --plan | --fit | --eval-only | --compare-modes | --save | --resume | --log | --timeline | \
    --save=* | --resume=* | --log=* | --timeline=*)
    fail "bench_scaling times runs and does nothing else: leave out ${1%%=*}"
    ;;
  *)
    [ "$1" != --device=cpu ] && [ "$1 ${2-}" != "--device cpu" ] || device=cpu
    options+=("$1")
    ;;
  esac
  shift $(($# > 0))
done
[[ $max =~ ^[0-9]{1,4}$ ]] && ((10#$max >= 1 && 10#$max <= 4096)) ||
  fail "--ranks $max: give a whole number from 1 to 4096"
max=$((10#$max))

log=$(mktemp /tmp/bench_scaling.XXXXXX) || fail "cannot make a file in /tmp"
trap 'rm -f "$log"' EXIT
for ((ranks = 1; ranks <= max; ranks = ranks < max && 2 * ranks > max ? max : 2 * ranks)); do
  launcher=("$build/tools/launch" "$ranks")
  [ $device = cuda ] || launcher=(mpirun --allow-run-as-root --oversubscribe --bind-to none -n "$ranks")
  [ $ranks -gt 1 ] || launcher=() # one rank needs none
  : >"$log"
  "${launcher[@]}" "$build/train" --steps=30 --val-fraction=0 --sample-every=0 --eval-every=0 --log "$log" "${options[@]}" >/dev/null
  status=$?
  [ $status = 0 ] || [ $ranks -gt 1 ] || exit $status # ./train has printed why
  plural=s
  [ $ranks -gt 1 ] || plural=
  [ $status = 0 ] || fail "the run with $ranks rank$plural failed"
  figure() { sed -n "s/.*\"event\":\"summary\".*\"$1\":\([0-9.e+-]*\).*/\1/p" "$log"; }
  awk -v ranks=$ranks -v alone="${alone-}" -v rate="$(figure tokens_per_second)" -v seconds="$(figure seconds_per_step)" \
    -v sent="$(figure wire_bytes_per_step)" -v peak="$(figure peak_bytes)" '
    BEGIN {
      if (!(rate > 0)) exit 1
      if (ranks == 1) printf "%5s %12s %14s %10s %12s %22s %14s\n", "ranks", "tokens/s", "each", "ms a step", "efficiency", "sent a step by each", "ledger'\''s peak"
      printf "%5d %12.0f %14.0f %10.1f %11.1f%% %18.1f MiB %10.1f MiB\n", ranks, rate, rate / ranks, 1e3 * seconds, 100 * rate / ranks / (alone ? alone : rate), sent / 2^20, peak / 2^20
    }' || fail "the run with $ranks rank$plural was too short to be timed: give more --steps"
  alone=${alone-$(figure tokens_per_second)}
done
