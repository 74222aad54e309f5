#!/usr/bin/env python3
"""Writes the data of kernels/lce/page.html into it: the step from the timelines of ./train --plan --timeline, the rungs
from ladder.py and LCE.md's table, the times of chunks from BENCHMARKS.md.

A step pushes and pops the same blocks whatever its sizes, and each block's bytes are a sum of products of N, V and H:
plans at eight corners find the factors, a ninth checks them. The blocks of LM head + loss also depend on the chunk;
the page has their formulas.
"""
import ast
import csv
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import textwrap

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
TRAIN = os.environ.get("LCE_TRAIN", os.path.join(ROOT, "train"))
PAGE = os.path.join(ROOT, "kernels", "lce", "page.html")
BEGIN, END = '<script type="application/json" id="data">\n', "</script>"
SEQUENCE, HEAD = 4096, "lm_head, loss"
OPTIONS = (f"--model llama-1b --seq-len {SEQUENCE} --head-dim 64 --intermediate-size 8192 --recompute layer --moment-dtype bf16 "
           "--no-master-weights --val-fraction 0 --sample-every 0 --device cuda")
MODES = {"fused": "--fused-lce", "materialized": "--materialized-logits"}
LOW, CHECKED = {"N": 8192, "V": 32768, "H": 1024}, (81920, 128256, 4096)
PRODUCTS = ["".join(letters) for count in range(4) for letters in itertools.combinations(LOW, count)]

# The ladder's passes over a row of width V, a letter for each, and what a rung stores.
PASSES = {"1 materialized": ("zzz zggg", "2 [N, V]"), "2 recomputed": ("zzzzzggg", "2 [C, V]"),
          "3 gradient_in_forward": ("zzz zggg", "[C, V]"), "4 anchored": ("z   zEEE", "[C, V]"),
          "5 in_epilogue, 6, 7": ("E     EE", "[C, V], in x's dtype")}


def corner(doubled):
    """Returns the sizes N, V and H, with these doubled."""
    return tuple(size * (1 + (letter in doubled)) for letter, size in LOW.items())


def timeline(mode, sizes):
    """Returns {category: bytes that stay}, and the second step's [(block, category, bytes; below 0 where it is popped)]."""
    tokens, vocab, hidden = sizes
    options = f"{OPTIONS} --batch {tokens // SEQUENCE} --vocab {vocab} --hidden-size {hidden} {MODES[mode]} --plan --timeline"
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "timeline.csv")
        subprocess.run([TRAIN, *options.split(), path], check=True, stdout=subprocess.DEVNULL)
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    categories = [name for name in rows[0] if name not in ("event", "step", "at", "block", "total")]
    last = max(k for k, row in enumerate(rows) if row["step"] == "1")
    events = [(row["block"], name, int(row[name]) - int(before[name])) for before, row in itertools.pairwise(rows[last:])
              for name in categories if row["step"] == "2" and row[name] != before[name]]
    for length in 4, 2:  # one chunk stands for all, and one pass over targets
        for k in reversed(range(len(events) - length)):
            if events[k][1] == HEAD and events[k:k + length] == events[k + length:k + 2 * length]:
                del events[k:k + length]
    return {name: int(rows[last][name]) for name in categories}, events


def value(form, sizes):
    return sum(factor * math.prod(sizes["NVH".index(letter)] for letter in letters) for letters, factor in form.items())


def form_of(found):
    """Returns {sizes: bytes} as factors of products: {"NH": 2, "": 256} for 2 N H + 256."""
    form = {}
    for letters in reversed(PRODUCTS):  # a mixed difference leaves the products that have all of them
        change = sum((-1)**(len(letters) - len(doubled)) * (found[corner(doubled)] - value(form, corner(doubled)))
                     for doubled in PRODUCTS if set(doubled) <= set(letters))
        if change:
            form[letters] = change // math.prod(LOW[letter] for letter in letters)
    if any(value(form, sizes) != size for sizes, size in found.items()):
        sys.exit(f"page_data: {form} is not what a block has: {found}")
    return form


def folded(events):
    """Returns [[times, event...]...], which is shorter: most layers push and pop alike."""
    parts = []
    while events:
        def times(length):
            return next(k for k in itertools.count(1) if events[k * length:(k + 1) * length] != events[:length])
        length = max(range(1, 64), key=lambda length: (times(length) - 1) * length)
        parts.append([times(length), *events[:length]])
        events = events[times(length) * length:]
    return parts


def step():
    """Returns the step: blocks are numbered from 1, and events are their numbers, below 0 where a block is popped."""
    numbers, steps, stays = {}, {}, {}
    for mode in MODES:
        plans = {sizes: timeline(mode, sizes) for sizes in [*map(corner, PRODUCTS), CHECKED]}
        stays = {name: form_of({sizes: stays[name] for sizes, (stays, _) in plans.items()}) for name in plans[CHECKED][0]}
        events = []
        for same in zip(*(events for _, events in plans.values()), strict=True):
            (block, category, change), sign = same[0], 1 if same[0][2] > 0 else -1
            form = {} if category == HEAD else form_of({sizes: sign * event[2] for sizes, event in zip(plans, same)})
            events.append(sign * numbers.setdefault((block, category, json.dumps(form)), len(numbers) + 1))
        steps[mode] = folded(events)
    blocks = [[block, category, json.loads(form)] for block, category, form in numbers]
    return {"command": OPTIONS, "sequence": SEQUENCE, "stays": stays, "blocks": blocks, **steps}


def read(*path):
    with open(os.path.join(ROOT, *path), encoding="utf-8") as file:
        return file.read()


def table(page, heading):
    """Returns the rows of the page's table whose first heading begins like this: lists of cells, the headings first."""
    found = re.search(rf"^\| {heading}.*\n(?:\|.*\n)+", page, re.M)[0]
    head, _, *rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in found.splitlines()]
    return [head, *rows]


def rungs():
    """Returns the ladder's rungs: passes over a row, code in Python (rung 6: C), and, on the CPU, what was measured."""
    source, page = read("tools", "ladder", "ladder.py"), read("kernels", "lce", "LCE.md")
    code = {f.name: textwrap.dedent("\n".join(source.splitlines()[f.body[0].lineno - 1:f.end_lineno]))
            for f in ast.parse(source).body if isinstance(f, ast.FunctionDef)}
    code["on_hopper"] = textwrap.dedent(re.sub("^[+ ]", "", re.search(r"5 → 6.*?```diff\n(.*?)```", page, re.S)[1], flags=re.M))
    measured = {row[0][0]: dict(time=float(row[2]), memory=float(row[3].split()[0]), certain=1 if "100%" in row[7] else float(row[7]))
                for row in table(page, "rung . time")[1:]}
    names = "materialized", "recomputed", "gradient_in_forward", "anchored", "in_epilogue", "on_hopper", "linear_cross_entropy"
    passes = [*PASSES.values()]
    return [{"name": name, "passes": passes[min(k, 4)][0], "holds": passes[min(k, 4)][1], "code": code[name], **measured.get(str(k + 1), {})}
            for k, name in enumerate(names)]


def chunks():
    """Returns {card: [[C, time over that of the three GEMMs]...]}, at all shapes that were measured."""
    page = read("tools", "BENCHMARKS.md")
    return {card: [[int(row[0].split()[1]), float(cell.split(",")[0])] for row in table(page, f"one {card}, .*N 4096") for cell in row[1:]
                   if re.match("chunk [0-9]+$", row[0]) and cell] for card in ("H200", "H100")}


def text():
    found = step()
    lines = [f'"{name}": {json.dumps(found[name])}' for name in ("command", "sequence", "stays")]
    lines.append('"blocks": [\n' + ",\n".join(map(json.dumps, found["blocks"])) + "]")
    lines += ["\n".join(textwrap.wrap(f'"{mode}": {json.dumps(found[mode])}', 108)) for mode in MODES]
    python = re.findall("```python\n(.*?)\n```", read("kernels", "lce", "LCE.md"), re.S)[1]
    lines.append(f'"python": {json.dumps([line.split("  #")[0].rstrip() for line in python.splitlines()])}')
    lines.append('"rungs": [\n' + ",\n".join(json.dumps(rung, ensure_ascii=False) for rung in rungs()) + "]")
    lines.append(f'"chunks": {json.dumps(chunks())}')
    return "{" + ",\n".join(lines) + "}\n"


def main():
    try:
        with open(PAGE, encoding="utf-8") as file:
            before, after = re.fullmatch(f"(.*{BEGIN}).*?({END}.*)", file.read(), re.S).groups()
        page = before + text() + after
        with open(PAGE, "w", encoding="utf-8") as file:
            file.write(page)
    except AttributeError:
        sys.exit(f"page_data: {PAGE} has no line {BEGIN.strip()}, after which the data would go; restore it from git")
    except OSError as error:
        sys.exit(f"page_data: {error}; run make, or name a program that plans by LCE_TRAIN")
    except (subprocess.CalledProcessError, ValueError, LookupError) as error:
        sys.exit(f"page_data: {TRAIN} does not plan what the page draws ({error!r}); run make, or name another program by LCE_TRAIN")


if __name__ == "__main__":
    main()
