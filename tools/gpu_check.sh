#!/bin/bash
# Everything that needs a GPU, in one go: builds for the GPU here, runs its tests (also under compute-sanitizer) and
# its benchmarks; prints each result as it comes, and all of them at the end. Whole logs go to runs/gpu_check/
# (OUT=folder: elsewhere).
#
#   tools/gpu_check.sh [all|tests|sanitizer|bench|peers]...
#   tools/gpu_check.sh --ranks N      what needs N GPUs: the tests of ranks, the head split over them, how training scales,
#                                     llama-8b on two
#
# DEPS_ROOT=folder (unpacked packages) in the environment is make's, for machines without apt.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
OUT=${OUT:-runs/gpu_check}
mkdir -p "$OUT"
ranks=0
if [ "${1:-}" = --ranks ]; then
  ranks=${2:?tools/gpu_check.sh --ranks N}
  shift 2
  set -- ranks "$@"
fi
parts=" ${*:-all} "
rm -f "$OUT/table.txt"
failed=0

wants() { [[ $parts == *" $1 "* || $parts == *" all "* ]]; }
row() { printf '%-44s %s\n' "$1" "$2" | tee -a "$OUT/table.txt"; }
# ... | rows TITLE: a row for each line.
rows() { while read -r text; do row "$1" "$text"; done; }

# run NAME SECONDS COMMAND...: keeps the output in NAME.log; a failure is a row of the table.
run() {
  local name=$1 seconds=$2
  shift 2
  timeout --kill-after=10 "$seconds" "$@" >"$OUT/$name.log" 2>&1
  local status=$?
  if [ $status != 0 ]; then
    failed=1
    row "$name" "FAILED with status $status, see $OUT/$name.log"
    tail -n 15 "$OUT/$name.log"
  fi
  return $status
}
# check TITLE NAME SECONDS COMMAND...: the last line of its output is a row, too.
check() {
  local title=$1
  shift
  run "$@" && row "$title" "$(tail -n 1 "$OUT/$1.log")"
}

command -v nvidia-smi >/dev/null || { echo "tools/gpu_check.sh: no nvidia-smi, so there is no GPU to check" >&2; exit 1; }
row "GPU" "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1)"

make -s all tests >"$OUT/build.log" 2>&1 ||
  { tail -n 30 "$OUT/build.log"; echo "tools/gpu_check.sh: the build failed" >&2; exit 1; }

if wants tests; then
  for program in build/release/tests/{kernels/test_{cuda*,fp8,kernels_*,linear_cross_entropy,loss*,tile_sampling,accuracy},trainer/test_{cuda*,fp8,offload,profile},model/test_{golden,generate},tools/test_lce_ladder}; do
    [[ $program != *.* ]] || continue # objects and their dependencies
    name=${program#build/release/tests/}
    check "$name" "${name/\//-}" 240 tests/run "$program"
  done
  # LM head + loss as a GPU before Hopper computes it.
  for program in test_{cuda,cuda_losses,linear_cross_entropy,loss_terms,tile_sampling,loss_golden}; do
    LCE_HOPPER=0 check "$program, portable way" "$program-portable" 240 tests/run "build/release/tests/kernels/$program"
  done
  # Builds liblce.so with CUDA before it runs.
  for program in kernels/test_liblce.py pytorch/test_{functions,training}.py; do
    check "$program" "${program#*/}" 570 tests/run "tests/$program"
  done
fi

if wants sanitizer; then
  # Small shapes, which leave the GPU room for all of them at once.
  export LCE_SMALL_SHAPES=1 LCE_MATMUL_TUNE=0
  for program in test_cuda test_cuda_hopper test_cuda_losses test_cuda_attention test_loss_terms test_tile_sampling; do
    timeout --kill-after=10 300 compute-sanitizer --tool memcheck --error-exitcode 9 "build/release/tests/kernels/$program" >"$OUT/$program-memcheck.log" 2>&1 &
  done
  # racecheck does not support mbarriers and bulk copies: it reports kernels that are ordered by them, or stops. So ours
  # are left out here, and to the comparisons with the CPU; cuBLASLt's (nvjet) are reported and counted apart.
  for program in test_cuda test_cuda_losses; do
    LCE_HOPPER=0 timeout --kill-after=10 300 compute-sanitizer --tool racecheck "build/release/tests/kernels/$program" >"$OUT/$program-racecheck.log" 2>&1 &
  done
  wait
  unset LCE_SMALL_SHAPES LCE_MATMUL_TUNE
  for log in "$OUT"/*-memcheck.log; do
    summary=$(grep 'ERROR SUMMARY' "$log" | tail -n 1 | sed 's/=* *//')
    [ "$summary" = "ERROR SUMMARY: 0 errors" ] && grep -q '^\[  PASSED' "$log" && ! grep -q '^\[  FAILED' "$log" || failed=1
    row "$(basename "$log" -memcheck.log) under memcheck" "${summary:-did not end}"
  done
  for log in "$OUT"/*-racecheck.log; do
    passed=$(grep -c '^\[  PASSED' "$log")
    all=$(grep -c 'Race reported' "$log")
    ours=$(grep 'Race reported' "$log" | grep -vc 'access at nvjet_')
    [ "$passed" = 2 ] && [ "$ours" = 0 ] || failed=1
    row "$(basename "$log" -racecheck.log) under racecheck" "$passed of 2 dtypes ran; hazards in our kernels: $ours, in cuBLASLt's: $((all - ours))"
  done
fi

if wants bench; then
  # layer N H V OPTIONS: LM head + loss against its three plain GEMMs, at three chunks
  layer() {
    local name="layer-$1-$2-$3"
    run "$name" 150 tools/bench_lce --device cuda --tokens "$1" --hidden-size "$2" --vocab "$3" --chunk 4096,2048,1024 "${@:4}" &&
      sed -n 's/^  \(fused\|+\|materialized\)/\1/p' "$OUT/$name.log" | rows "layer, N $1 H $2 V $3"
  }
  # step NAME OPTIONS...: a whole training step
  step() {
    local name="step-$1"
    shift
    run "$name" 150 tools/bench_step --device cuda "$@" &&
      row "$name" "$(awk '/^  step/ {rate = $4} /plain GEMMs/ {tflops = $5; share = $7} /at the peak \(ledger\)/ {bytes = $2 " " $3}
        END {print rate " tokens/s, GEMMs " tflops " TFLOP/s = " share " of the step, " bytes}' "$OUT/$name.log")"
  }
  # long_step NAME STEPS OPTIONS...: one of many micro-batches, of which bench_step would take minutes
  long_step() {
    local name="step-$1"
    run "$name" 200 ./train --device cuda --val-fraction 0 --sample-every 0 --steps "$2" "${@:3}" &&
      sed -n 's/^speed  *//p' "$OUT/$name.log" | rows "$name"
  }
  layer 4096 4096 128256
  layer 16384 2048 131072 --materialized --terms
  layer 8192 2304 256000
  layer 32768 4096 128256
  [ -x tools/bench_attention ] && run attention 120 tools/bench_attention && sed 's/^/  /' "$OUT/attention.log"
  run ladder 150 tools/lce_ladder --device cuda --tokens 8192 --hidden-size 4096 --vocab 128256 --chunk 1024 && sed "s/^/  /" "$OUT/ladder.log"
  step gpt2-124m --model gpt2-124m --batch 64 --seq-len 1024
  step gpt2-1558m --model gpt2-1558m --batch 16 --seq-len 1024
  step llama-1b --model llama-1b --batch 4 --seq-len 4096
  step llama-1b-lean --model llama-1b --batch 4 --seq-len 4096 --moment-dtype bf16 --no-master-weights --recompute elementwise --lce-chunk 1024
  step llama-1b-fp8 --model llama-1b --batch 4 --seq-len 4096 --fp8
  step llama-1b-materialized --model llama-1b --batch 4 --seq-len 4096 --materialized-logits
  long_step llama-1b-b16 5 --model llama-1b --batch 16 --seq-len 1024 --total-batch 524288 --moment-dtype bf16
  long_step llama-8b 4 --model llama-8b --batch 8 --seq-len 1024 --total-batch 131072 --moment-dtype bf16 --no-master-weights
fi

# The layer through PyTorch and through C, beside others where they are installed; `all` leaves it out without PyTorch.
if [[ $parts == *" peers "* ]] || { wants peers && python3 -c 'import torch.cuda' 2>/dev/null; }; then
  run liblce 200 make -s liblce.so && run peers 400 tools/bench_peers.py --no-errors --rounds 3 &&
    grep '^N \|QuACK\|lce\.c' "$OUT/peers.log" | rows peers
fi

if wants ranks && [ "$ranks" -gt 1 ]; then
  # Sums in the order of a ring: the switches' own need NVLink multicast, which not every machine grants.
  export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
  LCE_GPU_RANKS=$ranks TEST_TIMEOUT=560 check "test_ranks on $ranks GPUs" test_ranks 570 tests/run tests/trainer/test_ranks.py
  LCE_GPU_RANKS=$ranks check "test_vocabulary_parallel on $ranks GPUs" test_vocabulary_parallel 200 tests/run build/release/tests/kernels/test_vocabulary_parallel
  run split 150 tools/launch "$ranks" tools/bench_lce --device cuda --tokens 16384 --hidden-size 4096 --vocab 128256 --chunk 4096,2048,1024 &&
    sed -n 's/^  \(fused\|split\)/\1/p' "$OUT/split.log" | rows "layer, N 16384 H 4096 V 128256 a GPU"
  # scaling NAME OPTIONS...: weak scaling from one GPU to all
  scaling() {
    local name="scaling-$1"
    shift
    run "$name" 400 tools/bench_scaling --ranks "$ranks" --device cuda "$@" &&
      awk 'NR > 1 {print $1 " ranks: " $2 " tokens/s, " $5 ", " $6 " " $7 " sent a step by each"}' "$OUT/$name.log" | rows "$name"
  }
  scaling llama-1b --model llama-1b --batch 4 --seq-len 4096
  scaling gpt2-124m --model gpt2-124m --batch 64 --seq-len 1024 --steps 100
  # The same tokens on 1, 2, 4, ... GPUs: how far apart the losses of 20 steps in bf16 are.
  for ((n = 1; n <= ranks; n *= 2)); do
    run "agree-$n" 120 tools/launch $n ./train --device cuda --model llama-1b --batch 1 --seq-len 2048 --total-batch 32768 --steps 20 --val-fraction 0 --sample-every 0 --log "$OUT/agree-$n.jsonl" &&
      sed -n 's/.*"event":"step".*"loss":\([0-9.]*\).*/\1/p' "$OUT/agree-$n.jsonl" >"$OUT/agree-$n.losses"
    [ $n = 1 ] || row "llama-1b, 20 steps, $n GPUs and 1" "$(paste "$OUT/agree-1.losses" "$OUT/agree-$n.losses" | awk '{d = $1 > $2 ? $1 - $2 : $2 - $1; if (d > most) most = d} END {print NR " losses, at most " most " apart, the last " $1 " and " $2}')"
  done
  # A model whose state fits no single GPU, and whether the plan knew what each of two would hold.
  figure() { sed -n "s/.*\"event\":\"summary\".*\"$1\":\([0-9.e+]*\).*/\1/p" "$OUT/llama-8b.jsonl"; }
  for split in "" --vocab-parallel; do
    eight=(--device cuda --model llama-8b --zero 1 $split --batch 1 --seq-len 8192)
    run llama-8b-plan 60 ./train "${eight[@]}" --ranks 2 --plan &&
      run llama-8b 400 tools/launch 2 ./train "${eight[@]}" --steps 6 --val-fraction 0 --sample-every 0 --log "$OUT/llama-8b.jsonl" &&
      row "llama-8b --zero 1 $split on 2 GPUs, T 8192" "planned $(awk '/all together/ {print (NF > 8 ? $8 " " $9 : $4 " " $5)}' "$OUT/llama-8b-plan.log"), ledger $(awk "BEGIN {printf \"%.2f\", $(figure peak_bytes) / 2^30}") GiB, device $(awk "BEGIN {printf \"%.2f\", ($(figure device_peak_bytes) - $(figure device_overhead_bytes)) / 2^30}") GiB more than before, $(figure tokens_per_second) tokens/s"
  done
fi

echo
cat "$OUT/table.txt"
exit $failed
