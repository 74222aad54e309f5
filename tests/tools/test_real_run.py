#!/usr/bin/env python3
"""tools/real_run.sh on a model that takes no time, and tools/plot_run --groups on figures by hand."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import ROOT, TRAIN, main, need, run, write  # noqa: E402
from tap import Skip  # noqa: E402


def plot_groups(folder, *logs):
    return run(sys.executable, ROOT / "tools" / "plot_run", "--groups", "--out", folder / "groups.png", *logs)


def write_log(folder, name, losses, **summary):
    lines = [{"event": "start", "total_batch": 100}]
    for step, loss in enumerate(losses, 1):
        lines += [{"event": "step", "step": step, "loss": loss, "grad_norm": 1, "learning_rate": 1, "tokens_per_second": 50},
                  {"event": "validation", "step": step, "val_loss": loss}]
    lines += [{"event": "summary", "val_loss": losses[-1], "stopped": False, **summary}] if summary else []
    return write(folder / (name + ".jsonl"), lines)


def test_a_table_of_groups(folder):
    logs = [write_log(folder, f"all-tiles-{seed}", [9, 4 + seed], tokens_per_second=1000 * seed, head_peak_bytes=3 << 20)
            for seed in (1, 2, 3)]
    logs.append(write_log(folder, "sampled-1", [9, 5.5], tokens_per_second=9000, head_peak_bytes=1 << 20, dropped_tiles=0.875,
                          dropped_mass=0.25))
    done, cut = plot_groups(folder, *logs), plot_groups(folder, write_log(folder, "cut-1", [9]))
    # Losses 5, 6, 7: their standard deviation is 1, the mean's error 1/sqrt(3).
    assert done.out.splitlines()[2:4] == ["| all-tiles | 3 | 6.0000 ± 0.5774 | 2.00K | 3.0 MiB | none | none |",
                                          "| sampled | 1 | 5.5000 | 9.00K | 1.0 MiB | 87.5% | 25.0% |"], done
    assert cut.out.splitlines()[2] == "| cut | 0 | none | none | none | none | none |", cut
    plot_groups(folder, *(write_log(folder, f"{name}-1", [1]) for name in "abcdefghi")).fails("space for 8 groups")
    if "no picture can be drawn" in done.err:
        raise Skip(done.err.strip())
    assert done.ok() and cut.ok() and (folder / "groups.png").read_bytes()[:4] == b"\x89PNG"


def test_a_whole_run(folder):
    need("numpy", "tokenizers")
    model = "--model gpt2-tiny --hidden-size 16 --num-layers 1 --num-attention-heads 2 --batch 2 --seq-len 16"

    def real_run(vocab=300):
        return run(ROOT / "tools" / "real_run.sh", "--out", folder, "--text", ROOT / "README.md", "--steps", 4, "--seeds=2", "--model-options",
                   model, "--vocab", vocab, OMP_NUM_THREADS="1", LCE_TRAIN=str(TRAIN), PYTHON=sys.executable)
    for name in ("checkpoint", "table.md", "text.jsonl"):  # somebody's
        (folder / name).write_text("mine")
        real_run().fails("holds files that are not of an earlier run: name another directory with --out")
        assert [path.read_text() for path in folder.iterdir()] == ["mine"]
        (folder / name).unlink()
    first = real_run().ok().out
    rows = [line.split("|")[1:-1] for line in first.splitlines() if line.startswith("|")]
    assert [row[0].strip() for row in rows] == ["mode", "---", "materialized", "fused", "sampled"], first
    assert all(row[1] == " 2 " for row in rows[2:]) and first.count("\nrun ") == 6, first
    assert (folder / "checkpoint" / "latest" / "model.safetensors").exists()
    # Finished runs stay, an unfinished one is run again.
    assert "\nrun " not in real_run().ok().out
    for name, shown in (("fused-1", "run 2 of 6: fused, seed 1"), ("sampled-2", "run 6 of 6: sampled, seed 2")):
        log = folder / (name + ".jsonl")
        log.write_text("".join(log.read_text().splitlines(True)[:-1]))
        again = real_run().ok(shown)
        assert again.out.count("\nrun ") == 1, again
    assert real_run(vocab=301).fails("have other settings").status == 1
    for words, says in ("--soup 3", "--soup is no option"), ("--seeds", "no option with a value"), ("--seeds 0", "--seeds 0: give"), (
            "--text /nowhere", "there is no text /nowhere"):
        run(ROOT / "tools" / "real_run.sh", *words.split(), LCE_TRAIN=str(TRAIN)).fails(says)


main(globals())
