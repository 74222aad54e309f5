#!/usr/bin/env python3
"""kernels/lce/LCE.md on the ladder: exercises fail on their hole and on wrong answers, and pass once filled; its code is
the ladder's, in C and in PyTorch."""
import inspect
import pathlib
import re
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import ROOT, TRAIN, main, need, run  # noqa: E402

BUILD = ROOT / (ROOT / "build/last").read_text().strip() if TRAIN.parent == ROOT else TRAIN.parent  # as make records it
LADDER = ROOT / "tools/ladder"


# Wrong answers and what the checker says: exercise, the text of the rung's file, what replaces it, the message.
WRONG = [
    (1, "-row_sum[n] / total", "1 / total - 1", "rung 4 anchored at the target: dX of token 0, whose target leads by 30, is off by 1"),
    (1, "log1pf(row_sum[n])", "logf(1 + row_sum[n])", "loss of token 0, whose target leads by 30, is off by 1"),
    (2, "Tensor logits = push_logit_rows(backend, \"logits\", DTYPE_F32, l->chunk, l->weight.shape[0]);\n  Tensor lse = push_floats(backend, \"lse\", l->chunk);\n  for (int64_t first = 0; first < l->x.shape[0]; first += l->chunk) {",
     "recomputed(backend, l);\n  Tensor logits, lse;\n  for (int64_t first = 0; first < 0; first += l->chunk) {", "rung 3 gradient in the forward pass computes 4 GEMMs"),
    (3, "c.accumulate = first > 0", "c.accumulate = false", "ladder_chunk: no chunk adds to dW"),
    (3, "tensor_rows(*per_token[i], first, count)", "tensor_rows(*per_token[i], 0, count)", "ladder_chunk: x is not tokens 3 to 5"),
    (1, "anchor[n] = counts ? target_z[n]", "anchor[n] = counts ? target_z[n] + 1", "ladder_anchors: target_z of token 0 is "),
    (4, "anchor[n] = maximum_of(z, vocab)", "anchor[n] = maximum_of(z, vocab) - 20", "ladder_repair: the largest E of token 1 is "),
    (4, "row_sum[n] = (float)exponentials_of(a, n, 0, vocab)", "row_sum[n] = 1", "rung 4 anchored at the target: loss of token 1 is "),
    (4, "target_e[n] = exp_f32(target_z[n] - anchor[n])", "target_e[n] = 0", "ladder_repair: target_e of token 1 is 0; "),
    (5, "double q = fmin(1, mass / (double)s->full_mass)", "double q = 0.5 + 0 * mass", "a tile of mass 60, where M0 is 30, stays in"),
    (5, "tile) < q", "0) < q", "tiles of mass 15 and 8 stay together in "),
    (5, "(double)r[n] * (double)cpu_row(a->exps, n)[j]", "(double)r[top] * (double)cpu_row(a->exps, top)[j]", "a tile of mass 31, where M0 is 30, stays in"),
    (5, "(double)cpu_row(a->exps, n)[j]", "(double)cpu_row(a->exps, n)[left]", "a tile of mass 31, where M0 is 30, stays in"),
    (6, "bytes *= 2", "bytes = 65536", "the chunk that begins at token "),
    (7, "row_sum += factor[i] * row_sums", "row_sum += row_sums", "two ranks: loss of token "),
    (7, "factor[i] = exp_f32(anchors[i][n] - anchor)", "factor[i] = 0", "two ranks: loss of token 1 is "),
]


def test_exercises(folder):
    holes = BUILD.relative_to(ROOT) / "holes"
    shutil.rmtree(ROOT / holes, ignore_errors=True)
    cuda = int("-DHAVE_CUDA" in (BUILD / "flags").read_text())  # as what is here was built
    rungs = {n: path for path in LADDER.glob("*.c") for n in range(1, 8) if f"// Exercise {n}:" in path.read_text()}
    filled = set()
    for number, rung in sorted(rungs.items()):
        words = ["make", "-s", f"VARIANT={BUILD.name.removesuffix('-cpu')}", f"BUILD={BUILD.relative_to(ROOT)}", f"CUDA={cuda}", f"EXERCISES={holes}", f"N={number}", "build-and-exercise"]

        def fails(*parts):
            answer = run(*words)
            answer.expect(answer.status != 0, answer.out, [f"Exercise {number}: fill {holes}/{number}.c:", *parts])
        fails()
        comments = re.findall(rf"// Exercise {number}: (.*?)// end of exercise {number}\n", (ROOT / holes / f"{number}.c").read_text(), re.S)
        for comment in comments:  # all of it, and nothing else
            assert comment.rstrip().endswith(".") and all(line.lstrip().startswith("//") for line in comment.splitlines()[1:-1]), comment
            assert comment.rstrip() in rung.read_text(), comment
        assert len(comments) == 1 + (number == 1), comments
        for _, right, wrong, says in (case for case in WRONG if case[0] == number):
            code = rung.read_text()
            assert code.count(right) == 1, right
            (ROOT / holes / f"{number}.c").write_text(code.replace(right, wrong))
            fails(says)
        if rung not in filled:  # else the same file
            shutil.copy(rung, ROOT / holes / f"{number}.c")
            run(*words).ok(f"Exercise {number} is done.\n")
            filled.add(rung)
    words[-2] = "N=8"
    assert "there are exercises 1 to 7" in run(*words).fails().out


def test_differences(folder):
    code = [line.split("//")[0].strip() for path in LADDER.glob("*.c*") for line in path.read_text().splitlines()]
    blocks = re.findall("```diff\n(.*?)```", (ROOT / "kernels/lce/LCE.md").read_text(), re.S)
    assert len(blocks) == 5
    for line in "".join(blocks).splitlines():
        assert line[1:].split("//")[0].strip() in code, line


def test_pytorch(folder):
    """ladder.py's gradients are those of the C rungs, and two of its functions the page's."""
    need("torch")
    import torch
    sys.path.insert(0, str(LADDER))
    import ladder
    named = set(re.findall(r"^\| (\d) `(\w+)` \|", (ROOT / "kernels/lce/LCE.md").read_text(), re.M))
    assert named == {("6", "on_hopper"), *((str(n), rung.__name__) for n, rung in ladder.RUNGS.items())}, named
    assert max(len(inspect.getsource(rung).splitlines()) for rung in (ladder.matmuls, *ladder.RUNGS.values())) <= 15
    run(BUILD / "tests/tools/test_lce_ladder", LADDER_FILE=str(folder / "rungs")).ok()
    x, W, y, *of_c = torch.frombuffer(bytearray((folder / "rungs").read_bytes()), dtype=torch.float32).split(
        [37 * 24, 1301 * 24, 37, *[37, 37 * 24, 1301 * 24] * 6])
    problem = x.view(37, 24), W.view(1301, 24), y.view(torch.int32).long(), 9
    for i, (number, rung) in enumerate(ladder.RUNGS.items()):
        if number == 7:
            continue
        results = rung(*problem)
        for what, got, want in zip(("loss", "dX", "dW"), results, of_c[3 * i:3 * i + 3], strict=True):
            assert ladder.off(got.flatten(), want.double()) < 2e-6, f"{what} of rung {number}"
        certain = ladder.off(results[1][5], of_c[16].view(37, 24)[5].double())  # to that of the C rungs' last
        assert certain < 1e-4 if number >= 4 else certain > 0.5, (number, certain)
    run(sys.executable, LADDER / "ladder.py", *"--tokens 20 --hidden-size 8 --vocab 300 --chunk 6 --repeat 1".split(),
        LCE_LIBRARY="/nonexistent").ok("1 materialized", "5 in_epilogue", "7 linear_cross_entropy ", "is left out: ")


def test_the_pages_python(folder):
    """The functions of ladder.py hold the page's lines, with mm(a, b) for a @ b."""
    def plain(line):
        line = re.sub(r"add_mm\(dW, (\S+), (.*)\)$", r"dW += \1 @ \2", line.split("#")[0].strip())
        line = re.sub(r"\bmm\((\S+), (\S+?)\)", r"\1 @ \2", line)
        line = line.replace(".sub_(a[:, None]).exp_()", " - a[:, None]).exp()").replace(".float()", "")
        return re.sub(r"[() ]", "", line).replace("arangelenx", "arangeN")
    code = [plain(line) for line in (LADDER / "ladder.py").read_text().splitlines()]
    blocks = re.findall("```python\n(.*?)```", (ROOT / "kernels/lce/LCE.md").read_text(), re.S)
    assert len(blocks) == 2
    for line in "".join(blocks).splitlines():
        assert plain(line) in code, (line, plain(line))


main(globals())
