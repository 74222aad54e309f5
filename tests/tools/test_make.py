#!/usr/bin/env python3
"""make where it may not write, and what it builds again; how programs start, also in little memory."""
import os
import pathlib
import re
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import GPUS, TEXT, TINY, TRAIN, main, run  # noqa: E402
from tap import Skip  # noqa: E402

LARGE = f"--data {TEXT} --hidden-size 4096 --intermediate-size 4096 --steps 1"


def test_a_folder_that_may_not_be_written(folder):
    done = run("make", "-s", "BUILD=/proc/lce", "CUDA=0", "all").fails(
        "/proc/lce may not be written; build elsewhere (`make BUILD=")
    assert done.err.count("\n") == 1 + done.err.count("jobserver"), done  # of a make that runs this
    run("make", "-s", "BUILD=/proc/lce", "info").ok()


def test_a_compiler_that_does_not_work(folder):
    done = run("make", f"BUILD={folder}", "CUDA=0", "CC=nope", "all").fails("CC=nope does not compile a C program; name another compiler")
    assert "missing" not in done.out and not (folder / "flags").exists(), done  # where other objects would be compiled again


def make_toolkit(folder):
    """A CUDA toolkit that is found, and compiles nothing."""
    for name, text in (("include/cublasLt.h", ""), ("bin/nvcc", "#!/bin/sh\necho release 12.9, sm_90a\n"),
                       ("lib64/libcudart.so", "/* empty */"), ("lib64/libcublasLt.so", "/* empty */")):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "bin/nvcc").chmod(0o755)


# What runs is built without CUDA where no GPU is, in a folder of its own; make builds all.
def test_without_a_gpu(folder):
    if GPUS or shutil.which("nvidia-smi"):
        raise Skip("there is a GPU")
    make_toolkit(folder)
    where = "make", "-n", "VARIANT=release", f"BUILD={folder}/b", f"BIN={folder}/b/", f"CUDA_HOME={folder}", "DEPS_ROOT=none"
    done = run("env", "-u", "CUDA", "-u", "MAKEFLAGS", *where, "run").ok("There is no GPU here: ", f"{folder}/b-cpu/train.c.o")
    assert f"{folder}/bin/nvcc" not in done.out, done
    run("env", "-u", "MAKEFLAGS", *where, "CUDA=1", "run").ok(f"{folder}/bin/nvcc", f"{folder}/b/train.c.o")


# CUDA's objects depend on CUDA's flags alone.
def test_without_mpi_cuda_stays_built(folder):
    make_toolkit(folder)

    def flags(*words):
        where = "VARIANT=release", f"BUILD={folder}", f"BIN={folder}/", "CUDA=1", f"CUDA_HOME={folder}"
        run("make", "-n", *where, *words, "all").ok("-c kernels/cuda/")
        return [(folder / name).read_text() for name in ("flags", "cuda-flags")]
    plain, without, other = flags(), flags("MPI=0", "BLAS_LIBS=", "CFLAGS=-g"), flags("CPPFLAGS=-DX")
    assert plain[0] != without[0] and plain[1] == without[1] != other[1], (plain, without, other)


def test_spinning_is_bounded(folder):
    def spins(*words):
        unset = "env", "-u", "OMP_WAIT_POLICY", "-u", "GOMP_SPINCOUNT", "OMP_DISPLAY_ENV=verbose"
        shown = run(*unset, *words, TRAIN, "--help").ok().err
        if "GOMP_SPINCOUNT" not in shown:
            raise Skip("the threads are not those of GNU")
        return int(re.search("GOMP_SPINCOUNT = '(\\d+)'", shown)[1])
    assert spins() == 1000 and spins("GOMP_SPINCOUNT=77") == 77 and spins("OMP_WAIT_POLICY=active") > 1000


# OpenBLAS would wait for ever for room that `ulimit -v` does not leave.
def test_little_address_space(folder):
    if "openblas" not in run("ldd", TRAIN).out or "asan" in TRAIN.parts:
        raise Skip("there is no OpenBLAS, or there is ASan, which needs terabytes")

    def limited(kib, options):
        return run("sh", "-c", f"ulimit -v {kib}; exec {TRAIN} {TINY} {options}", OMP_NUM_THREADS="1")
    # The libraries take room, too; CUDA's are large.
    least = next(kib for kib in range(60000, 4000000, 40000) if "loading shared libraries" not in limited(kib, "--help").err)
    for kib, options in (least, "--plan"), (least, "--steps 1"), (least + 190000, "--steps 1"):
        limited(kib, options).refused("`ulimit -v` or `-d` leaves ", "OpenBLAS needs ", " thread")
    limited(least + 190000, "--plan").ok("all together")
    limited(least + 540000, f"--data {TEXT} --steps 1").ok()
    limited(least + 540000, LARGE).fails("this run needs ", " and the device has ")


# Limits under which the libraries would wait for ever or crash as they start.
def test_limits_of_the_shell(folder):
    if "openblas" not in run("ldd", TRAIN).out or "asan" in TRAIN.parts:
        raise Skip("there is no OpenBLAS, or there is ASan, which needs terabytes")
    for limit, *says in (("ulimit -d 10000", "`ulimit -v` or `-d` leaves ", "OpenBLAS needs "), ("ulimit -s 64", "`ulimit -s` leaves less than 256 KiB"),
                         ("export OMP_NUM_THREADS=100000", "OMP_NUM_THREADS is above 10000")):
        run("bash", "-c", f"{limit}; exec {TRAIN} {TINY} --steps 1").refused(*says)


# The group of this process, and one in it.
def test_little_memory_in_a_cgroup(folder):
    path = re.search("^(0:|\\d+:memory):(.*)$", pathlib.Path("/proc/self/cgroup").read_text(), re.M)
    top, file = ("", "memory.max") if path[1] == "0:" else ("memory", "memory.limit_in_bytes")
    group = pathlib.Path("/sys/fs/cgroup", top, path[2].strip("/"), f"lce-{os.getpid()}")
    try:
        group.mkdir()
        (group / file).write_text("300M")
        done, offloaded = (run("sh", "-c", f"echo $$ >{group}/cgroup.procs && exec {TRAIN} {TINY} {LARGE} {more}")
                           for more in ("", "--offload optimizer"))
    except OSError as error:
        raise Skip(f"no cgroup can be made: {error}") from error
    finally:
        if group.exists():
            group.rmdir()
    done.fails("this run needs ")
    left = float(re.search(r"--offload needs .* of this machine's memory and ([\d.]+) MiB are left", offloaded.fails().err)[1])
    assert 50 < left < 295, left  # the process holds some
    assert 50 < float(re.search(r" and the device has ([\d.]+) MiB to give", done.err)[1]) < 300, done


main(globals())
