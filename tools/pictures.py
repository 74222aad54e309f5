#!/usr/bin/env python3
"""Draws the still pictures of kernels/lce/LCE.md and REFERENCE.md into a folder: tools/pictures.py kernels/lce"""
import os
import sys

import drawing
from drawing import COLORS, GRID, INK, MUTED, box, panel, picture, save

# The ladder's passes over a row of width V, a letter for each, and what a rung holds.
PASSES = {"1 materialized": ("zzz zggg", "2 [N, V]"), "2 recomputed": ("zzzzzggg", "2 [C, V]"),
          "3 gradient_in_forward": ("zzz zggg", "[C, V]"), "4 anchored": ("z   zEEE", "[C, V]"),
          "5 to 7 in_epilogue, ..., fused": ("E     EE", "[C, V], in x's dtype")}


def passes(path):
    """Draws what each rung of the ladder reads and writes of width V: a letter for each pass over a row."""
    heads = ("GEMM 1\nwrites", "maximum\nreads", "sum\nreads", "GEMM 1\nagain", "gradient\nreads", "gradient\nwrites", "GEMM 2\nreads",
             "GEMM 3\nreads")
    figure, cells = picture(10.4, 4.3, "What a rung reads and writes",
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
    ax.text(9.35, -0.2, "holds", color=MUTED, fontsize=9)
    drawing.rows_of(ax, PASSES, 11.2)
    save(figure, path)


def ring(path):
    """Draws a CTA of the logits' GEMM over time (hopper_kernel.cuh), simulated in units of one k-step's MMAs."""
    stages, latency, steps, epilogue, tiles = 5, 3, 8, 6, 4
    figure, cells = picture(10.4, 4.9, "The ring of stages, the producer and the consumers",
                            "A CTA of the logits' GEMM. Grey: TMA fills a stage; coloured: a consumer's MMAs read it.",
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
    """Draws which cluster's tile comes when, of logits and dX at C 4,096, H 4,096, V 128,256."""
    clusters, shades = 66, ("#a9c3df", "#dce8f3", "#f3e3c8")
    figure, cells = picture(10.4, 5.6, "The order of tiles",
                            "C 4,096, H 4,096, V 128,256; 66 clusters of two CTAs on an H100; the tiles of a wave have one shade",
                            "Every other wave walks K backwards. The last 44 tiles of dX do not fill a wave, and are split along K.",
                            (0.5, 0.3, 1.75, 0.55), ncols=2, wspace=0.12)
    kinds = (("Logits: tiles of 256 x 192", "the first 20 of 668 columns, groups of 8 rows", 16, 668, 20, 8),
             ("dX: tiles of 512 x 192", "all 22 columns, groups of 3 rows", 8, 22, 22, 3))
    for cell, (title, unit, rows, columns, shown, group) in enumerate(kinds):
        ax = panel(figure, cells[cell], title, unit)
        for tile in range(rows * columns):
            row, column = tile_at(tile, rows, columns, group)
            if column < shown:
                box(ax, column, row, 1, 1, fc=shades[tile // clusters % 3], lw=0.8)
                ax.text(column + 0.5, row + 0.5, tile, fontsize=5, ha="center", va="center")
        ax.set(xlim=(0, shown), ylim=(rows, 0), xticks=[], yticks=[])
        ax.grid(False)
    save(figure, path)


if __name__ == "__main__":
    missing = drawing.why_not()
    if missing or len(sys.argv) != 2:
        sys.exit(f"pictures: {missing or 'name the folder for the pictures of LCE.md: tools/pictures.py kernels/lce'}")
    for draws, name in (passes, "passes.png"), (ring, "ring.png"), (tile_order, "tiles.png"):
        draws(os.path.join(sys.argv[1], name))
