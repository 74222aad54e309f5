#!/usr/bin/env python3
"""kernels/lce/page.html in headless Chromium: its numbers beside ./train --plan's and float64, its state, its looks; and
the tables and still pictures of all pages."""
import csv
import html
import json
import math
import pathlib
import re
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import ROOT, TRAIN, keep, main, need, once, read_log, run, train, write  # noqa: E402
from tap import Skip  # noqa: E402

sys.path.insert(0, str(ROOT / "tools"))
import page_data  # noqa: E402
import pictures  # noqa: E402

PAGE = ROOT / "kernels" / "lce" / "page.html"
TEXT = PAGE.read_text()
DATA = re.compile(r'<script type="application/json" id="data">\n(.*?)</script>', re.S)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
DARK = "--blink-settings=preferredColorScheme=0"


def open_in_chromium(folder, text, state, width, *words):
    write(folder / "page.html", text)
    return run(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
               "--enable-logging=stderr", f"--user-data-dir={folder}/{width}", f"--window-size={width},2800", *words,
               f"{(folder / 'page.html').as_uri()}#{state}")


@once
def need_chromium():
    if not CHROMIUM:
        raise Skip("there is no Chromium; apt-get install chromium has one")
    folder = pathlib.Path(keep.name, "chromium")
    if "<p>here" not in open_in_chromium(folder, "<p>here", "", 500, "--dump-dom").out:
        raise Skip(f"{CHROMIUM} does not open a file in {folder}")


def chromium(folder, state="", *words, script="", more="--dump-dom", widths=()):
    """Opens the page in a state, runs the body of an async function there, and returns the page and what that returned.
    With widths: in frames so wide, as no window is narrower than 500, without a state; what each returned, by its width.
    A line in the console fails."""
    need_chromium()
    got = "{...JSON.parse(parent.document.title), [innerWidth]: got}" if widths else "got ?? null"
    text = TEXT + f"<script>(async () => {{ {script} }})().then(got => parent.document.title = JSON.stringify({got}))</script>"
    if widths:
        frame = f'<iframe style="width: %spx; height: 2800px; border: 0" srcdoc="{html.escape(text).replace("%", "%%")}"></iframe>'
        text = '<title>{}</title><body style="margin: 0">' + "".join(frame % width for width in widths)
    done = open_in_chromium(folder, text, state, max(widths, default=900), "--virtual-time-budget=30000", *words, more).ok()
    assert "CONSOLE" not in done.err, done
    title = re.search("<title>(.*?)</title>", done.out)
    return done.out, title and json.loads(html.unescape(title[1]))


def at_each(folder, states, script):
    """Opens the page once, and moves it from state to state: what it shows and what the script returns in each."""
    loop = f"""const found = [];
      for (const state of {json.dumps(states)}) {{
        location.hash = state || "none";
        await new Promise(later => setTimeout(later, 100));
        found.push([document.body.innerHTML.replace(/<script[^]*?<.script>/g, ""), (() => {{ {script} }})()]);
      }}
      return found"""
    return chromium(folder, script=loop)[1]


def test_one_file_without_network(folder):
    assert "://" not in TEXT and "<link" not in TEXT and "src=" not in TEXT
    script = TEXT.split("<script>\n")[1].split("</script>")[0]
    assert script.count("\n") <= 440 and max(map(len, script.splitlines())) <= 140
    for part in ('<meta name="description"', '<meta property="og:title"', '<meta property="og:description"', "<noscript>", "<math "):
        assert part in TEXT, part
    # Nothing announces what changes while it plays.
    assert not re.search(r"<output|aria-live|role=.(status|alert|log|timer)", TEXT)


def test_a_picture_first_then_few_words(folder):
    sections = re.findall("<section>(.*?)</section>", TEXT, re.S)
    assert len(sections) == 8
    for section in sections:
        assert "<svg" not in section or section.index("<svg") < section.index("<p>"), section
        words = re.sub("<math.*?</math>|<[^>]*>", " ", " ".join(re.findall("<(?:p|li)>.*?</(?:p|li)>", section, re.S)), flags=re.S).split()
        assert len(words) <= 120, (len(words), section)


def test_data_is_what_the_tool_writes(folder):
    assert DATA.search(TEXT)[1] == page_data.text(), "run tools/page_data.py: plans, ladder.py, LCE.md or BENCHMARKS.md have changed"


def test_data_that_cannot_be_written(folder):
    """One sentence, and the page stays."""
    (folder / "other").write_text('#!/bin/sh\nfor file; do :; done\necho event,step,weights >"$file"\necho push,2,0 >>"$file"\n')
    (folder / "other").chmod(0o755)
    (folder / "page").write_text("no data")
    for page, program, says in ((PAGE, "/nonexistent", "No such file"), (PAGE, "/bin/true", "No such file"), (PAGE, "/bin/false", "does not plan"),
                                (PAGE, folder / "other", "does not plan"), (folder / "none", TRAIN, "No such file"),
                                (folder / "page", TRAIN, "has no line <script")):
        code = f"import page_data; page_data.PAGE = {str(page)!r}; page_data.main()"
        done = run(sys.executable, "-c", code, cwd=ROOT / "tools", LCE_TRAIN=str(program)).fails("page_data: ", says)
        assert done.err.count("\n") == 1 and PAGE.read_text() == TEXT, done


def test_numbers_are_the_plans(folder):
    """The command that the page shows plans the page's numbers, and each block of the loss. The second sizes have a
    shorter last chunk and a vocabulary of no whole cache lines."""
    states = "", "N=81920&V=50257&H=4096&C=32768"
    for sizes, (dom, blocks) in zip(states, at_each(folder, states, "return headBytes()"), strict=True):
        command = re.search(r"^./train (.*)", re.sub("<[^>]*>", "", re.search('id="command">(.*?)</pre>', dom)[1]))[1]
        assert not sizes or command.endswith(" --batch 20 --vocab 50257 --hidden-size 4096 --lce-chunk 32768")
        train(command, "--log", folder / "plan", "--timeline", folder / "steps.csv").ok()
        for plan in read_log(folder / "plan"):
            for key, field in ("head", "head_peak_bytes"), ("peak", "peak_bytes"):
                shown = int(re.search(rf'id="{plan["loss_mode"]}-{key}" data-bytes="(\d+)"', dom)[1])
                assert shown == plan[field], (sizes, plan["loss_mode"], key, shown, plan[field])
        totals = [(row["block"], int(row["total"])) for row in csv.DictReader((folder / "steps.csv").read_text().splitlines())]
        pushed = {}
        for (_, before), (name, now) in zip(totals, totals[1:]):
            pushed[name] = max(pushed.get(name, 0), now - before)  # the last chunk may be shorter
        vectors, _ = blocks.pop("vectors"), blocks.pop("logits")
        assert all(pushed[name] == size for name, size in blocks.items()), (blocks, pushed)
        assert vectors == sum(size for name, size in blocks.items() if not re.match("exponentials|scratch|scaled x", name))


def exact(z, y):
    """c and the loss in float64."""
    R = math.fsum(math.exp(v - z[y]) for j, v in enumerate(z) if j != y)
    return -R / (1 + R), math.log1p(R)


def test_which_number_to_subtract(folder):
    """-R / (1 + R) is right to 1.2e-6 in steps of 0.01, and to 1.4e-7 at whole leads; p - 1 is off by what the page, LCE.md
    and the slider say."""
    dom, rows = chromium(folder, "lead=14", script="return upTo(3000).map(k => [led(k / 100), usual(led(k / 100), 0), anchored(led(k / 100), 0)])")
    shown = {}
    for k, (z, usual, anchored) in enumerate(rows):
        (c, loss), most = exact(z, 0), 1.2e-6 if k % 100 else 1.45e-7
        assert abs(z[0] - max(z[1:]) - k / 100) < 1e-6
        assert abs(anchored["c"] / c - 1) < most and abs(anchored["loss"] / loss - 1) < most, k
        shown[k / 100] = f"{100 * abs(usual['c'] / c - 1):.1f}%"
        if k >= 1600:
            assert usual["c"] == usual["loss"] == 0
    assert [shown[lead] for lead in (10, 14, 15, 16, 30)] == ["0.2%", "6.7%", "27.5%", "100.0%", "100.0%"], shown
    assert "<b>6.7%</b>" in dom
    for page in TEXT, (PAGE.parent / "LCE.md").read_text():
        sentence = " ".join(re.sub("<[^>]*>", "", page).split())
        assert re.search(r"0\.2% at a lead of 10, 6\.7% at 14 and 27\.5% at 15, and from 16 on it is exactly 0, although the loss at 16 is 4\.8e-7", sentence)
    assert f"{exact(rows[1600][0], 0)[1]:.1e}" == "4.8e-07"


def test_by_hand(folder):
    """LCE.md's example, edited logits against float64, and a row that is repaired."""
    (dom, _), (repaired, row) = at_each(folder, ["", "z=2,2,-1,90,3&y=4"], "return anchored(logits(), at.y)")
    assert row["repaired"] and abs(row["loss"] - 87) < 1e-4 and row["c"] == -1 and "<b>computed again</b>" in repaired
    example = (PAGE.parent / "LCE.md").read_text().split("## An example with numbers")[1]
    for name in "R", "loss", "r", "c":
        value = re.search(rf"^{re.escape(name)} = .*?  +(-?[0-9.]+)  ", example, re.M)[1]
        assert re.search(rf"\b{name} = {re.escape(value.replace('-', '−').rstrip('0'))}\b", re.sub("</?b>", "", dom)), (name, value)
    assert "(−0.02463, −0.22698)" in dom and "(-0.024630, -0.226981)" in example
    edit = ("const input = document.querySelector('[data-logit=\"1\"]'); input.value = '2.5'; input.dispatchEvent(new Event('input', {bubbles: true}));"
            "document.querySelector('[name=y][value=\"0\"]').click(); return [anchored(logits(), at.y), logits(), at.y]")
    dom, (row, z, y) = chromium(folder, script=edit)
    c, loss = exact(z, y)
    assert (z, y) == ([2, 2.5, -1, -2, 3], 0) and abs(row["c"] / c - 1) < 2e-7 and abs(row["loss"] / loss - 1) < 2e-7 and f"R = {row['R']:.5f}" in dom


def test_the_state_is_in_the_address(folder):
    """It is read from there, written when the reader chooses, and read again when the address changes."""
    state = "N=32768&V=50257&C=1024&H=4096&t=900&lead=3&z=1,2,3,4,5.5&y=2&rung=5"
    _, found = chromium(folder, state, script="return at")
    assert found == dict(N=32768, V=50257, C=1024, H=4096, t=900, lead=3, z="1,2,3,4,5.5", y=2, rung=5), found
    _, (found, first) = chromium(folder, "N=7&V=x&t=1001&z=1,2&y=-1&rung=9&lead=", script="return [at, FIRST]")
    assert found == first
    script = """const input = document.querySelector("input[data-key=lead]"); input.value = 22;
      for (const type of ["input", "change"]) input.dispatchEvent(new Event(type, {bubbles: true}));
      document.querySelector("#rungs [value='2']").click();
      const written = location.hash;
      location.hash = "#lead=9&H=1024";
      await new Promise(later => setTimeout(later, 100));
      return [written, at.lead, at.H, at.rung]"""
    assert chromium(folder, script=script)[1] == ["#lead=22&rung=2", 9, 1024, 4]


def test_playing_lights_the_running_line(folder):
    lit = "[...document.querySelectorAll('#python .lit')].map(line => line.textContent)"
    lines = {"t=0": "for i in", "t=10": "E = (x[i]", "t=22": "dX[i] =", "t=40": "dW += E.T", "t=1000": "dW.index_add_"}
    for (t, line), (_, texts) in zip(lines.items(), at_each(folder, list(lines), f"return {lit}"), strict=True):
        assert [text.startswith(line) for text in texts] == [True], (t, line, texts)
    script = "requestAnimationFrame = frame => setTimeout(() => frame(performance.now()), 50);" \
        "$('play').click(); await new Promise(later => setTimeout(later, 10000)); return [at.t, location.hash, $('play').textContent]"
    found = chromium(folder, "t=700", script=script)[1]  # 20 ms each
    assert found == [1000, "#t=1000", "Play"], found


def test_the_ladders_code(folder):
    """A rung's code is that of ladder.py; what the rung before lacks is lit, what went is struck."""
    script = "return [...$('rung-code').children].map(line => [line.textContent, line.className])"
    rungs = (2, "for i in", "z = mm(x, W.T)"), (4, "E.scatter_(1", "lse = z.logsumexp(-1)"), (7, "context(x.device", "e.copy_(exps)")
    for (rung, new, gone), (_, lines) in zip(rungs, at_each(folder, [f"rung={rung}" for rung, *_ in rungs], script), strict=True):
        assert any(text.startswith(new) and how == "new" for text, how in lines) and [gone, "gone"] in lines, lines
        code = json.loads(DATA.search(TEXT)[1])["rungs"][rung - 1]["code"]
        assert [text for text, how in lines if how != "gone"] == [re.sub(" +# noqa.*", "", line).strip() for line in code.splitlines()], lines


def test_widths_and_themes(folder):
    """Nothing is wider than the window, letters are large enough and stand out from their ground."""
    script = """location.hash = "z=40,0,-20,0,20&y=0&rung=7";
      await new Promise(later => setTimeout(later, 100));
      const luminance = color => color.match(/[0-9.]+/g).slice(0, 3).map(v => (v / 255) ** 2.2)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0.05);
      const body = getComputedStyle(document.body), contrast = luminance(body.color) / luminance(body.backgroundColor);
      const beyond = [...document.querySelectorAll("main *")].filter(e => e.getBoundingClientRect().right > innerWidth + 1);
      return [at.rung, document.documentElement.scrollWidth, beyond.map(e => e.outerHTML.slice(0, 200)), contrast]"""
    for dark in False, True:
        found = chromium(folder, "", *[DARK] * dark, script=script, widths=(360, 768, 1280))[1]
        assert list(found) == ["360", "768", "1280"], found
        for width, (rung, wide, beyond, contrast) in found.items():
            assert rung == 7 and wide <= int(width) and not beyond, (width, rung, wide, beyond)
            assert contrast > 10 if dark else contrast < 0.1, (width, dark, contrast)
    chromium(folder, more=f"--screenshot={folder}/page.png")
    png = (folder / "page.png").read_bytes()
    assert png[:4] == b"\x89PNG" and int.from_bytes(png[16:20], "big") == 900 and len(png) > 30000, len(png)


def test_make_page(folder):
    """The folder has all that its page links to and all that its texts show."""
    run("make", "-s", "page", f"PAGE={folder}/page").ok(f"{folder}/page is complete")
    for name in "index.html", "LCE.md", "REFERENCE.md":
        text = (folder / "page" / name).read_text()
        links = re.findall(r'href="([^"#]+)' if name == "index.html" else r"!\[[^]]*\]\(([^)]+)\)", text)
        assert links and all((folder / "page" / link).is_file() for link in links), links
    address = re.search(r"^\[!\[.*\]\((.*)\)$", (ROOT / "README.md").read_text(), re.M)[1]
    assert address == "kernels/lce/LCE.md" or f'<meta property="og:url" content="{address}' in (folder / "page" / "index.html").read_text()
    run("make", "-s", "page", f"PAGE={folder}/page", "PAGE_URL=https://example.org/lce").ok()
    assert '<meta property="og:image" content="https://example.org/lce/llama-1b.png">' in (folder / "page" / "index.html").read_text()


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


main(globals(), 2)
