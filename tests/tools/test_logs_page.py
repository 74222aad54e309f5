#!/usr/bin/env python3
"""tools/logs.md: its events are those of a log, and its programs hand TensorBoard and Weights & Biases every figure of
every step (modules of those names stand in for both)."""
import json
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import ROOT, TINY, main, read_log, run, train  # noqa: E402

PAGE = (ROOT / "tools" / "logs.md").read_text()
SAY = "import json\ndef say(*what): print(json.dumps(what))\n"
MODULES = {"torch/__init__.py": "", "torch/utils/__init__.py": "", "torch/utils/tensorboard.py": SAY + """
class SummaryWriter:
    def __init__(self, name, flush_secs): say(name)
    def add_scalar(self, name, value, step): say(name, value, step)
    def close(self): say("closed")
""", "wandb.py": SAY + """
class init:
    def __init__(self, name): say(name); self.config = self
    def update(self, settings): say(settings["model"], settings["batch"])
    def log(self, figures, step): [say(name, value, step) for name, value in figures.items() if name != "step"]
    def finish(self): say("closed")
"""}


def test_programs_of_the_page(folder):
    train(TINY + f"--steps 3 --eval-every 2 --sample-every 3 --save {folder}/run --log {folder}/log").ok()
    log = read_log(folder / "log")
    assert {line["event"] for line in log} == set(re.findall("`([a-z]+)`", PAGE.split("its `event`")[1].split("[")[0])), log
    for name, text in MODULES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    figures = [[name, value, line["step"]] for line in log if "step" in line for name, value in line.items()
               if name != "step" and isinstance(value, (int, float))]
    assert {"loss", "val_loss", "grad_norm"} <= {name for name, *_ in figures}
    tensorboard, wandb = re.findall("```python\n(.*?)```", PAGE, re.S)
    for code, settings in (tensorboard, []), (wandb, [[log[0]["model"], log[0]["batch"]]]):
        (folder / "board.py").write_text(code)
        shown = run("sh", "-c", '"$0" board.py first <log', sys.executable, cwd=folder, PYTHONPATH=str(folder)).ok().out
        assert [json.loads(line) for line in shown.splitlines()] == [["first"], *settings, *figures, ["closed"]], shown


main(globals(), 1)
