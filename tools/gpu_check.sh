#!/bin/bash
# Builds for the GPU here, runs the tests that need one (also under compute-sanitizer) and the benchmarks, and
# prints a table of results. Whole logs go to runs/gpu_check/ (OUT=folder: elsewhere).
#
#   tools/gpu_check.sh [all|tests|sanitizer|bench|long|peers]...
#   tools/gpu_check.sh --ranks N      what needs N GPUs: the tests of ranks, the head split over them, how
#                                     training scales, llama-8b
#
# DEPS_ROOT=folder in the environment is make's. DEVICE=cpu tries the script itself without a GPU: tiny
# shapes, and rows that fail where the CPU lacks what they ask for.
# shellcheck disable=SC2046 # names of programs are split into words: none has a space
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
OUT=${OUT:-runs/gpu_check} DEVICE=${DEVICE:-cuda}
mkdir -p "$OUT"
ranks=0
if [ "${1:-}" = --ranks ]; then
  ranks=${2:?tools/gpu_check.sh --ranks N}
  set -- ranks "${@:3}"
fi
parts=" ${*:-all} "
rm -f "$OUT/table.txt"
tiny=()
[ "$DEVICE" = cuda ] || tiny=(--vocab 1000 --hidden-size 32 --intermediate-size 64 --num-layers 1 --num-attention-heads 2
  --num-key-value-heads 2 --head-dim 16 --batch 2 --seq-len 32 --total-batch 1024)

wants() { [[ $parts == *" $1 "* || $parts == *" all "* ]]; }
row() { printf '%-44s %s\n' "$1" "$2" | tee -a "$OUT/table.txt"; }

# run NAME SECONDS COMMAND...: keeps the output in NAME.log; a failure is a row, and makes this script fail.
run() {
  local name=$1 seconds=$2 status
  timeout --kill-after=10 "$seconds" "${@:3}" >"$OUT/$name.log" 2>&1 && return
  status=$?
  row "$name" "FAILED with status $status, see $OUT/$name.log"
  tail -n 15 "$OUT/$name.log"
  return $status
}

# figures FILE EVENT TEMPLATE: an f-string over the fields of each JSON line of that event; fails without any.
figures() {
  python3 - "$@" <<'END'
import json, sys
path, event, template = sys.argv[1:]
found = 0
for line in open(path, errors="replace"):
    if not line.startswith('{"event"'):
        continue
    r = json.loads(line)
    if r["event"] != event:
        continue
    groups = r.get("profile", {})

    def tflops(group):  # of a group of --profile
        return f"{1e-12 * groups[group]['flops'] / groups[group]['seconds']:.3g} TFLOP/s"

    def shares():  # of all of them in a step's time
        whole = sum(g["seconds"] for g in groups.values())
        return ", ".join(f"{name} {100 * g['seconds'] / whole:.1f}%" for name, g in groups.items() if g["seconds"] > 0.0005 * whole)
    print(eval(f'f"""{template}"""', dict(r, r=r, tflops=tflops, shares=shares)))
    found += 1
sys.exit(not found)
END
}
# show TITLE FILE EVENT TEMPLATE: a row for each.
show() {
  local text
  figures "$OUT/$2" "$3" "$4" | while read -r text; do row "$1" "$text"; done ||
    row "$1" "FAILED: no such figures in $OUT/$2" # pipefail
}

if [ "$DEVICE" = cuda ]; then
  command -v nvidia-smi >/dev/null || { echo "tools/gpu_check.sh: no nvidia-smi, so there is no GPU to check" >&2; exit 1; }
  row "GPU" "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1)"
fi
make -s all tests >"$OUT/build.log" 2>&1 ||
  { tail -n 30 "$OUT/build.log"; echo "tools/gpu_check.sh: the build failed" >&2; exit 1; }

# --- tests --------------------------------------------------------------------------------------------------

# test_programs PATTERN...: the test programs whose sources' names match.
test_programs() {
  local source
  for source in $(printf 'tests/%s.c ' "$@"); do echo "build/release/${source%.c}"; done
}
# check AT_ONCE SECONDS SUFFIX PROGRAM...: each program's last line is a row; those at once share the cores.
check() {
  local at_once=$1 seconds=$2 suffix=$3 program name
  [ "$at_once" = 1 ] || local -x OMP_NUM_THREADS=$((($(nproc) + at_once - 1) / at_once))
  for program in "${@:4}"; do
    while [ "$(jobs -rp | wc -l)" -ge "$at_once" ]; do wait -n; done
    name=${program##*tests/} name=${name//\//-}$suffix # kernels-test_fp8: trainer/ has one, too
    { run "$name" "$seconds" tests/run "$program" && row "$name" "$(tail -n 1 "$OUT/$name.log")"; } &
  done
  wait
}

if wants tests; then
  # These compare what the whole device holds: nothing else may run.
  alone='kernels/test_kernels_update$|trainer/test_cuda_training$'
  mapfile -t programs < <(test_programs 'kernels/test_*' 'trainer/test_'{'cuda*',fp8,profile,same_bits} model/test_{golden,generate,masked_loss} tools/test_lce_ladder |
    grep -v 'kernels/test_memory\|vocabulary_parallel\|collectives')
  check 4 400 "" $(printf '%s\n' "${programs[@]}" | grep -vE "$alone")
  check 1 240 "" $(printf '%s\n' "${programs[@]}" | grep -E "$alone")
  # Attention and LM head + loss as a GPU before Hopper computes them.
  LCE_HOPPER=0 check 4 400 -portable $(test_programs kernels/test_{attention,linear_cross_entropy,loss_terms,tile_sampling})
fi

# sanitize TOOL PROGRAM...: all at once. racecheck does not support mbarriers and bulk copies: it reports
# kernels ordered by them, or stops, so ours are left out there; cuBLASLt's (nvjet) are counted apart.
sanitize() {
  local tool=$1 program log verdict all ours good
  for program in "${@:2}"; do
    log=$OUT/$(basename "$program")-$tool.log good="FAILED, see $OUT: "
    {
      timeout --kill-after=10 300 compute-sanitizer --tool "$tool" --error-exitcode 9 "$program" >"$log" 2>&1
      if [ "$tool" = memcheck ]; then
        verdict=$(grep 'ERROR SUMMARY' "$log" | tail -n 1 | sed 's/=* *//')
        [ "$verdict" != "ERROR SUMMARY: 0 errors" ] || ! grep -q '^\[  PASSED' "$log" || grep -q '^\[  FAILED' "$log" || good=
      else
        all=$(grep -c 'Race reported' "$log") ours=$(grep 'Race reported' "$log" | grep -vc 'access at nvjet_')
        verdict="$(grep -c '^\[  PASSED' "$log") of 4 backends passed; hazards in our kernels: $ours, in cuBLASLt's: $((all - ours))"
        [[ $verdict != "4 of 4 "*"kernels: 0, "* ]] || good=
      fi
      row "$(basename "$program") under $tool" "$good${verdict:-did not end}"
    } &
    [[ $program != *kernels_update ]] || wait # it compares what the whole device holds
  done
  wait
}

if wants sanitizer; then
  # Small shapes, which leave the GPU room for all of them at once.
  export LCE_SMALL_SHAPES=1
  sanitize memcheck $(test_programs kernels/test_{kernels_update,kernels_layers,attention,cuda_hopper,fp8,linear_cross_entropy,loss_terms,tile_sampling})
  LCE_HOPPER=0 sanitize racecheck $(test_programs kernels/test_{kernels_layers,attention,loss_terms})
  unset LCE_SMALL_SHAPES
fi

# --- benchmarks ---------------------------------------------------------------------------------------------

# layer NAME N H V OPTIONS: LM head + loss against its three plain GEMMs; LAUNCHER starts ranks
LAUNCHER=()
layer() {
  local name=$1 n=$2 h=$3 v=$4
  [ "$DEVICE" = cuda ] || { n=$((n / 64)) h=$((h / 64)) v=$((v / 64)); }
  run "$name" 150 "${LAUNCHER[@]}" tools/bench_lce --json --device "$DEVICE" --tokens "$n" --hidden-size "$h" --vocab "$v" "${@:5}" &&
    show "$name, N $n H $h V $v" "$name.log" layer '{name}: {1e3 * seconds:.2f} ms, {ratio:.3f}, {layer_bytes / 2**20:.0f} MiB'
}
# train NAME SECONDS TEMPLATE OPTIONS...: a run of ./train, and figures of its summary
train() {
  run "$1" "$2" "${LAUNCHER[@]}" ./train --device "$DEVICE" --val-fraction 0 --sample-every 0 --log "$OUT/$1.jsonl" \
    "${@:4}" "${tiny[@]}" && show "$1" "$1.jsonl" summary "$3"
}
step() {
  train "step-$1" 200 '{tokens_per_second:,.0f} tokens/s, {1e3 * seconds_per_step:.1f} ms, MFU {100 * r.get("mfu", float("nan")):.1f}%, {peak_bytes / 2**30:.1f} GiB, LM head + loss {head_peak_bytes / 2**20:.0f} MiB' "${@:2}"
}
# Prints what --profile says of a step; few layers suffice for attention alone.
profile() { train "profile-$1" 150 '{shares()}; GEMMs {tflops("GEMMs")}, LM head + loss {tflops("LM head + loss")}' --steps 12 --profile "${@:2}"; }
attention() {
  train "attention-$1" 150 'forward {tflops("attention forward")}, backward {tflops("attention backward")}' --steps 12 --profile --num-layers 2 --vocab 1024 "${@:2}"
}

if wants bench; then
  layer layer 4096 4096 128256 --chunk 4096,2048,1024
  layer layer-terms 16384 2048 131072 --chunk 4096,2048,1024 --materialized --terms
  layer layer-gemma 8192 2304 256000 --chunk 4096,2048,1024
  layer layer-32k 32768 4096 128256 --chunk 4096,2048,1024
  layer ladder 8192 4096 128256 --chunk 1024 --ladder --materialized
  step gpt2-124m --steps 50 --model gpt2-124m --batch 64 --seq-len 1024
  step gpt2-1558m --steps 20 --model gpt2-1558m --batch 16 --seq-len 1024
  llama=(--steps 25 --model llama-1b --batch 4 --seq-len 4096)
  step llama-1b "${llama[@]}"
  step llama-1b-lean "${llama[@]}" --moment-dtype bf16 --no-master-weights --recompute elementwise --lce-chunk 1024
  step llama-1b-fp8 "${llama[@]}" --fp8
  step llama-1b-materialized "${llama[@]}" --materialized-logits
  step llama-1b-b16 --steps 5 --model llama-1b --batch 16 --seq-len 1024 --total-batch 524288 --moment-dtype bf16
  # A low rate: the loss of a model of this size would rise in its first steps, which then repair many rows.
  eight=(--model llama-8b --lr 2e-5 --steps 4 --seq-len 1024 --total-batch 131072 --moment-dtype bf16 --no-master-weights)
  step llama-1b-fit --steps 20 --model llama-1b --seq-len 4096 --fit
  step llama-8b "${eight[@]}" --fit
  step llama-8b-fp8 "${eight[@]}" --fit --fp8
  profile gpt2-124m --model gpt2-124m --batch 64 --seq-len 1024
  profile llama-1b --model llama-1b --batch 4 --seq-len 4096
  attention "B64-T1024-12x64" --model gpt2-124m --batch 64 --seq-len 1024
  attention "B4-T4096-32x64" --model llama-1b --num-key-value-heads 32 --batch 4 --seq-len 4096
  attention "B4-T4096-32-8x64" --model llama-1b --batch 4 --seq-len 4096
  attention "B2-T8192-32x128" --model llama-8b --num-key-value-heads 32 --batch 2 --seq-len 8192
  attention "B1-T32768-32-8x128" --model llama-8b --batch 1 --seq-len 32768
  small=()
  [ "$DEVICE" = cuda ] || small=(--shapes 2x64x4x2x16)
  if python3 -c 'import torch.cuda' 2>/dev/null; then # beside cuDNN's
    run attention 200 tools/bench_attention.py --json --device "$DEVICE" "${small[@]}" &&
      show attention attention.log attention '{shape}, {peer}: forward {forward:.3g}, backward {backward:.3g} TFLOP/s, both {both:.3f}'
  fi
fi

if wants long; then
  long=(--model llama-8b --lr 2e-5 --batch 1 --moment-dtype bf16 --no-master-weights --recompute layer --offload weights,gradients,optimizer,activations)
  step llama-8b-32k "${long[@]}" --steps 3 --seq-len 32768
  step llama-8b-32k-chunks "${long[@]}" --steps 3 --seq-len 32768 --mlp-chunk 4096
  step llama-8b-128k "${long[@]}" --steps 2 --seq-len 131072 --mlp-chunk 4096
fi

# Runs the checks of packages beside the trainer.
for part in tools/*/gpu_check.sh; do [ ! -e "$part" ] || . "$part"; done

# --- several GPUs -------------------------------------------------------------------------------------------

# on N: what follows runs as so many ranks
on() {
  LAUNCHER=(tools/launch "$1")
  [ "$DEVICE" = cuda ] || LAUNCHER=(mpirun --allow-run-as-root --oversubscribe --bind-to none -n "$1")
}
# scaling NAME OPTIONS...: weak scaling from one GPU to all. What each does alone is measured on all at once.
scaling() {
  local name=$1 alone n i gpus
  IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((ranks - 1)))}"
  rm -f "$OUT/scaling-$name-alone-"*
  on 1
  for ((i = 0; i < ranks; i++)); do
    CUDA_VISIBLE_DEVICES=${gpus[i]} train "scaling-$name-alone-$i" 200 '{tokens_per_second:,.0f} tokens/s, {peak_bytes / 2**30:.2f} GiB' "${@:2}" &
  done
  wait
  cat "$OUT/scaling-$name-alone-"*.jsonl >"$OUT/scaling-$name.jsonl"
  alone=$(figures "$OUT/scaling-$name.jsonl" summary '{tokens_per_second}' | awk '{sum += $1} END {print sum / NR}')
  for ((n = 2; n <= ranks; n = n < ranks && 2 * n > ranks ? ranks : 2 * n)); do
    on $n
    train "scaling-$name-$n" 200 '{tokens_per_second:,.0f} tokens/s, {100 * tokens_per_second / ranks / '"$alone"':.1f}% of as many alone, {wire_bytes_per_step / 2**20:.1f} MiB sent a step by each, {peak_bytes / 2**30:.2f} GiB' "${@:2}"
  done
}

if wants ranks && [ "$ranks" -gt 1 ]; then
  # Sums in the order of a ring: the switches' own need NVLink multicast, which not every machine grants.
  export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
  [ "$DEVICE" != cuda ] || export LCE_GPU_RANKS=$ranks
  TEST_TIMEOUT=560 check 1 570 "-$ranks-gpus" $(test_programs kernels/test_{collectives,vocabulary_parallel} model/test_masked_loss) tests/trainer/test_ranks*.py
  unset LCE_GPU_RANKS
  on "$ranks"
  layer split 16384 4096 128256 --chunk 4096,2048,1024
  scaling llama-1b --model llama-1b --batch 4 --seq-len 4096 --steps 30
  scaling gpt2-124m --model gpt2-124m --batch 64 --seq-len 1024 --steps 100
  # The same tokens on 1, 2, 4, ... GPUs: how far apart the losses of 20 steps in bf16 are.
  for ((n = 1; n <= ranks; n *= 2)); do
    on $n
    train "agree-$n" 120 '{steps} steps, the last loss {last_loss:.5f}' --model llama-1b --batch 1 --seq-len 2048 --total-batch 32768 --steps 20
    figures "$OUT/agree-$n.jsonl" step '{loss}' >"$OUT/agree-$n.losses"
    [ $n = 1 ] || row "agree-$n" "$(paste "$OUT/agree-1.losses" "$OUT/agree-$n.losses" | awk '{d = $1 > $2 ? $1 - $2 : $2 - $1; if (d > most) most = d} END {print NR " losses, at most " most " from those of one GPU"}')"
  done
  # A model whose state fits no single GPU, and whether the plan knew what each would hold.
  on "$ranks"
  for way in "--zero 2" "--zero 2 --fp8" "--zero 2 --vocab-parallel" "--zero 1" "--zero 1 --vocab-parallel"; do
    [[ $ranks -gt 2 || $way != *1* ]] || continue # two H100s hold no more than `--zero 2`
    name=llama-8b${way// /}
    read -ra eight <<<"--model llama-8b $way --seq-len 8192 --total-batch $((ranks * 8192)) --lr 2e-5"
    # The settings that fit one of these GPUs, for the plan, too.
    run "$name-fit" 60 "${LAUNCHER[@]}" ./train --device "$DEVICE" "${eight[@]}" --fit --steps 0 --val-fraction 0 --sample-every 0 "${tiny[@]}" &&
      read -ra eight <<<"${eight[*]} $(sed -n '/^--fit:/{n;s/.*\(--batch\)/\1/p}' "$OUT/$name-fit.log")"
    run "$name-plan" 60 ./train --device "$DEVICE" "${eight[@]}" --ranks "$ranks" --plan --log "$OUT/$name-plan.jsonl" "${tiny[@]}" &&
      show "$name-plan" "$name-plan.jsonl" plan '{loss_mode}: {peak_bytes / 2**30:.2f} GiB'
    train "$name" 400 '{tokens_per_second:,.0f} tokens/s, MFU {100 * r.get("mfu", float("nan")):.1f}%, ledger {peak_bytes / 2**30:.2f} GiB, device {(device_peak_bytes - device_overhead_bytes) / 2**30:.2f} GiB more than before' "${eight[@]}" --steps 6
  done
fi

echo
cat "$OUT/table.txt"
! grep -q ' FAILED' "$OUT/table.txt"
