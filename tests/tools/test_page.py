#!/usr/bin/env python3
"""kernels/lce/page.html in headless Chromium, and its numbers beside ./train --plan's."""
import csv
import html
import json
import pathlib
import re
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import ROOT, TRAIN, main, need, read_log, run, train  # noqa: E402
from tap import Skip  # noqa: E402

sys.path.insert(0, str(ROOT / "tools"))
import page_data  # noqa: E402
import pictures  # noqa: E402

PAGE = ROOT / "kernels" / "lce" / "page.html"
DATA = re.compile(r'<script type="application/json" id="data">\n(.*?)</script>', re.S)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def open_in_chromium(folder, text, sizes, width, *words):
    (folder / "page.html").write_text(text)
    return run(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
               "--enable-logging=stderr", f"--user-data-dir={folder}/{width}", f"--window-size={width},2800", *words,
               f"{(folder / 'page.html').as_uri()}#{sizes}")


def chromium(folder, sizes, width, *words):
    """Opens the page at these sizes and returns what it printed; a line in its console fails."""
    if not CHROMIUM:
        raise Skip("there is no Chromium; apt-get install chromium has one")
    if "<p>here" not in open_in_chromium(folder, "<p>here", "", 500, "--dump-dom").out:
        raise Skip(f"{CHROMIUM} does not open a file in {folder}")
    text = PAGE.read_text() + "<script>document.title = JSON.stringify(headBytes())</script>"
    done = open_in_chromium(folder, text, sizes, width, *words).ok()
    assert "CONSOLE" not in done.err, done
    return html.unescape(done.out)


def test_one_file_without_network(folder):
    text = PAGE.read_text()
    assert "://" not in text and "<link" not in text and "src=" not in text
    script = text.split("<script>\n")[1].split("</script>")[0]
    assert script.count("\n") <= 200 and max(map(len, script.splitlines())) <= 140


def test_data_is_what_the_tool_writes(folder):
    assert DATA.search(PAGE.read_text())[1] == page_data.text(), "run tools/page_data.py: the trainer's plans have changed"


def test_data_that_cannot_be_written(folder):
    """One sentence, and the page stays."""
    (folder / "other").write_text('#!/bin/sh\nfor file; do :; done\necho event,step,weights >"$file"\necho push,2,0 >>"$file"\n')
    (folder / "other").chmod(0o755)
    (folder / "page").write_text("no data")
    for page, program, says in ((PAGE, "/nonexistent", "No such file"), (PAGE, "/bin/true", "No such file"), (PAGE, "/bin/false", "does not plan"),
                                (PAGE, folder / "other", "does not plan"), (folder / "none", TRAIN, "No such file"),
                                (folder / "page", TRAIN, "has no line <script")):
        code = f"import page_data; page_data.PAGE = {str(page)!r}; page_data.main()"
        before = PAGE.read_text()
        done = run(sys.executable, "-c", code, cwd=ROOT / "tools", LCE_TRAIN=str(program)).fails("page_data: ", says)
        assert done.err.count("\n") == 1 and PAGE.read_text() == before, done


def test_numbers_are_the_plans(folder):
    """The command that the page shows plans the page's numbers, and each block of the loss. The second sizes have a
    shorter last chunk and a vocabulary of no whole cache lines."""
    for sizes in "", "N=81920&V=50257&H=4096&C=32768":
        dom = chromium(folder, sizes, 900, "--dump-dom")
        command = re.search(r'<pre id="command">./train (.*?)</pre>', dom)[1]
        assert not sizes or command.endswith(" --batch 20 --vocab 50257 --hidden-size 4096 --lce-chunk 32768")
        train(command, "--log", folder / "plan", "--timeline", folder / "steps.csv").ok()
        for plan in read_log(folder / "plan"):
            for key, field in ("head", "head_peak_bytes"), ("peak", "peak_bytes"):
                shown = int(re.search(rf'id="{plan["loss_mode"]}-{key}" data-bytes="(\d+)"', dom)[1])
                assert shown == plan[field], (sizes, plan["loss_mode"], key, shown, plan[field])
        blocks = json.loads(re.search("<title>(.*?)</title>", dom)[1])
        totals = [(row["block"], int(row["total"])) for row in csv.DictReader((folder / "steps.csv").read_text().splitlines())]
        pushes = [(name, now - before) for (_, before), (name, now) in zip(totals, totals[1:]) if now > before]
        pushed = dict(reversed(pushes))  # by the first chunk, which is the largest
        vectors, _ = blocks.pop("vectors"), blocks.pop("logits")
        assert all(pushed[name] == size for name, size in blocks.items()), (blocks, pushed)
        assert vectors == sum(size for name, size in blocks.items() if not re.match("exponentials|scratch|scaled x", name))


def test_screenshots(folder):
    for width in (1400, 900, 390):
        chromium(folder, "", width, f"--screenshot={folder}/page.png")
        png = (folder / "page.png").read_bytes()
        assert png[:4] == b"\x89PNG" and int.from_bytes(png[16:20], "big") == width and len(png) > 30000, (width, len(png))


def test_tables_of_all_pages(folder):
    """Every table has a header, the line of dashes directly below it, then rows of as many cells."""
    for page in (path for path in ROOT.rglob("*.md") if not {"build", "runs"} & set(path.relative_to(ROOT).parts)):
        text = re.sub("```.*?```", "", page.read_text(), flags=re.S)
        for table in re.findall(r"(?:^ *\|.*\n)+", text, re.M):
            head, *rows = [re.sub(r"`[^`]*`|\\\|", "", line).strip().strip("|").split("|") for line in table.splitlines()]
            dashed = len(rows) > 1 and all(re.fullmatch(" *:?-+:? *", cell) for cell in rows[0])
            assert dashed and {len(row) for row in rows} == {len(head)}, f"{page}: a table without a header or rows:\n{table}"


def test_still_pictures(folder):
    need("matplotlib")
    run(sys.executable, ROOT / "tools" / "pictures.py", folder).ok()
    text = "".join((PAGE.parent / name).read_text() for name in ("LCE.md", "REFERENCE.md"))
    assert all((PAGE.parent / path.name).exists() and f"]({path.name})" in text for path in folder.glob("*.png"))
    assert sorted(pictures.tile_at(tile, 8, 22, 3) for tile in range(176)) == [(row, column) for row in range(8) for column in range(22)]


main(globals())
