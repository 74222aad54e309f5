#!/usr/bin/env python3
"""Draws the still pictures of kernels/lce/LCE.md and REFERENCE.md into a folder: tools/pictures.py kernels/lce"""
import math
import os
import sys

import drawing
from drawing import COLORS, GRID, INK, MUTED, box, label, panel, picture, save
from page_data import PASSES, chunks

FUSED, USUAL = COLORS[1], COLORS[0]


def passes(path):
    """Draws what each rung of the ladder reads and writes of width V: a letter for each pass over a row."""
    heads = ("GEMM 1\nwrites", "maximum\nreads", "sum\nreads", "GEMM 1\nagain", "gradient\nreads", "gradient\nwrites", "GEMM 2\nreads",
             "GEMM 3\nreads")
    figure, cells = picture(10.4, 4.3, "Reads and writes of each rung",
                            "of width V for each token; z: logits, g: their gradient, E: exp(z - a)",
                            "Filled: written to memory. Outlined: read. GEMM 1: z = x Wᵀ; 2: dX; 3: dW.", (2.7, 0.3, 1.6, 0.55))
    ax = panel(figure, cells[0], bare=True)
    for y, (name, (letters, holds)) in enumerate(PASSES.items()):
        for x, letter in enumerate(letters):
            written = x in (0, 3, 5)
            if letter != " ":
                box(ax, x + 0.12, y + 0.14, 0.76, 0.72, letter, COLORS[1] if written else "white", COLORS[1],
                    "white" if written else INK, lw=1.4)
        ax.text(8.75, y + 0.5, len(letters.replace(" ", "")), ha="center", va="center", weight="bold")
        ax.text(9.35, y + 0.5, holds, va="center")
    for x, head in enumerate((*heads, "passes")):
        ax.text(x + (0.5 if x < 8 else 0.75), -0.2, head, ha="center", color=MUTED, fontsize=9)
    ax.text(9.35, -0.2, "stores", color=MUTED, fontsize=9)
    drawing.rows_of(ax, PASSES, 11.2)
    save(figure, path)


def ring(path):
    """Draws a CTA of the logits' GEMM over time (hopper_kernel.cuh), simulated in units of one k-step's MMAs."""
    stages, latency, steps, epilogue, tiles = 5, 3, 8, 6, 4
    figure, cells = picture(10.4, 4.9, "The ring of stages, the producer and the consumers",
                            "A CTA of the logits' GEMM. Light grey: TMA fills a stage. Blue: consumer 0's MMAs read it. Orange: consumer 1's.",
                            f"Time in k-steps, simulated: a load takes {latency}, a tile {steps} (32 at H 2,048), its epilogue {epilogue}.",
                            (1.5, 0.3, 1.35, 0.85))
    ax, sent, done, free = panel(figure, cells[0]), [], [], [0] * stages
    for k in range(steps * tiles):
        stage, turn = k % stages, k // steps % 2
        sent.append(max(free[stage], sent[-1] + 0.5 if sent else 0))  # once the stage is empty
        begin = max(sent[-1] + latency, done[-1] if done else 0)  # once it is full
        if k % steps == 0 and k >= 2 * steps:
            begin = max(begin, done[k - steps - 1] + epilogue)  # this consumer's last tile
        done.append(begin + 1)
        free[stage] = begin + 1
        color = COLORS[1 - turn]
        box(ax, sent[-1] - 0.2, 0.25, 0.4, 0.5, fc=MUTED)
        box(ax, sent[-1], 1.1 + stage, latency, 0.8, fc=GRID)
        box(ax, begin, 1.1 + stage, 1, 0.8, fc=color)
        box(ax, begin, 6.1 + turn, 1, 0.8, fc=color)
        if k % steps == steps - 1:
            box(ax, begin + 1, 6.1 + turn, epilogue, 0.8, "epilogue", ec=color, lw=1.4)
    drawing.rows_of(ax, ["producer: loads", *(f"stage {k}" for k in range(stages)), "consumer 0", "consumer 1"], 1)
    ax.set_xlim(-0.5, done[-1] + epilogue + 0.5)
    ax.grid(False)
    save(figure, path)


def tile_at(tile, rows, columns, group):
    """Mirrors tile_coord() of hopper_tiles.cuh, in tiles."""
    first, within = tile // (group * columns) * group, tile % (group * columns)
    height = min(group, rows - first)
    return first + within % height, within // height


def tile_order(path):
    """Draws which tiles of logits and dX are computed at the same time, at C 4,096, H 4,096, V 128,256."""
    clusters, shades = 66, ("#6f9cc9", "#a9c3df", "#f3d9ae")
    figure, cells = picture(10.4, 5.6, "The order of tiles",
                            "C 4,096, H 4,096, V 128,256. A wave is what an H100's 66 clusters of two CTAs compute at the same time.",
                            "Line: the order within a wave. Every other wave walks K backwards. The last wave of dX has 44 tiles, split along K.",
                            (0.5, 0.3, 1.75, 0.55), ncols=2, wspace=0.12)
    kinds = (("Logits: tiles of 256 x 192", "the first 28 of 668 columns, groups of 8 rows", 16, 668, 28, 8),
             ("dX: tiles of 512 x 192", "all 22 columns, groups of 3 rows", 8, 22, 22, 3))
    for cell, (title, unit, rows, columns, shown, group) in enumerate(kinds):
        ax, waves = panel(figure, cells[cell], title, unit, bare=True), [[], [], []]
        for tile in range(rows * columns):
            row, column = tile_at(tile, rows, columns, group)
            if column < shown:
                first = tile < 3 * clusters
                box(ax, column, row, 1, 1, fc=shades[tile // clusters] if first else "#f4f6f8", lw=0.8)
                if first:
                    waves[tile // clusters].append((column + 0.5, row + 0.5))
        ax.plot(*zip(*waves[0]), color=INK, lw=0.9, alpha=0.7)
        for number, wave in enumerate(waves):
            (x, y), = [[math.fsum(v) / len(wave) for v in zip(*wave)]]
            ax.text(x, y, f"wave {number + 1}", ha="center", va="center", weight="bold", bbox=dict(fc="white", ec="none", pad=2, alpha=0.8))
        ax.set(xlim=(0, shown), ylim=(rows, 0), yticks=[])
    save(figure, path)


def boxes(ax, places, height, **how):
    """Draws (x, y, width, words) as boxes."""
    for x, y, width, words in places:
        box(ax, x, y, width, height, words, **how)


def arrows(ax, *ends):
    """Draws an arrow for each (x, y, x, y), from the first place to the second."""
    for x, y, *end in ends:
        ax.annotate("", end, (x, y), arrowprops=dict(arrowstyle="-|>", color=MUTED, lw=1.4, shrinkA=0, shrinkB=0))


def flow(path):
    """Draws the data flow of one chunk: three GEMMs, and statistics of length C between them."""
    figure, cells = picture(10.4, 4.6, "One chunk", "Blue: a GEMM. E is the only matrix of width V; no logit is stored.", "", (0.4, 0.4, 1.3, 0.3))
    ax = panel(figure, cells[0], bare=True)
    boxes(ax, ((0, 0, 1.6, "x  [C, H]"), (0, 1.3, 1.6, "W  [V, H]"), (0, 3.9, 1.6, "y  [C]"), (6, 0.65, 1.7, "E  [C, V]"),
               (6, 2.4, 1.7, "R  [C]"), (11, 0.2, 1.6, "dX  [C, H]"), (11, 2, 1.6, "dW  [V, H]")), 0.8, fc=GRID)
    boxes(ax, ((2.6, 0.65, 2.4, "GEMM 1\nz = x Wᵀ, exp(z − a)"), (8.6, 0.2, 1.5, "GEMM 2\nE W"), (8.6, 2, 1.5, "GEMM 3\nEᵀ (r x)")),
          0.8, fc=FUSED, color="white")
    boxes(ax, ((2.6, 3.8, 2.4, "a = x · W[y]  [C]"), (5.75, 3.8, 6.85, "loss = log(1 + R),  r = 1 / (1 + R),  c = −R / (1 + R)  [C]")),
          0.9, ec=FUSED, lw=1.4)
    arrows(ax, (1.6, 0.4, 2.6, 0.9), (1.6, 1.7, 2.6, 1.2), (1.6, 4.25, 2.6, 4.25), (3.8, 3.8, 3.8, 1.45), (5, 1.05, 6, 1.05),
           (7.7, 0.9, 8.6, 0.6), (7.7, 1.2, 8.6, 2.3), (10.1, 0.6, 11, 0.6), (10.1, 2.4, 11, 2.4), (6.85, 1.45, 6.85, 2.4),
           (6.85, 3.2, 6.85, 3.8), (9.35, 3.8, 9.35, 2.8), (11.8, 3.8, 11.8, 2.8))
    for x, y, words in ((7, 1.95, "row sums"), (9.5, 3.3, "r"), (11.95, 3.3, "row y += c x")):
        ax.text(x, y, words, va="center", color=MUTED)
    for y, words in ((0.6, "= r (E W) + c W[y]"), (2.4, "+= Eᵀ (r x)")):
        ax.text(12.75, y, words, va="center")
    ax.set(xlim=(0, 15.4), ylim=(4.8, 0), yticks=[])
    save(figure, path)


def split(path):
    """Draws a head split over two ranks: what each computes, and what they exchange for a chunk."""
    figure, cells = picture(11.4, 4.9, "A head split over two ranks",
                            "One chunk. Each rank has half of W's rows, and C tokens of its own. Blue: a GEMM. Light orange: a collective.", "",
                            (0.4, 0.4, 1.3, 0.3))
    ax = panel(figure, cells[0], bare=True)
    for rank, y in enumerate((0.3, 2.8)):
        boxes(ax, ((0, y, 1.9, f"x of rank {rank}\n[C, H]"), (4.5, y, 1.9, "x of both\n[2 C, H]"), (12.4, y, 1.9, "R, r, c\n[2 C]"),
                   (20.2, y, 1.9, f"dX of rank {rank}\n[C, H]")), 1, fc=GRID)
        boxes(ax, ((7, y, 2.1, f"E, a{'₀₁'[rank]}, R{'₀₁'[rank]}\n[2 C, V / 2]"), (14.9, y, 2.6, "r (E W) + c W[y]\n[2 C, H]"),
                   (14.9, y + 1.15, 2.6, "dW of its rows\n[V / 2, H]")), 1, fc=FUSED, color="white")
        starts, ends = (1.9, 4, 6.4, 9.1, 11.9, 14.3, 17.5, 19.7), (2.4, 4.5, 7, 9.6, 12.4, 14.9, 18, 20.2)
        arrows(ax, *((start, y + 0.5, end, y + 0.5) for start, end in zip(starts, ends)), (14.3, y + 0.8, 14.9, y + 1.65))
    boxes(ax, ((2.4, 0, 1.6, "all-gather\nof x;\nsum of z[y]"), (9.6, 0, 2.3, "all-gather of\n(a₀, R₀), (a₁, R₁)"),
               (18, 0, 1.7, "reduce-\nscatter\nof dX")), 5.1, fc=drawing.SAVED)
    ax.set(xlim=(0, 22.1), ylim=(5.1, 0), yticks=[])
    save(figure, path)


def certain(path):
    """Draws the error of the target's gradient over its lead, in fp32, as page.html computes it."""
    import numpy
    f, leads = numpy.float32, [k / 25 for k in range(751)]
    errors = {"p − 1": [], "−R / (1 + R)": []}
    for lead in leads:
        z = numpy.array([12, *(12 - lead - more for more in (0, 0, 0, 0.125, 0.875))], f)
        R = math.fsum(math.exp(v) for v in z[1:].astype(float) - 12)  # of the logits as fp32 has them
        lse = z.max() + numpy.log(numpy.exp(z - z.max()).sum(dtype=f))
        sums = numpy.exp(z[1:] - z[0]).sum(dtype=f)
        for name, c in (("p − 1", numpy.exp(z[0] - lse) - f(1)), ("−R / (1 + R)", -sums / (f(1) + sums))):
            errors[name].append(max(abs(float(c) * (1 + R) / -R - 1), 1e-9))
    figure, cells = picture(10.4, 4.4, "Which number do you subtract?",
                            "Relative error of the target's entry of the gradient, in fp32; the target's logit is 12",
                            "Orange: the usual p − 1, after the maximum. Blue: after the target's own logit.", (0.95, 1.4, 1.2, 0.95))
    ax = panel(figure, cells[0])
    for (name, values), color in zip(errors.items(), (USUAL, FUSED)):
        ax.plot(leads, values, color=color, lw=0.9)
        label(ax, [(30, values[-1], color, name)])
    ax.set(yscale="log", ylim=(1e-9, 3), xlim=(0, 30), xlabel="lead of the target's logit", yticks=[1e-8, 1e-6, 1e-4, 1e-2, 1],
           yticklabels=["1e-8", "1e-6", "1e-4", "1%", "100%"])
    for lead, words in ((10, "0.2%"), (14, "6.7%"), (15, "27.5%"), (16, "100%")):
        ax.plot(lead, errors["p − 1"][25 * lead], "o", color=USUAL, ms=5)
        ax.annotate(words, (lead, errors["p − 1"][25 * lead]), xytext=(-4, 7), textcoords="offset points", ha="right", fontsize=9)
    save(figure, path)


def price(path):
    """Draws the time of a chunk over that of its three GEMMs: measured, and if nothing overlapped with dW's traffic."""
    figure, cells = picture(10.4, 4.4, "The price of a chunk",
                            "Time over that of the three GEMMs alone, bf16. Every chunk reads and writes dW: 8 V H bytes for 6 C V H flops.",
                            "Dots: measured at four sizes (BENCHMARKS.md). Dashes: if nothing overlapped, at 690 TFLOP/s and the card's bandwidth.",
                            (0.75, 0.7, 1.2, 0.95))
    ax, sizes = panel(figure, cells[0]), [512 * 2**(k / 10) for k in range(51)]
    for (card, points), bandwidth, color, beside in zip(chunks().items(), (4.8, 3.35), (COLORS[6], COLORS[3]), (1.04, 0.96)):
        ax.plot(sizes, [1 + 8 / bandwidth / (6 * size / 690) for size in sizes], color=color, lw=1.6, ls=drawing.DASHES)
        ax.plot(*zip(*((beside * size, time) for size, time in points)), "o", color=color, ms=5, alpha=0.8)
        label(ax, [(600, 1 + 8 / bandwidth / (6 * 600 / 690), color, card)], up=7)
    ticks = [512 << k for k in range(6)]
    ax.set(xscale="log", xticks=ticks, xticklabels=map(drawing.count, ticks), xlim=(512, 16384), ylim=(0.9, 1.6), xlabel="tokens per chunk")
    ax.minorticks_off()
    save(figure, path)


PICTURES = {"flow": flow, "certain": certain, "passes": passes, "price": price, "split": split, "ring": ring, "tiles": tile_order}

if __name__ == "__main__":
    missing = drawing.why_not()
    if missing or len(sys.argv) != 2:
        sys.exit(f"pictures: {missing or 'name the folder for the pictures of LCE.md: tools/pictures.py kernels/lce'}")
    for name, draws in PICTURES.items():
        draws(os.path.join(sys.argv[1], name + ".png"))
