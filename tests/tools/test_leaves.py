#!/usr/bin/env python3
"""Deletes a package beside the trainer in a copy of the tree: the rest builds, and its programs are the same, byte for byte.

So its tests pass as they do here. It takes the objects that are built, of the variant and with the settings of `make test`.
"""
import os
import pathlib
import re
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import ROOT, main, run  # noqa: E402
from tap import Skip  # noqa: E402

PACKAGE = "tools/torch", "tests/pytorch", "tools/bench_peers.py"
CORE = "kernels", "model", "trainer", "data", "train.c"
TESTS = "kernels/test_loss_terms", "model/test_golden", "trainer/test_plan"  # which read files of the tree


def files():
    listed = run("sh", "-c", "git ls-files -co --exclude-standard 2>/dev/null || find * -type f -not -path 'build/*'").ok().out
    return [name for name in listed.splitlines() if (ROOT / name).is_file()]


def test_the_core_names_no_package(folder):
    names = re.compile("liblce|torch_operations|given_ids|batch_invariant|hopper_invariant|found_blas", re.I)
    places = re.compile("tools/torch/liblce|tests/pytorch|bench_peers")
    for name in files():
        content = (ROOT / name).read_text(errors="replace")
        if name.split("/")[0] in CORE:
            assert not names.search(content), name
        if name.split("/")[0] in (*CORE, "tests") and not name.startswith("tests/pytorch") and name != "tests/tools/test_leaves.py":
            assert not places.search(content), name


def test_the_package_can_be_deleted(folder):
    def make(*words):
        return run("make", f"-j{os.cpu_count()}", *words, cwd=folder)
    if not all((ROOT / name).exists() for name in PACKAGE):
        raise Skip("it is deleted")
    for name in files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    build, *programs = make("-s", "--eval", "where:;@echo $(BUILD) $(TEST_PROGRAMS) $(call programs,$(PROGRAMS))", "where").ok().out.split()
    if os.path.isabs(build):
        raise Skip(f"the copy would be built in {build}, too")
    for path in (ROOT / build).rglob("*"):
        if path.suffix in (".o", ".d", ".a") or path.name in ("flags", "cuda-flags", "sources"):
            copy = folder / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
    sources = [name for name in files() if (folder / build / f"{name}.d").exists() and not name.startswith(PACKAGE)]
    for name in sources:  # make itself builds nothing again where a header is gone
        read = (folder / build / f"{name}.d").read_text()
        assert not any(place in read for place in PACKAGE), f"{name} includes a header of the package"
    if " -c " in make("-n", "all", "tests").ok().out:
        raise Skip(f"{build} is not built, or with other settings than make's here")
    for name in PACKAGE:
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()
    done = make("all", "tests").ok()
    assert not re.search("^  (cc|nvcc|c\\+\\+) ", done.out, re.M), done
    left = [name for name in programs if "/pytorch/" not in name]
    assert len(left) > 9 and len(sources) > 50, (left, sources)
    for name in left:
        assert (folder / name).read_bytes() == (ROOT / name).read_bytes(), f"{name} is another without the package"
    if not build.endswith("emulated"):  # which is slow
        run("tests/run", *[f"{build}/tests/{name}" for name in TESTS], cwd=folder).ok(" 0 failed")


main(globals())
