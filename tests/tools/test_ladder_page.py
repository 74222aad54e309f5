#!/usr/bin/env python3
"""kernels/lce/LCE.md on the ladder: exercises fail on their hole and pass once filled; diffs are the ladder's lines."""
import pathlib
import re
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import ROOT, TRAIN, main, run  # noqa: E402

BUILD = ROOT / "build/release" if TRAIN.parent == ROOT else TRAIN.parent
LADDER = ROOT / "tools/ladder"


def test_exercises(folder):
    holes = BUILD.relative_to(ROOT) / "holes"
    shutil.rmtree(ROOT / holes, ignore_errors=True)
    cuda = int("-DHAVE_CUDA" in (BUILD / "flags").read_text())  # as what is here was built
    filled = set()
    for number, rung in enumerate(("rows_cpu.c", "rungs.c", "rungs.c", "rows_cpu.c", "rows_cpu.c"), 1):
        words = ["make", "-s", f"VARIANT={BUILD.name}", f"CUDA={cuda}", f"EXERCISES={holes}", f"N={number}", "build-and-exercise"]
        hole = run(*words)
        hole.expect(hole.status != 0, hole.out, [f"Exercise {number}: fill {holes}/{number}.c:"])
        if rung not in filled:  # else the same file
            shutil.copy(LADDER / rung, ROOT / holes / f"{number}.c")
            run(*words).ok(f"Exercise {number} is done.\n")
            filled.add(rung)
    words[-2] = "N=6"
    assert "there are exercises 1 to 5" in run(*words).fails().out


def test_differences(folder):
    code = [line.split("//")[0].strip() for path in LADDER.glob("*.c*") for line in path.read_text().splitlines()]
    blocks = re.findall("```diff\n(.*?)```", (ROOT / "kernels/lce/LCE.md").read_text(), re.S)
    assert len(blocks) == 5
    for line in "".join(blocks).splitlines():
        assert line[1:].split("//")[0].strip() in code, line


main(globals())
