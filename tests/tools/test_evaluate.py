#!/usr/bin/env python3
"""tools/evaluate: the loss of a saved model over all validation data, alone and on ranks; and its wrong uses."""
import math
import os
import pathlib
import re
import shlex
import shutil
import signal
import struct
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import DEVICE, TEXT, TINY, TOOLS, Process, column, keep, main, need_ranks, once, read_log, run, train, write_manifest, write_shard  # noqa: E402

EVALUATE = TOOLS / "evaluate"
def evaluate(line, **how):
    return run(EVALUATE, *shlex.split(DEVICE + line), **how)


@once
def trained():
    """A model, its data and its log, the last line of which has the loss over all of them."""
    folder = pathlib.Path(keep.name)
    shard = write_shard(folder / "val.bin", [(3 * i + i // 9) % 61 for i in range(700)])
    train(TINY + f"--steps 2 --data {shutil.copy(shard, folder / 'train.bin')} --val-data {shard} --eval-batches 0 --save {folder}/model --log {folder}/log").ok()
    return folder / "model", shard, read_log(folder / "log")[-1]


# The loss over all that is held out or given, by the weights alone, whatever the batch.
def test_evaluates(folder):
    model, shard, summary = trained()
    for options in "", "--batch 2 ", "--materialized-logits ", "--lce-chunk 5 ":
        output = evaluate(f"--init {model} --seq-len 16 --val-data {shard} --log {folder}/log {options}").ok("validation loss ")
        log = read_log(folder / "log")
        assert not output.err and "learning rate" not in output.out and "saved" not in output.out, output
        assert [line["event"] for line in log] == ["start", "validation", "summary"] and not column(log, "grad_norm"), log
        assert abs(log[-1]["val_loss"] - summary["val_loss"]) < 1e-6, (log, summary)
        assert math.isclose(log[-1]["perplexity"], math.exp(log[-1]["val_loss"])), log
    # A folder that tools/prepare_data.py made stands for its validation shards, with or without the others.
    shutil.copy(shard, folder / "val_000000.bin")
    write_manifest(folder, val=(shard.stat().st_size - 1024) // 2, train=700)
    for option in "--val-data", "--data", "--val-data":
        evaluate(f"--init {model} --seq-len 16 {option} {folder} --log {folder}/log").ok()
        assert abs(read_log(folder / "log")[-1]["val_loss"] - summary["val_loss"]) < 1e-6
        write_shard(folder / "train_000000.bin", [1] * 700)
    # A byte of text is a token: bits per byte are the loss in bits.
    evaluate(f"--init {model} --data {TEXT} --val-fraction 0.5 --log {folder}/log").ok(" bits per byte")
    validation = read_log(folder / "log")[1]
    assert math.isclose(validation["bits_per_byte"] * math.log(2), validation["val_loss"], rel_tol=1e-6), validation
    # One that separates files is a target, too, and no byte of theirs.
    for name in "ab":
        (folder / name).write_bytes(b"some words " * 3)
    evaluate(f"--init {model} --seq-len 16 --val-data {folder}/a --val-data {folder}/b --log {folder}/log").ok()
    validation = read_log(folder / "log")[1]
    bits = validation["val_loss"] * 66 / 65 / math.log(2)
    assert math.isclose(validation["bits_per_byte"], bits, rel_tol=1e-6), validation


# A terminal is shown how far it is, and the loss so far; a pipe is so every five seconds.
def test_shows_progress(folder):
    model, _, _ = trained()
    shard = write_shard(folder / "val.bin", [(3 * i + i // 9) % 61 for i in range(20000)])
    output = evaluate(f"--init {model} --seq-len 4 --batch 1 --val-data {shard}", terminal=True).ok("validation loss ")
    shown = re.findall(r"\r\033\[Kbatch ([0-9,]+)/5,000  loss ([0-9.]+)  [0-9.]+K? tok/s  [0-9]+s left", output.out)
    done = [int(batches.replace(",", "")) for batches, _ in shown]
    assert done and done == sorted(set(done)) and all(0 < batches < 5000 and batches % 64 == 0 for batches in done), output
    loss = re.search("validation loss ([0-9.]+)", output.out)[1]
    assert all(abs(float(so_far) - float(loss)) < 0.5 for _, so_far in shown), output
    assert "batch " not in evaluate(f"--init {model} --seq-len 16 --val-data {shard}").ok().out.split("loaded")[1]


def test_plans_its_memory(folder):
    model, shard, _ = trained()
    table = evaluate(f"--init {model} --plan").ok("  weights ").out
    assert "gradients" not in table.replace("activation gradients", "") and "moments" not in table, table
    evaluate(f"--init {model} --fit --plan --device-memory 1").ok("--fit: ", "--batch ")
    evaluate(f"--init {model} --val-data {shard} --device-memory 0.0001").refused("this run needs ", " and the device has ")


# The ranks share the batches, and the loss is the same.
def test_ranks(folder):
    need_ranks()
    model, shard, _ = trained()
    losses = []
    for ranks in 0, 2, 3:
        output = evaluate(f"--init {model} --val-data {shard} --seq-len 16 --log {folder}/log", ranks=ranks).ok()
        assert not output.err and output.out.count("validation loss ") == 1, output
        losses.append(read_log(folder / "log")[-1]["val_loss"])
    assert len(set(losses)) == 1, losses


def test_a_signal_ends_it(folder):
    for ranks in 0, 2:  # any rank may get the signal
        if ranks:
            need_ranks()
        p = Process(EVALUATE, *shlex.split(DEVICE + f"--init {trained()[0]} --seq-len 1 --batch 1 --val-fraction 0.9"), ranks=ranks)
        p.wait_for("loaded ")
        time.sleep(0.5)
        os.kill(p.of_rank(1) if ranks else p.pid, signal.SIGTERM)
        output = p.finish(20)
        (output.fails if ranks else output.refused)("lce: stopped on a signal: not all is evaluated")


# Every wrong use is one sentence, before anything is loaded or written.
def test_wrong_uses(folder):
    model, shard, _ = trained()
    log = folder / "log.jsonl"
    log.write_text("of another run\n")
    evaluate(f"--log {log} --val-data {shard}").refused("there is no model to evaluate; name its folder with --init DIR")
    evaluate(f"--log {log} --init {model} --val-fraction 0 --data {shard}").refused("there is nothing to evaluate; name --val-data or ")
    evaluate(f"--log {log} --init {model} --val-data {folder}/nowhere").refused("/nowhere: No such file")
    evaluate(f"--log {log} --init {folder}/nowhere").refused("/nowhere")
    for option in "--lr 1", "--save nowhere", "--resume nowhere", "--fp8", "--model gpt2-tiny":
        evaluate(f"--log {log} --init {model} {option}").refused(f"{option.split()[0]} is not an option")
    evaluate(f"--log {log} --init {model} --val-data {shard} --val-fraction 0.1").refused("exclude each other")
    assert log.read_text() == "of another run\n"
    train("--eval-only --init nowhere").refused("--eval-only is not an option: tools/evaluate --init DIR --val-data PATH evaluates a model")


# A model of NaN is not evaluated with a figure and status 0: not by the loss or by a sample.
def test_weights_that_are_nan(folder):
    shard, model = write_shard(folder / "val.bin", list(range(61)) * 12), folder / "sick/latest"
    train(TINY + f"--steps 1 --data {shard} --save {folder}/sick").ok()
    with open(model / "model.safetensors", "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(struct.pack("<f", float("nan")))
    (model / "trainer_state.json").unlink()  # which has the weights' checksum
    evaluate(f"--init {model} --val-data {shard}").refused("there is NaN or infinity among the weights in ")
    train(f"--device cpu --init {model} --data {shard} --steps 2").refused("step 1: the loss is nan", "there is NaN or infinity among the weights")
    run(TOOLS / "generate_ids", "--device", "cpu", "--init", model, "--prompt", "10").refused("is nan: some weight is NaN or infinite")


trained()
main(globals())
