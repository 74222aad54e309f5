#!/usr/bin/env python3
"""--profile in whole runs: its table and the log's figures agree, on one rank and on two."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import GPUS, SIZES, TEXT, main, need_ranks, read_log, train  # noqa: E402

RUN = f"--model llama-tiny {SIZES} --num-layers 3 --batch 2 --steps 6 --sample-every 0 --data {TEXT} "


def check(folder, line, group, ranks=0):
    """The summary's groups against each other and the printed table; the run's output."""
    log, device = folder / "log.jsonl", "cuda" if GPUS and ranks else "cpu"
    output = train(RUN + f"--device {device} --profile --log {log} {line}", ranks=ranks).ok("a step's time", ", mean of 4 ")
    groups = read_log(log)[-1]["profile"]
    assert groups[group]["calls"] > 0, groups
    for name, g in groups.items():
        row = f"\n  {name:<28} {g['calls']:8.6g} {1e3 * g['seconds']:10.2f} "
        assert not g["calls"] or row in output.out, (row, output)
    counted = {name: (g["flops"] > 0, g["bytes"] > 0) for name, g in groups.items() if g["calls"]}
    assert counted["GEMMs"] == counted["LM head + loss"] == (True, True), counted
    assert counted["attention forward"] == counted["attention backward"] == (True, False), counted
    assert counted["norms, elementwise"] == counted["optimizer"] == (False, True), counted
    all_together = sum(g["seconds"] for g in groups.values())
    assert f"\n  {'all together':<28} {'':8} {1e3 * all_together:10.2f} " in output.out, output
    assert " TFLOP/s" in output.out and " GB/s" in output.out
    return output


def test_runs(folder):
    check(folder, "--compare-modes", "LM head + loss").ok("materialized, measured")
    check(folder, "--offload optimizer,weights", "copies")


def test_ranks(folder):
    need_ranks()
    for zero in range(3):
        check(folder, f"--zero {zero}", "communication", ranks=2)


def test_without(folder):
    output = train(RUN + f"--device cpu --log {folder / 'log.jsonl'}").ok(" tokens/s, ").out
    assert "a step's time" not in output and "MFU" not in output  # a CPU has no peak
    summary = read_log(folder / "log.jsonl")[-1]
    assert summary["tokens_per_second"] > 0 and "profile" not in summary and "mfu" not in summary
    train(RUN + "--device cpu --profile --steps 2").ok("profile  none: it begins after 2 steps\n")


main(globals())
