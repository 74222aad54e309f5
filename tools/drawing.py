"""The pictures of tools/memory_curve and tools/plot_run: memory over a size or over time, and runs."""
import os
import statistics
import sys

KIB, MIB, GIB = 2**10, 2**20, 2**30

# One palette. Materialized has the first colour and fused the second in every picture; they differ in grey.
INK, MUTED, GRID, SAVED = "#1c2330", "#5c6673", "#e1e5ea", "#fbe6d0"
COLORS = "#e87d1e", "#143d73", "#3a8f4f", "#8e4ba8", "#a81c33", "#5c7f99", "#1f939a", "#b08a14"
MODES = {"materialized": (COLORS[0], "s", "materialized logits"), "fused": (COLORS[1], "o", "fused, in chunks")}
# What memory holds, from the bottom up: what stays, then what comes and goes. Neighbours differ in lightness.
STAYING = {"weights": "#33414b", "master weights": "#556b78", "gradients": "#8397a3", "optimizer moments": "#b4c2ca",
           "tables and batch": "#6d6d6d"}
HEAD = "lm_head, loss"
STACK = STAYING | {"activations": "#5bad9c", "activation gradients": "#c6e9df", "workspace": "#e3b03c", HEAD: COLORS[4]}
DASHES = (0, (4, 2.5))  # what is planned only
NO_TIMES = "Planned, to the byte, so there are no times."
STYLE = {"font.size": 9.5, "svg.fonttype": "none", "savefig.dpi": 200, "axes.spines.top": False, "axes.spines.right": False,
         "axes.spines.left": False, "axes.edgecolor": MUTED, "axes.grid": True, "axes.grid.axis": "y", "grid.color": GRID,
         "axes.axisbelow": True, "axes.labelcolor": MUTED, "axes.titlelocation": "left", "text.color": INK, "xtick.color": MUTED,
         "ytick.color": MUTED, "ytick.left": False, "legend.frameon": False}


def why_not():
    """Imports matplotlib, only where something is drawn. Returns why it cannot and what to do, or None."""
    global plt, ticker, transforms
    try:
        import matplotlib.pyplot as plt
        from matplotlib import ticker, transforms
    except ImportError:
        return (f"{sys.executable} has no matplotlib, which draws them; have it by: apt-get install python3-matplotlib (for Debian's own "
                f"python), or {sys.executable} -m pip install matplotlib")
    plt.switch_backend("Agg")
    plt.rcParams.update(STYLE)
    return None


# --- text ---------------------------------------------------------------------------------------------------

count = "{:,.0f}".format


def shown(text):
    """What a terminal would act on is escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def unit_of(value, units=((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B"))):
    return next((unit for unit in units if value >= unit[0]), units[-1])


def size(value):
    """1.04 GiB, 561.2 MiB, as the programs print it."""
    scale, unit = unit_of(value)
    return f"{value / scale:,.{2 if scale == GIB else 1 if scale > 1 else 0}f} {unit}"


def three_digits(value):
    return f"{value:.{2 - (value >= 10) - (value >= 100)}f}"


def rate(value):
    """459K."""
    scale, unit = unit_of(value, ((1e9, "B"), (1e6, "M"), (1e3, "K"), (1, "")))
    return three_digits(value / scale) + unit


def times(large, small):
    return three_digits(large / small) if small else ""


# --- parts of a picture -------------------------------------------------------------------------------------

def picture(width, height, title, subtitle, note, margins, **grid):
    """A figure with its words and a grid of panels, in inches; margins are left, right, top, bottom."""
    figure, (left, right, top, bottom) = plt.figure(figsize=(width, height)), margins
    figure.text(0.36 / width, 1 - 0.3 / height, title, fontsize=14, weight="bold", va="top")
    figure.text(0.36 / width, 1 - 0.64 / height, subtitle, color=MUTED, va="top")
    figure.text(0.36 / width, 0.18 / height, note, color=MUTED, fontsize=8.5)
    return figure, figure.add_gridspec(left=left / width, right=1 - right / width, top=1 - top / height, bottom=bottom / height, **grid)


def require_ours(path):
    """A picture may only replace one of these programs."""
    if os.path.isfile(path) and os.path.getsize(path):
        with open(path, "rb") as file:
            if b"lce.c" not in file.read():
                raise FileExistsError(17, "what is there is not from this program; name another --out, or move it away", path)


def save(figure, path, fontsize=9.5):
    """Writes the figure, with a legend below the titles for the named lines of the first panel."""
    if figure.axes[0].get_legend_handles_labels()[0]:
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="upper left", ncols=9, handlelength=2.4, columnspacing=1.8,
                      fontsize=fontsize, bbox_to_anchor=(0.26 / figure.get_figwidth(), 1 - 0.92 / figure.get_figheight()))
    require_ours(path)
    form = os.path.splitext(path)[1][1:] or "png"
    with open(path, "wb") as file:
        figure.savefig(file, format=form, metadata={"Software" if form == "png" else "Creator": "lce.c"})
    plt.close(figure)


def panel(figure, cell, title, unit=""):
    """A panel: a title, under it the unit of the y axis, and space for the label of a point at the top."""
    ax = figure.add_subplot(cell)
    ax.set_title(title, pad=32 if unit else 8, weight="bold", fontsize=10.5)
    ax.annotate(unit, (0, 1), xycoords="axes fraction", xytext=(0, 17), textcoords="offset points", color=MUTED, fontsize=9)
    return ax


def bars(ax, names, values, form, colors):
    """A horizontal bar for each value, with its figure behind it; None is an empty one."""
    places = range(len(names))
    drawn = ax.barh(places, [value or 0 for value in values], 0.92 * 0.78, color=colors)
    ax.bar_label(drawn, ["" if value is None else form(value) for value in values], padding=5, fontsize=9,
                 bbox=dict(fc="white", ec="none", pad=1))
    ax.set(yticks=places, yticklabels=names, ylim=(len(names) - 0.4, -0.6))
    ax.xaxis.set_visible(False)
    ax.grid(False)
    ax.spines["bottom"].set_visible(False)


def label(ax, places, right=9, up=0.0):
    """Writes lines of text beside points, (x, y, colour, line...), to the left where `right` is negative. The
    first line is bold unless it is grey; the others are grey. Labels that would overlap are pushed apart."""
    places = sorted(places, key=lambda place: place[1])
    points = [ax.transData.transform(place[:2]) * 72 / ax.figure.dpi for place in places]
    before, now, heights = [y for _, y in points], [y for _, y in points], [12.5 * (len(place) - 3) for place in places]
    for k in list(range(len(places) - 1)) * 200:
        overlap = max(0, (heights[k] + heights[k + 1]) / 2 - (now[k + 1] - now[k]))
        if abs(points[k][0] - points[k + 1][0]) < 100:
            now[k] -= overlap / 2
            now[k + 1] += overlap / 2
    for (x, y, color, *lines), old, new, height in zip(places, before, now, heights):
        for k, text in enumerate(lines):
            bold = k == 0 and color != MUTED
            ax.annotate(text, (x, y), xytext=(right, up + new - old + height / 2 - 12.5 * (k + 0.5)), textcoords="offset points",
                        ha="right" if right < 0 else "left", va="center", color=MUTED if k else color, annotation_clip=False,
                        weight="bold" if bold else "normal", fontsize=9.5 if bold else 9,
                        zorder=7, bbox=dict(fc="white", ec="none", pad=0.5, alpha=0.8))


def linear_axis(ax, high, in_bytes=True, most=5):
    """The y axis from 0 to a round figure, its unit beside each tick."""
    scale, unit = unit_of(high) if in_bytes else (1, "")
    at = ticker.MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]).tick_values(0, high / scale)
    ax.set(ylim=(0, at[-1] * scale), yticks=at * scale, yticklabels=[f"{value:g} {unit if value else ''}" for value in at])


def log_axis(ax, low, high):
    """The y axis, of bytes, with a tick at some powers of two."""
    powers = [2**k for k in range(60) if low / 1.6 <= 2**k <= 1.6 * high][::-1]
    ticks = powers[::-(-len(powers) // 5)]
    ax.set(yscale="log", ylim=(low / 1.6, 1.6 * high), yticks=ticks,
           yticklabels=["{1:g} {0[1]}".format(unit_of(tick), tick / unit_of(tick)[0]) for tick in ticks])


# --- memory over a size -------------------------------------------------------------------------------------

AXES = {"tokens": "tokens", "vocab": "vocabulary", "hidden": "hidden size", "chunk": "tokens per chunk"}
COLUMN = {"tokens": "tokens", "vocab": "vocab_size", "hidden": "hidden_size", "chunk": "chunk"}


def best(row, name):
    """The measured figure where there is one, else the planned one."""
    return row["ledger_bytes" if name == "bytes" else name] or row["planned_" + name]


def layer_bytes(row):
    return best(row, "layer_bytes")


def x_of(row):
    return row[COLUMN[row["sweep"]]] or row["tokens"]  # materialized logits are one chunk


def setting(s, rows=()):
    """The line under a title: model, the sizes that are not swept, dtype, memory options and the device."""
    step, swept = s["what"] == "step", list(s["sweeps"])
    sizes = {"tokens": f"{s['batch']:,} x {s['seq_len']:,} tokens" if step else f"N {s['batch'] * s['seq_len']:,}",
             "hidden": f"H {s['hidden_size']:,}" * (not step), "vocab": f"V {s['vocab_size']:,}"}
    shown = [text for name, text in sizes.items() if text and swept != [name]]
    parts = [s["model"] if step else "LM head + loss alone", *shown, s["dtype"]]
    if step and s["recompute"] != "none":
        parts.append("recompute " + s["recompute"])
    if step and s["offload"]:
        parts.append("offloaded: " + s["offload"].replace(",", ", "))
    devices = sorted({row["device"] for row in rows if row["status"] == "measured"} | {s.get("measured_on")} - {None})
    where = {"cuda": "a GPU", "cpu": "a CPU"}[s["device"]]
    how = "measured on " + ", ".join(devices) if devices else f"planned for {where}" if s["planned"] or rows else f"on {where}"
    return f"{', '.join(parts)}; {how}"


def foot(s, rows):
    measured = [row for row in rows if row["status"] == "measured"]
    same = sum(row["ledger_bytes"] == row["planned_bytes"] for row in measured)
    too_large = sum(row["status"] == "does not fit" for row in rows)
    words = {f"Measured by the ledger; plan and ledger agree to the byte at {same} of {len(measured)} points.": measured,
             NO_TIMES: not measured, "Hollow: planned only.": 0 < len(measured) < len(rows),
             f"{too_large} would not fit.": too_large, s["grey"]: s["grey"]}
    return " ".join(text for text, true in words.items() if true)


def draw_modes(ax, rows, y):
    """Draws a line for each mode, hollow where only planned. Returns {mode: [xs, ys, measured]}."""
    found = {}
    for mode, (color, marker, name) in MODES.items():
        points = sorted((x_of(row), y(row), row["status"] == "measured") for row in rows if row["mode"] == mode and y(row))
        if not points:
            continue
        xs, ys, measured = found[mode] = list(zip(*points))
        line = dict(color=color, lw=2.4 if mode == "fused" else 2, ls="-" if any(measured) else DASHES, label=name)
        hollow = [k for k, was in enumerate(measured) if not was]
        if len(xs) == 1 and rows[0]["sweep"] == "chunk":
            ax.axhline(ys[0], **line)
        else:
            ax.plot(xs, ys, marker, **line, ms=7, mew=1.4, mfc=color if any(measured) else "white", zorder=4, clip_on=False)
            ax.plot(xs, ys, marker, color=color, ms=7, mew=1.4, mfc="white", zorder=5, clip_on=False, markevery=hollow)
    return found


def over_size(ax, rows, y, form=size, main=False, more=()):
    """Draws y over the swept size; labels and compares the lines' ends. The axis also includes `more`."""
    both = draw_modes(ax, rows, y)
    xs, ys = sorted({x_of(row) for row in rows}), [*more, *(value for _, values, _ in both.values() for value in values)]
    doubling = len(xs) > 2 and xs[-1] >= xs[0] * max(16, 1.6**(len(xs) - 1))
    ticks = xs[::-1][::-(-len(xs) // (5 if main else 3))] + [0] * (not doubling)
    ax.set(xscale="log" if doubling else "linear", xticks=ticks, xticklabels=map(count, ticks))
    if not doubling:
        ax.set_xlim(0, xs[-1])
    if doubling and form is size and max(ys) >= 8 * min(ys):
        log_axis(ax, min(ys), max(ys))
    else:
        linear_axis(ax, max(ys), form is size, 5 if main else 4)
    ax.minorticks_off()
    if rows[0]["sweep"] == "chunk":
        return both
    ends = {mode: (line[-1], values[-1]) for mode, (line, values, _) in both.items()}
    places = [(*end, MODES[mode][0], *[mode] * main, form(end[1])) for mode, end in ends.items()]
    x, low, high = max(ends.values())[0], *(of(end for _, end in ends.values()) for of in (min, max))
    if high > 1.02 * low:
        middle = (low * high)**0.5 if ax.get_yscale() == "log" else (low + high) / 2
        places.append((x, middle, INK, times(high, low) + "x"))
        ax.plot([x, x], [low, high], color=MUTED, lw=1, clip_on=False, zorder=1,
                transform=transforms.offset_copy(ax.transData, ax.figure, 12, 0, "points"))
    label(ax, places, 18)
    return both


def others(ax, s, rows):
    """Draws what the source says in grey: at its sizes, or as a line across where it names none. Over chunks,
    also labels what the materialized mode holds, and the fused mode at its default chunk."""
    left, right = ax.get_xlim()
    for name, points in s["marks"].items():
        line = [(x, mib * MIB) for x, mib in points]
        x, y = line[-1]
        if x is None:
            ax.axhline(y, color=MUTED, lw=1.1, ls=":")
        else:
            ax.plot(*zip(*line), "D", color=MUTED, ls=":", ms=4.5, lw=1.1, zorder=6, clip_on=False)
        label(ax, [(left if x is None else x, y, MUTED, f"{name}, {size(y)}")], *((6, 7) if x is None else (-9, 10)))
    held = {row["chunk"]: layer_bytes(row) for row in rows} if rows[0]["sweep"] == "chunk" else {}
    at, full = s["default_chunk"], held.get(0)
    if full:
        label(ax, [(right, full, COLORS[0], "materialized, " + size(full))])
    if full and at in held:
        ax.plot(at, held[at], "o", ms=13, mfc="none", mec=COLORS[1], mew=1.4, zorder=5)
        label(ax, [(at, held[at], COLORS[1], "fused, default chunk", f"{size(held[at])}, {times(full, held[at])}x less")], 12, -14)


def memory(s, rows, path):
    """A step, or LM head + loss alone, over one size: the total, the loss, and the time if measured."""
    layer, sweep, timed = s["what"] == "layer", rows[0]["sweep"], any(row["step_seconds"] or row["layer_seconds"] for row in rows)
    title = "With its inputs and gradients" if layer else "Peak memory of a training step"
    whole = (title, "in total", lambda row: best(row, "bytes"), size)
    alone = ("LM head + loss" + ("" if layer else " alone"), "beyond its inputs and gradients", layer_bytes, size)
    # Chunks have one panel: their labels need the space.
    panels = [alone] if sweep == "chunk" else [alone, whole] if layer else [whole, alone]
    if timed:
        panels.append(("Time", "over that of its three GEMMs", lambda row: row["layer_seconds"] and
                       row["layer_seconds"] / row["floor_seconds"], "{:.2f}".format) if layer else
                      ("Time of a step, s", "forward, backward, AdamW", lambda row: row["step_seconds"], "{:.3g} s".format))
    over = AXES[sweep] + (" of a step" if sweep == "tokens" and not layer else "")
    title = s["title"] or (f"LM head + loss over the {over}" if layer else f"Training {s['model']}: memory over the {over}")
    beside = len(panels) - 1
    shape = dict(nrows=beside, ncols=2, width_ratios=(1.75, 1), wspace=0.9 if sweep == "chunk" else 0.62, hspace=0.95) if beside else {}
    figure, cells = picture(10.4, 5.7, title, setting(s, rows), foot(s, rows), (0.95, 1.2 if beside else 2.6, 1.95, 0.95), **shape)
    for k, (title, unit, y, form) in enumerate(panels):
        ax = panel(figure, cells[k - 1, 1] if k else cells[:, 0], title, unit)
        known = [mib * MIB for points in s["marks"].values() for _, mib in points] if y is layer_bytes else []
        both = over_size(ax, rows, y, form, k == 0, more=known)
        if y is layer_bytes:
            others(ax, s, rows)
        if k == 0 and len(both) == 2 and both["fused"][0] == both["materialized"][0]:
            ax.fill_between(*both["fused"][:2], both["materialized"][1], color=SAVED, alpha=0.75, lw=0, zorder=0)
    main = figure.axes[0]
    device = [(x_of(row), row["device_bytes"] - row["device_base_bytes"]) for row in rows if row["device_bytes"]]
    if device:
        main.plot(*zip(*device), "_", color=INK, ms=20, mew=1.3, label="counted by the device", zorder=3, clip_on=False)
    usable = max(row["usable_bytes"] or 0 for row in rows)
    if not layer and 0 < usable < main.get_ylim()[1]:
        main.axhline(usable, color=INK, lw=1, ls=(0, (7, 4)))
        label(main, [(main.get_xlim()[0], usable, MUTED, f"the device has {size(usable)}")], 4, 8)
    for ax in (main, figure.axes[-1]):
        ax.set_xlabel(AXES[sweep])
    save(figure, path)


def grid(s, rows, path):
    """Several sweeps side by side: the memory held, and the rate where it was measured."""
    def teraflops(row):
        return row["layer_seconds"] and 6e-12 * row["tokens"] * row["vocab_size"] * row["hidden_size"] / row["layer_seconds"]
    kinds = [("memory held", layer_bytes, size), ("TFLOP/s", teraflops, count)][:1 + any(map(teraflops, rows))]
    figure, cells = picture(12, 2.75 + 2.3 * len(kinds), s["title"], setting(s, rows), foot(s, rows), (0.95, 0.95, 2, 0.85),
                            nrows=len(kinds), ncols=len(s["sweeps"]), wspace=1, hspace=0.75)
    for k, (unit, y, form) in enumerate(kinds):
        for column, sweep in enumerate(s["sweeps"]):
            over_size(panel(figure, cells[k, column], AXES[sweep], unit), [row for row in rows if row["sweep"] == sweep], y, form)
    save(figure, path)


def draw(s, rows, path):
    """Draws a table of tools/memory_curve."""
    if "step" in rows[0]:
        timeline(s, rows, path)
    elif len({row["sweep"] for row in rows}) > 1:
        grid(s, rows, path)
    else:
        memory(s, rows, path)


# --- memory over time ---------------------------------------------------------------------------------------

def total(row):
    return sum(row[name] for name in STACK)


def timeline(s, rows, path):
    """A panel for each mode, all on one scale: bytes by category over time."""
    titles = {"fp32 logits": "logits in fp32: a baseline, planned", "materialized": "materialized logits", "fused": "fused, in chunks"}
    there = {row["mode"] for row in rows}
    modes = {mode: [row for row in rows if row["mode"] == mode] for mode in titles if mode in there}
    peak, planned, end = max(map(total, rows)), s["planned"], {mode: moments[-1]["at"] for mode, moments in modes.items()}
    stays = sum(modes["fused"][-1][name] for name in STAYING)
    # Where most memory stays from step to step, the picture leaves it out: the shape is what comes and goes.
    left_out, base = (STAYING, stays) if stays > 0.55 * peak else ({}, 0)
    names = [name for name in STACK if name not in left_out and max(row[name] for row in rows) > 0.004 * peak]
    beyond = f" beyond the {size(stays)} of weights, gradients and optimizer state" if left_out else ""
    figure, cells = picture(10.8, 2.65 + 2.35 * len(modes), s["title"] or f"Training {s['model']}: memory over three steps", setting(s),
                            NO_TIMES if planned else "Bytes that the ledger counts on the device, dated after waiting for it.",
                            (0.9, 2.15, 1.9, 0.95), nrows=len(modes), hspace=0.62)
    for k, (mode, rows) in enumerate(modes.items()):
        top, spike, last = max(rows, key=total), max(rows, key=lambda row: row[HEAD]), rows[-1]
        right = end[mode] if planned else max(end.values())  # bytes are no time: no mode may look as if it ended earlier
        title = titles[mode]
        if mode == "fused" and not top[HEAD]:
            title += ": the layers, not the loss, now set the peak"
        if mode == "fused" and not planned and end["fused"] > 1.005 * end["materialized"]:
            title += f"; the run ends {100 * (end['fused'] / end['materialized'] - 1):.0f}% later"
        ax = panel(figure, cells[k], title, "bytes in use" + beyond)
        linear_axis(ax, 1.06 * (peak - base))
        ax.set_xlim(0, right)
        ax.stackplot([row["at"] for row in rows], [[row[name] for row in rows] for name in names], labels=names,
                     colors=[STACK[name] for name in names], step="post", lw=0)
        ax.axhline(total(top) - base, color=INK, lw=1, ls=DASHES)
        places, below = [(right, total(top) - base, INK, "peak " + size(total(top)))], 0
        for name in names:
            if name in STAYING and last[name] > 0.02 * peak:
                places.append((right, below + last[name] / 2, MUTED, f"{name} {size(last[name])}"))
            below += last[name]
        label(ax, places)
        label(ax, [(spike["at"], total(top) - base, STACK[HEAD], "LM head + loss " + size(spike[HEAD]))], 2, 9)
        if planned:
            steps = {row["step"]: row["at"] for row in rows[::-1]}  # when each begins
            ax.set_xticks(list(steps.values()), [f"step {step}" for step in steps], ha="left")
    ax.set_xlabel("bytes pushed and popped, in their order, each mode's to its own scale: no time" if planned else "time of three steps, s")
    save(figure, path, fontsize=8.5)


# --- runs ---------------------------------------------------------------------------------------------------

def trend(values):
    """A centred moving mean, twice (Tukey's twicing): the mean alone lies above a convex curve."""
    def mean(v):
        spans = [min(len(v) // 50, i, len(v) - 1 - i) for i in range(len(v))]
        return [statistics.fmean(v[i - n:i + n + 1]) for i, n in enumerate(spans)]
    once = mean(values)
    return [a + b for a, b in zip(once, mean([v - a for v, a in zip(values, once)]))]


def colors_of(names):
    """Each mode has its own colour; other names take those that are left."""
    left = iter(COLORS[2:] + COLORS[1::-1])
    return [next((color for mode, (color, *_) in MODES.items() if name.startswith(mode)), None) or next(left) for name in names]


def runs(title, subtitle, logs, path, start):
    """{name: log}: loss, gradient norm, learning rate and throughput over the steps."""
    figure, cells = picture(10.4, 7.65, title, subtitle, "", (0.75, 0.45, 2, 0.7), nrows=2, ncols=2, wspace=0.2, hspace=0.5)
    panels = {"loss": ("Loss", "circles: validation"), "grad_norm": ["Gradient norm"], "learning_rate": ["Learning rate"],
              "tokens_per_second": ["Tokens a second"]}
    for k, (field, titles) in enumerate(panels.items()):
        ax = panel(figure, cells[k], *titles)
        for (run, log), color in zip(logs.items(), colors_of(logs)):
            steps, values = log.series("step", field, start)
            if k < 2:  # noise around a trend; what follows is drawn as it is
                ax.plot(steps, values, color=color, alpha=0.3, lw=0.8)
            ax.plot(steps, trend(values) if k < 2 else values, color=color, lw=1.8 if k < 3 else 1, label=run)
            if field == "loss":
                ax.plot(*log.series("validation", "val_loss", start), "o-", color=color, lw=0.8, ms=4, mec="white")
        if field != "loss":
            ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(lambda value, _: rate(value).replace(".00", "").replace(".0K", "K"))
    for ax in figure.axes[2:]:
        ax.set_xlabel("step")
    save(figure, path)


def groups(title, subtitle, all_groups, path):
    """Each group's validation loss over steps and time, and minus the first group's; memory and speed."""
    figure, cells = picture(11.4, 7.4, title, subtitle, "Line: mean of the runs; band: from the lowest to the highest.",
                            (0.75, 1.35, 1.35, 0.95), nrows=2, ncols=2, wspace=0.55, hspace=0.55)
    colors, first = colors_of(group.name for group in all_groups), all_groups[0]
    for k, (name, x) in enumerate((("Validation loss", "step"), ("Validation loss over the time of the steps", "time, s"),
                                   (f"Validation loss minus the mean of {first.name}", "step"))):
        ax, places = panel(figure, cells[k], name), []
        ax.set_xlabel(x)
        for group, color in zip(all_groups, colors):
            xs = group.seconds if k == 1 else list(group.losses)
            beside = [statistics.fmean(first.losses.get(step, losses)) if k == 2 else 0 for step, losses in group.losses.items()]
            means, lows, highs = ([of(losses) - mean for losses, mean in zip(group.losses.values(), beside)]
                                  for of in (statistics.fmean, min, max))
            ax.plot(xs, means, color=color, lw=2)
            ax.fill_between(xs, lows, highs, color=color, alpha=0.15, lw=0)
            if means:
                places.append((means[-1], color, group.name, f"{means[-1]:{'+' if k == 2 else ''}.4f}"))
        label(ax, [(ax.get_xlim()[1], *place) for place in places])
        ax.set_xlim(ax.get_xlim())
    kinds = ("LM head + loss, peak memory", "head_peak_bytes", size), ("Tokens a second", "tokens_per_second", rate)
    for k, (name, field, form) in enumerate(kinds):
        ax = panel(figure, cells[3].subgridspec(2, 1, hspace=0.75)[k], name)
        bars(ax, [group.name for group in all_groups], [group.total(field) for group in all_groups], form, colors)
    save(figure, path)


def ladder(rows, path):
    """The versions in kernels/lce/LCE.md, from bench_lce --ladder --json: bars of time, memory and, on a CPU, error."""
    kinds = [("Time / three plain GEMMs", "ratio", "{:.2f}".format), ("Memory beyond inputs and gradients", "layer_bytes", size)]
    if all("certain_error" in row for row in rows):
        kinds += [("Error of dX, target nearly certain", "certain_error", lambda e: f"{100 * e:.0f}%" if e > 0.005 else f"{e:.0e}")]
    figure, cells = picture(0.8 + 4.3 * len(kinds), 1.9 + 0.42 * len(rows), "Versions of LM head + loss", "N {tokens:,}, H {hidden_size:,}, "
                            "V {vocab_size:,}, chunks of {chunk:,}; {gpu}".format(**rows[0]), "", (2.9, 0.9, 1.3, 0.3),
                            ncols=len(kinds), wspace=0.4)
    notes = {5: ", made to be read"}
    labels = [f"{row['name']}\n{row['gemms']} GEMMs{notes.get(row['rung'], '')}" for row in rows]
    for k, (title, field, form) in enumerate(kinds):
        names, colors = labels if k == 0 else [""] * len(rows), ["#8fb4d6"] * (len(rows) - 1) + [COLORS[1]]
        ax = panel(figure, cells[k], title)
        bars(ax, names, [row[field] for row in rows], form, colors)
        if field == "ratio":  # what no version can do without
            ax.axvline(1, color=INK, linewidth=1, zorder=4)
            ax.annotate("1.0", (1, len(rows) - 0.45), xytext=(0, -3), textcoords="offset points", ha="center", va="top", fontsize=9, annotation_clip=False)
    save(figure, path)


# --- the still pictures of kernels/lce/LCE.md ---------------------------------------------------------------

def box(ax, x, y, width, height, words="", fc="white", ec="white", color=INK, **how):
    ax.add_patch(plt.Rectangle((x, y), width, height, fc=fc, ec=ec, **how))
    ax.text(x + width / 2, y + height / 2, words, color=color, ha="center", va="center")


def passes(path):
    """What each rung of the ladder reads and writes of width V: a letter for each pass over a row."""
    heads = ("GEMM 1\nwrites", "maximum\nreads", "sum\nreads", "GEMM 1\nagain", "gradient\nreads", "gradient\nwrites", "GEMM 2\nreads",
             "GEMM 3\nreads")
    rungs = {"1 materialized": ("zzz zggg", "2 [N, V]"), "2 recomputed": ("zzzzzggg", "2 [C, V]"),
             "3 gradient_in_forward": ("zzz zggg", "[C, V]"), "4 anchored": ("z   zEEE", "[C, V]"),
             "5 to 7 in_epilogue, ..., fused": ("E     EE", "[C, V], in x's dtype")}
    figure, cells = picture(10.4, 4.3, "What a rung reads and writes",
                            "of width V for each token; z: logits, g: their gradient, E: exp(z - a)",
                            "Filled: written to memory. Outlined: read. GEMM 1: z = x Wᵀ; 2: dX; 3: dW.", (2.7, 0.3, 1.6, 0.55))
    ax = panel(figure, cells[0], "")
    for y, (name, (letters, holds)) in enumerate(rungs.items()):
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
    ax.set(xlim=(0, 11.2), ylim=(len(rungs), 0), xticks=[], yticks=[y + 0.5 for y in range(len(rungs))], yticklabels=rungs)
    ax.spines["bottom"].set_visible(False)
    ax.grid(False)
    save(figure, path)


def ring(path):
    """A CTA of the logits' GEMM over time (hopper_kernel.cuh), simulated in units of one k-step's MMAs."""
    stages, latency, steps, epilogue, tiles = 5, 3, 8, 6, 4
    figure, cells = picture(10.4, 4.9, "The ring of stages, the producer and the consumers",
                            "A CTA of the logits' GEMM. Grey: TMA fills a stage; coloured: a consumer's MMAs read it.",
                            f"Time in k-steps, simulated: a load takes {latency}, a tile {steps} (32 at H 2,048), its epilogue {epilogue}.",
                            (1.5, 0.3, 1.35, 0.85))
    ax, sent, done, free = panel(figure, cells[0], ""), [], [], [0] * stages
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
    names = ["producer: loads", *(f"stage {k}" for k in range(stages)), "consumer 0", "consumer 1"]
    ax.set(xlim=(-0.5, done[-1] + epilogue + 0.5), ylim=(8, 0), yticks=[k + 0.5 for k in range(8)], yticklabels=names)
    ax.grid(False)
    save(figure, path)


def tile_at(tile, rows, columns, group):
    """tile_coord() of hopper_tiles.cuh, in tiles."""
    first, within = tile // (group * columns) * group, tile % (group * columns)
    height = min(group, rows - first)
    return first + within % height, within // height


def tile_order(path):
    """Which cluster's tile comes when, of logits and dX at C 4,096, H 4,096, V 128,256."""
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
    missing = why_not()
    if missing or len(sys.argv) != 2:
        sys.exit(f"pictures: {missing or 'name the folder for the pictures of LCE.md: tools/pictures.py kernels/lce'}")
    for draws, name in (passes, "passes.png"), (ring, "ring.png"), (tile_order, "tiles.png"):
        draws(os.path.join(sys.argv[1], name))
