#!/usr/bin/env python3
"""./train's command line: what it refuses, in one sentence, what it prints, and what short runs write."""
import json
import math
import os
import pathlib
import re
import shutil
import signal
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import tap  # noqa: E402
from program import (Deadline, Process, ROOT, TINY, TRAIN, assert_planned, column, floats, main, need, once, read_log, run, start,  # noqa: E402
                     tensors, train, write_mask, write_manifest, write_shard)

ENDLESS = TINY + "--steps 1000000 --sample-every 0 --eval-every 0 "

# --- refusals that follow from the table of options ---------------------------------------------------------


@once
def options():
    """Returns {name: (what stands behind "=", or "", and the lines' text)} of all options that --help lists."""
    listed = re.findall(r"^  --([a-z0-9-]+)\[?=?([^ \n\]]*)\]?((?: .*| *\n {28}.*)(?:\n {28}.*)*)$", train("--help").ok().out, re.M)
    assert len(listed) > 70, listed
    return {name: (value, " ".join(text.split())) for name, value, text in listed}


def wrong_values(limits, words):
    """Returns what an option refuses that takes such numbers or words: first numbers just outside of the limits."""
    if not limits:
        return [wrong for word in words for wrong in (word + "x", word[:-1], word.upper(), word + ",") if wrong not in words]
    whole, low, high = limits
    if whole:
        return [str(int(low) - 1), str(int(float(high)) + 1), "1.5", "4x", "99999999999999999999"]
    return [repr(float(low) / 2 if float(low) > 0 else -1e-6), repr(float(high) * 1.01), "nan", "inf", "1e-3x"]


# --help has the limits or words of each option; its refusal names them, and an option takes its limits and words themselves.
def test_each_option_refuses_wrong_values(folder):
    tried = set()
    for name, (value, text) in options().items():
        shown = re.search(r"\[(\S+) (?:to (\S+?)|or more)[];]", text)
        words = re.split("[|,]", value) if re.search("[a-z0-9][|,][a-z0-9]", value) else []
        if not shown and not words:
            continue
        refusal = train(f"--{name}=x --plan", cwd=folder).refused(f"lce: --{name} x: give ").err
        limits = re.search("give a (whole )?number from (.*) to (.*)\n", refusal)
        assert bool(limits) == bool(shown), refusal
        if shown:
            assert limits[2] == shown[1] and (limits[3] == shown[2] or not shown[2] and float(limits[3]) > 1e5), (shown[0], refusal)
        else:
            assert all(word in refusal for word in words), refusal
        takes = limits.groups() if limits else (*words,)
        values = wrong_values(limits and takes, words)
        for wrong in ["", *(values[:2] if takes in tried else values)]:  # one parser reads them all
            output = train(f"--{name}={wrong} --plan", cwd=folder).refused()
            assert output.err == refusal.replace(f"--{name} x:", f"--{name} {wrong}:"), output
        for right in (takes[1], takes[2] if shown and shown[2] else takes[1]) if limits else words:
            if takes not in tried:
                assert ": give " not in train(f"--{name}={right} --help", cwd=folder).ok().err
        tried.add(takes)
    assert len(tried) > 20 and not os.listdir(folder), "refused, and written all the same"


# Words that are no options: what was meant, and nothing that a terminal would act on.
def test_words_that_are_no_options(folder):
    for name, (value, _) in options().items():
        line, says = (f"--{name}", f": give a value, --{name} {value}") if value else (f"--{name}=7", f"=7: --{name} takes no value")
        if name not in ("fp8", "fit"):  # which may stand alone
            train(line, cwd=folder).refused(f"lce: --{name}{says}\n")
    for line, says in {"--vocabulary 7": "--vocabulary is not an option: try --vocab; --help", "-x": "-x is not an option", "-xyz": "-xyz is not",
                       "--plan -xyz 7": "-xyz is not", "--e": "--e is how several options begin", "--learning-rate=1": "try --lr; --help",
                       "--max-steps 9": "try --steps", "--batch_size 4": "try --batch", "--$(printf 'a\\033b')": "--a\\x1Bb is not",
                       "-steps 9": "-steps is not an option: try --steps", "-vocab 9": "-vocab is not an option: try --vocab",
                       "--warmup-steps 9": "try --warmup;", "-": "- is ",
                       "--seq_len": "--seq_len: give a value, --seq-len T\n", "--log --plan": "--log: give a value, --log FILE, before --plan\n"}.items():
        run("sh", "-c", f"{TRAIN} {line}", cwd=folder).refused(says)
    assert not os.listdir(folder), "--log --plan has written"
    assert train("-h").ok().out == train("--help").ok().out == train("--usage").ok().out
    # What is typed elsewhere, and what begins as one option alone, is understood. A value may look like an option behind "=".
    train("--seq_len 32 --num-l=2 --plan").ok(" x 32, ")
    train(f"{TINY} --steps 0 --sample-every 0 --log=--plan", cwd=folder).ok()
    assert os.listdir(folder) == ["--plan"]


ELSEWHERE = ("gradient-accumulation-steps bf16 layers save-steps eval-steps epochs output-dir wandb tensorboard max-length wd lr-scheduler-type "
             "num-train-epochs micro-batch-size gradient-checkpointing max-grad-norm compile fsdp lora ema").split()


# What other programs call an option is answered with what serves here.
def test_options_of_other_programs(folder):
    for name in ELSEWHERE:
        answer = train(f"--{name} 1", cwd=folder).refused(f"lce: --{name} is not an option: ").err.split(": ", 2)[2]
        named = re.findall("--([a-z0-9-]+)", answer.replace("--help lists", ""))
        assert set(named) <= options().keys(), answer


EXCLUSIONS = [
    ("fused-lce", "materialized-logits", "give one of them"),
    ("tie-word-embeddings", "untie-word-embeddings", "give one of them"),
    ("master-weights", "no-master-weights", "give one of them"),
    ("fp8", "no-fp8", "give one of them"),
    ("materialized-logits", "lce-chunk 64", "chunks and sampling belong to --fused-lce"),
    ("materialized-logits", "lce-sample 1", "chunks and sampling belong to --fused-lce"),
    ("metrics", "lce-sample 1", "sampling knows only the rows' sums, and metrics need more"),
    ("vocab-parallel", "materialized-logits", "a split head has only the fused mode"),
    ("vocab-parallel", "compare-modes", "a split head has only the fused mode"),
    ("val-data a", "val-fraction 0.1", "nothing is held out where there is separate validation data"),
    ("pack documents", "dump x", "packed windows do not follow the files' order"),
    ("pack documents", "data-order sequential", "packed windows do not follow the files' order"),
    ("init a", "model gpt2-tiny", "both say what the model is"),
]


def test_options_exclude_each_other(folder):
    for a, b, why in EXCLUSIONS:
        for first, second in ((a, b), (b, a)):
            output = train(f"--steps 0 --{first} --{second}", cwd=folder).refused(why)
            names = {a.split()[0], b.split()[0]}
            assert names == set(re.match("lce: --(.*) and --(.*) exclude each other", output.err).groups()), output
    assert not os.listdir(folder)


# Two options that exclude each other do not if one of them is 0, "none".
def test_possible_combinations(folder):
    for line in ("--metrics --lce-sample 0", "--materialized-logits --lce-sample 0", "--steps 10 --warmup 10",
                 "--tie-word-embeddings --tie-word-embeddings", "--model gpt2-tiny --num-key-value-heads 4",
                 "--pack documents --data-order shuffled", "--momentum 0.95", "--pack none --data-order sequential",
                 "--optimizer muon --model gpt2-774m --ranks 8 --zero 1"):  # a layer is cut into several buckets
        train(f"--device cpu --plan {line}").ok()


# --- refusals of their own ----------------------------------------------------------------------------------

REFUSED = [
    ("--model gpt2", "no model preset is called 'gpt2'; there are gpt2-tiny, gpt2-124m, gpt2-350m, gpt2-774m, gpt2-1558m\n"),
    ("--offload weights,moments", "give one or more of weights,gradients,optimizer"),
    ("--offload weights,", "--offload weights,: give one or more of "),
    ("--prompt ''", "--prompt: give at least one character"),
    ("corpus.txt", "'corpus.txt' is not an option; paths are given with --data PATH"),
    ("--steps 5 7", "'7' is not an option"),
    ("--recompute-layers 1", "--recompute-layers needs --recompute elementwise|mlp|layer: "),
    ("--recompute layer --recompute-layers 99", "99: the model has 4 layers; leave it out, or give 0, for all of them"),
    ("--mlp-chunk 8 --recompute mlp", "--mlp-chunk needs --recompute layer: a chunk's activations are dropped"),
    ("--fp8=head", "--fp8 head: give none|all|layers"),
    ("--fp8 head", "'head' is not an option"),
    ("--fp8 --seq-len 100", "--fp8 takes multiples of 16, and --seq-len is 100"),
    ("--fp8 --mlp-chunk 30 --recompute layer", "--fp8 takes multiples of 16, and --mlp-chunk is 30"),
    ("--fp8 --head-dim 20", "--fp8 takes multiples of 16, and key/value heads x head size is 40"),
    ("--fp8 --device cuda --dtype fp32 --plan", "--fp8 reads and writes bf16 on cuda, and not fp32"),
    ("--offload activations", "from which all else is computed again: add --recompute layer"),
    ("--offload optimizer --num-layers 10000 --hidden-size 65536", "of this machine's memory and "),
    ("--pack documents --end-of-text 60000 --vocab 60000", "--end-of-text 60000: the vocabulary has 60000"),
    ("--end-of-text 5", "--end-of-text needs --pack documents: only packing"),
    ("--init a --resume b", "--init begins with the model in a and --resume with the checkpoint in b"),
    ("--end-of-text 0", "--end-of-text needs --pack documents: only packing"),
    ("--resume auto", "--resume auto looks for checkpoints in --save DIR, so give --save as well\n"),
    ("--keep 2", "--keep needs --save DIR: without it nothing is saved\n"),
    ("--save-every 2", "--save-every needs --save DIR: without it nothing is saved\n"),
    ("--save-dtype fp32", "--save-dtype needs --save DIR: without it nothing is saved\n"),
    ("--zero 0 --vocab-parallel", "--vocab-parallel needs --zero 1|2: gradients, master weights"),
    ("--logit-softcap 30 --label-smoothing 0.1", "--label-smoothing with llama-tiny's logit soft-cap of 30: the fused mode has no label smoothing together"),
    ("--logit-softcap 30 --label-smoothing 0.1 --materialized-logits --compare-modes", "use the materialized mode alone"),
    ("--steps 10 --warmup 11", "--warmup 11 is longer than --steps 10; shorten it or raise --steps"),
    ("--model gpt2-tiny --rope-theta 10000", "--rope-theta: gpt2-tiny is a GPT-2, which has no rotary embedding; leave it out"),
    ("--rope-theta 0", "--rope-theta 0: give a number from 1 to "),
    ("--momentum 0.9", "--momentum needs --optimizer muon: AdamW has --beta1\n"),
    ("--decay-share 0.5", "--decay-share needs --schedule wsd: others do not decay at the end\n"),
    (TINY + "--dump x", "--dump: there is no step to run; raise --steps above 0"),
    ("--logit-softcap 30 --lce-sample 1", "--lce-sample has no logit soft-cap, and llama-tiny has one, of 30; leave it out, or"),
    ("--batch 3 --seq-len 64 --total-batch 500",
     "--total-batch 500 is not a multiple of the 192 tokens of a micro-batch (--batch x --seq-len); change "),
    ("--batch 3 --seq-len 64 --total-batch 1", "--total-batch 1 is not a multiple of the 192 tokens"),
    ("--plan --ranks 2 --dump x", "one micro-batch on one rank, and this one has 2: start one rank alone"),
    (TINY + "--dump x --total-batch 96", "--dump is of a step of one micro-batch on one rank, and this one has 2"),
    ("--model gpt2-124m --seq-len 1025", "--seq-len 1025 is longer than the 1024 positions of gpt2-124m"),
    ("--model llama-8b --batch 1000000 --seq-len 131072", "is more than 2147483647 tokens in a micro-batch"),
    ("--hidden-size 130", "a hidden size of 130 does not divide into 4 heads"),
    ("--num-key-value-heads 3", "4 attention heads cannot share 3 key/value heads evenly"),
    ("--model gpt2-tiny --num-key-value-heads 2", "GPT-2 has as many key/value heads as attention heads"),
    ("--model gpt2-tiny --head-dim 16", "GPT-2's 4 heads of 16 do not make up a hidden size of 128"),
    ("--head-dim 31", "head_dim cannot be 31; choose an even --head-dim"),
    ("--hidden-size 2147483644 --num-attention-heads 2 --intermediate-size 2147483647", "is beyond anything this program counts"),
    ("--plan --batch 1000000 --seq-len 2000 --num-layers 10000 --intermediate-size 8388608", "out of memory"),
    ("--device cpu --dtype bf16", "the CPU computes in fp32 only; leave out --dtype"),
    ("--device cpu --grad-dtype bf16", "the CPU computes in fp32 only"),
    ("--device cpu --plan --moment-dtype bf16", "the CPU computes in fp32 only"),
    ("--device cuda", "; leave it out to compute on the CPU"),
    ("--device cuda --fit", "give --device-memory GIB"),
    ("--fit --ranks 2", "--ranks 2: a launcher starts ranks (tools/launch 2 ./train ...); for --plan alone"),
    ("--resume /nowhere", "/nowhere"),
    ("--init /nowhere", "/nowhere"),
    (TINY + "--data /nowhere/at/all.txt", "/nowhere/at/all.txt"),
    (TINY + "--val-data /nowhere/at/all.txt", "/nowhere/at/all.txt"),
    (TINY + "--data 'no*.md'", "no file matches "),
    (TINY + "--lr 100 --warmup 0 --grad-clip 0 --weight-decay 100 --steps 200 --sample-every 0 --data Makefile",
     "the training has diverged, try a lower --lr"),
]


def test_impossible_options(folder):
    shutil.copy(ROOT / "Makefile", folder)
    for line, part in REFUSED:
        train("--steps 0 " + line, cwd=folder).refused(part)
    assert os.listdir(folder) == ["Makefile"]
    for line, part in (("--log /nowhere/log.json", "cannot write the log /nowhere/log.json: No such file"),
                       ("--log /dev/full", "cannot write the log /dev/full: No space left on device"),
                       ("--steps 1 --dump /dev/full", "--dump /dev/full: cannot make the folder /dev/full"),
                       ("--dump /dev/null/x", "--dump /dev/null/x"),
                       ("--steps 1 --timeline /nowhere/t.csv", "cannot write the timeline /nowhere/t.csv")):
        train(TINY + line).refused(part)


def test_wrong_data(folder):
    (folder / "empty.txt").write_text("")
    (folder / "short.txt").write_text("too little")
    (folder / "letters.txt").write_text("a" * 100)
    for line, part in (("empty.txt", "is empty"), ("short.txt", "holds 10 tokens"),
                       ("letters.txt --vocab 97", "and the vocabulary has 97: name other text, or train a new model with --vocab 98"),
                       ("letters.txt --vocab 98 --prompt aab", "--prompt: token 2 is 98 and the vocabulary has 98")):
        train(TINY + f"--data {folder}/{line}").refused(part)
    # Data of which nothing counts; one target that counts is enough.
    for name in ("bare", "full", "one"):
        write_shard(folder / f"{name}.bin", 400 * [1])
    for name, counts in (("bare", 400 * [0]), ("one", [i == 200 for i in range(400)])):
        write_mask(folder / f"{name}.mask", counts)
    for data, val_data, part in (("bare", "full", "training windows"), ("full", "bare", "validation batches")):
        train(TINY + f"--data {folder}/{data}.bin --val-data {folder}/{val_data}.bin").refused(
            "bare.bin", f"no target of the {part} counts")
    train(TINY + f"--steps 5 --data {folder}/one.bin --val-data {folder}/full.bin").ok()
    # A pipe or a device might never end: it is no input, under whatever option.
    os.mkfifo(folder / "config.json")
    for path in (folder / "config.json", "/dev/zero"):
        train(TINY + f"--data {path}").refused("neither a file nor a directory")
        train(TINY + f"--val-data {path}").refused("neither a file nor a directory")
        train(TINY + f"--tokenizer {path}").refused("is not a regular file")
    train(f"--init {folder}").refused("/config.json: it is not a regular file")


# If tokens are not bytes, a prompt is ids or a shard, and the refusal of text has a command for ids.
def test_prompts_of_tokens(folder):
    data = write_shard(folder / "data.bin", 400 * [4, 2])
    line = TINY.replace("300", "500") + f"--data {data} --steps 1 --sample-every 1 --sample-tokens 2 --log {folder}/log "

    def sample(words, field="tokens"):
        train(line + words).ok()
        return column(read_log(folder / "log"), field, "sample")[0]
    assert sample("")[:-2] == [4]  # the data's first
    assert sample("--prompt '5, 6,7'")[:-2] == [5, 6, 7]
    write_shard(folder / "prompt.bin", [8, 9])
    assert sample(f"--prompt {folder}/prompt.bin")[:-2] == [8, 9]
    train(line + "--prompt 5,500").refused("--prompt: token 1 is 500 and the vocabulary has 500")
    write_shard(folder / "long.bin", bytes(2 << 20 | 2), count=1 << 20 | 1)
    train(line + f"--prompt {folder}/long.bin").refused("it has 1048577 tokens; give a shard of at most 1048576")
    train(line + f"--prompt {folder}/absent.bin").refused("absent.bin")
    for words in ("Hello", "1,-2", "1;2", "1,2x"):
        train(line + f"--prompt '{words}'").refused("--prompt: ", "give a shard (*.bin), or ids such as 15496,995", "tokenizer.json 'TEXT'")
    # With a tokenizer samples are text, and begin with a newline where it has one.
    line += f"--tokenizer {ROOT}/tests/golden/tokenizers/gpt2 "
    assert sample("", "text").startswith("\n")
    assert sample("--prompt 39,68,0", "text").startswith("He!")
    said = train(line + "--prompt Hello").refused("gpt2/tokenizer.json 'TEXT'").err
    need("tokenizers")
    command = said[said.index("python3 -c"):said.index(" prints")].replace("python3", sys.executable).replace("'TEXT'", "'Hello world'")
    ids = run("sh", "-c", command).ok().out
    assert sample(f"--prompt {ids}", "text").startswith("Hello world")


# Training needs no tokenizer: one that comes with a model and cannot be used ends no run.
def test_a_models_tokenizer_that_cannot_be_used(folder):
    model = shutil.copytree(ROOT / "tests/golden/mistral", folder / "mistral")
    line = f"--device cpu --init {model} --data tests/golden/mistral/tokens.bin --val-fraction 0 --batch 1 --seq-len 8 --steps 1"
    tokenizer = {"model": {"vocab": {"a": 0}, "merges": [], "byte_fallback": True}}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "is not used" in train(line).ok().err
    train(line + f" --tokenizer {model}").refused("no byte-level BPE")


# An existing file stays, unless it is an earlier output of the same kind.
def test_outputs_replace_only_outputs(folder):
    mine, log, timeline = folder / "mine.txt", folder / "log.jsonl", folder / "steps.csv"
    line = TINY + "--steps 1 --sample-every 0 "
    mine.write_text("x" * 400)
    for _ in range(2):  # over its own outputs
        train(f"{line} --log {log} --timeline {timeline}").ok()
    assert [event["event"] for event in read_log(log)].count("start") == 1
    first = (folder / "log.jsonl.1").read_bytes()  # of an earlier run
    assert (folder / "steps.csv.1").is_file() and not (folder / "steps.csv.2").exists()
    train(f"{line} --log {log}").ok()
    assert (folder / "log.jsonl.1").read_bytes() == first and len(read_log(folder / "log.jsonl.2")) == len(read_log(log)) == 4
    for stream in ("/dev/stdout", folder / "both"):  # where standard output is as well, both write on
        run("sh", "-c", f"{TRAIN} {line} --log {stream} >{folder}/both").ok()
        lines = (folder / "both").read_text().splitlines()
        assert sum(text.startswith('{"event":"') for text in lines) == 4 and "device   CPU, " in "\n".join(lines), lines
    for options, kept, part in ((f"--log {mine}", mine, "the log"), (f"--log {mine} --data {mine}", mine, "the log"),
                                (f"--timeline {mine} --data {mine}", mine, "the timeline"),
                                (f"--log {log} --data {log}", log, "this run reads it; name another file"),
                                (f"--timeline {log}", log, "is not from this program"),
                                (f"--log {timeline}", timeline, "is not from this program")):
        before = kept.read_bytes()
        train(line + options).refused(part)
        assert kept.read_bytes() == before, kept
    train(f"{line} --log {folder}/one --timeline {folder}/one").refused("another output is written there")


# Data that shrinks or changes under a run ends it with a sentence.
def test_data_that_changes(folder):
    path, count = folder / "live.bin", 1 << 20
    for shrinks in (False, True):
        write_shard(path, bytes(2 * count), count=count)
        p = start(ENDLESS + f"--data {path}")
        p.wait_for("step 1/1000000")
        if shrinks:
            os.truncate(path, 4096)
        else:
            write_shard(path, b"\xff" * 2 * count, count=count)  # first empties the file
        output = p.finish().refused()
        says = "live.bin was shortened", "live.bin has changed since it was opened: token "
        assert says[0] in output.err or not shrinks and says[1] in output.err, output


def test_help(folder):
    output = train("--help").ok("Model (", "Job", "Optimizer (", "LM head + loss", "Data, ", "Checkpoints", "Machine and memory",
                                "Output", "--model=PRESET", "--batch=B", "never above 4096", "[1 or more; default 4]", "Examples:")
    assert not output.err and max(map(len, output.out.splitlines())) < 80
    assert output.out[output.out.index("Examples:"):].count("\n  ./train --") == 3, output
    assert all(line.startswith("  ./train") for line in output.out.split("Examples:\n")[1].split("\n")[:3]), output
    assert train("--help", ARGP_HELP_FMT="garbage").ok().out == output.out
    assert train("--version").ok().out.startswith("lce.c ") and train("-V").ok().out == train("--version").ok().out


# --- what is said about memory ------------------------------------------------------------------------------

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def row(table, name):
    """The first two columns of a row of the memory table, in bytes."""
    found = re.search(rf"^  {re.escape(name)} +([\d.]+) (\w+) +([\d.]+) (\w+)$", table, re.M)
    assert found, f"no row {name} in {table}"
    return float(found[1]) * UNITS[found[2]], float(found[3]) * UNITS[found[4]]


def head_and_all(table):
    head, both = row(table, "LM head + loss alone, at its peak"), row(table, "all together (ledger)")
    assert head[0] < head[1] and both[0] < both[1] and head[0] < both[0] and head[1] < both[1], table
    return head


def test_plans(folder):
    presets = train("--model x").fails("there are ").err.split("there are ")[1].rstrip(".\n").split(", ")
    assert len(presets) >= 13, presets
    for name in presets:
        for device, dtype in (("cpu", "fp32"), ("cuda", "bf16")):
            output = train(f"--model {name} --plan --batch 16 --device {device}").ok(
                name, "fused, planned", "materialized, planned", dtype)
            assert not output.err
            head_and_all(output.out)
    # 32,768 tokens of 128,256 logits in bf16 are 7.83 GiB (and a little more for aligned rows).
    output = train("--model llama-8b --seq-len 32768 --batch 1 --plan --device cuda --recompute layer").ok(
        "llama-8b (8.03B parameters) on cuda: batch 1 x 32768, V 128,256, bf16, chunks of 4096")
    head = head_and_all(output.out)
    assert abs(head[1] / (32768 * 128256 * 2) - 1) < 0.01 and head[0] < head[1] / 7, head


# The chunk that is printed is the one that is used: of nearly equal size, no more than the tokens there are.
def test_chunk_is_the_used_one(folder):
    for options, chunk in {"--lce-chunk 100000": 48, "--lce-chunk 47": 24, "--lce-chunk 20": 16}.items():
        train(TINY + f"--steps 1 {options} --log {folder}/log").ok(f"linear_cross_entropy, {chunk} tokens at a time")
        assert read_log(folder / "log")[0]["lce_chunk"] == chunk
        train(TINY + f"--plan {options}").ok(f"fp32, chunks of {chunk}, ")
    # The default on a CPU, by which the command of the README shows what it is about.
    output = train("--device cpu --vocab 128256 --fused-lce --plan").ok("batch 4 x 256, V 128,256, fp32, chunks of 114, ")
    fused, materialized = map(float, re.search(r"lm_head, loss +([\d.]+) MiB +([\d.]+) MiB", output.out).groups())
    assert materialized > 8 * fused


def chosen(output):
    """What --fit chose, as options, and its peak in bytes."""
    found = re.search(r"^--fit: .*\n +\S+(?: tokens/s)? +([\d.]+) (GiB|MiB|KiB)  (--batch .*)$", output.out, re.M)
    assert found, output
    return found[3], float(found[1]) * {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}[found[2]]


# What it chooses fits, as --plan has it, and what is given stays.
def test_fit(folder):
    lean = "--moment-dtype bf16 --no-master-weights --model llama-8b --total-batch 131072 --seq-len 1024 --device cuda --plan "
    for more, memory, expected in (
            ("", 78.9, "--batch 4 --recompute elementwise --recompute-layers "),
            ("--batch 8 --lce-chunk 2048 ", 78.9, "--batch 8 --recompute mlp --recompute-layers "),
            ("--batch 2 --recompute layer ", 70, "--batch 2 --recompute layer --lce-chunk "),
            ("--recompute-layers 0 ", 78.9, "--batch 4 --lce-chunk "),  # of all layers, where there is any
            ("--materialized-logits ", 78.9, "--batch 4 --recompute elementwise")):
        options, peak = chosen(train(lean + more + f"--fit --device-memory {memory}").ok())
        assert options.startswith(expected) and peak < memory * 2**30, options
        train(lean + more + options + f" --log {folder}/log").ok()
        materialized = "materialized" in more
        assert abs(read_log(folder / "log")[materialized]["peak_bytes"] - peak) < 2**24, (options, peak)
    # 24 GiB need the host's memory: the remedy works. Large micro-batches hide the update, and layers' inputs are kept there, too.
    small = lean + "--device-memory 24 "
    train(small + "--fit").fails("not even one sequence of 1024 tokens fits in 24.00 GiB; add --fit offload\n")
    options, _ = chosen(train(small + "--fit offload").ok("  --fp8 --batch "))
    assert re.fullmatch("--batch 64 --recompute layer --recompute-layers .* --offload weights,gradients,optimizer,activations", options), options
    # An offload that costs no time is the next best where it frees little.
    output = train("--model llama-1b --device cuda --plan --device-memory 80 --seq-len 4096 --recompute layer --fit offload").ok()
    best, following = re.findall(r"--batch (.*)\n", output.out)[:2]
    assert following == best + " --offload activations", output
    train(lean.replace("--moment-dtype bf16 --no-master-weights ", "") + "--device-memory 12 --seq-len 4096 --fit").fails("; add --fit offload")
    train(lean + "--device-memory 1 --fit").fails("1.00 GiB; take a smaller model, a smaller --seq-len or a device with more memory\n")
    train(lean + "--fit").fails("give --device-memory GIB")
    # Without --fit the remedy is tried, too: where weights alone do not fit, --fit alone would not help.
    train(small).fails("); add --fit offload\n")
    train(lean + "--device-memory 1").fails("); take a smaller model, a smaller --seq-len or a device with more memory\n")
    train(lean + "--device-memory 30 --ranks 8").fails("); add --fit --zero 2\n")
    train(lean + "--device-memory 30 --ranks 8 --fit --zero 2").ok()
    # FP8 is named where the run can have it.
    for more, can in ("", True), ("--head-dim 8 --num-attention-heads 256 ", True), ("--recompute layer --mlp-chunk 1000 ", False):
        offered = train("--model llama-1b --device cuda --plan --fit --device-memory 78.9 --seq-len 1024 " + more).ok().out
        assert ("--fp8 --batch" in offered) == can, (more, offered)
    given = lean + "--device-memory 78.9 --batch 128 --recompute none "
    train(given).fails("); add --fit and leave out --batch --recompute\n")
    train(given + "--fit").fails("no batch of 128 sequences of 1024 tokens fits in 78.90 GiB; leave out --batch --recompute\n")


# Every line that it prints can be run, those with other options are faster by 1%, and where memory abounds nothing is offloaded.
def test_fit_prints_what_runs(folder):
    base = "--model llama-8b --max-position-embeddings 65536 --device cuda --plan "
    for more, expected in (("--device-memory 1000 --seq-len 4096 ", ""), ("--device-memory 90 --seq-len 4096 ", "--moment-dtype bf16 "),
                           ("--device-memory 28 --seq-len 32768 --moment-dtype bf16 --no-master-weights ", "--mlp-chunk 4096 ")):
        output = train(base + more + "--fit offload").ok(expected)
        lines = re.findall(r"^ +([\d,]+) tokens/s +\S+ \S+  (.+)$", output.out, re.M)
        rates = [int(rate.replace(",", "")) for rate, _ in lines]
        assert len(lines) > 3 and all(rate > 1.009 * rates[0] for rate, (_, line) in zip(rates, lines) if not line.startswith("--batch")), output
        assert ("--offload" in lines[0][1]) == bool(expected), output
        own = [tuple(re.findall(r"--(?:batch|offload) \S+", line)) for _, line in lines if line.startswith("--batch")]
        assert len(own) == 4 == len(set(own)), own  # not one with other chunks
        for _, options in lines:
            train(base + more + options).ok()


# It trains what it chose, also where a run resumes on a smaller device.
def test_fit_trains(folder):
    job = TINY.replace("--batch 3 ", "") + "--seq-len 64 --steps 2 --sample-every 0 --total-batch 1024 "
    first = train(job + f"--fit --device-memory 0.02 --steps 1 --save {folder}/run --log {folder}/log").ok()
    options, peak = chosen(first)
    start, summary = read_log(folder / "log")[0], read_log(folder / "log")[-1]
    assert f"--batch {start['batch']} " in options + " " and abs(summary["peak_bytes"] - peak) < 2**18, (options, summary)
    again, less = chosen(train(f"--resume {folder}/run --steps 2 --fit --device-memory {0.9 * peak / 2**30}").ok())
    assert again != options and less < peak, (again, options)
    train(f"--resume {folder}/run --steps 2 --device-memory {0.5 * peak / 2**30}").fails("); add --fit\n")  # the batch is the checkpoint's
    train(job + "--fit --batch 16 --recompute layer").ok("--batch 16 --recompute layer")
    # Micro-batches are tried up to a bound, even where a step has 10^12 tokens and few divisors.
    deadline = Deadline(20)
    train("--model gpt2-tiny --seq-len 1 --total-batch 1099511627689 --device cuda --device-memory 80 --plan --fit").ok("--batch 1 ")
    assert not deadline.passed()
    many = train("--model gpt2-tiny --num-layers 1 --seq-len 256 --total-batch 645120 --device cuda --device-memory 80 --plan --fit offload")
    assert int(re.search("best of ([0-9]+) settings", many.ok().out)[1]) > 512, many  # all 39 divisors up to 256
    # A CPU has one memory, which --offload does not enlarge.
    train("--device cpu --num-layers 4000 --model llama-8b --batch 1 --seq-len 16 --offload weights,gradients,optimizer").fails(
        "lce: --offload needs ", "leave it out: it is of no use on a CPU")


# An OpenBLAS that does not know the CPU, here by name alone: its better kernels serve, unless they compute wrongly.
def test_openblas_kernels(folder):
    flags = pathlib.Path("/proc/cpuinfo").read_text()
    if "asan" in TRAIN.parts or "openblas" not in run("ldd", TRAIN).out or not re.search(r"\bavx2\b", flags) or not shutil.which("gcc"):
        raise tap.Skip("it needs OpenBLAS, AVX2, gcc and a build without sanitizers")
    source = ('#include <stdlib.h>\nchar *openblas_get_corename(void) { char *core = getenv("OPENBLAS_CORETYPE"); '
              'return core ? core : "Prescott"; }\n')
    for name, more in (("old", ""), ("wrong", "void cblas_sgemm(void) {}\n")):
        (folder / f"{name}.c").write_text(source + more)
        assert run("gcc", "-shared", "-fPIC", folder / f"{name}.c", "-o", folder / f"{name}.so").status == 0
    job = TINY + "--steps 0 --val-fraction 0 "
    chosen = train(job, LD_PRELOAD=f"{folder}/old.so").ok()
    assert re.search(r"OpenBLAS for (SkylakeX|Haswell|Zen)\n", chosen.out) and not chosen.err, chosen
    wrong = train(job, LD_PRELOAD=f"{folder}/wrong.so").ok("OpenBLAS for Prescott\n")
    assert wrong.err.startswith("lce: this OpenBLAS takes the CPU for a Prescott, and its kernels for a "), wrong
    train(job, LD_PRELOAD=f"{folder}/old.so", OPENBLAS_CORETYPE="Nehalem").ok("OpenBLAS for Nehalem\n")
    train(job, LCE_PROBE_BLAS="1").ok("OpenBLAS for ")  # the child that tries them is known by its name


# Why there is no GPU interests only who asked for one.
def test_no_gpu(folder):
    assert "no GPU is used: " in train("--plan --model gpt2-tiny --device auto").ok().out
    assert "no GPU is used: " not in train("--plan --model gpt2-tiny").ok().out


def test_device_memory(folder):
    # A run as on a smaller device. One that does not fit names --fit, which then helps.
    small = TINY + "--device-memory 0.02 --steps 1 --sample-every 0 --seq-len 64 "
    train(small + "--batch 1").ok()
    train(small + "--batch 4096").refused("this run needs ", "the device has 20.5 MiB to give", "); add --fit and leave out --batch\n")
    train(small + "--fit").ok()
    train(TINY + "--device-memory 0.0001").refused("has 104.9 KiB to give (weights ")
    # More than any machine has: said before anything is allocated.
    train(TINY + "--seq-len 2000 --batch 1000000 --lce-chunk 1000000 --recompute none").refused("this run needs ", "activations ")


# Both modes beside each other, and the same memory whichever of them the run itself had.
def test_compare_modes(folder):
    tables = []
    for mode in ("--fused-lce", "--materialized-logits"):
        output = train(TINY + f"--vocab 3000 --batch 16 --steps 2 --sample-every 0 --compare-modes {mode}").ok("(VmHWM)")
        assert not output.err
        _, summary, table = output.out.split("memory at the step's peak")
        assert "fused, measured" in table and "materialized, measured" in table
        head = head_and_all(table)
        assert abs(float(re.search(r"LM head \+ loss hold ([\d.]+) times less", table)[1]) - head[1] / head[0]) < 0.2
        tables.append(table[:table.index("time of one forward and")])
    assert tables[0] == tables[1]
    # One chunk holds more than all of the few logits.
    train(TINY + "--steps 0 --compare-modes").ok("LM head + loss hold 1.1 times more when fused\n")


# --- short runs ---------------------------------------------------------------------------------------------


def test_run(folder):
    job = TINY + "--total-batch 96 --lr 0.01 --warmup 4 --schedule linear --min-lr 0 "
    rates = [0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01 * 2 / 3, 0.01 / 3]
    for mode, flag in (("fused", "--lce-chunk 20"), ("materialized", "--materialized-logits")):
        output = train(job + f"{flag} --steps 7 --eval-every 3 --eval-batches 2 --sample-every 5 --prompt 'if (' "
                       f"--sample-tokens 9 --log {folder}/log").ok(
            "device   CPU, ", "model    llama-tiny: ", "step     96 tokens: 2 micro-batches of 3 x 16", "step 1/7  loss 5.",
            "step 7/7  loss ", "step 3  validation loss ", "), 2 of ", "step 5  sample: if (", "is what token frequencies alone give",
            "all together (ledger)", "(VmHWM)")
        assert not output.err and "\r" not in output.out and "\033" not in output.out, output  # no terminal: plain lines
        log = read_log(folder / "log")
        start, last, losses = log[0], log[-1], column(log, "loss")
        expected = dict(event="start", loss_mode=mode, vocab_size=300, steps=7, model="llama-tiny", batch=3, total_batch=96)
        assert expected.items() <= start.items(), start
        assert [line["event"] for line in log].count("sample") == 1 and column(log, "text")[0].startswith("if (")
        assert column(log, "step", "step") == [1, 2, 3, 4, 5, 6, 7] and column(log, "step", "validation") == [3, 6, 7]
        assert column(log, "step", "sample") == [5] and column(log, "tokens") == 7 * [96]
        assert all(map(math.isclose, column(log, "learning_rate"), rates)), column(log, "learning_rate")
        for field in ("grad_norm", "tokens_per_second"):
            assert len(column(log, field)) == 7 and min(column(log, field)) > 0, field
        # A byte is a token, and files end in one more.
        for loss, bits in zip(column(log, "val_loss"), column(log, "bits_per_byte")):
            assert loss * (1 - 1e-12) < bits * math.log(2) < 1.02 * loss
        expected = dict(event="summary", loss_mode=mode, first_loss=losses[0], last_loss=losses[-1],
                        val_loss=column(log, "val_loss")[-1], steps=7, stopped=False)
        assert expected.items() <= last.items(), last
        assert abs(losses[0] - math.log(300)) < 0.2 and last["tokens_per_second"] > 0 and last["unigram_entropy"] > 2
        assert "dropped_tiles" not in last and last["device_peak_bytes"] > last["peak_bytes"]
        assert_planned(job + flag, last["peak_bytes"])
        planned = row(train(job + flag + " --plan").ok().out, "LM head + loss alone, at its peak")[mode == "materialized"]
        assert abs(planned - last["head_peak_bytes"]) <= 52, (planned, last)  # printed as 22.8 KiB


# Each step's shares of tiles and of mass dropped, and their means over the steps in the summary.
def test_sampling(folder):
    train(TINY + f"--steps 5 --lce-sample 100 --log {folder}/log").ok("  dropped ", "% of mass  ", "\nsampling dropped ",
                                                                     "% of mass, mean of all steps\n")
    log = read_log(folder / "log")
    tiles, mass = column(log, "dropped_tiles"), column(log, "dropped_mass")
    assert len(tiles) == len(mass) == 5 and sum(tiles) > 0 and sum(mass) > 0
    assert all(0 <= t <= 1 and 0 <= m < 1 and (t > 0) == (m > 0) for t, m in zip(tiles, mass)), (tiles, mass)
    assert abs(log[-1]["dropped_tiles"] - sum(tiles) / 5) < 1e-12 and abs(log[-1]["dropped_mass"] - sum(mass) / 5) < 1e-12


# No step at all: the model as it is, validated.
def test_no_steps(folder):
    assert "nan" not in train(TINY + f"--steps 0 --log {folder}/log").ok().out
    log = read_log(folder / "log")
    assert not column(log, "loss") and abs(log[-1]["val_loss"] - math.log(300)) < 0.2
    assert log[-1]["steps"] == 0 and log[-1]["first_loss"] is None


def test_terminal(folder):
    train(TINY + "--steps 3 --sample-every 0 --eval-every 0", terminal=True).ok(
        "\r\033[Kstep 1/3", "\r\033[Kstep 3/3", "left\r\n")  # the line is left standing


# Token shards, with validation shards of their own; nothing held back; a sample as token ids.
def test_shards(folder):
    tokens = [i * i % 300 for i in range(600)]
    for name, count in (("train_1", 600), ("train_2", 500), ("val", 100)):
        write_shard(folder / f"{name}.bin", tokens[:count])
    train(TINY + f"--steps 2 --sample-every 2 --sample-tokens 5 --data '{folder}/train_*.bin' --val-data {folder}/val.bin "
          f"--log {folder}/log").ok("llm.c shards, uint16, 2 files, 1,100 tokens")
    log = read_log(folder / "log")
    assert [len(sample) for sample in column(log, "tokens", "sample")] == [1 + 5] and log[-1]["val_loss"] > 0
    output = train(TINY + f"--steps 1 --sample-every 0 --data {folder}/train_1.bin --val-fraction 0 --log {folder}/log").ok()
    assert "validation loss" not in output.out and read_log(folder / "log")[-1]["val_loss"] is None
    # --dump writes what the log says of the first step: the mean loss, the norm of all gradients.
    train(TINY + f"--steps 2 --sample-every 0 --data {folder}/train_1.bin --val-fraction 0 --data-order sequential "
          f"--dump {folder}/compared --log {folder}/log").ok()
    first, dumped = read_log(folder / "log")[1], tensors(folder / "compared/first-step/first_step.safetensors")
    norm = math.sqrt(sum(x * x for name, tensor in dumped.items() if name.startswith("grad.") for x in floats(tensor)))
    assert dumped["tokens"].shape == [3, 16]
    assert abs(sum(floats(dumped["loss"])) / 48 / first["loss"] - 1) < 1e-5 and abs(norm / first["grad_norm"] - 1) < 1e-5


def made_by_prepare_data(folder, **counts):
    """A folder as tools/prepare_data.py makes it."""
    folder.mkdir()
    for name, count in counts.items():
        write_shard(folder / f"{name}_000000.bin", [i * i % 61 for i in range(count)])
    write_manifest(folder, **counts)
    shutil.copy(ROOT / "tests/golden/tokenizers/gpt2/tokenizer.json", folder)
    return folder


# From a folder with a manifest --data takes the training shards, and validates on its own, unless more is said.
def test_a_folder_of_prepare_data(folder):
    line, made, bare = TINY + "--steps 1 --sample-every 0 --data ", made_by_prepare_data(folder / "made", train=600, val=100), folder / "bare"
    shutil.copytree(made, bare)
    (bare / "manifest.json").write_text('{"format": "another"}')
    (folder / "both").mkdir()
    shutil.copytree(made, folder / "both/again")
    other = write_shard(folder / "other.bin", [1, 2] * 50)
    for options, says, own in ((f"{made}", "600 tokens; 35 training and 7 validation", made), (f"{made} --val-fraction 0.2", "28 training and 7", ""),
                               (f"{made} --val-data {other}", "35 training and 7", other), (f"{folder}/both", "600 tokens; 33 training", ""),
                               (f"{bare}", "2 files, 700 tokens; 39 training and 2 validation", ""), (f"{other} --val-data {made}", "7 validation", made),
                               (f"{other} --val-data {bare}", "44 validation", bare)):
        output = train(line + options).ok(says)
        assert (f"validation data: {own}\n" in output.out) == bool(own) and ("validation data: " in output.out) == bool(own), output
    train(f"{line} {made} --save {folder}/saved").ok()
    assert f"validation data: {made}\n" in (output := train(f"--device cpu --resume {folder}/saved --steps 2").ok()).out
    assert output.err.count("lce:") == 1, output  # of --steps
    (folder / "link.bin").symlink_to(made / "train_000000.bin")
    for options in (f"{made} --val-data {folder}/link.bin", f"'{made}/*.bin' --val-data {made}", f"{bare} --val-data {bare}/val_000000.bin"):
        train(line + options).refused(".bin is both in --data and in --val-data; leave it out of one")
    train(TINY + "--val-data README.md").refused("README.md is both in")
    # Without a manifest nothing tells the splits apart, and the sentence names those that are asked for.
    lost = shutil.copytree(bare, folder / "lost")
    (lost / "manifest.json").unlink()
    for split, options in (("train", lost), ("val", f"{other} --val-data {lost}")):
        (lost / f"{split}_000000.ends").touch()
        train(line + str(options)).fails("/lost/manifest.json does not exist, ", f"/lost/{split}_*.bin'\n")


# A new model has the vocabulary of the shards' tokenizer, unless it is given.
def test_the_vocabulary_of_the_data(folder):
    line, made = "--device cpu --batch 1 --seq-len 16 --steps 1 --sample-every 0 --data ", made_by_prepare_data(folder / "made", train=600, val=100)
    known = json.loads((made / "tokenizer.json").read_text())
    size = 1 + max([*known["model"]["vocab"].values(), *(token["id"] for token in known["added_tokens"])])
    manifest = json.loads((made / "manifest.json").read_text())
    for options in (made, f"'{made}/train_*.bin'", made / "train_000000.bin"):
        output = train(f"{line} {options}").ok(f", V {size:,}, ")
        assert "--vocab" not in output.err, output
    (made / "manifest.json").write_text(json.dumps(manifest | {"tokenizer": {"vocab_size": 70}}))
    for _ in range(2):  # begins, and resumes with the same options
        train(f"{line} {made} --save {folder}/saved --resume auto --model llama-tiny").ok(", V 70, ")
    assert "--vocab" not in train(f"{line} {made} --vocab 140").ok(", V 140, ").err
    assert "--vocab 142: the data's tokenizer has 70 tokens, and no text has the others; leave it out" in train(f"{line} {made} --vocab 142").ok().err
    assert "--vocab" not in train(f"{line} {made} --init {folder}/saved").ok(", V 70, ").err
    train(f"{line} {made} --vocab 60").refused("train a new model with --vocab 61 or more")


# Shards of another tokenizer than the model's are refused, however they are named, unless that is what is wanted.
def test_shards_of_another_tokenizer(folder):
    made, model = made_by_prepare_data(folder / "made", train=600, val=100), shutil.copytree(ROOT / "tests/golden/llama", folder / "model")
    line = f"--device cpu --init {model} --steps 1 --batch 1 --seq-len 16 --sample-every 0 "
    train(line + f"--data {made}").ok()  # the model has none
    shutil.copy(made / "tokenizer.json", model)
    assert "differ" not in train(line + f"--data {made}").ok().err
    (made / "tokenizer.json").write_text('{"model": 2}')
    for options in (f"--data {made}", f"--data '{made}/train_*.bin'", f"--val-data {made}/val_000000.bin --data {model}/tokens.bin"):
        train(line + options).refused("was not made with the model's tokenizer (", "or give --other-tokenizer")
    train(line + f"--data {made} --other-tokenizer --save {folder}/saved").ok()
    assert (output := train(f"--device cpu --resume {folder}/saved --steps 2").ok()).err.count("lce:") == 2, output
    os.remove(made / "tokenizer.json")
    assert "tokenizer.json does not exist: nothing says" in train(line + f"--data {made}").ok().err


# Checkpoints get what ends a text and lays out a chat from prepared data; what the model lacked is said.
def test_what_prepared_data_bring(folder):
    model, made = shutil.copytree(ROOT / "tests/golden/llama", folder / "model"), folder / "made"
    (model / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key != "eos_token_id"}))
    made.mkdir()
    write_shard(made / "train_000000.bin", 400 * [4, 2])
    write_manifest(made, train=800)
    for name, text in ("tokenizer.json", "{}"), ("chat_template.jinja", "x"), ("generation_config.json", '{"eos_token_id": 2}'):
        (made / name).write_text(text)
    err = train(f"--device cpu --init {model} --data {made} --batch 1 --seq-len 8 --steps 0 --save {folder}/run").ok().err
    assert f"the eos_token_id in {model} is absent: checkpoints get that of {made}, 2\n" in err, err
    assert f"{model} has no chat template: checkpoints get that of {made}\n" in err, err


# A model's context is extended: by another base of its rotary frequencies and more positions, which its config then has.
def test_a_longer_context(folder):
    line = f"--device cpu --data {write_shard(folder / 'data.bin', 400 * [4, 2])} --batch 1 --steps 1 --sample-every 0 "
    longer = "--rope-theta 7 --max-position-embeddings 128 "
    train(line + "--init tests/golden/llama --seq-len 128").refused("lower it, or raise --max-position-embeddings")
    train(line + "--init tests/golden/gpt2 --max-position-embeddings 25").refused("is 25, and ", "config.json says 24; leave it out")  # learned
    model = shutil.copytree(ROOT / "tests/golden/llama", folder / "model")
    for name in ("kept", "rope_parameters"):  # a file need not say what is the default
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key != name}))
        train(line + f"--init {model} {longer} --seq-len 70 --save {folder}/{name} --log {folder}/log").ok(
            "with --rope-theta 7 in place of 10000, --max-position-embeddings 128 in place of 64\n")
        config = json.loads((folder / name / "config.json").read_text())
        assert config.get("rope_parameters", config)["rope_theta"] == 7 and config["max_position_embeddings"] == 128
    assert read_log(folder / "log")[0]["rope_theta"] == 7
    assert " in place of " not in train(line + f"--init {folder}/kept {longer} --seq-len 70 --log {folder}/again").ok().out
    train(line + f"--init {folder}/kept --seq-len 70 --rope-theta 10000 --log {folder}/other").ok()
    assert column(read_log(folder / "again"), "loss") != column(read_log(folder / "other"), "loss")


# One line for each event: number, step, time, name, total, and the categories, which add up to the total.
def test_timeline(folder):
    train(TINY + f"--steps 5 --sample-every 0 --timeline {folder}/timeline.csv").ok()
    header, *lines = (folder / "timeline.csv").read_text().splitlines()
    assert header.startswith('event,step,at,block,total,"weights",'), header
    events = [line.split(",") for line in lines]
    steps, at = [event[1] for event in events], [float(event[2]) for event in events]
    assert [event[0] for event in events] == [str(i) for i in range(len(events))]
    assert steps.count("1") == steps.count("2") == steps.count("3") > 20 and set(steps) == {"1", "2", "3"}
    assert at[0] == 0 and at == sorted(at) and at[-1] > 0
    totals = [int(line.rsplit('"', 1)[1].split(",")[1]) for line in lines]
    categories = [list(map(int, line.rsplit('"', 1)[1].split(",")[2:])) for line in lines]
    assert all(len(c) == header.count(',"') and sum(c) == total for c, total in zip(categories, totals))
    assert_planned(TINY, max(totals))


# --- ends ---------------------------------------------------------------------------------------------------


# Ctrl-C (or a polite kill) while a long run is under way: it ends after the running step, with the summary.
def test_signals(folder):
    for number, times, saving, says in ((signal.SIGINT, 1, "", "\nnothing is saved: no --save\n"),
                                        (signal.SIGTERM, 1, f" --save {folder}/run", f"\nto go on: {TRAIN} --resume {folder}/run\n"),
                                        (signal.SIGHUP, 2, "", ""), (signal.SIGXCPU, 2, "", "")):  # these are sent several times
        p = start(ENDLESS + f"--log {folder}/log{saving}")
        p.wait_for("step 1/1000000")
        so_far = (folder / "log").read_text()  # a log is complete at any time
        assert '{"event":"step","step":1,' in so_far and so_far.endswith("\n")
        for _ in range(times):
            os.kill(p.pid, number)
        output = p.finish()
        assert output.status == -number and "all together (ledger)" in output.out and says in output.out, output
        last = read_log(folder / "log")[-1]
        said = int(re.search("stopped after step (.*) on a signal", output.out)[1])
        assert not output.err and last["event"] == "summary" and last["stopped"] and last["val_loss"] > 0
        assert last["steps"] == said and 1 <= said < 1000000
    # It does not wait for the end of a long sample or evaluation, nor does what was trained get lost.
    p = start(TINY + f"--steps 9 --sample-every 1 --sample-tokens 1000000 --save {folder}/sampled")
    p.wait_for("step 1/9")
    time.sleep(0.5)
    os.kill(p.pid, signal.SIGTERM)
    output = p.finish(20)
    assert output.status == -signal.SIGTERM and "stopped after step 1 on a signal" in output.out and "saved in " in output.out, output
    # A shell's loop of runs ends with one Ctrl-C.
    loop = Process("setsid", "env", "--default-signal=INT", "bash", "-c", f"for i in 1 2 3; do echo run $i; {TRAIN} {ENDLESS}; done")
    loop.wait_for("step 1/1000000")
    os.killpg(loop.pid, signal.SIGINT)
    assert loop.finish(20).out.count("run ") == 1
    # Nor for that of the last validation; a second signal ends the one after the save.
    p = start(TINY + f"--steps 1 --sample-every 0 --seq-len 1 --batch 1 --val-fraction 0.9 --eval-batches 0 --save {folder}/last")
    p.wait_for("step 1/1")
    for said in ("saved in ", ""):
        os.kill(p.pid, signal.SIGTERM)
        p.wait_for(said)
    assert p.finish(20).status == -signal.SIGTERM
    # A signal that nohup ignores stays ignored.
    run("sh", "-c", f"trap '' HUP; {TRAIN} {ENDLESS} >{folder}/out & p=$!; until grep 'step 1/' {folder}/out; do sleep 0.02; done; "
        "kill -HUP $p; sleep 0.5; kill -0 $p || exit 1; kill $p; wait $p; test $? = 143").ok()


# A reader that goes away, or a full disk, ends the run like a signal: it saves, and says why.
def test_dead_output(folder):
    for name, output in (("pipe", "| head -n 1 >/dev/null"), ("full", ">/dev/full")):
        done = run("bash", "-c", f"set -o pipefail; {TRAIN} {ENDLESS} --save {folder}/{name} {output}")
        assert done.status == 1, done
        done.fails("cannot write to standard output" + (": No space left" if name == "full" else ""))
        assert (folder / name / "model.safetensors").exists()
    for line in ("--help", "--plan", "--steps 0"):
        run("sh", "-c", f"{TRAIN} {TINY} {line} >/dev/full").fails("cannot write to standard output: No space left")


# So does a log that cannot grow, and the run that resumes continues after its last whole line.
def test_full_log(folder):
    output = run("bash", "-c", f"ulimit -f 100; exec {TRAIN} {ENDLESS} --warmup 0 --save {folder}/full --log {folder}/log")
    assert output.status == 1 and output.err.endswith("/log: File too large\n") and output.err.count("\n") == 1, output
    assert "saved in " in output.out and re.search(r"stopped after step \d+\nstep ", output.out), output
    done = re.search(r"stopped after step (\d+)", output.out)[1]
    train(f"--device cpu --resume {folder}/full --steps {done} --log {folder}/log").ok()
    assert len(read_log(folder / "log")) > 100


main(globals())
