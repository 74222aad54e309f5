#!/usr/bin/env python3
"""tools/real_run.sh on a model that takes no time, and tools/plot_run --groups on logs whose figures are worked out by hand.

Prints TAP, as the other tests do. The run is skipped where the packages are missing.
"""
import json
import os
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests"))
import tap  # noqa: E402
from tap import Skip  # noqa: E402
TRAIN = os.path.abspath(os.environ.get("LCE_TRAIN", os.path.join(ROOT, "train")))
PLOT_RUN = os.path.join(ROOT, "tools", "plot_run")
TINY = "--model gpt2-tiny --hidden-size 16 --num-layers 1 --num-attention-heads 2 --batch 2 --seq-len 16"


def call(*command, expect=0, check=True):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LCE_TRAIN": TRAIN, "PYTHON": sys.executable}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
    assert not check or done.returncode == expect, f"exit {done.returncode}: {done.stderr}{done.stdout}"
    return done


def plot_groups(folder, *logs):
    return call(PLOT_RUN, "--groups", "--out", os.path.join(folder, "groups.png"), *logs, check=False)


def write_log(folder, name, losses, **summary):
    path = os.path.join(folder, name + ".jsonl")
    lines = [{"event": "start", "total_batch": 100}]
    for step, loss in enumerate(losses, 1):
        lines += [{"event": "step", "step": step, "loss": loss, "grad_norm": 1, "learning_rate": 1, "tokens_per_second": 50},
                  {"event": "validation", "step": step, "val_loss": loss}]
    lines.append({"event": "summary", "val_loss": losses[-1], "stopped": False, **summary})
    with open(path, "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def test_a_table_of_groups(folder):
    logs = [write_log(folder, f"all-tiles-{seed}", [9, 4 + seed], tokens_per_second=1000 * seed, head_peak_bytes=3 << 20)
            for seed in (1, 2, 3)]
    logs.append(write_log(folder, "sampled-1", [9, 5.5], tokens_per_second=9000, head_peak_bytes=1 << 20, dropped_tiles=0.875,
                          dropped_mass=0.25))
    done = plot_groups(folder, *logs)
    lines = done.stdout.splitlines()
    # Losses 5, 6, 7: their standard deviation is 1, the mean's error 1/sqrt(3).
    assert lines[2] == "| all-tiles | 3 | 6.0000 ± 0.5774 | 2.00K | 3.0 MiB | none | none |", lines
    assert lines[3] == "| sampled | 1 | 5.5000 | 9.00K | 1.0 MiB | 87.5% | 25.0% |", lines
    cut = write_log(folder, "cut-1", [9])
    with open(cut, "r+") as file:
        text = file.read()
        file.truncate(text.rindex('{"event": "summary"'))
    lines = plot_groups(folder, cut).stdout.splitlines()
    assert lines[2] == "| cut | 0 | none | none | none | none | none |", lines
    many = [write_log(folder, f"{name}-1", [1]) for name in "abcdefghi"]
    assert "space for 8 groups" in plot_groups(folder, *many).stderr
    if "no picture can be drawn" in done.stderr:
        raise Skip(done.stderr.strip())
    with open(os.path.join(folder, "groups.png"), "rb") as file:
        assert file.read(4) == b"\x89PNG"


def real_run(folder, *options, expect=0):
    return call(os.path.join(ROOT, "tools", "real_run.sh"), "--out", folder, "--text", os.path.join(ROOT, "README.md"), "--steps",
                4, "--seeds", 2, "--model-options", TINY, *options, expect=expect)


def test_a_whole_run(folder):
    try:
        import numpy  # noqa: F401
        import tokenizers  # noqa: F401
    except ImportError as missing:
        raise Skip(f"{missing}: pip install tokenizers numpy")
    first = real_run(folder, "--vocab", 300).stdout
    rows = [line.split("|")[1:-1] for line in first.splitlines() if line.startswith("|")]
    assert [row[0].strip() for row in rows] == ["mode", "---", "materialized", "fused", "sampled"], first
    assert all(row[1] == " 2 " for row in rows[2:]) and first.count("\nrun ") == 6, first
    assert os.path.exists(os.path.join(folder, "checkpoint", "latest", "model.safetensors"))
    # Finished runs stay, an unfinished one is run again.
    assert "\nrun " not in real_run(folder, "--vocab", 300).stdout
    for name, shown in (("fused-1", "run 2 of 6: fused, seed 1"), ("sampled-2", "run 6 of 6: sampled, seed 2")):
        log = os.path.join(folder, name + ".jsonl")
        with open(log) as file:
            lines = file.readlines()
        with open(log, "w") as file:
            file.writelines(lines[:-1])
        again = real_run(folder, "--vocab", 300).stdout
        assert again.count("\nrun ") == 1 and shown in again, again
    assert "have other settings" in real_run(folder, "--vocab", 301, expect=1).stderr


def in_folder(test):
    def run():
        if not os.path.exists(PLOT_RUN):
            raise Skip(f"there is no {PLOT_RUN}")
        with tempfile.TemporaryDirectory(prefix="lce-real-run-") as folder:
            test(folder)
    return run


sys.exit(tap.run({name: in_folder(test) for name, test in list(globals().items()) if name.startswith("test_")}) > 0)
