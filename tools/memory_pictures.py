"""The pictures of tools/memory_curve: memory over a size, and over the time of three steps."""
import drawing
from drawing import COLORS, DASHES, INK, MIB, MODES, MUTED, SAVED, count, label, panel, picture, save, size, times

# Categories of memory from the bottom up: those that stay, then those that come and go. Neighbours differ in lightness.
STAYING = {"weights": "#33414b", "master weights": "#556b78", "gradients": "#8397a3", "optimizer moments": "#b4c2ca",
           "tables and batch": "#6d6d6d"}
HEAD = "lm_head, loss"
STACK = STAYING | {"activations": "#5bad9c", "activation gradients": "#c6e9df", "workspace": "#e3b03c", HEAD: COLORS[4]}
NO_TIMES = "Planned, byte for byte, so there are no times."
AXES = {"tokens": "tokens", "vocab": "vocabulary", "hidden": "hidden size", "chunk": "tokens per chunk"}
COLUMN = {"tokens": "tokens", "vocab": "vocab_size", "hidden": "hidden_size", "chunk": "chunk"}


def best(row, name):
    """Returns the measured figure if there is one, else the planned one."""
    return row["ledger_bytes" if name == "bytes" else name] or row["planned_" + name]


def layer_bytes(row):
    return best(row, "layer_bytes")


def x_of(row):
    return row[COLUMN[row["sweep"]]] or row["tokens"]  # materialized logits are one chunk


def total(row):
    return sum(row[name] for name in STACK)


# --- words --------------------------------------------------------------------------------------------------

def setting(s, rows=()):
    """Returns the line under a title: model, the sizes that are not swept, dtype, memory options and the device."""
    step, swept = s["what"] == "step", list(s["sweeps"])
    sizes = {"tokens": f"{s['batch']:,} x {s['seq_len']:,} tokens" if step else f"N {s['batch'] * s['seq_len']:,}",
             "hidden": f"H {s['hidden_size']:,}" * (not step), "vocab": f"V {s['vocab_size']:,}"}
    shown = [text for name, text in sizes.items() if text and swept != [name]]
    options = {f"sequences of {s['seq_len']:,}": swept == ["tokens"], "recompute " + s["recompute"]: s["recompute"] != "none",
               "bf16 moments": "--moment-dtype bf16" in s["options"], "no master weights": "--no-master-weights" in s["options"],
               "offloaded: " + s["offload"].replace(",", ", "): s["offload"]}
    parts = [s["model"] if step else "LM head + loss alone", *shown, s["dtype"], *(words for words, given in options.items() if step and given)]
    devices = sorted({row["device"] for row in rows if row["status"] == "measured"} | {s.get("measured_on")} - {None})
    where = {"cuda": "a GPU", "cpu": "a CPU"}[s["device"]]
    how = "measured on " + ", ".join(devices) if devices else f"planned for {where}" if s["planned"] or rows else f"on {where}"
    return f"{', '.join(parts)}; {how}"


def foot(s, rows):
    measured = [row for row in rows if row["status"] == "measured"]
    same = sum(row["ledger_bytes"] == row["planned_bytes"] for row in measured)
    too_large = sum(row["status"] == "does not fit" for row in rows)
    words = {f"Measured by the ledger; plan and ledger agree byte for byte at {same} of {len(measured)} points.": measured,
             NO_TIMES: not measured, "Hollow: planned only.": 0 < len(measured) < len(rows),
             f"{too_large} would not fit.": too_large, s["grey"]: s["grey"]}
    return " ".join(text for text, true in words.items() if true)


# --- memory over a size -------------------------------------------------------------------------------------

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
        drawing.log_axis(ax, min(ys), max(ys))
    else:
        drawing.linear_axis(ax, max(ys), form is size, 5 if main else 4)
    ax.minorticks_off()
    if rows[0]["sweep"] == "chunk":
        return both
    ends = {mode: (line[-1], values[-1]) for mode, (line, values, _) in both.items()}
    places = [(*end, MODES[mode][0], *[mode] * main, form(end[1])) for mode, end in ends.items()]
    x, low, high = max(ends.values())[0], *(of(end for _, end in ends.values()) for of in (min, max))
    if high > 1.02 * low:
        middle = (low * high)**0.5 if ax.get_yscale() == "log" else (low + high) / 2
        places.append((x, middle, INK, times(high, low) + "x"))
        drawing.span(ax, x, low, high)
    label(ax, places, 18)
    return both


def others(ax, s, rows):
    """Draws the source's figures in grey: at its sizes, or as a line across if it names none. Over chunks it also
    labels what the materialized mode holds, and the fused mode at its default chunk."""
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


def panels_of(layer, rows):
    """Returns the panels of a sweep, (title, unit, y, form): memory in total, the loss', and the time if measured."""
    whole = ("With its inputs and gradients" if layer else "Peak memory of a training step", "in total", lambda row: best(row, "bytes"), size)
    alone = ("LM head + loss" + ("" if layer else " alone"), "beyond its inputs and gradients", layer_bytes, size)
    time = (("Time", "over that of its three GEMMs", lambda row: row["layer_seconds"] and row["layer_seconds"] / row["floor_seconds"],
             "{:.2f}".format) if layer else
            ("Time of a step, s", "forward, backward, AdamW", lambda row: row["step_seconds"], "{:.3g} s".format))
    # Chunks have one panel: their labels need the space.
    return ([alone] if rows[0]["sweep"] == "chunk" else [alone, whole] if layer else [whole, alone]) + [time] * any(map(time[2], rows))


def memory(s, rows, path):
    """Draws a step, or LM head + loss alone, over one size."""
    layer, sweep = s["what"] == "layer", rows[0]["sweep"]
    over = AXES[sweep] + (" of a step" if sweep == "tokens" and not layer else "")
    title = s["title"] or (f"LM head + loss over the {over}" if layer else f"Training {s['model']}: memory over the {over}")
    panels = panels_of(layer, rows)
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
    """Draws several sweeps side by side: the memory held, and the rate if it was measured."""
    def teraflops(row):
        return row["layer_seconds"] and 6e-12 * row["tokens"] * row["vocab_size"] * row["hidden_size"] / row["layer_seconds"]
    kinds = [("memory held", layer_bytes, size), ("TFLOP/s", teraflops, count)][:1 + any(map(teraflops, rows))]
    figure, cells = picture(12, 2.75 + 2.3 * len(kinds), s["title"], setting(s, rows), foot(s, rows), (0.95, 0.95, 2, 0.85),
                            nrows=len(kinds), ncols=len(s["sweeps"]), wspace=1, hspace=0.75)
    for k, (unit, y, form) in enumerate(kinds):
        for column, sweep in enumerate(s["sweeps"]):
            over_size(panel(figure, cells[k, column], AXES[sweep], unit), [row for row in rows if row["sweep"] == sweep], y, form)
    save(figure, path)


# --- memory over time ---------------------------------------------------------------------------------------

def moments(ax, rows, names, peak, base):
    """Stacks the bytes of `names` over time beyond `base`, and labels the peak, the loss and what stays."""
    top, spike, last, right, below = max(rows, key=total), max(rows, key=lambda row: row[HEAD]), rows[-1], ax.get_xlim()[1], 0
    ax.stackplot([row["at"] for row in rows], [[row[name] for row in rows] for name in names], labels=names,
                 colors=[STACK[name] for name in names], step="post", lw=0)
    ax.axhline(total(top) - base, color=INK, lw=1, ls=DASHES)
    places = [(right, total(top) - base, INK, "peak " + size(total(top)))]
    for name in names:
        if name in STAYING and last[name] > 0.02 * peak:
            places.append((right, below + last[name] / 2, MUTED, f"{name} {size(last[name])}"))
        below += last[name]
    label(ax, places)
    label(ax, [(spike["at"], total(top) - base, STACK[HEAD], "LM head + loss " + size(spike[HEAD]))], 2, 9)


def timeline(s, rows, path):
    """Draws a panel for each mode, all on one scale: bytes by category over time."""
    titles = {"fp32 logits": "logits in fp32: a baseline, planned", "materialized": "materialized logits", "fused": "fused, in chunks"}
    modes = {mode: part for mode in titles if (part := [row for row in rows if row["mode"] == mode])}
    peak, planned, end = max(map(total, rows)), s["planned"], {mode: part[-1]["at"] for mode, part in modes.items()}
    stays = sum(modes["fused"][-1][name] for name in STAYING)
    # If most memory stays from step to step, the picture leaves it out: the shape is what comes and goes.
    left_out, base = (STAYING, stays) if stays > 0.55 * peak else ({}, 0)
    names = [name for name in STACK if name not in left_out and max(row[name] for row in rows) > 0.004 * peak]
    beyond = f" beyond the {size(stays)} of weights, gradients and optimizer state" if left_out else ""
    if not max(modes["fused"], key=total)[HEAD]:
        titles["fused"] += ": the layers, not the loss, now set the peak"
    if not planned and end["fused"] > 1.005 * end["materialized"]:
        titles["fused"] += f"; the run ends {100 * (end['fused'] / end['materialized'] - 1):.0f}% later"
    figure, cells = picture(10.8, 2.65 + 2.35 * len(modes), s["title"] or f"Training {s['model']}: memory over three steps", setting(s),
                            NO_TIMES if planned else "Bytes that the ledger counts on the device, dated after waiting for it.",
                            (0.9, 2.15, 1.9, 0.95), nrows=len(modes), hspace=0.62)
    for k, (mode, part) in enumerate(modes.items()):
        ax = panel(figure, cells[k], titles[mode], "bytes in use" + beyond)
        drawing.linear_axis(ax, 1.06 * (peak - base))
        ax.set_xlim(0, end[mode] if planned else max(end.values()))  # bytes are no time: no mode may look as if it ended earlier
        moments(ax, part, names, peak, base)
        if planned:
            steps = {row["step"]: row["at"] for row in part[::-1]}  # when each begins
            ax.set_xticks(list(steps.values()), [f"step {step}" for step in steps], ha="left")
    ax.set_xlabel("bytes pushed and popped, in their order, each mode's to its own scale: no time" if planned else "time of three steps, s")
    save(figure, path, fontsize=8.5)


def draw(s, rows, path):
    """Draws a table of tools/memory_curve."""
    several = len({row.get("sweep") for row in rows}) > 1
    (timeline if "step" in rows[0] else grid if several else memory)(s, rows, path)
