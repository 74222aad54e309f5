"""The pictures of tools/memory_curve and tools/plot_run: memory over a size and over time, and runs. matplotlib draws them."""
import os
import statistics
import sys

KIB, MIB, GIB = 2**10, 2**20, 2**30

# One palette. Materialized has the first colour and fused the second in every picture; they differ on grey paper, too.
INK, MUTED, GRID, SAVED = "#1c2330", "#5c6673", "#e1e5ea", "#fbe6d0"
COLORS = "#e87d1e", "#143d73", "#3a8f4f", "#8e4ba8", "#a81c33", "#5c7f99", "#1f939a", "#b08a14"
MODES = {"materialized": (COLORS[0], "s", "materialized logits"), "fused": (COLORS[1], "o", "fused, in chunks")}
# What memory holds, from the bottom up: what stays, then what comes and goes. Neighbours differ in lightness.
STAYING = {"weights": "#33414b", "master weights": "#556b78", "gradients": "#8397a3", "optimizer moments": "#b4c2ca",
           "tables and batch": "#6d6d6d"}
HEAD = "lm_head, loss"
STACK = STAYING | {"activations": "#5bad9c", "activation gradients": "#c6e9df", "workspace": "#e3b03c", HEAD: COLORS[4]}
DASHES = (0, (4, 2.5))  # what is planned only


def why_not():
    """Why no picture can be drawn, and what to do about it; None where one can. Only who draws waits for matplotlib."""
    global plt, FixedLocator, FuncFormatter, MaxNLocator, NullLocator, ScaledTranslation
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
        from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
        from matplotlib.transforms import ScaledTranslation
        return None
    except ImportError:
        pass
    of_debian = sys.prefix == "/usr" and os.path.exists("/etc/debian_version")
    how = "apt-get install python3-matplotlib" if of_debian else f"{sys.executable} -m pip install matplotlib"
    return f"{sys.executable} has no matplotlib, which draws them; have it by: {how}"


# --- text -------------------------------------------------------------------------------------------------------

def unit_of(value):
    return next(((s, u) for s, u in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if value >= s), (1, "B"))


def size(value):
    """1.04 GiB, 561.2 MiB, as the programs print it."""
    scale, unit = unit_of(value)
    return f"{value / scale:,.{2 if scale == GIB else 1 if scale > 1 else 0}f} {unit}"


def tick(value):
    scale, unit = unit_of(value)
    return f"{value / scale:g} {unit}" if value else "0"


def count(value):
    return f"{value:,.0f}"


def rate(value):
    """459K."""
    scale, unit = next(((s, u) for s, u in ((1e9, "B"), (1e6, "M"), (1e3, "K")) if value >= s), (1, ""))
    return f"{value / scale:.{2 if value < 10 * scale else 1 if value < 100 * scale else 0}f}{unit}"


def times(large, small):
    return f"{large / small:.{2 if large < 10 * small else 1 if large < 100 * small else 0}f}x" if small else ""


# --- parts of a picture -----------------------------------------------------------------------------------------

def picture(width, height, title, subtitle, note="", margins=(0.95, 1.2, 1.95, 0.95), **grid):
    """A figure of so many inches with its words, and a grid of panels within margins (left, right, top, bottom)."""
    plt.rcParams.update({
        "font.family": "DejaVu Sans", "font.size": 9.5, "svg.fonttype": "none", "savefig.dpi": 200,
        "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False, "axes.edgecolor": MUTED,
        "axes.grid": True, "axes.grid.axis": "y", "grid.color": GRID, "axes.axisbelow": True, "axes.labelcolor": MUTED,
        "text.color": INK, "xtick.color": MUTED, "ytick.color": MUTED, "ytick.left": False, "legend.frameon": False,
        "axes.titlelocation": "left"})
    figure = plt.figure(figsize=(width, height))
    left, right, top, bottom = margins
    for y, text, options in ((height - 0.3, title, dict(fontsize=14, weight="bold", va="top")),
                             (height - 0.64, subtitle, dict(color=MUTED, va="top")),
                             (0.18, note, dict(color=MUTED, fontsize=8.5, va="bottom"))):
        figure.text(0.36 / width, y / height, text, **options)
    return figure, figure.add_gridspec(left=left / width, right=1 - right / width, top=1 - top / height,
                                       bottom=bottom / height, **grid)


def save(figure, path, fontsize=9.5):
    """With a legend below the titles, of what has a name in the first panel."""
    handles, names = figure.axes[0].get_legend_handles_labels()
    if names:
        figure.legend(handles, names, loc="upper left", ncols=9, handlelength=2.4, columnspacing=1.8, fontsize=fontsize,
                      bbox_to_anchor=(0.26 / figure.get_figwidth(), 1 - 0.92 / figure.get_figheight()))
    with open(path, "wb") as file:
        figure.savefig(file, format=os.path.splitext(path)[1][1:] or "png", facecolor="white")
    plt.close(figure)


def moved(ax, transform, right=0.0, up=0.0):
    """The transform, and then so many points."""
    return transform + ScaledTranslation(right / 72, up / 72, ax.figure.dpi_scale_trans)


def head(ax, title, unit=""):
    """A panel's title, and under it what its y axis counts."""
    ax.set_title(title, pad=22 if unit else 8, weight="bold", fontsize=10.5)
    ax.text(0, 1, unit, transform=moved(ax, ax.transAxes, up=7), color=MUTED, fontsize=9)


def bars(ax, names, places):
    """Bars to the right (y, value, height, colour, text beside it, name in the legend), with names at the left."""
    for y, value, height, color, text, *name in places:
        ax.barh(y, value, height, color=color, label=name[0] if name else None)
        ax.annotate(text, (value, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9, annotation_clip=False,
                    bbox=dict(fc="white", ec="none", pad=1))
    ax.set_yticks([k for k, _ in names], [name for _, name in names])
    ax.xaxis.set_visible(False)
    ax.grid(False)
    ax.spines["bottom"].set_visible(False)


def label(ax, places, right=9, up=0.0):
    """Lines of text [(text, colour, bold)] beside points (x, y), to the left where `right` is negative. Those that would
    overlap are pushed apart."""
    points = 72 / ax.figure.dpi
    boxes = sorted(([ax.transData.transform((x, y))[1] * points, 12.5 * len(lines), x, y, lines] for x, y, lines in places),
                   key=lambda box: box[0])
    heights = [box[0] for box in boxes]
    for _ in range(200):
        for low, high in zip(boxes, boxes[1:]):
            overlap = max(0, (low[1] + high[1]) / 2 - (high[0] - low[0]))
            low[0], high[0] = low[0] - overlap / 2, high[0] + overlap / 2
    for (now, height, x, y, lines), before in zip(boxes, heights):
        for k, (text, color, bold) in enumerate(lines):
            ax.annotate(text, (x, y), xytext=(right, up + now - before + height / 2 - 12.5 * (k + 0.5)), textcoords="offset points",
                        ha="right" if right < 0 else "left", va="center", color=color, weight="bold" if bold else "normal",
                        fontsize=9.5 if bold else 9, annotation_clip=False)


def label_ends(ax, x, ends, form, names):
    """Names and values at the ends of the modes' lines, and between two of them how many times the larger is the smaller."""
    places = [(x, y, [(mode, MODES[mode][0], True), (form(y), MUTED, False)] if names else [(form(y), MODES[mode][0], True)])
              for mode, y in ends.items()]
    low, high = min(ends.values()), max(ends.values())
    if high > 1.02 * low:
        at, under = (ax.transData.transform((x, y))[1] for y in (high, low))
        middle = ax.transData.inverted().transform((0, (at + under) / 2))[1]
        places.append((x, middle, [(times(high, low), INK, True)]))
        ax.plot([x, x], [low, high], color=MUTED, lw=1, clip_on=False, zorder=1, transform=moved(ax, ax.transData, right=12))
    label(ax, places, 18)


def log_axis(ax, which, values, form, most=5):
    """Of base 2, with so many ticks at most."""
    axis = ax.xaxis if which == "x" else ax.yaxis
    (ax.set_xscale if which == "x" else ax.set_yscale)("log", base=2)
    ticks = [2.0**k for k in range(-20, 60) if min(values) <= 2.0**k <= max(values)]
    axis.set_major_locator(FixedLocator(ticks[::-1][::max(1, -(-len(ticks) // most))]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: form(value)))


def linear_axis(ax, high, in_bytes, ticks):
    """The y axis from 0 to a round figure, its unit beside each tick."""
    scale, unit = unit_of(high) if in_bytes else (1, "")
    at = MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10]).tick_values(0, high / scale) * scale
    ax.set_ylim(0, at[-1])
    ax.yaxis.set_major_locator(FixedLocator(at))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / scale:g} {unit if value else ''}".rstrip()))


# --- memory over a size -----------------------------------------------------------------------------------------

AXES = {"tokens": "tokens", "vocab": "vocabulary", "hidden": "hidden size", "chunk": "tokens per chunk"}
COLUMN = {"tokens": "tokens", "vocab": "vocab_size", "hidden": "hidden_size", "chunk": "chunk"}


def best(row, name):
    """The measured figure where there is one, else the planned one."""
    return row["ledger_bytes" if name == "bytes" else name] or row["planned_" + name]


def x_of(row):
    return row[COLUMN[row["sweep"]]] or row["tokens"]  # materialized logits are one chunk


def setting(s, rows=()):
    """What stands under a title: model, the sizes that are not swept, dtype, memory options and the device."""
    step, swept = s["what"] != "layer", list(s["sweeps"])
    tokens = f"{s['batch']:,} x {s['seq_len']:,} tokens" if step else f"N {s['batch'] * s['seq_len']:,}"
    sizes = {"tokens": "" if "positions" in s else tokens,
             "hidden": "" if step else f"H {s['hidden_size']:,}", "vocab": f"V {s['vocab_size']:,}"}
    parts = [s["model"] if step else "LM head + loss alone", *(text for name, text in sizes.items() if swept != [name]), s["dtype"]]
    if step:
        parts += ["recompute " + s["recompute"] if s["recompute"] != "none" else "",
                  "offloaded: " + s["offload"].replace(",", ", ") if s["offload"] else ""]
    devices = sorted({row["device"] for row in rows if row["status"] == "measured"} | {s.get("measured_on")} - {None})
    where = "measured on " + ", ".join(devices) if devices else ("planned for a " if s["planned"] or rows else "on a ") + (
        "GPU" if s["device"] == "cuda" else "CPU")
    return f"{', '.join(filter(None, parts))}; {where}"


def foot(s, rows):
    measured = [row for row in rows if row["status"] == "measured"]
    same = sum(row["ledger_bytes"] == row["planned_bytes"] for row in measured)
    words = [f"Measured by the ledger; plan and ledger agree to the byte at {same} of {len(measured)} points." if measured else
             "Planned, to the byte: nothing was computed, so there are no times."]
    if 0 < len(measured) < len(rows):
        words.append("Hollow: planned only.")
    too_large = sum(row["status"] == "does not fit" for row in rows)
    if too_large:
        words.append(f"{too_large} would not fit.")
    return " ".join([*words, s["grey"]])


def draw_modes(ax, rows, y):
    """A line for each mode, {mode: (xs, ys)}; dashed and hollow where it is only planned."""
    found = {}
    for mode, (color, marker, name) in MODES.items():
        points = sorted((x_of(row), y(row), row["status"] == "measured") for row in rows if row["mode"] == mode and y(row))
        if not points:
            continue
        xs, ys, measured = zip(*points)
        line = dict(color=color, lw=2.4 if mode == "fused" else 2, ls="-" if any(measured) else DASHES, label=name)
        if len(xs) == 1 and rows[0]["sweep"] == "chunk":
            ax.axhline(ys[0], **line)
        else:
            ax.plot(xs, ys, marker, **line, ms=7, mew=1.4, mfc=color if any(measured) else "white", zorder=4, clip_on=False)
            hollow = [point[:2] for point in points if any(measured) and not point[2]]
            ax.plot(*zip(*hollow or [((), ())]), marker, color=color, ms=7, mew=1.4, mfc="white", zorder=5, clip_on=False)
        found[mode] = xs, ys
    return found


def over_size(ax, rows, title, unit, y, form=size, main=False):
    """A panel of one figure over what is swept, its lines labelled and compared where they end."""
    head(ax, title, unit)
    both = draw_modes(ax, rows, y)
    xs, ys = sorted({x_of(row) for row in rows}), [value for _, values in both.values() for value in values]
    doubling = len(xs) > 2 and all(b >= 1.6 * a for a, b in zip(xs, xs[1:])) and xs[-1] >= 16 * xs[0]
    if doubling:
        log_axis(ax, "x", xs, count, 5 if main else 3)
    else:
        ax.set_xlim(0, xs[-1])
        ax.xaxis.set_major_locator(FixedLocator([0] + xs[::-1][::-(-len(xs) // (5 if main else 3))]))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count(value)))
    if doubling and form is size and max(ys) >= 8 * min(ys):
        log_axis(ax, "y", (min(ys) / 2, 2 * max(ys)), tick)
        ax.set_ylim(min(ys) / 1.6, 1.6 * max(ys))
    else:
        linear_axis(ax, max(ys), form is size, 5 if main else 4)
    if rows[0]["sweep"] != "chunk":
        label_ends(ax, max(line[-1] for line, _ in both.values()), {mode: values[-1] for mode, (_, values) in both.items()}, form, main)
    return both


def others(ax, s, rows):
    """What the source and other libraries hold, in grey: at their own sizes, of chunks too; a rule for what has no size. With
    a sweep of chunks also what ours hold at the one that a run takes by itself."""
    chunks, lines, points, ends = rows[0]["sweep"] == "chunk", {}, {}, []
    for name, x, value in s["marks"] + [(p["name"], p["chunk"], p["bytes"]) for p in s["peers"] if chunks]:
        lines.setdefault(name, []).append((x, value))
    values = [value for line in lines.values() for _, value in line]
    low, high = ax.get_ylim()
    if values and ax.get_yscale() == "log":
        ax.set_ylim(min([low] + [value / 2 for value in values]), max([high] + [2 * value for value in values]))
        log_axis(ax, "y", ax.get_ylim(), tick)
    elif values:
        linear_axis(ax, max([high] + values), True, 5)
    for name, line in lines.items():
        if line[0][0] is None:
            ax.axhline(line[0][1], color=MUTED, lw=1.1, ls=":")
        else:
            ax.plot(*zip(*line), "D", color=MUTED, ls=":", ms=4.5, lw=1.1, zorder=6, clip_on=False)
        points.setdefault(line[-1], []).append((f"{name}, {size(line[-1][1])}", MUTED, False))
    left, right = ax.get_xlim()
    last = max(map(x_of, rows))
    if chunks:
        held, full = (next((best(row, "layer_bytes") for row in rows if row["mode"] == mode and row["chunk"] == chunk), None)
                      for mode, chunk in (("fused", s["default_chunk"]), ("materialized", 0)))
        if full:
            ends.append((right, full, [("materialized, " + size(full), COLORS[0], True)]))
        if held and full:
            ax.plot(s["default_chunk"], held, "o", ms=13, mfc="none", mec=COLORS[1], mew=1.4, zorder=5)
            label(ax, [(s["default_chunk"], held, [("fused, default chunk", COLORS[1], True),
                                                   (f"{size(held)}, {times(full, held)} less", MUTED, False)])], 12, -14)
    for (x, y), text in points.items():
        if x is None:
            label(ax, [(left, y, text)], 6, 7)
        elif chunks and x == last:
            ends.append((right, y, text))
        else:
            label(ax, [(x, y, text)], *((9, -3) if chunks and x < last / 8 else (-9, 10)))
    label(ax, ends)


def memory(s, rows, path):
    """A step, or LM head + loss alone, over one size: in total, the loss, and where it was measured the time."""
    layer, sweep = s["what"] == "layer", rows[0]["sweep"]
    panels = [("With its inputs and gradients" if layer else "Peak memory of a training step", "in total", "bytes"),
              ("LM head + loss" + ("" if layer else " alone"), "beyond its inputs and gradients", "layer_bytes")]
    if layer:
        panels.reverse()
    if sweep == "chunk":  # its labels take the space
        panels.pop()

    def time(row):
        return row["layer_seconds"] / row["floor_seconds"] if layer and row["layer_seconds"] else row["step_seconds"]
    timed = any(time(row) for row in rows)
    over = AXES[sweep] + (" of a step" if sweep == "tokens" and not layer else "")
    what = f"LM head + loss over the {over}" if layer else f"Training {s['model']}: memory over the {over}"
    margins = (0.95, 2.6 if sweep == "chunk" else 1.2, 1.95, 0.95)
    figure, cells = picture(10.4, 5.7, s["title"] or what, setting(s, rows), foot(s, rows), margins, nrows=1 + timed, ncols=2,
                            width_ratios=(1.75, 1), wspace=0.62, hspace=0.95)
    axes = [figure.add_subplot(cells[:, 0]), figure.add_subplot(cells[0, 1])] if len(panels) > 1 else [figure.add_subplot(cells[:, :])]
    for ax, (title, unit, key) in zip(axes, panels):
        both = over_size(ax, rows, title, unit, lambda row: best(row, key), main=ax is axes[0])
        if key == "layer_bytes":
            others(ax, s, rows)
        if ax is axes[0] and len(both) == 2 and both["fused"][0] == both["materialized"][0]:
            ax.fill_between(*both["fused"], both["materialized"][1], color=SAVED, alpha=0.75, lw=0, zorder=0)
    device = [(x_of(row), row["device_bytes"] - row["device_base_bytes"]) for row in rows if row["device_bytes"]]
    if device:
        axes[0].plot(*zip(*device), "_", color=INK, ms=20, mew=1.3, label="counted by the device", zorder=3, clip_on=False)
    usable = max(row["usable_bytes"] or 0 for row in rows)
    if not layer and usable < axes[0].get_ylim()[1] and usable:
        axes[0].axhline(usable, color=INK, lw=1, ls=(0, (7, 4)))
        label(axes[0], [(axes[0].get_xlim()[0], usable, [(f"the device has {size(usable)}", INK, False)])], 4, 8)
    if timed:
        axes.append(figure.add_subplot(cells[1, 1]))
        over_size(axes[2], rows, "Time", "over that of its three GEMMs", time, "{:.2f}".format) if layer else over_size(
            axes[2], rows, "Time of a step, s", "forward, backward, AdamW", time, "{:.3g} s".format)
    for ax in (axes[0], axes[-1]):
        ax.set_xlabel(AXES[sweep])
    save(figure, path)


def grid(s, rows, path):
    """Several sweeps side by side: what is held, and where it was measured the rate."""
    sweeps = list(dict.fromkeys(row["sweep"] for row in rows))
    kinds = [("memory held", lambda row: best(row, "layer_bytes"), size)]
    if any(row["layer_seconds"] for row in rows):
        kinds.append(("TFLOP/s", lambda row: row["layer_seconds"] and 6e-12 * row["tokens"] * row["vocab_size"] * row["hidden_size"] /
                      row["layer_seconds"], count))
    figure, cells = picture(12, 2.6 + 2.3 * len(kinds), s["title"], setting(s, rows), foot(s, rows), (0.95, 0.95, 1.85, 0.85),
                            nrows=len(kinds), ncols=len(sweeps), wspace=1, hspace=0.75)
    for k, (unit, y, form) in enumerate(kinds):
        for column, sweep in enumerate(sweeps):
            over_size(figure.add_subplot(cells[k, column]), [row for row in rows if row["sweep"] == sweep], AXES[sweep], unit, y, form)
    save(figure, path)


def trade(s, rows, path):
    """LM head + loss: time over that of its three GEMMs against memory, chunk by chunk, beside other libraries."""
    rows = [row for row in rows if row["sweep"] == "chunk" and row["layer_seconds"]]
    figure, cells = picture(10.4, 5.7, s["title"] or "LM head + loss: time against memory, chunk by chunk", setting(s, rows),
                            foot(s, rows), (0.95, 2.2, 1.95, 0.95))
    ax = figure.add_subplot(cells[0])
    head(ax, "Forward and backward of LM head + loss, by tokens per chunk", "time over that of its three GEMMs")
    ratios = [row["layer_seconds"] / row["floor_seconds"] for row in rows]
    top, held = max([1.5, *ratios]) + 0.05, []
    for mode, (color, marker, name) in MODES.items():
        points = [(best(row, "layer_bytes"), row["layer_seconds"] / row["floor_seconds"], row["chunk"])
                  for row in rows if row["mode"] == mode]
        ax.plot([p[0] for p in points], [p[1] for p in points], marker + "-", color=color, lw=2.2, ms=7, mec="white", label=name)
        for x, y, chunk in points:
            default = chunk and chunk == s["default_chunk"]
            text = [(f"{'default ' if default else ''}{chunk:,}" if chunk else mode, color, bool(default or not chunk))]
            label(ax, [(x, y, text)], *((-3, -13) if chunk else (9, 0)))
        held += [x for x, *_ in points]
    places = {}
    for peer in s["peers"]:
        at = peer["bytes"], min(peer["ratio"], top - 0.03)
        ax.plot(*at, "D", color=MUTED, ms=6)
        places.setdefault(at, []).append((peer["name"] + (f", at {peer['ratio']}" if at[1] < peer["ratio"] else ""), MUTED, False))
    for at, lines in places.items():
        between = min(held) < at[0] <= max(held) and at[1] < top - 0.03
        label(ax, [(*at, lines)], -9 if between else 9, 6.25 * (1 - len(lines)))
    held += [x for x, _ in places]
    ax.axhline(1, color=INK, lw=1, ls=":")
    ax.set_ylim(min([0.95, *ratios]) - 0.05, top)
    log_axis(ax, "x", (min(held) / 1.5, 1.5 * max(held)), tick)
    ax.set_xlabel("memory beyond inputs and gradients")
    save(figure, path)


# --- memory over time -------------------------------------------------------------------------------------------

def total(row):
    return sum(row[name] for name in STACK)


def timeline(s, rows, path):
    """Rows of a mode, `at` and bytes by category: a panel for each mode, on the same scale."""
    titles = {"fp32 logits": "logits in fp32: a baseline, planned", "materialized": "materialized logits", "fused": "fused, in chunks"}
    there, planned = {row["mode"] for row in rows}, s["planned"]
    modes = {mode: [row for row in rows if row["mode"] == mode] for mode in titles if mode in there}
    peaks = {mode: max(map(total, rows)) for mode, rows in modes.items()}
    ends = {mode: rows[-1]["at"] for mode, rows in modes.items()}
    stays = sum(modes["fused"][-1][name] for name in STAYING)
    # Where most memory stays from step to step, the picture leaves it out: the shape is what comes and goes.
    left_out = STAYING if stays > 0.55 * max(peaks.values()) else {}
    names = [name for name in STACK if name not in left_out and max(row[name] for rows in modes.values() for row in rows) >
             0.004 * max(peaks.values())]
    base = stays if left_out else 0
    note = ("Planned, to the byte: nothing was computed, so there are no times." if planned else
            "Bytes that the ledger counts on the device, dated after waiting for it.")
    title = s["title"] or f"Training {s['model']}: memory over three steps"
    figure, cells = picture(10.8, 2.5 + 2.35 * len(modes), title, setting(s), note, (0.9, 2.15, 1.75, 0.95),
                            nrows=len(modes), ncols=1, hspace=0.62)
    for k, (mode, rows) in enumerate(modes.items()):
        ax = figure.add_subplot(cells[k])
        top = max(rows, key=total)
        text = titles[mode]
        if mode == "fused" and not top[HEAD]:
            text += ": the layers, not the loss, now set the peak"
        if mode == "fused" and not planned and ends["fused"] > 1.005 * ends["materialized"]:
            text += f"; the run ends {100 * (ends['fused'] / ends['materialized'] - 1):.0f}% later"
        head(ax, text, f"bytes in use{f' beyond the {size(stays)} of weights, gradients and optimizer state' if left_out else ''}")
        linear_axis(ax, 1.06 * (max(peaks.values()) - base), True, 5)
        ax.set_xlim(0, max(ends.values()))
        at = [row["at"] for row in rows]
        ax.stackplot(at, [[row[name] for row in rows] for name in names], labels=names, colors=[STACK[name] for name in names],
                     step="post", lw=0)
        ax.axhline(total(top) - base, color=INK, lw=1, ls=DASHES)
        places, below = [(ax.get_xlim()[1], total(top) - base, [(f"peak {size(total(top))}", INK, True)])], 0
        for name in names:
            if name in STAYING and rows[-1][name] > 0.02 * max(peaks.values()):
                places.append((ax.get_xlim()[1], below + rows[-1][name] / 2, [(f"{name} {size(rows[-1][name])}", MUTED, False)]))
            below += rows[-1][name]
        label(ax, places)
        spike = max(rows, key=lambda row: row[HEAD])
        label(ax, [(spike["at"], total(top) - base, [(f"LM head + loss {size(spike[HEAD])}", STACK[HEAD], True)])], 2, 9)
        if planned:
            starts = [next(row["at"] for row in rows if row["step"] == step) for step in (1, 2, 3)]
            ax.set_xticks(starts, ["step 1", "step 2", "step 3"], ha="left")
    ax.set_xlabel("bytes pushed and popped, in their order: no time" if planned else "time of three steps, s")
    save(figure, path, fontsize=8.5)


def longest(s, rows, path):
    """Bars: the longest sequences by memory and what is offloaded, in both modes, beside what the model was made for."""
    names = list(dict.fromkeys((row["memory_gib"], row["offloaded"]) for row in rows))
    figure, cells = picture(10.4, 2.5 + 0.68 * len(names), s["title"], setting(s),
                            "Planned, to the byte: nothing was computed. Beside a bar: tokens, and what the host holds for them.",
                            (1.75, 2.2, 1.6, 0.85))
    ax = figure.add_subplot(cells[0])
    head(ax, f"tokens of the longest sequence, batch {s['batch']}")
    places = []
    for row in rows:
        y, (color, _, name) = names.index((row["memory_gib"], row["offloaded"])) + 0.39 * (row["mode"] == "fused"), MODES[row["mode"]]
        text = f"{count(row['seq_len'])}" + (f", host {size(row['host_bytes'])}" if row["host_bytes"] else "") if row["seq_len"] else "none"
        places.append((y, row["seq_len"], 0.36, color, text, name if row in rows[:2] else None))
    bars(ax, [(k + 0.195, f"{memory:g} GiB" + (", all offloaded" if offloaded == "all" else ""))
              for k, (memory, offloaded) in enumerate(names)], places)
    ax.set_ylim(len(names) - 0.3, -0.6)
    ax.axvline(s["positions"], color=INK, lw=1.1, ls=DASHES, zorder=0)
    label(ax, [(s["positions"], -0.4, [(f"{s['model']} is made for {count(s['positions'])} positions", INK, False)])], 5)
    save(figure, path)


# --- runs -------------------------------------------------------------------------------------------------------

def trend(values):
    """A centred moving mean, and that of what it leaves (Tukey's twicing), since the mean of a convex curve lies above it."""
    def mean(v):
        spans = [min(len(v) // 50, i, len(v) - 1 - i) for i in range(len(v))]
        return [statistics.fmean(v[i - n:i + n + 1]) for i, n in enumerate(spans)]
    once = mean(values)
    return [a + b for a, b in zip(once, mean([v - a for v, a in zip(values, once)]))]


def colors_of(names):
    """The modes' own; others take what is left."""
    left = iter(COLORS[2:] + COLORS[1::-1])
    return [next((color for mode, (color, *_) in MODES.items() if name.startswith(mode)), None) or next(left) for name in names]


def runs(title, subtitle, logs, path, start):
    """{name: log}: loss, gradient norm, learning rate and throughput over the steps."""
    figure, cells = picture(10.4, 7.4, title, subtitle, "", (0.75, 0.45, 1.75, 0.7), nrows=2, ncols=2, wspace=0.2, hspace=0.5)
    panels = (("loss", "Loss", "circles: validation"), ("grad_norm", "Gradient norm", ""), ("learning_rate", "Learning rate", ""),
              ("tokens_per_second", "Tokens a second", ""))
    for k, (field, name, unit) in enumerate(panels):
        ax = figure.add_subplot(cells[k])
        head(ax, name, unit)
        for (run, log), color in zip(logs.items(), colors_of(logs)):
            steps, values = log.series("step", field, start)
            if field != "learning_rate":
                ax.plot(steps, values, color=color, alpha=0.3, lw=0.8)
            ax.plot(steps, trend(values), color=color, lw=1.8, label=run)
            if field == "loss":
                ax.plot(*log.series("validation", "val_loss", start), "o-", color=color, lw=0.8, ms=4, mec="white")
        if field != "loss":
            ax.set_ylim(bottom=0)
        if field == "tokens_per_second":
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: rate(value).replace(".00", "").replace(".0K", "K")))
        ax.set_xlabel("step" if k > 1 else "")
    save(figure, path)


def groups(title, subtitle, all_groups, path):
    """Means and ranges of the groups' validation losses over steps and time, beside the first group's, and two bars each."""
    figure, cells = picture(11.4, 7.4, title, subtitle, "Line: mean of the runs; band: from the lowest to the highest.",
                            (0.75, 1.35, 1.35, 0.95), nrows=2, ncols=2, wspace=0.55, hspace=0.55)
    for k, (name, x) in enumerate((("Validation loss", "step"), ("Validation loss over the time of the steps", "time, s"),
                                   (f"Validation loss minus the mean of {all_groups[0].name}", "step"))):
        ax, places = figure.add_subplot(cells[k]), []
        head(ax, name)
        ax.set_xlabel(x)
        for group, color in zip(all_groups, colors_of(group.name for group in all_groups)):
            offsets = [all_groups[0].means.get(step, mean) if k == 2 else 0 for step, mean in group.means.items()]
            xs = group.seconds if k == 1 else list(group.means)
            means, lows, highs = ([value - off for value, off in zip(values, offsets)]
                                  for values in (group.means.values(), group.lows, group.highs))
            ax.plot(xs, means, color=color, lw=2)
            ax.fill_between(xs, lows, highs, color=color, alpha=0.15, lw=0)
            if means:
                places.append((xs[-1], means[-1], [(group.name, color, True), (f"{means[-1]:{'+' if k == 2 else ''}.4f}", MUTED, False)]))
        end = ax.get_xlim()[1]
        label(ax, [(end, y, lines) for _, y, lines in places])
        ax.set_xlim(right=end)
    kinds = ("LM head + loss, peak memory", "head_peak_bytes", size), ("Tokens a second", "tokens_per_second", rate)
    for k, (name, field, form) in enumerate(kinds):
        ax = figure.add_subplot(cells[3].subgridspec(2, 1, hspace=0.75)[k])
        head(ax, name)
        values = [(y, group.total(field), color) for y, (group, color) in enumerate(zip(all_groups, colors_of(g.name for g in all_groups)))]
        bars(ax, [(y, group.name) for y, group in enumerate(all_groups)],
             [(y, value, 0.62, color, form(value)) for y, value, color in values if value is not None])
        ax.set_ylim(len(all_groups) - 0.5, -0.5)
    save(figure, path)


# --- the ladder -------------------------------------------------------------------------------------------------

def ladder(rows, path):
    """The rungs of kernels/LCE.md, from lines of bench_lce --ladder --json: bars of time and memory, the last one dark."""
    figure, cells = picture(10.4, 1.9 + 0.32 * len(rows), "Six versions of LM head + loss", "N {tokens:,}, H {hidden_size:,}, "
                            "V {vocab_size:,}, chunks of {chunk:,}; {gpu}".format(**rows[0]), margins=(2.7, 0.9, 1.3, 0.3), ncols=2,
                            wspace=0.4)
    for k, (title, field, form) in enumerate((("Time / three plain GEMMs", "ratio", "{:.2f}".format),
                                              ("Memory beyond inputs and gradients", "layer_bytes", size))):
        ax = figure.add_subplot(cells[k])
        head(ax, title)
        bars(ax, [(row["rung"], row["name"]) for row in rows] if k == 0 else [],
             [(row["rung"], row[field], 0.68, COLORS[1] if row is rows[-1] else "#8fb4d6", form(row[field])) for row in rows])
        ax.set_ylim(len(rows) + 0.5, 0.5)
    save(figure, path)
