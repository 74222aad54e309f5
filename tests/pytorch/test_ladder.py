#!/usr/bin/env python3
"""The last rung of tools/ladder/ladder.py, linear_cross_entropy, beside the one that it grew from."""
import os
import subprocess
import sys

import setting

if setting.torch:
    import torch
    sys.path.insert(0, os.path.join(setting.ROOT, "tools", "ladder"))
    import ladder


def the_last_row():
    x, W, y = torch.randn(20, 8), torch.randn(300, 8), torch.randint(300, (20,))
    for what, got, want in zip(("loss", "dX", "dW"), ladder.linear_cross_entropy(x, W, y, 6), ladder.anchored(x, W, y, 6), strict=True):
        setting.close(what, got, want, 1e-5)
    sizes = "--device cpu --tokens 20 --hidden-size 8 --vocab 300 --chunk 6 --repeat 1".split()
    table = subprocess.run([sys.executable, ladder.__file__, *sizes], capture_output=True, text=True)
    assert table.returncode == 0 and "MiB" in table.stdout.split("7 linear_cross_entropy")[1], table


setting.run({"the_last_row": the_last_row})
