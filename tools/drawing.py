"""The style and the parts of all pictures: memory_pictures.py, plot_run and pictures.py draw with them."""
import os
import sys

KIB, MIB, GIB = 2**10, 2**20, 2**30

# One palette. Materialized has the first colour and fused the second in every picture; they differ in grey.
INK, MUTED, GRID, SAVED = "#1c2330", "#5c6673", "#e1e5ea", "#fbe6d0"
COLORS = "#e87d1e", "#143d73", "#3a8f4f", "#8e4ba8", "#a81c33", "#5c7f99", "#1f939a", "#b08a14"
MODES = {"materialized": (COLORS[0], "s", "materialized logits"), "fused": (COLORS[1], "o", "fused, in chunks")}
DASHES = (0, (4, 2.5))  # planned only
STYLE = {"font.size": 9.5, "svg.fonttype": "none", "savefig.dpi": 200, "axes.spines.top": False, "axes.spines.right": False,
         "axes.spines.left": False, "axes.edgecolor": MUTED, "axes.grid": True, "axes.grid.axis": "y", "grid.color": GRID,
         "axes.axisbelow": True, "axes.labelcolor": MUTED, "axes.titlelocation": "left", "text.color": INK, "xtick.color": MUTED,
         "ytick.color": MUTED, "ytick.left": False, "legend.frameon": False}


def why_not():
    """Imports matplotlib, only where something is drawn. Returns None, or why it cannot and what to do."""
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
    """Escapes what a terminal would act on."""
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


# --- a picture ----------------------------------------------------------------------------------------------

def picture(width, height, title, subtitle, note, margins, **grid):
    """Returns a figure with its words and a grid of panels, in inches; margins are left, right, top, bottom."""
    figure, (left, right, top, bottom) = plt.figure(figsize=(width, height)), margins
    figure.text(0.36 / width, 1 - 0.3 / height, title, fontsize=14, weight="bold", va="top")
    figure.text(0.36 / width, 1 - 0.64 / height, subtitle, color=MUTED, va="top")
    figure.text(0.36 / width, 0.18 / height, note, color=MUTED, fontsize=8.5)
    return figure, figure.add_gridspec(left=left / width, right=1 - right / width, top=1 - top / height, bottom=bottom / height, **grid)


def require_ours(path):
    """Refuses to replace a file that is not a picture of these programs."""
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


def panel(figure, cell, title="", unit="", bare=False):
    """Adds a panel: a title, under it the unit of the y axis. A bare one has no axes and no grid."""
    ax = figure.add_subplot(cell)
    ax.set_title(title, pad=32 if unit else 8, weight="bold", fontsize=10.5)
    ax.annotate(unit, (0, 1), xycoords="axes fraction", xytext=(0, 17), textcoords="offset points", color=MUTED, fontsize=9)
    if bare:
        ax.grid(False)
        ax.spines["bottom"].set_visible(False)
        ax.xaxis.set_visible(False)
    return ax


# --- parts of a panel ---------------------------------------------------------------------------------------

def bars(ax, names, values, form, colors):
    """Draws a horizontal bar for each value, with its figure behind it; None is an empty one."""
    places = range(len(names))
    drawn = ax.barh(places, [value or 0 for value in values], 0.92 * 0.78, color=colors)
    ax.bar_label(drawn, ["" if value is None else form(value) for value in values], padding=5, fontsize=9,
                 bbox=dict(fc="white", ec="none", pad=1))
    ax.set(yticks=places, yticklabels=names, ylim=(len(names) - 0.4, -0.6))


def box(ax, x, y, width, height, words="", fc="white", ec="white", color=INK, **how):
    ax.add_patch(plt.Rectangle((x, y), width, height, fc=fc, ec=ec, **how))
    ax.text(x + width / 2, y + height / 2, words, color=color, ha="center", va="center")


def rows_of(ax, names, width):
    """Gives the panel a row of height 1 for each name, from the top down, to draw boxes in."""
    ax.set(xlim=(0, width), ylim=(len(names), 0), yticks=[y + 0.5 for y in range(len(names))], yticklabels=names)


def label(ax, places, right=9, up=0.0):
    """Writes lines of text beside points, (x, y, colour, line...), to the left where `right` is negative. The
    first line is bold unless it is grey; the others are grey. Pushes apart labels that would overlap."""
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


def span(ax, x, low, high):
    """Draws a line from low to high, a little to the right of x."""
    ax.plot([x, x], [low, high], color=MUTED, lw=1, clip_on=False, zorder=1,
            transform=transforms.offset_copy(ax.transData, ax.figure, 12, 0, "points"))


def linear_axis(ax, high, in_bytes=True, most=5):
    """Lets the y axis run from 0 to a round figure, with the unit beside each tick."""
    scale, unit = unit_of(high) if in_bytes else (1, "")
    at = ticker.MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]).tick_values(0, high / scale)
    ax.set(ylim=(0, at[-1] * scale), yticks=at * scale, yticklabels=[f"{value:g} {unit if value else ''}" for value in at])


def log_axis(ax, low, high):
    """Makes the y axis logarithmic, in bytes, with a tick at some powers of two."""
    powers = [2**k for k in range(60) if low / 1.6 <= 2**k <= 1.6 * high][::-1]
    ticks = powers[::-(-len(powers) // 5)]
    ax.set(yscale="log", ylim=(low / 1.6, 1.6 * high), yticks=ticks,
           yticklabels=["{1:g} {0[1]}".format(unit_of(tick), tick / unit_of(tick)[0]) for tick in ticks])
