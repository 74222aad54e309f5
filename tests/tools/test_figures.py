#!/usr/bin/env python3
"""Figures stand in the tables of tools/BENCHMARKS.md; where another page repeats one, it is the same. (page.html's are
filled in by tools/page_data.py: test_page.py.)"""
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import ROOT, main  # noqa: E402

sys.path.insert(0, str(ROOT / "tools"))
import page_data  # noqa: E402

README, LCE, REFERENCE, CURVES = "README.md", "kernels/lce/LCE.md", "kernels/lce/REFERENCE.md", "tools/CURVES.md"
BENCHMARKS, PLAN = "tools/BENCHMARKS.md", "tests/trainer/test_plan.c"
SHAPES = "N 4096", "N 16384", "N 8192", "N 32768"
LONG = "fused, `--mlp-chunk 4096`"
FIGURE = "([0-9,]+)"

# A page, a regular expression for its text whose groups are figures, and where these stand: the beginnings of a table's
# first heading, of a row and of another heading. Groups are the cell's figures in turn; a space is also a line's end.
REPEATED = [
    (README, r"takes ([0-9.]+ GiB) instead of", "tokens of a step", "LM head + loss, fused", "81,920"),
    (README, r"takes [0-9.]+ GiB instead of ([0-9.]+), in", "tokens of a step", "LM head + loss, materialized", "81,920"),
    (README, r"10\.5 billion of them: ([0-9.]+ GiB)", "tokens of a step", "LM head + loss, materialized", "81,920"),
    (README, r"^\| ([0-9.]+) \| [0-9.]+ \| [0-9.]+ \| [0-9.]+ \|$", "one H200", "chunk 2048", "N 16384"),
    (README, r"^\| [0-9.]+ \| ([0-9.]+) \| [0-9.]+ \| [0-9.]+ \|$", "one H200", "chunk 1024", "N 16384"),
    (README, r"^\| [0-9.]+ \| [0-9.]+ \| ([0-9.]+) \| [0-9.]+ \|$", "one H200", "materialized", "N 16384"),
    (README, r"^\| [0-9.]+ \| [0-9.]+ \| [0-9.]+ \| ([0-9.]+) \|$", "one H200", "`--fp8`, chunk 2048", "N 16384"),
    (README, r"24 GiB card\D+([0-9,]+) tokens", "device memory", "24 GiB, all", LONG),
    (README, r"80 GiB card\D+([0-9,]+) tokens", "device memory", "80 GiB, all", LONG),
    (README, r"not timed; materialized: ([0-9,]+), [0-9]", "device memory", "24 GiB, all", "materialized"),
    (README, r"not timed; materialized: [0-9,]+, ([0-9,]+)\)", "device memory", "80 GiB, all", "materialized"),
    *((README, rf"^\| {row}.* \| {ours} \| {theirs} \| {codes} \|$", "one H100, 28 Nov", row, column)
      for row in ("llama-1b, B 4, T 4096", "gpt2-124m, B 64, T 1024")
      for column, ours, theirs, codes in (("lce.c", FIGURE, "[0-9,]+", "[0-9,]+"), ("transformers, bf16", "[0-9,]+", FIGURE, "[0-9,]+"),
                                          ("lce.c, `--fp8`", "[0-9,]+", "[0-9,]+", FIGURE))),
    (LCE, r"^\| chunks of 4,096 \| ([0-9.]+) \| ([0-9.]+ GiB) \|", "one H100", "chunk 4096", "N 32768"),
    (LCE, r"^\| chunks of 1,024 \| ([0-9.]+) \| ([0-9.]+ MiB) \|", "one H100", "chunk 1024", "N 32768"),
    (REFERENCE, r"to this path `linear_cross_entropy` takes ([0-9.]+) times", "one H100, `LCE_HOPPER=0`", "chunk 4096", "N 16384"),
    (REFERENCE, r"in chunks of 4096: ([0-9.]+) times the time of the unsplit head", "H100s", "two", "chunk 4096"),
    (REFERENCE, r"on two H100s, ([0-9.]+) times on four", "H100s", "four", "chunk 4096"),
    (CURVES, r"time ([0-9.]+) in chunks of 2,048", "one H200", "chunk 2048", "N 16384"),
    (CURVES, r"time [0-9.]+ in chunks of 2,048; ([0-9.]+)", "one H200", "materialized", "N 16384"),
    (CURVES, r"time ([0-9.]+) in ([0-9.]+ MiB), chunk 1,024", "one H200", "chunk 1024", "N 4096"),
    (CURVES, r"; ([0-9.]+) in ([0-9.]+ GiB), chunk 4,096", "one H200", "chunk 4096", "N 4096"),
    (BENCHMARKS, r"^\| llama-1b, T 4096, `--fit` \(above\) \| [0-9,]+ \| ([0-9,]+)", "one H100", "llama-1b, T 4096, `--fit`", "tokens/s"),
    (BENCHMARKS, r"^\| llama-8b, `--fit` \(above\).* \| ([0-9,]+); [0-9,]+ \|$", "one H100", "llama-8b", "tokens/s"),
    (BENCHMARKS, r"^\| llama-8b, `--fit` \(above\).* \| [0-9,]+; ([0-9,]+) \|$", "one H100", "the same, `--fp8`, `--fit`", "tokens/s"),
    *((PLAN, job + r'"(?: LEAN)?, ([0-9]+)\}', "one H100", row, "tokens/s")
      for job, row in (("124m --batch 64", "gpt2-124m, B 64"), ("--vocab 128256", "the same, V 128256 ("),
                       ("128256 --fp8", "the same, V 128256, `--fp8`"), ("1558m --batch 16", "gpt2-1558m"),
                       ("1b --seq-len 4096", "llama-1b, B 4"),
                       ("4096 --fp8", "the same, `--fp8`"), ("--materialized-logits", "the same, `--materialized"),
                       ("batch 8 --lce-chunk 4096", "llama-1b, T 4096, `--fit`"),
                       ("-layers 3 --lce-chunk 4096 ", "llama-8b"), ("--fp8 --lce-chunk 4096 ", "the same, `--fp8`, `--fit`"))),
    (PLAN, r'--batch 1", ([0-9]+)\}', "one H100", "llama-1b, B 1", "measured"),
    *((README, rf"^\| {tokens} \| (?:`--rec|the same).* \| {figures} GiB \|", "tokens of a step", row, tokens)
      for tokens in ("81,920", "16,384")
      for row, figures in (("LM head + loss, fused", r"([0-9.]+) / [0-9.]+ GiB \| [0-9.]+ / [0-9.]+"),
                           ("LM head + loss, materialized", r"[0-9.]+ / ([0-9.]+) GiB \| [0-9.]+ / [0-9.]+"),
                           ("fused", r"[0-9.]+ / [0-9.]+ GiB \| ([0-9.]+) / [0-9.]+"),
                           ("materialized", r"[0-9.]+ / [0-9.]+ GiB \| [0-9.]+ / ([0-9.]+)"))),
    *((REFERENCE, rf"^\| C = {chunk} " + r"\| [^|]* " * k + r"\| ([0-9.]+), ([0-9.]+ .iB) \|", "one H200", f"chunk {chunk}", shape)
      for chunk in (4096, 2048, 1024) for k, shape in enumerate(SHAPES[:3])),
    *((REFERENCE, rf"^\| {term}.* \| ([0-9.]+) \|$", "", row, "one H200")
      for term, row in (("weights of tokens", "mean on"), ("temperature", "mean on"), ("z-loss", "mean on"), ("label smoothing ε", "label"),
                        ("soft-cap u", "soft-cap"), ("bias b", "bias"), ("log Σ p²", "squared"), ("entropy", "entropy"),
                        ("largest logit", "squared"))),
]


def lines(page):
    return (ROOT / page).read_text().splitlines()


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def cell_of(text, heading, row, column):
    """Returns the number of a line of BENCHMARKS.md, and its cell in this row and column of the first table that has them."""
    head = None
    for number, line in enumerate(text, 1):
        if not line.startswith("|"):
            head = None
        elif head is None:
            head = cells(line) if cells(line)[0].startswith(heading) else []
        elif cells(line)[0].startswith(row):
            for title, cell in list(zip(head, cells(line)))[1:]:
                if title.startswith(column):
                    return number, cell
    raise LookupError(f"{BENCHMARKS} has no table of {heading!r} with a row {row!r} and a column {column!r}")


def figures(text):
    """Returns [(value, half of its last digit)] of each figure; MiB are GiB."""
    found = []
    for digits, unit in re.findall(r"([0-9][0-9,]*(?:\.[0-9]+)?)( MiB)?", text):
        scale = 1 / 1024 if unit else 1
        found.append((float(digits.replace(",", "")) * scale, 0.5001 * 10**-len(digits.partition(".")[2]) * scale))
    return found


def disagreements(repeated, text_of):
    """Returns a sentence for each repeated figure that differs from the table's by more than its rounding."""
    found, text = [], text_of(BENCHMARKS)
    for page, pattern, *place in repeated:
        number, cell = cell_of(text, *place)
        matches = list(re.finditer(pattern.replace(" ", r"\s+"), "\n".join(text_of(page)), re.M))
        if len(matches) != 1:
            found.append(f"{page}: {len(matches)} places match {pattern}; let REPEATED name one, or none if the figure is gone")
            continue
        for group, (true, rounding) in zip(matches[0].groups(), figures(cell)):
            (value, half), = figures(group)
            if abs(value - true) > max(half, rounding):
                line = matches[0].string.count("\n", 0, matches[0].start()) + 1
                found.append(f"{page}:{line} says {group}, but {BENCHMARKS}:{number} has {cell}")
    return found


def test_repeated_figures(folder):
    assert not disagreements(REPEATED, lines), "\n".join(disagreements(REPEATED, lines))


def test_another_figure_is_found(folder):
    """A page with another figure, and a sentence that went, are named."""
    (page, pattern, *_), = [each for each in REPEATED if each[1].startswith(r"^\| chunks of 4,096")]
    at = next(k for k, line in enumerate(lines(page)) if re.match(pattern, line))

    def changed(to):
        return lambda path: [re.sub(pattern, to, line) if path == page else line for line in lines(path)]
    each, = [each for each in disagreements(REPEATED, changed("| chunks of 4,096 | 9.99 | 1.04 GiB |"))]
    assert each.startswith(f"{page}:{at + 1} says 9.99, but {BENCHMARKS}:"), each
    each, = disagreements(REPEATED, changed("| chunks of 4,096 | 1.02 | 1.4 GiB |"))
    assert f"{page}:{at + 1} says 1.4 GiB" in each, each
    each, = disagreements(REPEATED, changed("gone"))
    assert each.startswith(f"{page}: 0 places match"), each


def test_what_half_the_chunk_adds(folder):
    """Exercise 8's answer is the difference between BENCHMARKS' rows of one H100."""
    times = page_data.chunks()["H100"]
    large, middle, small = ([time for chunk, time in times if chunk == size] for size in (4096, 2048, 1024))
    added = [f"{b - a:.2f}" for a, b in zip(middle, small)]
    text = " ".join(" ".join(lines(LCE)).split())
    assert f"and adds {min(added)} to {max(added)}; from" in text
    assert f"and adds at most {max(b - a for a, b in zip(large, middle)):.2f} (" in text


main(globals(), 1)
