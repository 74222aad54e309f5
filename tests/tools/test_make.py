#!/usr/bin/env python3
"""make where it may not write, and what it builds again; how programs start: with short spins, and with little address space."""
import os
import pathlib
import resource
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import TINY, TRAIN, main, run, train  # noqa: E402
from tap import Skip  # noqa: E402


# A toolkit that is found, and compiles nothing.
def toolkit(folder):
    for name, text in (("bin/nvcc", "#!/bin/sh\necho release 12.9, sm_80 sm_90a\n"), ("include/cublasLt.h", ""),
                       *((f"lib64/lib{name}.so", "/* empty */\n") for name in ("cudart", "cublasLt"))):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "bin/nvcc").chmod(0o755)
    return f"CUDA_HOME={folder}"


def test_a_folder_that_may_not_be_written(folder):
    done = run("make", "-s", "BUILD=/proc/lce", "CUDA=0", "all")
    done.fails("/proc/lce may not be written; build elsewhere (`make BUILD=/tmp/lce BIN=/tmp/lce/`), or copy this folder")
    assert "No rule" not in done.err and "sh:" not in done.err and done.err.count("\n") == 1, done
    run("make", "-s", "BUILD=/proc/lce", "info").ok()


# CUDA's objects depend on CUDA's flags alone, and all others on all flags.
def test_without_mpi_cuda_stays_built(folder):
    def flags(*words):
        run("make", "-n", f"BUILD={folder}/build", f"BIN={folder}/build/", toolkit(folder / "cuda"), *words, "all").ok("-c kernels/cuda/")
        return [(folder / "build" / name).read_text() for name in ("flags", "cuda-flags")]
    plain, without = flags("CPPFLAGS="), flags("CPPFLAGS=", "MPI=0", "BLAS_LIBS=")
    assert plain[0] != without[0] and plain[1] == without[1] and "HAVE_CUDA" in plain[1], (plain, without)
    assert flags("CPPFLAGS=-DX")[1] != plain[1]


# GNU's threads spin briefly, unless the user says otherwise.
def test_spinning_is_bounded(folder):
    def display(**environment):
        given = {name: environment.get(name) for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
        words = [word for name, value in given.items() for word in (["-u", name] if value is None else [f"{name}={value}"])]
        return run("env", *sorted(words, key=lambda word: "=" in word), "OMP_DISPLAY_ENV=verbose", TRAIN, "--help").ok().err
    if "GOMP_" not in display():
        raise Skip("the threads are not those of GNU")
    assert "GOMP_SPINCOUNT = '1000'" in display(), display()
    assert "GOMP_SPINCOUNT = '77'" in display(GOMP_SPINCOUNT="77")
    assert "GOMP_SPINCOUNT = '1000'" not in display(OMP_WAIT_POLICY="active")


# OpenBLAS would wait for ever for room that `ulimit -v` does not leave.
def test_little_address_space(folder):
    if "openblas" not in run("ldd", TRAIN).out or "asan" in TRAIN.parts:
        raise Skip("there is no OpenBLAS, or there is ASan, which needs terabytes")
    for kib, options in (60000, "--plan"), (60000, "--steps 1"), (250000, "--steps 1"):
        line = f"ulimit -v {kib}; exec {TRAIN} {TINY} {options}"
        run("sh", "-c", line, OMP_NUM_THREADS="1").refused("`ulimit -v` leaves ", "OpenBLAS needs ", " thread")
    run("sh", "-c", f"ulimit -v 250000; exec {TRAIN} {TINY} --plan", OMP_NUM_THREADS="1").ok("all together")
    data = os.path.relpath(__file__)
    run("sh", "-c", f"ulimit -v 600000; exec {TRAIN} {TINY} --data {data} --steps 1", OMP_NUM_THREADS="1").ok()
    wide = f"ulimit -v 600000; exec {TRAIN} {TINY} --data {data} --steps 1 --hidden-size 4096 --intermediate-size 4096"
    run("sh", "-c", wide, OMP_NUM_THREADS="1").fails("this run needs ", " and the device has ")


main(globals())
