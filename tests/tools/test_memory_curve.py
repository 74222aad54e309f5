#!/usr/bin/env python3
"""tools/memory_curve and tools/plot_run: figures worked out by hand, plan against ledger, sweeps that stop, refusals, and what is in the
pictures."""
import csv
import importlib.util
import json
import os
import pathlib
import re
import signal
import sys
import tempfile
import xml.etree.ElementTree

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import ROOT, TINY, TRAIN, main, once, read_log, run, train, Process  # noqa: E402
from tap import Skip  # noqa: E402

GIB = 2**30
MODEL = TINY.replace("--device cpu ", "").split()
DRAWS = importlib.util.find_spec("matplotlib") is not None
FIGURES = ("planned_bytes", "planned_layer_bytes", "ledger_bytes", "layer_bytes", "step_seconds", "layer_seconds")
RECIPES = {"llama3-8b-32k": 0, "llama3-8b-4x20480": 0, "llama3-8b-hidden-states": 0, "llama3-8b-longest": 0, "tokens-81920": 16,
           "tokens-65536": 16, "chunk-sweep": 39, "gemma2-2b": 8, "llama3-8b-layer": 7, "batch-512": 8}


def tool(name, *words, **how):
    return run(sys.executable, ROOT / "tools" / name, *words, LCE_TRAIN=str(TRAIN), OMP_NUM_THREADS="1", **how)


def curve(folder, *words):
    return tool("memory_curve", "--out", folder, *words)


def number(cell):
    try:
        return float(cell)
    except ValueError:
        return cell


def table(path):
    with open(path, newline="") as file:
        settings = json.loads(file.readline().removeprefix("# "))
        rows = [{name: number(cell) for name, cell in row.items()}
                for row in csv.DictReader(file)]
    return settings, rows


def reading(folder, mode, **where):
    found = [row for row in table(folder / "curve.csv")[1] if row["mode"] == mode and all(row[k] == v for k, v in where.items())]
    assert len(found) == 1, (mode, where, found)
    return found[0]


def texts(path):
    """What an SVG says, and its root."""
    root = xml.etree.ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg", root.tag
    return ["".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]


def assert_says(path, *parts):
    said = texts(path)
    for part in parts:
        assert any(part in text for text in said), f"no {part!r} in {said}"
    return said


def need_pictures():
    if not DRAWS:
        raise Skip("there is no matplotlib")


# --- figures --------------------------------------------------------------------------------------------------


def test_worked_out_by_hand(folder):
    """N 64, H 32, V 1000 on a GPU in bf16. Every block counts in whole 256 bytes."""
    curve(folder, *"--layer-only --plan-only --device cuda --sweep tokens --values 64 --hidden-size 32 --vocab 1000 --lce-chunk 16".split(),
          *"--num-attention-heads 2 --num-key-value-heads 1".split()).ok()
    held = 64 * 32 * 2 + 1000 * 32 * 2 + 64 * 32 * 2 + 1000 * 32 * 4 + 256 + 256 + (32 << 20)  # x, W, dx, dW, losses, targets, workspace
    logits = 64 * 1024 * 2  # rows of 1000 stand 1024 apart: whole cache lines
    whole = reading(folder, "materialized")
    assert whole["planned_layer_bytes"] == logits and whole["planned_bytes"] == held + logits and whole["status"] == "planned", whole
    fused = reading(folder, "fused")
    chunk = 6 * 256 + 16 * 1024 * 2  # six fp32 columns of 16 rows, exponentials
    assert fused["chunk"] == 16 and fused["planned_layer_bytes"] >= chunk + 16 * 32 * 2, fused
    assert fused["planned_bytes"] == held + fused["planned_layer_bytes"], fused
    assert all(row[name] == "" for row in (whole, fused) for name in FIGURES[2:]), (whole, fused)


def test_plan_equals_ledger(folder):
    """Measured here, on the CPU."""
    sweeps = ("--sweep tokens --values 16,48,4x40", 6), ("--sweep vocab --values 280:900:x2", 4), ("--sweep hidden --values 8:24:8", 6), (
        "--sweep tokens --values 64,96 --recompute layer --lce-chunk 7", 4), ("--sweep chunk --values 3,50 --tokens 50", 3), (
        "--layer-only --sweep vocab --values 300,501", 4)
    for k, (options, points) in enumerate(sweeps):
        done = curve(folder / str(k), "--device", "cpu", *MODEL, *options.split()).ok(f"at {points} of {points} measured points")
        rows = table(folder / str(k) / "curve.csv")[1]
        assert len(rows) == points, done
        for row in rows:
            assert row["status"] == "measured" and row["ledger_bytes"] == row["planned_bytes"] > 0, row
            assert row["layer_bytes"] == row["planned_layer_bytes"] > 0, row
            assert (row["step_seconds"] or row["layer_seconds"]) > 0 and "CPU" in row["device"], row


def test_equals_trains_plan(folder):
    curve(folder, *"--plan-only --device cuda --model llama-1b --seq-len 512 --values 2048".split()).ok("nothing was allocated")
    train("--device cuda --model llama-1b --seq-len 512 --batch 4 --plan --log", folder / "plan").ok()
    for p in read_log(folder / "plan"):
        row = reading(folder, p["loss_mode"])
        assert (row["planned_bytes"], row["planned_layer_bytes"], row["chunk"]) == (p["peak_bytes"], p["head_peak_bytes"], p["lce_chunk"])
        assert sum(p["at_peak"].values()) == p["peak_bytes"], p


def test_what_does_not_fit(folder):
    options = "--layer-only --values 4096 --vocab 128256 --hidden-size 64 --device-memory 0.5".split()  # the fused mode fits
    curve(folder, "--plan-only", "--device", "cuda", *options).ok("does not fit")
    assert [reading(folder, mode)["status"] for mode in ("fused", "materialized")] == ["planned", "does not fit"]
    curve(folder / "cpu", "--device", "cpu", *MODEL, "--values", "32,64", "--device-memory", "1e-5").ok()
    assert all(row["status"] == "does not fit" and row["ledger_bytes"] == "" for row in table(folder / "cpu" / "curve.csv")[1])


def test_patience(folder):
    """What takes longer is planned, and measured later when there is more."""
    words = ["--device", "cpu", *MODEL, "--values", "512,1024"]
    curve(folder, *words, "--patience", "0.001").ok()
    assert {row["status"] for row in table(folder / "curve.csv")[1]} == {"too slow"}
    curve(folder, *words).ok()
    assert [row["status"] for row in table(folder / "curve.csv")[1]] == ["measured"] * 4


# --- recipes --------------------------------------------------------------------------------------------------


@once
def recipe(name):
    """Planned: where its files are, and what was printed."""
    folder = pathlib.Path(recipes, name)
    return folder, curve(folder, "--recipe", name, "--plan-only", "--format", "svg").ok()


def test_recipes(folder):
    listed = tool("memory_curve", "--list-recipes").ok().out
    assert re.findall(r"^([a-z0-9-]+) ", listed, re.M) == list(RECIPES), listed
    for name, points in RECIPES.items():
        folder, done = recipe(name)
        done.ok("\n  says: ")
        if points:
            rows = table(folder / "curve.csv")[1]
            assert len(rows) == points and all(row["planned_bytes"] > row["planned_layer_bytes"] > 0 for row in rows), name
    # The figures that the sources are known for come out of ours.
    gib = reading(recipe("tokens-81920")[0], "materialized", tokens=81920)["planned_layer_bytes"] / GIB
    assert abs(gib - 19.57) < 0.01, gib
    mib = reading(recipe("batch-512")[0], "materialized", tokens=512)["planned_layer_bytes"] / 2**20
    assert 250 < mib < 253, mib
    rows = table(recipe("llama3-8b-hidden-states")[0] / "timeline.csv")[1]
    assert 20 * GIB <= next(row["activations"] for row in rows if row["lm_head, loss"]) < 21.3 * GIB
    recipe("gemma2-2b")[1].ok("1 MB / 24 GB", "60.1 MiB", "QuACK (CuTe)", "560.1 MiB, chunk 1,024")


def test_offloaded_timelines(folder):
    """The published setting: offloaded, 8 chunks, and a baseline whose logits are fp32. The peaks are ./train's plans of the same options."""
    for name, logits in (("llama3-8b-32k", 32768), ("llama3-8b-4x20480", 81920)):
        settings, rows = table(recipe(name)[0] / "timeline.csv")
        train("--plan " + settings["options"] + " --log", folder / "plan").ok()
        plans = {p["loss_mode"]: p for p in read_log(folder / "plan")}
        for mode, like, more in (("fused", "fused", 0), ("materialized", "materialized", 0), ("fp32 logits", "materialized", logits * 128256 * 2)):
            part = [row for row in rows if row["mode"] == mode]
            totals = [sum(value for key, value in row.items() if key not in ("mode", "at", "step")) for row in part]
            assert max(totals) == plans[like]["peak_bytes"] + more, (name, mode)
            assert max(row["lm_head, loss"] for row in part) == plans[like]["head_peak_bytes"] + more, (name, mode)
            assert part[-1]["lm_head, loss"] == 0 and part[0]["at"] == 0 and all(a["at"] <= b["at"] for a, b in zip(part, part[1:]))


def test_longest_sequences(folder):
    """Each fits its memory, and one token more does not; the fused loss and offloading lengthen it."""
    options = ("--device cuda --plan --model llama-8b --batch 1 --max-position-embeddings 16777216 --recompute layer --moment-dtype bf16 "
               "--no-master-weights ")
    rows = table(recipe("llama3-8b-longest")[0] / "longest.csv")[1]
    assert len(rows) == 12
    for row in rows:
        for more in (0, 1):
            length = int(row["seq_len"]) + more
            offload = "--offload weights,gradients,optimizer,activations" if row["offloaded"] == "all" else ""
            if length:
                train(f"{options} --seq-len {length} {offload} --log", folder / "plan").ok()
                p = next(p for p in read_log(folder / "plan") if p["loss_mode"] == row["mode"])
                assert (p["peak_bytes"] > row["memory_gib"] * GIB) == bool(more), row
                assert more or p["peak_bytes"] == row["planned_bytes"] and p["host_bytes"] == row["host_bytes"], row
    lengths = {(row["memory_gib"], row["offloaded"], row["mode"]): row["seq_len"] for row in rows}
    for memory in (24, 48, 80):
        assert lengths[memory, "all", "fused"] > lengths[memory, "all", "materialized"] > lengths[memory, "nothing", "fused"]
    curve(folder / "one", "--recipe", "llama3-8b-longest", "--device-memory", "100").ok(" 100 GiB  all")


def test_documents_have_the_peers(folder):
    """README and BENCHMARKS.md say what the recipes' marks are: BENCHMARKS.md all of it, the README some, without the third size."""
    source = (ROOT / "tools" / "memory_curve").read_text()
    peers = re.findall(r'^    "([^"]+)": \(\(([0-9., ]+)\), ', source, re.M)
    readme, benchmarks, shown = (ROOT / "README.md").read_text(), (ROOT / "tools" / "BENCHMARKS.md").read_text(), 0
    assert len(peers) >= 6
    for name, figures in peers:
        f = figures.split(", ")
        cells = [f"{f[k]}, {f[k + 1]} MiB" for k in range(0, 8, 2)]
        assert f"\n| {name} | {' | '.join(cells)} |\n" in benchmarks, name
        if f"\n| {name} |" in readme:
            assert f"\n| {name} | {' | '.join(cells[:2] + cells[3:])} |\n" in readme, name
            shown += 1
    assert shown > 3


# --- a sweep that stops ---------------------------------------------------------------------------------------


def test_killed_sweep_resumes(folder):
    words = "--device cpu --layer-only --values 64:256:64 --vocab 3000 --hidden-size 32".split()
    curve(folder / "whole", *words).ok()
    stopped = Process(sys.executable, ROOT / "tools" / "memory_curve", *words, "--out", folder / "killed", LCE_TRAIN=str(TRAIN),
                      OMP_NUM_THREADS="1")
    stopped.wait_for("tokens 128")
    os.kill(stopped.pid, signal.SIGKILL)
    assert stopped.finish().status == -signal.SIGKILL
    path = folder / "killed" / "curve.csv"
    before = table(path)[1]
    assert 3 <= len(before) < 8
    with open(path, "a") as file:
        file.write("tokens,fused,1,64")  # a row that was cut off in the middle is no row
    curve(folder / "killed", *words).ok(f"{len(before)} of 8 points are in")
    after, whole = table(path)[1], table(folder / "whole" / "curve.csv")[1]
    assert after[:len(before)] == before, "what was measured before the kill was measured again"
    same = [name for name in after[0] if not name.endswith("_seconds")]
    assert [[row[name] for name in same] for row in after] == [[row[name] for name in same] for row in whole]
    # A finished sweep changes nothing, other settings are refused, and --fresh replaces them.
    text = path.read_text()
    curve(folder / "killed", *words).ok()
    assert path.read_text() == text
    other = "--device cpu --layer-only --values 64 --vocab 3001 --hidden-size 32".split()
    curve(folder / "killed", *other).fails("holds a sweep with vocab_size 3000, and this one has 3001; give another --out, or --fresh")
    curve(folder / "killed", *other, "--fresh").ok()


def test_damaged_files(folder):
    (folder / "curve.csv").write_text("tokens,bytes\n1,2\n")
    curve(folder, "--plan-only", "--device", "cpu", *MODEL).fails("is no table of this program")
    curve(folder / "nothing", "--redraw").fails("holds no table")


REFUSALS = {
    "--sweep depth": "--sweep", "--values 0": "whole numbers from 1", "--values 12a": "'12a' is not understood", "--values=": "is not understood",
    "--values 64,32": "32 stands after 64", "--values 32,32": "32 stands after 32", "--values 64:32:8": "does not grow",
    "--values 64:128": "'64:128' is not understood", "--values 64:128:0": "does not grow", "--values 64:128:x1": "does not grow",
    "--values 1:100000:1": "give up to 256", "--values 99999999999": "whole numbers from 1 to 2147483647",
    "--values 100": "100 tokens are not whole sequences of 16", "--values 70000x70000": "whole numbers from 1 to 2147483647",
    "--sweep vocab --values 4x4": "'4x4' is not understood", "--sweep chunk --tokens 64 --values 65": "more than the 64 tokens there are",
    "--tokens 64": "--tokens belongs to --layer-only", "--tokens 0 --layer-only": "--tokens 0: give a whole number from 1",
    "--timeline --sweep tokens": "--timeline excludes", "--recipe soup": "no recipe is called 'soup'; there are " + ", ".join(RECIPES),
    "--recipe batch-512 --sweep vocab": "--recipe excludes", "--patience never": "--patience", "--device-memory 0": "--device-memory 0: give",
    "--model gpt2-tiny --sweep hidden --values 100": "100", "--tokenz 5": "--tokenz", "--out /proc/nothing": "cannot make the folder /proc/nothing",
    "--out /dev/null": "cannot make the folder /dev/null"}


def test_refusals(folder):
    for words, says in REFUSALS.items():
        model = [] if "--model" in words else MODEL
        done = curve(folder, "--plan-only", "--device", "cpu", *model, *words.split()).fails(says)
        assert done.status == 1 and done.err.startswith("memory_curve: ") and done.err.count("\n") == 1, done


# --- pictures -------------------------------------------------------------------------------------------------


def test_pictures_of_sweeps(folder):
    need_pictures()
    curve(folder, *"--plan-only --device cuda --model llama-1b --format svg".split()).ok("wrote " + str(folder / "curve.svg"))
    rows = {row["mode"]: row for row in table(folder / "curve.csv")[1] if row["tokens"] == 32768}
    ratio = rows["materialized"]["planned_bytes"] / rows["fused"]["planned_bytes"]
    said = assert_says(folder / "curve.svg", "Training llama-1b", "V 128,256, bf16; planned for a GPU", "Planned, to the byte", f"{ratio:.2f}x")
    assert not any("Time" in text or re.search(r"\d s$", text) for text in said), said
    # Measured: the time, too, and what the device counts.
    curve(folder / "cpu", "--device", "cpu", *MODEL, "--values", "32,64", "--format", "svg").ok()
    assert_says(folder / "cpu" / "curve.svg", "measured on CPU", "Time of a step", "counted by the device", "agree to the byte at 4 of 4")
    curve(folder / "cpu", "--redraw").ok()
    assert (folder / "cpu" / "curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    # Time against memory.
    curve(folder / "chunk", "--device", "cpu", *MODEL, *"--sweep chunk --values 8,16,48 --format svg".split()).ok()
    assert_says(folder / "chunk" / "curve.svg", "time against memory", "over that of its three GEMMs", "materialized")


def test_pictures_of_recipes(folder):
    need_pictures()
    # A planned sweep has the libraries at their own chunks, and ours at the default one.
    assert_says(recipe("gemma2-2b")[0] / "curve.svg", "QuACK (CuTe), 3.13 GiB", "Liger (Triton)", "fused, default chunk", "560.1 MiB, 7.14x less", "planned for a GPU")
    assert_says(recipe("chunk-sweep")[0] / "curve.svg", "vocabulary", "hidden size", "7.55x")
    assert_says(recipe("chunk-sweep")[0] / "chunk.svg", "QuACK (CuTe), 1.55 GiB", "fused, default chunk")
    said = assert_says(recipe("llama3-8b-32k")[0] / "timeline.svg", "the layers, not the loss, now set the peak", "peak 9.37 GiB", "LM head + loss 15.66 GiB", "no time")
    assert not any("later" in text for text in said), said
    assert_says(recipe("llama3-8b-longest")[0] / "longest.svg", "131,072 positions", "517,933, host 180.37 GiB")


def test_a_measured_timeline(folder):
    done = curve(folder, *"--timeline --device cpu --format svg".split(), *MODEL).ok("peak in 3 steps, measured")
    settings, rows = table(folder / "timeline.csv")
    curve(folder / "peak", "--device", "cpu", "--plan-only", *MODEL, "--values", "48").ok()
    for mode in ("fused", "materialized"):
        part = [row for row in rows if row["mode"] == mode]
        totals = [sum(value for key, value in row.items() if key not in ("mode", "at", "step")) for row in part]
        assert max(totals) == reading(folder / "peak", mode)["planned_bytes"] and {row["step"] for row in part} == {1, 2, 3}, done
    if DRAWS:
        assert_says(folder / "timeline.svg", "time of three steps, s", "measured on")


def test_without_matplotlib(folder):
    """The table comes all the same, and a sentence says how to have pictures."""
    (folder / "matplotlib.py").write_text("raise ImportError('none')\n")
    done = run(sys.executable, ROOT / "tools" / "memory_curve", "--plan-only", "--device", "cpu", *MODEL, "--out", folder / "out",
               LCE_TRAIN=str(TRAIN), PYTHONPATH=str(folder)).ok("has no matplotlib", "install")
    assert "Traceback" not in done.err and len(table(folder / "out" / "curve.csv")[1]) == 16
    assert [path.name for path in (folder / "out").iterdir()] == ["curve.csv"]


def test_from_another_folder(folder):
    done = run(ROOT / "tools" / "memory_curve", "--plan-only", "--device", "cpu", *MODEL, cwd=folder, LCE_TRAIN=str(TRAIN)).ok()
    assert (folder / "runs" / "memory_curve" / "curve.csv").exists(), done


# --- runs -----------------------------------------------------------------------------------------------------


def test_plot_run(folder):
    need_pictures()
    log = folder / "smooth.jsonl"
    steps = [{"event": "step", "step": k, "loss": 3 + 8 * 2.7183**(-k / 15), "grad_norm": 1, "learning_rate": 1e-3, "tokens_per_second": 100}
             for k in range(1, 301)]
    start = {"event": "start", "model": "llama-1b", "vocab_size": 128256, "batch": 4, "seq_len": 2048, "dtype": "bf16", "device": "a machine"}
    log.write_text("".join(json.dumps(line) + "\n" for line in [start, *steps]) + '{"event":"step","ste')  # killed
    tool("plot_run", log, "--out", folder / "run.svg").ok()
    assert_says(folder / "run.svg", "Training llama-1b", "V 128,256, 4 x 2,048 tokens, bf16, on a machine", "Gradient norm", "Tokens a second")
    tool("plot_run", log, log, "--out", folder / "run.png", "--from", "100").ok()
    assert (folder / "run.png").read_bytes()[:4] == b"\x89PNG"
    rungs = folder / "ladder.jsonl"
    rungs.write_text("".join(json.dumps({"event": "layer", "name": f"{k} a version", "rung": k, "tokens": 1024, "hidden_size": 256, "chunk": 128,
                                         "vocab_size": 32768, "gpu": "a machine", "ratio": 1 + k / 100, "layer_bytes": k << 20}) + "\n"
                             for k in range(1, 7)))
    tool("plot_run", rungs, "--out", folder / "ladder.svg").ok()
    assert_says(folder / "ladder.svg", "N 1,024, H 256, V 32,768, chunks of 128; a machine", "3 a version", "1.03", "3.0 MiB", "1.06", "6.0 MiB")
    tool("plot_run", log, "--out", "/dev/full").fails("cannot write the picture /dev/full")
    tool("plot_run", "/dev/zero").fails("it is not a regular file")
    tool("plot_run", folder / "none").fails("cannot open the log")
    log.write_text("no JSON\n")
    tool("plot_run", log).fails("line 1: this is no JSON object")
    log.write_text(json.dumps(start) + "\n")
    tool("plot_run", log).fails("has no step to draw")


with tempfile.TemporaryDirectory(prefix="lce-recipes-") as recipes:
    main(globals(), 2)
