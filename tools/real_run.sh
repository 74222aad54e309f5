#!/bin/bash
# From text to a picture: fetches text, trains a tokenizer, makes shards, and trains a model with LM head +
# loss materialized, fused and sampled, from several seeds each. Draws and prints what that does to loss, time
# and memory. `make real-run` builds what it needs. It continues after an interruption. On an NVIDIA GPU the
# model is gpt2-124m with 65,536 tokens a step, else gpt2-tiny with 1,024; some minutes either way.
#
#   --lce-sample M0      M0 of the sampled runs (default 1)
#   --model-options OPT  ./train's options for model and batch, instead of the ones above
#   --out DIR            Folder of text, shards, logs and picture (default runs/real_run): new, empty, of an
#                        earlier run, or with nothing but shards/, which are then used
#   --seeds N            Runs of each kind (default 3 on a GPU, 2 on a CPU). A seed sets the weights and the
#                        data's order: runs with the same seed start alike and read the same batches
#   --steps N            Optimizer steps (default 540 on a GPU, 60 on a CPU)
#   --text PATH          Text to train on: anything that tools/prepare_data.py reads
#                        (default the documentation and C of Debian's or Ubuntu's linux-source package)
#   --vocab V            Entries of the tokenizer (default 128256)
#
# Python with tokenizers and numpy makes the shards (PYTHON names one; missing, they go into a virtual
# environment in DIR). With torch and transformers it also checks the last checkpoint.
set -euo pipefail

fail() {
  echo "real_run: $*" >&2
  exit 1
}

root=$(dirname "$(realpath "$0")")/..
train=$(realpath "${LCE_TRAIN:-$root/train}")
python=${PYTHON:-python3}
plot_run=("$python" "$root/tools/plot_run")
declare -A option=([lce-sample]=1 [out]=$root/runs/real_run [text]='' [vocab]=128256)
if nvidia-smi -L >/dev/null 2>&1; then
  device=cuda text_bytes=160000000 eval_every=30
  option+=([seeds]=3 [steps]=540 [model-options]="--model gpt2-124m --batch 64 --seq-len 1024 --lr 1e-3")
else
  device=cpu text_bytes=20000000 eval_every=10
  option+=([seeds]=2 [steps]=60 [model-options]="--model gpt2-tiny --batch 8 --seq-len 128 --eval-batches 4")
fi

while [ $# -gt 0 ]; do
  [[ $1 != --*=* ]] || set -- "${1%%=*}" "${1#*=}" "${@:2}"
  [ "$1" != --help ] || { sed -n '2,/^set/s/^# \?//p' "$0" && exit; }
  [[ $1 =~ ^--[a-z-]+$ && $# -gt 1 && -v "option[${1#--}]" ]] || fail "$1 is no option with a value; --help lists them"
  option[${1#--}]=$2
  shift 2
done
seeds=${option[seeds]} steps=${option[steps]} text=${option[text]} out=${option[out]}
[[ $seeds =~ ^[1-9][0-9]?$ ]] || fail "--seeds $seeds: give a whole number from 1 to 99"
[[ $steps =~ ^[1-9][0-9]{0,8}$ ]] || fail "--steps $steps: give a whole number from 1 on"
[ -x "$train" ] || fail "there is no $train: run make"
[ -z "$text" ] || text=$(realpath -e "$text" 2>/dev/null) || fail "there is no text ${option[text]}"
mkdir -p "$out"
out=$(realpath "$out")

modes=(materialized fused sampled)
sample="--lce-sample ${option[lce-sample]}" warmup=$(((steps + 8) / 9))
declare -A mode_options=([materialized]=--materialized-logits [fused]=--fused-lce [sampled]=$sample)
options="--device $device ${option[model-options]} --vocab ${option[vocab]} --steps $steps"
options+=" --warmup $warmup --eval-every $eval_every --sample-every 0"
settings="$options $sample"
# These runs replace and remove their files without asking, so they accept only a folder of their own.
[ -e "$out/settings" ] || [ -z "$(find "$out" -mindepth 1 -maxdepth 1 ! -name shards | head -n 1)" ] ||
  fail "$out holds files that are not of an earlier run: name another directory with --out"
[ -e "$out/settings" ] || echo "$settings" >"$out/settings"
[ "$settings" = "$(cat "$out/settings")" ] ||
  fail "the runs in $out have other settings ($(cat "$out/settings")): name another directory with --out"

# --- text, tokenizer, shards --------------------------------------------------------------------------------

# Into $out/text.jsonl, a file a line: which files does not depend on their order in the package.
fetch_text() {
  local package
  package=$(apt-cache search --names-only '^linux-source-[0-9.]+$' 2>/dev/null | sort -V | sed -n '1s/ .*//p') || true
  [ -n "$package" ] ||
    fail "apt knows no package linux-source-...: run apt-get update as root, or name a text with --text"
  echo "fetching $package ..."
  rm -rf "$out/package" && mkdir "$out/package"
  (cd "$out/package" && apt-get -qq -o APT::Sandbox::User=root download "$package" && dpkg -x "$package"_*.deb .) ||
    fail "the package $package cannot be downloaded and unpacked: is this machine offline? --text names a text of yours"
  echo "choosing documentation, C and headers, $((text_bytes / 1000000)) MB of it ..."
  "$python" - "$(find "$out/package" -type f -name 'linux-source-*.tar.*' | head -n 1)" $text_bytes >"$out/text.partial" <<'END'
import hashlib, json, re, sys, tarfile

wanted = re.compile(r"[^/]+/(Documentation/.*\.(rst|txt)|(?!(arch|drivers|sound|tools)/).*\.[ch])")
files = {}
with tarfile.open(sys.argv[1]) as archive:
    for member in archive:
        if member.isfile() and wanted.fullmatch(member.name):
            key = hashlib.sha256(member.name.split("/", 1)[1].encode()).digest()
            files[key] = archive.extractfile(member).read().decode(errors="replace")
left = int(sys.argv[2])
for key in sorted(files):
    if len(files[key]) > 200_000:  # tables and test vectors, of which one could be half of what validates
        continue
    left -= len(files[key])
    if left < 0:
        break
    print(json.dumps({"text": files[key]}))
END
  mv "$out/text.partial" "$out/text.jsonl"
  rm -r "$out/package"
}

make_shards() {
  command -v "$python" >/dev/null || fail "making shards needs Python: there is no $python"
  [ -n "$text" ] || [ -e "$out/text.jsonl" ] || fetch_text
  if ! "$python" -c 'import numpy, tokenizers' 2>/dev/null; then
    local venv=$out/venv
    echo "installing the Python packages numpy and tokenizers into $venv ..."
    { "$python" -m venv "$venv" && "$venv/bin/pip" install --quiet numpy tokenizers; } ||
      fail "they cannot be installed (Debian's package python3-venv makes environments): PYTHON names a python that has them"
    python=$venv/bin/python
  fi
  "$python" "$root/tools/prepare_data.py" "${text:-$out/text.jsonl}" --train-tokenizer "${option[vocab]}" --val-fraction 0.02 \
    --out "$out/shards"
}

[ -e "$out/shards/manifest.json" ] || make_shards
data=(--data "$out/shards/train_*.bin")
# Without validation shards ./train holds a part of the data back.
if [ -e "$out/shards/val_000000.bin" ]; then data+=(--val-data "$out/shards/val_*.bin"); fi

# --- training -----------------------------------------------------------------------------------------------

trap 'fail "interrupted; started again, it goes on with this run"' INT
count=0 logs=()
for ((seed = 1; seed <= seeds; seed++)); do
  for mode in "${modes[@]}"; do # in turn, so that a machine that slows down slows all of them
    count=$((count + 1)) name=$mode-$seed save=()
    logs+=("$out/$name.jsonl")
    [ $count -lt $((3 * seeds)) ] || save=(--save "$out/checkpoint" --keep 1)
    if grep -qs '"stopped":false' "$out/$name.jsonl" && [[ ! ${save[*]} || -e $out/checkpoint/latest ]]; then continue; fi
    printf '\nrun %d of %d: %s, seed %d\n' $count $((3 * seeds)) "$mode" $seed
    [[ ! ${save[*]} ]] || rm -rf "$out/checkpoint" # of a run that was interrupted, or of fewer seeds
    # shellcheck disable=SC2086 # lists of options
    "$train" $options ${mode_options[$mode]} --seed $seed "${data[@]}" --log "$out/$name.jsonl" "${save[@]}" |
      tee "$out/$name.txt" | grep --line-buffered '^step [0-9]\+\(/\|  validation\)'
    grep -q '"stopped":false' "$out/$name.jsonl" || kill -INT $$
  done
done

# --- what came out ------------------------------------------------------------------------------------------

echo
# If plot_run cannot draw, it says why after the table.
"${plot_run[@]}" --groups --from "$warmup" --out "$out/picture.png" "${logs[@]}" >"$out/table.md" || true
cat "$out/table.md"

echo
if "$python" -c 'import torch, transformers, safetensors' 2>/dev/null; then
  "$python" "$root/tests/golden/make_golden.py" --live "$train" --checkpoint "$out/checkpoint/latest" \
    --shard "$(find "$out/shards" -name '*_000000.bin' | sort | tail -n 1)" --device $device
else
  echo "The check of the checkpoint against transformers is skipped: $python lacks torch, transformers or safetensors."
fi
