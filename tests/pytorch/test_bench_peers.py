#!/usr/bin/env python3
"""tools/bench_peers.py on the CPU: each of lce.c's rows is measured, and right."""
import json
import os
import subprocess
import sys

from setting import ROOT, run


def rows(*options):
    done = subprocess.run([sys.executable, os.path.join(ROOT, "tools", "bench_peers.py"), "--device", "cpu", "--shapes", "24x8x200",
                           "--rounds", "1", "--json", *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for row in found:
        if row["peer"].startswith("lce.c"):
            assert row.get("ms", 0) > 0 and max(row.get(f"{what}_error", 0) for what in ("dx", "dw")) < 1e-5, row
    return [row for row in found if "why" not in row]


def peers(*options):
    return {row["peer"] for row in rows(*options)}


def every_loss():
    assert {"lce.c, C interface, chunk 4096", "lce.c, chunk 1024", "lce.c, chunk 4096, batch invariant"} < peers()
    assert {"lce.c, chunk 4096", "lce.c, chunk N", "lce.c, chunk 2048, K 8"} < peers("--z-loss", "--log-probs")
    divergences = {(row["title"].split(":")[0], row["peer"]) for row in rows("--divergence")}
    assert {(f"{kind}, N 24, H 8, the teacher's H {h}, V 200", f"lce.c, chunk {chunk}")
            for kind in ("forward_kl", "reverse_kl", "jsd") for h in (16, 8) for chunk in (2048, 1024)} < divergences


def the_trainer():
    assert {"lce.c", "transformers, fp32 weights"} <= peers("--trainer", "--models", "llama-tiny:2x32")


if __name__ == "__main__":
    run({"every_loss": every_loss, "the_trainer": the_trainer})
