#!/usr/bin/env python3
"""tools/memory_curve and tools/plot_run: figures by hand, plan against ledger, sweeps that stop, pictures."""
import csv
import importlib.util
import json
import os
import pathlib
import re
import signal
import sys
import xml.etree.ElementTree

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import ROOT, TINY, TRAIN, keep, main, need, once, read_log, run, train, write, Process  # noqa: E402

GIB = 2**30
MODEL = TINY.replace("--device cpu ", "")
PLANNED = "--plan-only --device cpu " + MODEL
MEASURED = "--device cpu " + MODEL
FUSED_AND_NOT = "fused", "materialized"
RECIPES = {"llama3-8b-32k": 0, "llama3-8b-4x20480": 0, "llama3-8b-hidden-states": 0, "tokens-81920": 16, "tokens-65536": 16,
           "nanochat-d20": 16, "chunk-sweep": 39, "gemma2-2b": 8, "llama3-8b-layer": 7, "batch-512": 8}


def tool(name, *words, start=run, **how):
    return start(sys.executable, ROOT / "tools" / name, *words, **{"LCE_TRAIN": str(TRAIN), "OMP_NUM_THREADS": "1", **how})


def curve(folder, options, **how):
    return tool("memory_curve", "--out", folder, *options.split(), **how)


def undrawn(folder, options, **how):
    """The table alone: matplotlib, which takes most of the time, is not found. redraw() has the pictures."""
    write(pathlib.Path(keep.name, "undrawn/matplotlib.py"), "raise ImportError('none')\n")
    return curve(folder, options, PYTHONPATH=f"{keep.name}/undrawn", **how)


SEVERAL = """
import json, runpy, sys
said = []
for words in json.loads(sys.argv[1]):
    sys.argv, why = words, ""
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        why = end.code or ""
    said.append(why)
json.dump(said, sys.stderr)
"""


def several(name, lines):
    """Runs a tool with the words of each line, in one process. Returns what it printed, and each one's last sentence or ""."""
    lines = [[str(ROOT / "tools" / name), *map(str, words)] for words in lines]
    done = run(sys.executable, "-c", SEVERAL, json.dumps(lines), LCE_TRAIN=str(TRAIN), OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT / "tools")).ok()
    return done.out, json.loads(done.err)


def redraw(*folders):
    """Draws the folders' tables."""
    _, said = several("memory_curve", [["--out", folder, "--redraw", "--format", "svg"] for folder in folders])
    assert not any(said), said
    if importlib.util.find_spec("matplotlib"):
        assert all(any(folder.glob("*.svg")) for folder in folders), folders


def number(cell):
    try:
        return float(cell)
    except ValueError:
        return cell


def table(path):
    lines = path.read_text().splitlines()
    return json.loads(path.with_suffix(".json").read_text()), [{name: number(cell) for name, cell in row.items()} for row in csv.DictReader(lines)]


def curve_rows(folder):
    return table(folder / "curve.csv")[1]


def reading(folder, mode, **where):
    row, = [row for row in curve_rows(folder) if row["mode"] == mode and all(row[k] == v for k, v in where.items())]
    return row


def peak(moments):
    return max(sum(value for key, value in row.items() if key not in ("mode", "at", "step")) for row in moments)


def plans(folder, options):
    """Returns ./train's plans of these options, {mode: plan}."""
    train(f"{options} --plan --log", folder / "plan").ok()
    return {line["loss_mode"]: line for line in read_log(folder / "plan")}


def assert_says(path, *parts):
    """Requires these parts among the words of an SVG, if one can be drawn."""
    need("matplotlib")
    root = xml.etree.ElementTree.parse(path).getroot()
    said = ["".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]
    for part in parts:
        assert any(part in text for text in said), f"no {part!r} in {said}"
    return said


def test_worked_out_by_hand(folder):
    """N 64, H 32, V 1000 on a GPU in bf16. Every block counts in whole 256 bytes."""
    undrawn(folder, "--layer-only --plan-only --device cuda --sweep tokens --values 64 --hidden-size 32 --vocab 1000 --lce-chunk 16 "
            "--num-attention-heads 2 --num-key-value-heads 1").ok()
    # x, W, dx, dW, losses, targets, workspace
    held = 64 * 32 * 2 + 1000 * 32 * 2 + 64 * 32 * 2 + 1000 * 32 * 4 + 256 + 256 + (32 << 20)
    logits = 64 * 1024 * 2  # rows of 1000 stand 1024 apart: whole cache lines
    fused, whole = (reading(folder, mode) for mode in FUSED_AND_NOT)
    assert whole["planned_layer_bytes"] == logits and whole["planned_bytes"] == held + logits and whole["status"] == "planned", whole
    chunk = 6 * 256 + 16 * 1024 * 2  # six fp32 columns of 16 rows, exponentials
    assert fused["chunk"] == 16 and fused["planned_layer_bytes"] >= chunk + 16 * 32 * 2, fused
    assert fused["planned_bytes"] == held + fused["planned_layer_bytes"], fused
    assert all(row[name] == "" for row in (whole, fused) for name in ("ledger_bytes", "layer_bytes", "step_seconds", "layer_seconds"))


def test_plan_equals_ledger(folder):
    """Measured here, on the CPU."""
    sweeps = {"--sweep tokens --values 16,48,4x40": 6, "--sweep vocab --values 280:900:x2": 4, "--sweep hidden --values 8:24:8": 6,
              "--sweep tokens --values 64,96 --recompute layer --lce-chunk 7": 4, "--sweep chunk --values 3,50 --tokens 50": 3,
              "--layer-only --sweep vocab --values 300,501": 4}
    for k, (options, points) in enumerate(sweeps.items()):
        done = undrawn(folder / str(k), f"{MEASURED} {options}").ok(f"at {points} of {points} measured points")
        assert len(curve_rows(folder / str(k))) == points, done
        for row in curve_rows(folder / str(k)):
            assert row["status"] == "measured" and row["ledger_bytes"] == row["planned_bytes"] > 0, row
            assert row["layer_bytes"] == row["planned_layer_bytes"] > 0, row
            assert (row["step_seconds"] or row["layer_seconds"]) > 0 and "CPU" in row["device"], row
    redraw(*(folder / str(k) for k in range(len(sweeps))))


def test_equals_trains_plan(folder):
    options = "--device cuda --model llama-1b --seq-len 512 "
    undrawn(folder, f"{options} --plan-only --values 2048").ok("nothing was allocated")
    for mode, p in plans(folder, f"{options} --batch 4").items():
        row = reading(folder, mode)
        assert (row["planned_bytes"], row["planned_layer_bytes"], row["chunk"]) == (p["peak_bytes"], p["head_peak_bytes"], p["lce_chunk"])
        assert sum(p["at_peak"].values()) == p["peak_bytes"], p


def test_what_does_not_fit(folder):
    undrawn(folder, "--plan-only --device cuda --layer-only --values 4096 --vocab 128256 --hidden-size 64 --device-memory 0.5").ok("does not fit")
    assert [reading(folder, mode)["status"] for mode in FUSED_AND_NOT] == ["planned", "does not fit"]
    undrawn(folder / "cpu", MEASURED + " --values 32,64 --device-memory 1e-5").ok()
    assert all(row["status"] == "does not fit" and row["ledger_bytes"] == "" for row in curve_rows(folder / "cpu"))
    redraw(folder, folder / "cpu")


def test_patience(folder):
    """Plans a point that takes longer, and measures it later when there is more patience."""
    for more, status in (" --patience 0.001", "too slow"), (" --plan-only", "planned"), ("", "measured"), (" --plan-only", "measured"):
        done = undrawn(folder, f"{MEASURED} --values 512,1024{more}").ok()
        assert [row["status"] for row in curve_rows(folder)] == [status] * 4 and ("nothing was allocated" in done.out) == (status == "planned")


@once
def recipes():
    """Planned: where the files of each are, and what was printed."""
    folders = {name: pathlib.Path(keep.name, name) for name in RECIPES}
    planned = {name: (folder, undrawn(folder, f"--recipe {name} --plan-only").ok("\n  says: ")) for name, folder in folders.items()}
    redraw(*folders.values())
    return planned


def recipe(name):
    return recipes()[name]


def test_recipes(folder):
    listed = tool("memory_curve", "--list-recipes").ok().out
    assert re.findall(r"^([a-z0-9-]+) ", listed, re.M) == list(RECIPES), listed
    for name, points in RECIPES.items():
        rows = curve_rows(recipe(name)[0]) if points else []
        recipe(name)
        assert not points or table(recipe(name)[0] / "curve.csv")[0]["options"].count("--device ") == 1
        assert len(rows) == points and all(row["planned_bytes"] > row["planned_layer_bytes"] > 0 for row in rows), name
    # The figures that the sources are known for come out of ours.
    gib = reading(recipe("tokens-81920")[0], "materialized", tokens=81920)["planned_layer_bytes"] / GIB
    assert abs(gib - 19.57) < 0.01, gib
    mib = reading(recipe("batch-512")[0], "materialized", tokens=512)["planned_layer_bytes"] / 2**20
    assert 250 < mib < 253, mib
    rows = table(recipe("llama3-8b-hidden-states")[0] / "timeline.csv")[1]
    assert 20 * GIB <= next(row["activations"] for row in rows if row["lm_head, loss"]) < 21.3 * GIB
    recipe("nanochat-d20")[1].ok("fall 14.3 times beyond their gradients, from 8.00 GiB to 572.6 MiB in chunks of 4,096")
    recipe("gemma2-2b")[1].ok("1 MB / 24 GB", "60.1 MiB", "560.1 MiB, chunk 1,024")


def test_offloaded_timelines(folder):
    """The published setting: offloaded, 8 chunks, and a baseline whose logits are fp32. The peaks are
    ./train's plans of the same options."""
    for name, tokens in (("llama3-8b-32k", 32768), ("llama3-8b-4x20480", 81920)):
        settings, rows = table(recipe(name)[0] / "timeline.csv")
        planned = plans(folder, settings["options"])
        for mode, like, more in (("fused", "fused", 0), ("materialized", "materialized", 0), ("fp32 logits", "materialized", tokens * 128256 * 2)):
            part = [row for row in rows if row["mode"] == mode]
            assert peak(part) == planned[like]["peak_bytes"] + more, (name, mode)
            assert max(row["lm_head, loss"] for row in part) == planned[like]["head_peak_bytes"] + more, (name, mode)
            assert part[-1]["lm_head, loss"] == 0 and part[0]["at"] == 0 and all(a["at"] <= b["at"] for a, b in zip(part, part[1:]))


def test_killed_sweep_resumes(folder):
    options, path = "--device cpu --layer-only --values 64:256:64 --vocab 3000 --hidden-size 32", folder / "killed" / "curve.csv"
    undrawn(folder / "whole", options).ok()
    stopped = undrawn(folder / "killed", options, start=Process)
    stopped.wait_for("tokens 128")
    os.kill(stopped.pid, signal.SIGKILL)
    assert stopped.finish().status == -signal.SIGKILL
    before = curve_rows(folder / "killed")
    assert 3 <= len(before) < 8
    with open(path, "a") as file:
        file.write("tokens,fused,1,64")  # a row that was cut off in the middle is no row
    undrawn(folder / "killed", options).ok(f"{len(before)} of 8 points are in")
    after, whole = curve_rows(folder / "killed"), curve_rows(folder / "whole")
    assert after[:len(before)] == before, "what was measured before the kill was measured again"
    same = [name for name in after[0] if not name.endswith("_seconds")]
    assert [[row[name] for name in same] for row in after] == [[row[name] for name in same] for row in whole]
    # A finished sweep changes nothing, other settings are refused, and --fresh replaces them.
    text = path.read_text()
    undrawn(folder / "killed", options).ok()
    assert path.read_text() == text
    redraw(folder / "killed")
    other = options.replace("3000", "3001")
    undrawn(folder / "killed", other).fails("holds a sweep with vocab_size 3000, and this one has 3001; give another --out, or --fresh")
    undrawn(folder / "killed", other + " --fresh --plan-only").ok()


def test_the_default_chunk_is_in_a_sweep(folder):
    undrawn(folder, "--plan-only --device cpu --layer-only --tokens 4096 --sweep chunk").ok(" in chunks of 456 (the default) (planned)")
    undrawn(folder / "near", "--plan-only --device cpu --tokens 4096 --sweep chunk --values 64,500,4096").ok(" in chunks of 500 (planned)")
    redraw(folder, folder / "near")


def test_damaged_and_foreign_files(folder):
    """One sentence, and nothing is replaced."""
    undrawn(folder, PLANNED).ok()
    csv_file, settings = folder / "curve.csv", folder / "curve.json"
    text, head = csv_file.read_text(), csv_file.read_text().splitlines()[0]
    for damaged in ("tokens,bytes\n1,2\n", f"{head[:50]}\n", f"{head}\ntokens,fused\n", text.replace(",planned,", f",{'x' * 200000},"),
                    text.replace("300,16", "[" * 100000 + ",16"), text.replace("300,16", "1e999,16"), text.replace("300,16", "[1],16"),
                    text.replace("300,16", "null,16"), text.replace("300,16", ",16"), text.replace(",,,,,,0,", ",,,,9,,0,"),
                    text.replace("tokens,fused", "token,fused"), "mine"):
        csv_file.write_text(damaged + "\n")
        _, said = several("memory_curve", [["--out", folder, *(PLANNED + more).split()] for more in ("", " --fresh", " --redraw")])
        assert csv_file.read_text() == damaged + "\n"
        for sentence in said:
            assert "curve.csv is no table of this program" in sentence and "\n" not in sentence, (damaged, said)
    csv_file.write_text(text)
    for foreign in ("mine", "[]", "[" * 100000, '{"what": 1}'):
        settings.write_text(foreign)
        assert curve(folder, PLANNED + " --fresh").fails("is no table of this program").err.count("\n") == 1
        assert settings.read_text() == foreign and csv_file.read_text() == text
    csv_file.rename(folder / "timeline.csv")
    curve(folder, "--timeline " + PLANNED).fails("timeline.csv is no table of this program")
    (folder / "other").mkdir()
    (folder / "other" / "curve.png").write_text("a picture")
    curve(folder / "other", PLANNED + " --fresh").fails("curve.png: what is there is not from this program")
    assert [path.read_text() for path in (folder / "other").iterdir()] == ["a picture"]
    curve(folder / "nothing", "--redraw").fails("holds no table")


REFUSALS = {
    "'{}' is not understood":
        "--values 12a;--values 64:32:8;--values 64:128;--values 64:128:0;--values 64:128:x1;--sweep vocab --values 4x4;--values ",
    "give up to 256 whole numbers from 1 to 2147483647, each once, from small to large":
        "--values 0;--values 64,32;--values 32,32;--values 1:100000:1;--values 99999999999;--values 70000x70000",
    "{} tokens are not whole sequences of 16": "--values 100", "more than the 64 tokens there are": "--sweep chunk --tokens 64 --values 65",
    "--tokens belongs to --layer-only": "--tokens 64", "--seq-len": "--layer-only --tokens 0", "--sweep": "--sweep depth",
    "not allowed with argument": "--timeline --sweep tokens;--recipe batch-512 --sweep vocab;--recipe batch-512 --timeline",
    "exclude --values": "--timeline --values 16;--recipe batch-512 --values 16;--timeline --layer-only",
    "'soup' (choose from ": "--recipe soup", "--patience": "--patience never;--patience 0",
    "--device-memory": "--device-memory 0", "without effect here": "--save {};--save={};--steps 9", "--tokenz": "--tokenz 5",
    "100": "--model gpt2-tiny --num-layers 12 --sweep hidden --values 100", "/proc/nothing": "--out /proc/nothing", "/dev/null": "--out /dev/null"}


def test_refusals(folder):
    cases = [(says, case.split(" ")) for says, cases in REFUSALS.items() for case in cases.split(";")]
    lines = [["--out", folder, "--plan-only", "--device", "cpu", *([] if "--model" in words else MODEL.split()), *words] for _, words in cases]
    for (says, words), sentence in zip(cases, several("memory_curve", lines)[1], strict=True):
        assert sentence.startswith("memory_curve: ") and says.format(words[-1]) in sentence and "\n" not in sentence, (words, sentence)
    assert tool("memory_curve", "--out", folder, *lines[0][2:]).fails("memory_curve: ").status == 1


def test_pictures_of_sweeps(folder):
    curve(folder, "--plan-only --device cuda --model llama-1b --format svg").ok()
    fused, whole = (reading(folder, mode, tokens=32768)["planned_bytes"] for mode in FUSED_AND_NOT)
    said = assert_says(folder / "curve.svg", "Training llama-1b", "V 128,256, bf16, sequences of ", "; planned for a GPU", "Planned, byte for byte", f"{whole / fused:.2f}x")
    assert not any("Time" in text or re.search(r"\d s$", text) for text in said), said
    # Measured: the time, too, and what the device counts.
    curve(folder / "cpu", MEASURED + " --values 32,64 --format svg").ok("wrote " + str(folder / "cpu" / "curve.svg"))
    assert_says(folder / "cpu" / "curve.svg", "measured on CPU", "Time of a step", "counted by the device", "agree byte for byte at 4 of 4")
    curve(folder / "cpu", "--redraw").ok()
    # Names are printed without what a terminal would act on.
    for words, says in (("--plan-only", "\nwrote "), ("--batch 3", " holds a sweep with ")):
        done = curve(folder / "\x1b[31m", words)
        assert says in done.out + done.err and "\x1b" not in done.out + done.err, done
    assert (folder / "cpu" / "curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    # Chunks, with the time beside the memory.
    curve(folder / "chunk", MEASURED + " --sweep chunk --values 8,16,48 --format svg").ok()
    assert_says(folder / "chunk" / "curve.svg", "over that of its three GEMMs", "materialized, ", "tokens per chunk")


def test_pictures_of_recipes(folder):
    assert_says(recipe("gemma2-2b")[0] / "curve.svg", "paper: plain, 23.44 GiB", "fused, default chunk", "560.1 MiB, 7.14x less",
                "planned for a GPU")
    assert_says(recipe("chunk-sweep")[0] / "curve.svg", "vocabulary", "hidden size", "7.55x")
    said = assert_says(recipe("llama3-8b-32k")[0] / "timeline.svg", "the layers, not the loss, now set the peak", "peak 9.37 GiB",
                       "LM head + loss 15.66 GiB", "each mode's to its own scale: no time")
    assert not any("later" in text for text in said), said
    assert_says(recipe("batch-512")[0] / "curve.svg", "PyTorch, playbook, 1.47 GiB", "Grey: the playbook's table")


def test_a_measured_timeline(folder):
    done = curve(folder, f"--timeline --format svg {MEASURED}").ok("peak in 3 steps, measured")
    rows = table(folder / "timeline.csv")[1]
    for mode, p in plans(folder, TINY).items():
        part = [row for row in rows if row["mode"] == mode]
        assert peak(part) == p["peak_bytes"] and {row["step"] for row in part} == {1, 2, 3}, done
    assert_says(folder / "timeline.svg", "time of three steps, s", "measured on")


def test_without_matplotlib(folder):
    """The table comes all the same, and a sentence says how to have pictures. Without --out the files go
    below the current folder."""
    (folder / "matplotlib.py").write_text("raise ImportError('none')\n")
    out = folder / "runs" / "memory_curve"
    done = run(ROOT / "tools" / "memory_curve", *PLANNED.split(), cwd=folder, LCE_TRAIN=str(TRAIN), PYTHONPATH=str(folder))
    done.ok("has no matplotlib", "install")
    assert "Traceback" not in done.err and len(curve_rows(out)) == 16 and {path.name for path in out.iterdir()} == {"curve.csv", "curve.json"}


def test_plot_run(folder):
    need("matplotlib")

    def write(name, lines, end=""):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines) + end)
        return folder / name
    start = {"event": "start", "model": "llama-1b", "vocab_size": 128256, "batch": 4, "seq_len": 2048, "dtype": "bf16", "device": "a machine"}
    steps = [{"event": "step", "step": k, "loss": 3 + 8 * 2.7183**(-k / 15), "grad_norm": 1, "learning_rate": 1e-3, "tokens_per_second": 100}
             for k in range(1, 301)]
    rungs = [{"event": "layer", "name": f"{k} a version", "rung": k, "tokens": 1024, "hidden_size": 256, "chunk": 128, "vocab_size": 32768,
              "gpu": "a machine", "ratio": 1 + k / 100, "layer_bytes": k << 20, "gemms": 3 + (k == 2), "certain_error": 1.0 if k < 4 else 1e-6} for k in range(1, 7)]
    log = write("smooth.jsonl", [start, *steps], '{"event":"step","ste')  # killed
    deep = write("deep", [start, *steps], "[" * 100000 + "\n")
    other, ladder, escape = write("other.jsonl", [{**start, "device": "another"}, *steps]), write("ladder.jsonl", rungs), write("a\x1b[31m-1.jsonl", [start, *steps])
    (folder / "mine.png").write_bytes(b"\x89PNG, by another program")
    lines = {("run.svg", log): "", ("two.svg", log, other, log): "", ("run.png", log, log, "--from", "100"): "", ("ladder.svg", ladder): "",
             ("run.png", log): "",  # over its own
             ("groups.png", "--groups", escape): "", ("mine.png", log): "is not from this program", ("wrong.png", deep): "line 302: this is no JSON object",
             ("wrong.png", write("odd", [{**start, "batch": []}, *steps])): "nothing is drawn", ("wrong.png", "/dev/zero"): "regular file",
             ("wrong.png", folder / "none"): "cannot open the log", ("wrong.png", write("text", [], "no JSON\n")): "line 1: this is no JSON object",
             ("wrong.png", write("empty", [start])): "has no step to draw"}
    printed, said = several("plot_run", [[*words, "--out", folder / picture] for picture, *words in lines])
    for (words, says), sentence in zip(lines.items(), said, strict=True):
        assert says in sentence and bool(says) == bool(sentence), (words, sentence)
    assert "\n| a\\x1b[31m | " in printed, printed
    assert_says(folder / "run.svg", "Training llama-1b", "V 128,256, 4 x 2,048 tokens, bf16, on a machine", "Gradient norm", "Tokens per second")
    assert_says(folder / "two.svg", "bf16, on a machine and another")
    assert_says(folder / "ladder.svg", "N 1,024, H 256, V 32,768, chunks of 128; a machine", "3 a version", "1.03", "3.0 MiB", "1.06", "6.0 MiB",
                "1.0", "4 GEMMs", "3 GEMMs, there to be read", "target nearly certain", "100%", "1e-06")
    assert (folder / "run.png").read_bytes()[:4] == b"\x89PNG" and not (folder / "wrong.png").exists()
    tool("plot_run", log, "--out", "/dev/full").fails("cannot write the picture /dev/full")


DRAWN = """
import drawing, runpy, sys
plot_run, figures = runpy.run_path(sys.argv[1]), []
drawing.why_not()
drawing.plt.close = figures.append
plot_run["draw_runs"]("", "", {"a run": plot_run["Log"](sys.argv[2])}, sys.argv[3], 0)
figure, = figures
for ax in figure.axes[2:]:
    print([float(y) for line in ax.lines for y in line.get_ydata()])
print(figure.legends[0].get_window_extent().overlaps(figure.axes[0].get_tightbbox()))
"""


def test_a_schedule_is_drawn_as_it_is(folder):
    need("matplotlib")
    rates, speeds = ([scale * min(k / 20, 1) for k in range(1, 201)] for scale in (2e-3, 100.0))
    (folder / "log").write_text("".join(json.dumps({"event": "step", "step": k, "loss": 1, "grad_norm": 1, "learning_rate": rate,
                                                    "tokens_per_second": speed}) + "\n" for k, (rate, speed) in enumerate(zip(rates, speeds))))
    done = run(sys.executable, "-c", DRAWN, ROOT / "tools" / "plot_run", folder / "log", folder / "run.png", PYTHONPATH=str(ROOT / "tools"))
    assert done.ok().out == f"{rates}\n{speeds}\nFalse\n", done


main(globals(), 2)
