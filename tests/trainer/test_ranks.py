#!/usr/bin/env python3
"""Training with several ranks: a job does what one rank does with the same tokens, and ends as one."""
import fcntl
import math
import os
import pathlib
import random
import re
import shutil
import signal
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import tap  # noqa: E402
from program import (DEVICE, GPUS, LAUNCH, SIZES, TEXT, TRAIN, Deadline, Process, assert_planned, column,  # noqa: E402
                     difference, keep, main, need_ranks, once, pace, read_log, run, start, together, train, wait_until, write_mask, write_shard)

# 24 micro-batches a step: 24, 12, 8, 6 or 3 for 1, 2, 3, 4 or 8 ranks.
STEPS = 6
JOB = (DEVICE + "--dtype fp32 --num-layers 2 --seq-len 16 --batch 2 --total-batch 768 --steps 6 --lr 0.01 --warmup 2 "
       f"--epsilon 1e-5 --eval-every 3 --eval-batches 5 --sample-every 4 --sample-tokens 3 --data {TEXT} ")
LLAMA = JOB + SIZES + "--untie-word-embeddings "
TIED = JOB + SIZES + "--tie-word-embeddings "
GPT2 = JOB + "--model gpt2-tiny --vocab 300 --hidden-size 24 --num-attention-heads 2 "
# GPUs draw tiles in bf16 alone, and in chunks of a tile's 128 rows, which have four times the mass. A large
# epsilon keeps bf16's rounding as small in the weights as it is in the gradients.
SAMPLED, MASS = LLAMA, 50
if GPUS:
    SAMPLED, MASS = LLAMA + "--dtype bf16 --save-dtype fp32 --batch 8 --total-batch 1536 --epsilon 0.01 ", 4 * MASS
QWEN = (JOB + "--model qwen3-0.6b --vocab 300 --hidden-size 16 --intermediate-size 24 --num-attention-heads 4 "
        "--num-key-value-heads 2 --head-dim 6 ")
OLMO = QWEN.replace("qwen3-0.6b", "olmo2-1b")
MUON = "--optimizer muon "
PACKED = " --pack documents --end-of-text 10 "
# GPUs take seconds to start: two of them, and all.
RANKS = sorted({2, GPUS}) if GPUS else [2, 3, 4]
ALL = RANKS[-1]
# Bounds values that differ by rounding alone. Adam divides small differences by small moments.
TOLERANCE = 2e-4 if GPUS else 2e-5
WEIGHTS = 30 * TOLERANCE

class Job:
    """A run that has ended: its checkpoints and its log."""

    def __init__(self, ranks, options, output, folder):
        self.ranks, self.options, self.output, self.folder, self.log = ranks, options, output, folder, read_log(f"{folder}.jsonl")

    def checkpoint(self, step):
        return self.folder / f"step-{step:06}"

    def apart(self, other, step=STEPS, stem="model"):
        return difference(self.checkpoint(step) / f"{stem}.safetensors", other.checkpoint(step) / f"{stem}.safetensors")

    def close(self, other, step=STEPS):
        apart = self.apart(other, step)
        assert apart <= WEIGHTS, f"weights differ by {apart}: {self.output} and {other.output}"

    def same_bits(self, other, step=STEPS):
        for stem in ("model", "training_state"):
            assert self.apart(other, step, stem) == 0, f"{stem} differs: {self.output} and {other.output}"

    def same_column(self, other, field, tolerance, event=None):
        mine, theirs = column(self.log, field, event), column(other.log, field, event)
        assert mine and len(mine) == len(theirs), (field, mine, theirs)
        same = all(abs(x - y) <= tolerance * abs(x) for x, y in zip(mine, theirs))
        assert same, f"{field}: {mine} and {theirs}: {self.output} and {other.output}"

    def same_training(self, other):
        """Requires what a run of one rank and one of several share, and that the plan knew what the several held."""
        self.close(other)
        for field, tolerance in (("loss", TOLERANCE), ("grad_norm", 10 * TOLERANCE), ("val_loss", TOLERANCE)):
            self.same_column(other, field, tolerance)
        self.same_column(other, "tokens", 0, "step")
        assert_planned(f"{other.options} --save x --ranks {other.ranks}", other.log[-1]["peak_bytes"])


# A job of `ranks` ranks, 0: without a launcher. Each one runs once; turn 2 is a repetition.
@once
def job(ranks, options, turn=1):
    need_ranks()
    folder = pathlib.Path(tempfile.mkdtemp(dir=keep.name), "job")
    output = train(f"{options} --save {folder} --log {folder}.jsonl", ranks=ranks).ok()
    assert "\033" not in output.out, output  # standard output is no terminal
    return Job(ranks, options, output, folder)


def resume(ranks, checkpoint, options=""):
    return job(ranks, f"{DEVICE} --resume {checkpoint} {options}")


# --- ends: these wait long, and so come first ---------------------------------------------------------------


# Gives --timeout so many seconds, or more if the ranks share their cores with much else.
def patient(seconds):
    return math.ceil(seconds * pace())


# An endless run, once it has saved something, and its --timeout: GPUs take long to start many runs at once.
def endless(folder):
    timeout, often = patient(12 if GPUS else 3), "--steps 100000000 --eval-every 0 --sample-every 0 --save-every 20 --keep 2"
    p = start(LLAMA + f"{often} --save {folder} --timeout {timeout}", ranks=2)
    p.wait_for("saved in")
    return p, timeout


# No process is left: the launcher may end just before the last of them.
def wait_until_gone(pid):
    wait_until(lambda: not os.path.lexists(f"/proc/{pid}") or b"State:\tZ" in pathlib.Path(f"/proc/{pid}/status").read_bytes(),
               5, f"process {pid} is left behind")


# All end soon, one rank says why, the last checkpoint is whole. The launcher names a rank that is killed.
def test_a_rank_that_is_gone_ends_the_job(folder):
    need_ranks()

    def end(rank, number, seconds, sentences, *says):
        p, timeout = endless(folder / f"{rank}-{number}")
        other, deadline = p.of_rank(1 - rank), Deadline(seconds + timeout * (number == signal.SIGSTOP))
        os.kill(p.of_rank(rank), number)
        output = p.finish().fails(*says)
        assert output.err.count("lce:") in sentences and not deadline.passed(), output
        wait_until_gone(other)
        train(f"{DEVICE} --resume {folder}/{rank}-{number} --plan").ok()
    killed, waits = "signal 9 (Killed)", "another rank has not reached it, or has ended"
    together(end, [(1, signal.SIGKILL, 10, (0, 1), "rank 1 ", killed), (0, signal.SIGKILL, 10, (0, 1), "rank 0 ", killed),
                   (1, signal.SIGSTOP, 22, (1,), "lce: no progress for ", waits),
                   (0, signal.SIGSTOP, 22, (1,), "lce: rank 1: no progress for ", waits)])


# A rank that makes no progress, here since nobody reads its output, reports that before those that wait.
def test_a_hanging_rank_is_reported(folder):
    need_ranks()
    os.mkfifo(folder / "pipe")
    pipe = os.open(folder / "pipe", os.O_RDWR)
    fcntl.fcntl(pipe, 1031, 4096)  # F_SETPIPE_SZ: soon full
    line = f"{TRAIN} {LLAMA} --steps 100000 --sample-every 1 --sample-tokens 400 --timeout {patient(2)}"
    shell(2, f'test $RANK = 0 || exec {line}; exec {line} >{folder}/pipe').fails(
        "lce: no progress for ", " s, between collectives: this rank holds up the others")
    os.close(pipe)


# A shell's command, in which $RANK is the rank.
def shell(ranks, command):
    return run("sh", "-c", f"RANK=${{RANK-$OMPI_COMM_WORLD_RANK}}; {command}", ranks=ranks)


# Rank 1 has less memory than rank 0, or its host has: --fit chooses what fits both.
def test_fit_on_unequal_ranks(folder):
    need_ranks()
    if not GPUS:
        line = (f"{TRAIN} --device cpu --num-layers 2 {SIZES} --vocab 128256 --seq-len 256 --data Makefile --steps 1 --sample-every 0 "
                "--eval-batches 1 --lce-chunk 100000 --fit")
        shell(2, f"export OMP_NUM_THREADS=1; test $RANK = 0 || ulimit -v 900000; exec {line}").ok("\nstep 1/1 ")
        if run("unshare", "-m", "true").status == 0:
            line += " --vocab 1000 --offload optimizer"
            known = pathlib.Path("/proc/meminfo").read_text()
            (folder / "less").write_text(re.sub(r"(MemAvailable:\s+)\d+", r"\g<1>150000", known))
            inside = f"unshare -m sh -c 'mount --bind {folder}/less /proc/meminfo && exec {line}'"
            fits = shell(2, f"export OMP_NUM_THREADS=1; test $RANK = 0 || exec {inside}; exec {line}")
            fits.ok(" micro-batches of 32 x 256,", "\nstep 1/1 ")


# Every rank with a value of its own for one setting, or a command line that one rank alone cannot read.
def test_ranks_must_have_equal_options(folder):
    need_ranks()
    begins = "lce: rank 1: all ranks must see the same options, checkpoints and data, and this one "

    def differ(options, *says):
        output = shell(2, f"exec {TRAIN} {JOB if '--init' in options else LLAMA} {options}").fails(*says)
        assert len(re.findall("^lce: (?!--logit-softcap)", output.err, re.M)) == 1, output
    for name, change in (("theta", "--rope-theta 20000"), ("plain", ""), ("seed", "--seed 7")):  # models of one size
        train(f"{LLAMA} {change} --steps 0 --warmup 0 --save {folder}/{name}/model").ok()
    (folder / "seed/model/trainer_state.json").unlink()  # which has checksums
    models = "--init %s/$(test $RANK = 0 && echo %s || echo %s)/model"
    cases = [(models % (folder, "theta", "plain"), begins, 'has "rope_theta":500000 where rank 0 has "rope_theta":20000'),
             (models % (folder, "plain", "seed"), begins, 'has "weights":'),
             (f"--init {folder}/plain/model --rope-theta 1$RANK", begins, 'has "rope_theta":11 where rank 0 has "rope_theta":10'),
             ("--logit-softcap 1$RANK", begins, 'has "final_logit_softcapping":11 where rank 0 has "final_logit_softcapping":10'),
             ("--lr 0.0$((1 + RANK))", begins, 'has "lr":"0.02" where rank 0 has "lr":"0.01"'),
             ("--vocab $((300 + RANK))", begins, 'has "vocab_size":301 where rank 0 has "vocab_size":300'),
             ("--data $(test $RANK = 0 && echo Makefile || echo LICENSE)", begins, 'has "data":'),
             (f"$(test $RANK = 0 || echo --save {folder}/one)", begins, 'has "save":1 where rank 0 has "save":0'),
             (f"--save {folder}/two --save-every 1$RANK", begins, 'has "save-every":"11" where rank 0 has "save-every":"10"'),
             ("--eval-batches 1$RANK", begins, 'has "eval-batches":"11" where'),
             ("--sample-tokens 1$RANK", begins, 'has "sample-tokens":"11" where'),
             ("$(test $RANK = 0 && echo --compare-modes)", begins, 'has nothing where rank 0 has "compare-modes":"set"'),
             ("$(test $RANK = 0 || echo --nonsense)", "lce: rank 1: --nonsense is not an option")]
    for first in range(0, len(cases), 4):  # Open MPI's launchers meet in /tmp
        together(differ, cases[first:first + 4])
    if not GPUS:  # a launcher without MPI ends such a job by its --timeout
        differ("$(test $RANK = 0 && echo --plan)", "lce: rank 1: rank 0 has --plan and this rank does not; give all ranks the same options")


# Any rank may get the signal; all stop after the same step and save, and continue from there.
def test_a_signal_stops_all_ranks(folder):
    need_ranks()
    for rank in range(2):
        p, _ = endless(folder / str(rank))
        os.kill(p.of_rank(rank), signal.SIGINT)
        output = p.finish().ok()
        stopped = int(re.search(r"stopped after step (\d+)", output.out)[1])
        assert "lce:" not in output.err and (folder / f"{rank}/step-{stopped:06}").exists(), output
        train(f"{DEVICE} --resume auto --save {folder}/{rank} --steps {stopped + 2}", ranks=2).ok()
        assert (folder / f"{rank}/step-{stopped + 2:06}").exists()


# --- data parallel ------------------------------------------------------------------------------------------


def test_any_number_of_ranks_trains_the_same(folder):
    one = job(0, LLAMA)
    one.same_bits(job(1, LLAMA))
    for ranks in RANKS:
        one.same_training(job(ranks, LLAMA))
    for ranks, options in ((ALL, TIED), (2, GPT2 + PACKED)):
        job(0, options).same_training(job(ranks, options))
    options = GPT2 + "--recompute layer --metrics --z-loss 0.001"
    one, several = job(0, options), job(ALL, options)
    one.same_training(several)
    for field in ("z_loss", "entropy", "max_logit"):
        one.same_column(several, field, 10 * TOLERANCE)
    if not GPUS:
        one.same_column(several, "accuracy", 0)


def test_the_same_number_of_ranks_repeats_bitwise(folder):
    ranks = RANKS[1] if not GPUS else 2
    job(ranks, LLAMA).same_bits(job(ranks, LLAMA, 2))
    job(ranks, LLAMA).same_column(job(ranks, LLAMA, 2), "loss", 0)
    zero2 = job(2, LLAMA + "--zero 2")
    zero2.same_bits(job(2, zero2.options + " --verify-every 2"))  # which computes between the steps


# Bits that arrive wrongly at one rank are found there, also where a rank has only its shard of the sums.
def test_a_rank_that_computes_wrongly_is_named(folder):
    need_ranks()
    if GPUS or "asan" in TRAIN.parts or not shutil.which("mpicc"):
        raise tap.Skip("it needs MPI's compiler and a build without sanitizers")
    names = "x n at t out m to u".split()
    kinds = "const void *", "const int *", "const int *", "MPI_Datatype ", "void *", "const int *", "const int *", "MPI_Datatype "
    (folder / "flip.c").write_text(
        "#include <mpi.h>\nint MPI_Alltoallv(" + ", ".join(map(str.__add__, kinds, names)) + ", MPI_Comm c) {\n"
        "static int calls;\nint rank, error = PMPI_Alltoallv(" + ", ".join(names) + ", c);\nMPI_Comm_rank(c, &rank);\n"
        "if (rank == 1 && calls++ == 0) *(int *)out ^= 1 << 30;\nreturn error; }\n")
    assert run("mpicc", "-shared", "-fPIC", folder / "flip.c", "-o", folder / "flip.so").status == 0
    shell(2, f"LD_PRELOAD={folder}/flip.so exec {TRAIN} {LLAMA} --zero 2 --verify-every 1").fails(
        "lce: rank 1: in step 1 rank 1 computed the gradients of the layers twice, with different bits, on CPU")


# Half the windows count nothing at all, so that now and then a rank's whole micro-batch does not.
@once
def masked():
    draw = random.Random(5)
    path = write_shard(pathlib.Path(keep.name, "masked.bin"), [3 * i % 61 if i % 5 else draw.randrange(61) for i in range(3400)])
    write_mask(path.with_suffix(".mask"), [i // 17 % 4 == 3 and i % 3 > 0 for i in range(3400)])  # windows are 17 tokens long
    return LLAMA.replace(str(TEXT), str(path))


def test_masked_ranks_neither_hang_nor_skew(folder):
    for ranks in RANKS:
        job(0, masked()).same_training(job(ranks, masked()))


# --- what is sharded over the ranks -------------------------------------------------------------------------


# Enough layers that they take turns in the buffer for gradients. Level 1 is what all other tests have.
def test_zero_levels_train_the_same(folder):
    llama, gpt2 = LLAMA + "--num-layers 5 ", GPT2 + "--num-layers 3 "
    for options, ranks, zero in ((llama, 2, 0), (llama, RANKS[:2][-1], 2), (llama, ALL, 1), (llama, ALL, 2),
                                 (TIED, ALL, 0), (TIED, 2, 2), (gpt2, 2, 0), (gpt2, 2, 2), (QWEN, 2, 0), (OLMO, 2, 2),
                                 (llama + MUON, 2, 0), (llama + MUON, ALL, 1), (llama + MUON, ALL, 2), (gpt2 + MUON, 2, 2)):
        job(0, options).same_training(job(ranks, options + f"--zero {zero}"))


# The same bits with what is offloaded, and from one of its checkpoints.
def test_offloading_changes_no_bit(folder):
    for ranks, spread, then in ((0, "", "optimizer,gradients"), (2, "--zero 0", None), (2, "--zero 2", None),
                                (2, "--zero 1 --vocab-parallel", "gradients,weights"), (2, MUON, None),
                                (2, MUON + "--zero 2 --vocab-parallel", "optimizer")):
        options = LLAMA + f"--num-layers 5 --recompute layer --save-every 2 {spread} "
        plain, moved = job(ranks, options), job(ranks, options + "--offload weights,gradients,optimizer,activations")
        plain.same_bits(moved, 2)
        plain.same_bits(moved)
        if then:
            plain.same_bits(resume(ranks, moved.checkpoint(2), f"{spread} --recompute layer --offload {then}"))


# The same bits again from a checkpoint, which says that the run is in FP8.
def test_fp8_resumes_bitwise(folder):
    options = ("--hidden-size 32 --intermediate-size 48 --head-dim 16 --fp8 --save-every 2 --save-dtype fp32 "
               f"--dtype {'bf16' if GPUS else 'fp32'} ")
    for ranks, zero in ((0, ""), (2, "--zero 2"), (2, MUON + "--zero 1")):
        whole = job(ranks, LLAMA + options + zero)
        whole.same_bits(resume(ranks, whole.checkpoint(2), "--save-dtype fp32 " + zero))
    for model in LLAMA, TIED:
        split = job(2, model + options + "--vocab-parallel --zero 1")
        job(0, model + options).same_column(split, "loss", 5e-3)  # each part of W has a scale of its own
        split.same_bits(resume(2, split.checkpoint(2), "--save-dtype fp32 --vocab-parallel --zero 1"))


# The head's rows on several ranks: its loss is that of the whole head.
def test_a_split_head_trains_the_same(folder):
    smoothed = TIED + "--label-smoothing 0.1 --lce-chunk 5 "
    for options, counts in ((LLAMA + "--vocab 301 ", RANKS),  # which nothing divides
                            (smoothed, RANKS[:2]), (GPT2 + "--num-layers 3 ", [2]), (TIED + PACKED, [ALL]),
                            (masked() + " --z-loss 0.001 ", RANKS[-2:]), (LLAMA + "--metrics --logit-softcap 3 ", [2])):
        for ranks in counts:
            split = options + f"--vocab-parallel --zero {1 + ranks % 2} "
            job(0, options).same_training(job(ranks, split))
    split = smoothed + "--vocab-parallel "
    job(2, split).same_bits(job(2, split, 2))


# A split head resumes any run; settings that it does not support are dropped, with a warning.
def test_a_split_head_resumes_any_run(folder):
    checkpoint = job(0, LLAMA + "--save-every 2 --materialized-logits").checkpoint(2)
    then = resume(2, checkpoint, "--zero 1 --vocab-parallel")
    assert "--materialized-logits was set when " in then.output.err, then.output
    job(0, LLAMA).close(then)
    # Options given now are handled differently.
    train(f"{DEVICE} --resume {checkpoint} --zero 1 --vocab-parallel --materialized-logits", ranks=2).fails(
        " and --vocab-parallel exclude each other: ")


# Some tiles are dropped, not equally many in all steps; nor always an even number, as if ranks drew alike.
def check_dropped(run, steps, tiles_of_step):
    tiles, mass = column(run.log, "dropped_tiles"), column(run.log, "dropped_mass")
    assert len(tiles) == len(mass) == steps and all(0 < x < 1 for x in tiles + mass), (tiles, mass)
    assert len(set(tiles)) > 1 and any(round(tiles_of_step * x) % 2 for x in tiles), tiles


# Ranks draw apart, and again the same; sampling leaves the first loss as it is.
def test_sampled_ranks_train(folder):
    unsampled = job(0, SAMPLED)
    for way, tiles in (("--zero 1", 24 if GPUS else 48), ("--zero 2 --vocab-parallel --recompute layer", 24)):
        sampled = job(2, SAMPLED + f"{way} --lce-sample {MASS}")
        check_dropped(sampled, STEPS, tiles)
        first, again = column(unsampled.log, "loss")[0], column(sampled.log, "loss")[0]
        assert abs(first - again) <= TOLERANCE * first, (first, again)
        sampled.same_bits(job(2, sampled.options, 2))
    # A run of one rank goes on with a split head, and with its sampling.
    alone = job(0, SAMPLED + f"--lce-sample {MASS} --save-every 2")
    check_dropped(resume(2, alone.checkpoint(2), "--zero 1 --vocab-parallel"), STEPS - 2, 24)


# Parts of a run with different numbers of ranks and ways to spread: nothing in a checkpoint depends on them.
def test_checkpoints_do_not_depend_on_ranks(folder):
    many = 4 if ALL >= 4 else 2
    whole = job(0, QWEN + "--save-every 2")
    first = job(many, QWEN + "--save-every 2 --zero 2")
    whole.close(first, 2)
    two = resume(2, first.checkpoint(2), "--zero 1 --save-every 4")
    whole.close(two, 4)
    one = resume(0, two.checkpoint(4))
    whole.close(one)
    assert whole.apart(one, STEPS, "training_state") < 100 * TOLERANCE
    # With the same ranks it continues bitwise identically.
    two.same_bits(resume(2, two.checkpoint(4), "--zero 1"))
    # A whole head continues a split one's checkpoint, and the other way around.
    whole = job(0, TIED + "--save-every 2")
    split = job(2, TIED + "--save-every 2 --zero 1 --vocab-parallel")
    whole.close(split, 2)
    then = resume(2, split.checkpoint(2), "--zero 2 --save-every 4")
    whole.close(resume(many, then.checkpoint(4), "--zero 2 --vocab-parallel"))


# A state that is spread takes less; and a run's ledger equals its plan byte for byte.
def test_plans_depend_on_ranks(folder):
    large = "--num-layers 12 --hidden-size 64 --vocab 2000 --steps 2 --total-batch 64 "
    peaks = []
    for way in (TIED + "--zero 0", TIED + "--zero 1", TIED + "--zero 2", TIED + "--zero 1 --vocab-parallel", LLAMA + "--zero 2",
                LLAMA + "--zero 2 --vocab-parallel"):
        train(f"{way} {large} --ranks 2 --plan --log {folder}/log").ok()
        peaks.append(read_log(folder / "log")[0]["peak_bytes"])
    assert peaks[2] < peaks[1] < peaks[0] and peaks[3] < peaks[1] and peaks[5] < peaks[4], peaks
    for way in (TIED + "--zero 1 --vocab-parallel --label-smoothing 0.1 --batch 24 --lce-chunk 99 ",
                TIED + "--zero 1 --vocab-parallel --lce-sample 50 "):
        options = way + large + ("--total-batch 768 " if "--batch 24" in way else "")
        summary = job(2, options).log[-1]
        assert_planned(f"{options} --save x --ranks 2", summary["peak_bytes"])


# The summary has the memory of the rank that holds the most: rank 0 offloads; rank 1 holds what no ledger knows.
def test_the_largest_peak_is_reported(folder):
    need_ranks()
    offloads = f"exec {TRAIN} {LLAMA} --log {folder}/log $(test $RANK = 1 || echo --offload optimizer)"
    shell(2, offloads).ok()
    plain, summary = job(2, LLAMA).log[-1], read_log(folder / "log")[-1]
    assert (summary["peak_bytes"], summary["host_bytes"]) == (plain["peak_bytes"], 0), (summary, plain)
    if not GPUS and "asan" not in TRAIN.parts and shutil.which("mpicc"):
        (folder / "hold.c").write_text("#include <stdlib.h>\n#include <string.h>\nvoid *held;\n__attribute__((constructor)) "
                                       "static void hold(void) { held = memset(malloc(1 << 26), 1, 1 << 26); }\n")
        assert run("mpicc", "-shared", "-fPIC", folder / "hold.c", "-o", folder / "hold.so").status == 0
        shell(2, f"test $RANK = 0 || export LD_PRELOAD={folder}/hold.so; {offloads}").ok()
        assert read_log(folder / "log")[-1]["device_peak_bytes"] > summary["device_peak_bytes"] + (1 << 25), summary


# Ranks agree on steps without a target that counts, and count them once.
def test_steps_without_targets(folder):
    size = 768 * STEPS + 1
    tokens = write_shard(folder / "masked.bin", [i * i % 61 for i in range(size)])
    write_mask(folder / "masked.mask", [(i - 1) // 768 not in (1, 4) for i in range(size)])
    options = LLAMA.replace(str(TEXT), str(tokens)) + f"--data-order sequential --val-data {TEXT} --zero 1 "
    one, several = job(1, options), job(2, options)
    several.same_training(one)
    assert [count == 0 for count in column(several.log, "tokens", "step")] == [False, True, False, False, True, False], several.log
    for run in one, several:
        assert run.output.err.count("lce:") == 1 and "2 of 6 steps had no target" in run.output.err, run.output


# All-reduces are rings: (ranks - 1) / ranks of the bytes, each way. Tied embeddings' gradients are gathered as rows, once.
def test_what_ranks_send(folder):
    wide = JOB + "--model llama-tiny --vocab 1000 --seq-len 64 --total-batch 1024 --steps 2 --eval-every 0 --sample-every 0 "
    assert job(0, LLAMA).log[-1]["wire_bytes_per_step"] == 0
    for ranks, zero, tied in (2, 0, False), (2, 1, False), (2, 2, False), (2, 0, True), (2, 1, True), (ALL, 0, False):
        options = f"{wide} --zero {zero} {'--tie-word-embeddings' if tied else '--untie-word-embeddings'} "
        start, *_, end = job(ranks, options).log
        batch_tokens, hidden = start["batch"] * start["seq_len"], start["hidden_size"]
        micro_batches, whole = start["total_batch"] // (ranks * batch_tokens), 4 * start["parameters"]
        head = 4 * start["vocab_size"] * hidden
        sums = micro_batches * (whole - head) + head if zero == 2 else whole
        formula = (ranks - 1) / ranks * (sums + whole) + (ranks - 1) * (batch_tokens * (4 * hidden + 4) if tied else 0)
        assert abs(end["wire_bytes_per_step"] - formula) < 2e-3 * formula, (options, formula, end)


# --- what is said -------------------------------------------------------------------------------------------


def test_one_rank_prints(folder):
    several = job(2, LLAMA)
    several.output.ok("ranks    2, started by ")
    for part in ("step 3  validation loss", "step 4  sample:", "all together (ledger)"):
        assert several.output.out.count(part) == 1, several.output
    assert "lce:" not in several.output.err


# One sentence, once, and no rank stays behind.
def test_impossible_options_are_refused_once(folder):
    need_ranks()
    for options, part in (("--total-batch 96", "is not a multiple of the 64 tokens of a micro-batch (ranks x --batch"),
                          ("--ranks 3", "--ranks 3: a launcher starts ranks"), ("--data nowhere", "nowhere")):
        output = train(LLAMA + options, ranks=2).fails(part)
        assert output.status == 1 and output.err.count("lce:") == 1, output


# The launcher in the tree, with programs of any kind and with ranks that cannot compute.
def test_tools_launch_starts_and_ends_ranks(folder):
    output = run(LAUNCH, 3, "sh", "-c", "echo rank $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE")
    assert output.ok("rank 2 of 3, 2 of 3").out.count("rank ") == 3, output
    deadline = Deadline(10)
    output = run(LAUNCH, 3, "sh", "-c", "test $RANK = 1 && exit 7; exec sleep 100").fails(
        "tools/launch: rank 1 (process ", "exited with status 7; the other ranks are ended")
    assert output.status == 7 and not deadline.passed(), output
    if not GPUS:
        output = run(LAUNCH, 3, TRAIN, *LLAMA.split()).fails("3 ranks on the CPU need MPI", "mpirun -n 3 ./train")
        assert output.status == 1 and output.err.count("lce:") == 1, output


# Ranks that are stopped, or that ignore signals as their children do: after the grace period, or a second signal.
def test_tools_launch_kills_what_does_not_end(folder):
    def end(name, command, grace, *signals):
        p = Process(LAUNCH, 2, "sh", "-c", f"file={folder}/{name}-$RANK; {command}", LCE_GRACE_SECONDS=grace)
        p.wait_for("ready\nready\n")
        for number in signals:
            os.kill(p.pid, number)
        assert p.finish().fails("have not ended in time and are killed").status == 137
        for process in [*(folder / f"{name}-0").read_text().split(), *(folder / f"{name}-1").read_text().split()]:
            wait_until_gone(process)
    ignores = "trap '' TERM INT; sleep 1000 & echo $$ $! >$file; echo ready; wait"
    stops = ("{ until grep -q State:.T /proc/$$/status; do sleep 0.01; done; echo ready; exec sleep 1000; } & "
             "echo $$ $! >$file; kill -STOP $$")
    together(end, [("stops", stops, "1", signal.SIGTERM), ("ignores", ignores, "1", signal.SIGTERM),
                   ("twice", ignores, "1000", signal.SIGINT, signal.SIGTERM)])
    # Ranks that save and end as asked: the launcher then ends by the signal itself.
    p = Process(LAUNCH, 2, "sh", "-c", "trap 'exit 0' TERM; echo ready; while :; do sleep 0.1; done")
    p.wait_for("ready\nready\n")
    os.kill(p.pid, signal.SIGTERM)
    output = p.finish()
    assert output.status == -signal.SIGTERM and "tools/launch" not in output.err, output
    run(LAUNCH, 1, "true", LCE_GRACE_SECONDS="soon").fails("LCE_GRACE_SECONDS=soon: give whole seconds")


if __name__ == "__main__":
    # ASan takes its time, and sees nothing new in the same code again.
    some = "test_checkpoints_do_not_depend_on_ranks"
    main({some: globals()[some]} if "asan" in TRAIN.parts else globals())
