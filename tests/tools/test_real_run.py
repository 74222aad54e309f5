#!/usr/bin/env python3
"""tools/real_run.sh on a model that takes no time, and tools/plot_run --groups on logs whose figures are worked out by hand."""
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import ROOT, TRAIN, main, run  # noqa: E402
from tap import Skip  # noqa: E402

TINY = "--model gpt2-tiny --hidden-size 16 --num-layers 1 --num-attention-heads 2 --batch 2 --seq-len 16"


def plot_groups(folder, *logs):
    return run(sys.executable, ROOT / "tools" / "plot_run", "--groups", "--out", folder / "groups.png", *logs)


def write_log(folder, name, losses, **summary):
    path = folder / (name + ".jsonl")
    lines = [{"event": "start", "total_batch": 100}]
    for step, loss in enumerate(losses, 1):
        lines += [{"event": "step", "step": step, "loss": loss, "grad_norm": 1, "learning_rate": 1, "tokens_per_second": 50},
                  {"event": "validation", "step": step, "val_loss": loss}]
    lines += [{"event": "summary", "val_loss": losses[-1], "stopped": False, **summary}] if summary else []
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_table_of_groups(folder):
    logs = [write_log(folder, f"all-tiles-{seed}", [9, 4 + seed], tokens_per_second=1000 * seed, head_peak_bytes=3 << 20)
            for seed in (1, 2, 3)]
    logs.append(write_log(folder, "sampled-1", [9, 5.5], tokens_per_second=9000, head_peak_bytes=1 << 20, dropped_tiles=0.875,
                          dropped_mass=0.25))
    done = plot_groups(folder, *logs)
    lines = done.out.splitlines()
    # Losses 5, 6, 7: their standard deviation is 1, the mean's error 1/sqrt(3).
    assert lines[2] == "| all-tiles | 3 | 6.0000 ± 0.5774 | 2.00K | 3.0 MiB | none | none |", done
    assert lines[3] == "| sampled | 1 | 5.5000 | 9.00K | 1.0 MiB | 87.5% | 25.0% |", done
    without_summary = plot_groups(folder, write_log(folder, "cut-1", [9]))
    assert without_summary.out.splitlines()[2] == "| cut | 0 | none | none | none | none | none |", without_summary
    plot_groups(folder, *(write_log(folder, f"{name}-1", [1]) for name in "abcdefghi")).fails("space for 8 groups")
    if "no picture can be drawn" in done.err:
        raise Skip(done.err.strip())
    assert (folder / "groups.png").read_bytes()[:4] == b"\x89PNG"


def real_run(folder, *options):
    return run(ROOT / "tools" / "real_run.sh", "--out", folder, "--text", ROOT / "README.md", "--steps", 4, "--seeds", 2,
               "--model-options", TINY, *options, OMP_NUM_THREADS="1", LCE_TRAIN=str(TRAIN), PYTHON=sys.executable)


def test_a_whole_run(folder):
    try:
        import numpy  # noqa: F401
        import tokenizers  # noqa: F401
    except ImportError as missing:
        raise Skip(f"{missing}: pip install tokenizers numpy")
    first = real_run(folder, "--vocab", 300).ok().out
    rows = [line.split("|")[1:-1] for line in first.splitlines() if line.startswith("|")]
    assert [row[0].strip() for row in rows] == ["mode", "---", "materialized", "fused", "sampled"], first
    assert all(row[1] == " 2 " for row in rows[2:]) and first.count("\nrun ") == 6, first
    assert (folder / "checkpoint" / "latest" / "model.safetensors").exists()
    # Finished runs stay, an unfinished one is run again.
    assert "\nrun " not in real_run(folder, "--vocab", 300).ok().out
    for name, shown in (("fused-1", "run 2 of 6: fused, seed 1"), ("sampled-2", "run 6 of 6: sampled, seed 2")):
        log = folder / (name + ".jsonl")
        log.write_text("".join(log.read_text().splitlines(True)[:-1]))
        again = real_run(folder, "--vocab", 300).ok(shown)
        assert again.out.count("\nrun ") == 1, again
    assert real_run(folder, "--vocab", 301).fails("have other settings").status == 1


main(globals())
