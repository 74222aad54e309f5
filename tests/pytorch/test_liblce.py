#!/usr/bin/env python3
"""liblce.so through ctypes: PyTorch's golden values, a head split over ranks, and on a GPU a caller's stream.

Builds a library of its own for the CPU, and the usual one for a GPU.
"""
import array
import ctypes
import fcntl
import functools
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FOLDER = os.path.join("build", "library-cpu")
sys.path[:0] = [os.path.join(ROOT, "tools", "torch", "lce"), os.path.join(ROOT, "tests")]
import tap  # noqa: E402
from library import KINDS, Args, Collective, load  # noqa: E402
from tap import Skip  # noqa: E402

golden = json.load(open(os.path.join(ROOT, "tests", "golden", "loss.json")))
N, H, V = golden["rows"], golden["hidden"], golden["vocab"]


def floats(values):
    return array.array("f", values)


def address(elements):
    return elements.buffer_info()[0]


def build(folder, *settings):
    """The path of a library built in the folder, by one of the tests that run at the same time."""
    os.makedirs(os.path.join(ROOT, folder), exist_ok=True)
    last = pathlib.Path(ROOT, "build/last")  # says which build the programs outside of build/ are of
    before = last.exists() and last.read_text()
    with open(os.path.join(ROOT, folder, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # The plain variant, whatever make runs the tests: Python cannot load a library with ASan.
        words = "make", "-s", "VARIANT=release", *settings, f"LIBLCE_BUILD={folder}", f"LIBLCE={folder}/liblce.so", "liblce.so"
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (last.exists() and last.read_text()) == before, "another build's programs would be linked again"
    return os.path.join(ROOT, folder, "liblce.so")


def close(what, got, want, most=2e-5):
    largest = max(map(abs, want))
    for i, (a, b) in enumerate(zip(got, want)):
        assert abs(a - b) <= most * largest, f"{what}[{i}] is {a}, not {b}"


def case_named(name):
    return next(c for c in golden["cases"] if c["name"] == name)


def targets_of(case, wide=False):
    return array.array("q" if wide else "i", case.get("targets", golden["targets"]))


def run(lce, context, case, dweight=None, wide=False, without=None, **more):
    """The tensors of a call that computes the case."""
    targets = targets_of(case, wide)
    t = dict(x=floats(golden["x"]), weight=floats(golden["weight"]), targets=targets,
             loss=floats([0] * N), dx=floats([9] * N * H), dweight=dweight or floats([9] * V * H))
    t.pop(without, None)
    args = Args(tokens=N, hidden_size=H, vocab_size=V, scale=case["scale"], mean=case["mean"],
                label_smoothing=case["label_smoothing"], z_loss=case["z_loss"], temperature=case["temperature"],
                chunk=4, targets_int64=wide, **{name: address(elements) for name, elements in t.items()}, **more)
    assert lce.lce_linear_cross_entropy(context, ctypes.byref(args)) == 0, lce.lce_last_error()
    assert lce.lce_synchronize(context) == 0
    return t


OUTPUTS = ("token_z_loss", "log_prob", "logsumexp", "entropy", "max_logit")


def every_field_arrives(lce):
    """All golden cases of PyTorch, each with every tensor of the struct, materialized too, added up too."""
    context = lce.lce_create(b"cpu", 0, b"fp32")
    zero = {"entropy_weights": 0}
    for case in golden["cases"]:
        given = {name: floats(golden[name]) if case[f"with_{name}"] else floats([zero.get(name, 1)] * size)
                 for name, size in (("class_weights", V), ("token_weights", N), ("entropy_weights", N))}
        given["bias"] = floats(golden["bias"] if case["with_bias"] else [0] * V)
        got = {name: floats([9] * N) for name in OUTPUTS}
        got.update(dbias=floats([9] * V), correct=floats([9] * N), predicted=array.array("i", [9] * N))
        more = {name: address(elements) for name, elements in (*given.items(), *got.items())}
        for materialized in range(case["with_entropy_weights"], 2):  # which the fused mode has not
            more["entropy_weights"] = address(given["entropy_weights"]) if materialized else None
            got.update(run(lce, context, case, wide=materialized == 1, softcap=case["softcap"], materialized=materialized,
                           **more))
            for what in ("loss", "dx", "dweight", "predicted", *OUTPUTS, *(["dbias"] if "dbias" in case else [])):
                close(f"{case['name']}: {what}", got[what], case[what])
            targets = case.get("targets", golden["targets"])
            want = [float(y >= 0 and y == p) for y, p in zip(targets, case["predicted"])]
            assert list(got["correct"]) == want, case["name"]
        once = got["dweight"]
        again = run(lce, context, case, once, softcap=case["softcap"], materialized=1, accumulate=1, **more)["dweight"]
        close(f"{case['name']}: dweight twice", again, [2 * number for number in case["dweight"]])
        if case["label_smoothing"]:
            continue
        known = {f"known_{name}": address(got[name]) for name in ("log_prob", "entropy")}
        got["dbias"] = floats([9] * V)
        alone = run(lce, context, case, without="loss", softcap=case["softcap"], dbias=address(got["dbias"]), **known,
                    **{name: address(given[name]) for name in given})
        alone["dbias"] = got["dbias"]
        for what in ("dx", "dweight", *(["dbias"] if "dbias" in case else [])):
            close(f"{case['name']}: {what} of known outputs", alone[what], case[what])
    lce.lce_destroy(context)


class Ranks:
    """Threads as ranks: each leaves its part at a barrier, and takes what it needs from all."""

    def __init__(self, lce, size):
        self.size, self.parts, self.barrier = size, [None] * size, threading.Barrier(size)
        self.contexts = [lce.lce_create(b"cpu", 0, b"fp32") for _ in range(size)]
        self.collectives = [Collective(functools.partial(self.exchange, rank)) for rank in range(size)]
        for rank, context in enumerate(self.contexts):
            assert lce.lce_join(context, rank, size, self.collectives[rank], None) == 0

    def exchange(self, rank, _, kind, out, x, count, dtype):
        word = ctypes.c_int32 if dtype == 2 else ctypes.c_float
        self.parts[rank] = list((word * count).from_address(x))
        self.barrier.wait()
        if KINDS[kind] == "all_gather":
            result = sum(self.parts, [])
        else:
            result = [sum(parts) for parts in zip(*self.parts)]
        if KINDS[kind] == "reduce_scatter":
            result = result[rank * count // self.size:(rank + 1) * count // self.size]
        self.barrier.wait()
        (word * len(result)).from_address(out)[:] = result
        return 0


def split_call(lce, context, case, parts, rank):
    """A rank's tensors of a call with its tokens and its rows, and with known outputs where these suffice."""
    n = -(-N // len(parts))
    counted, rows = range(rank * n, min(N, (rank + 1) * n)), range(sum(parts[:rank]), sum(parts[:rank + 1]))

    def of(part, values, width=1):
        """The part's floats, of tokens with zeros for those beyond the last one; at least one, to have an address."""
        more = (n - len(part)) * width if part is counted else not part
        return floats(values[part.start * width:part.stop * width] + [0] * more)
    known, per_token = not case["label_smoothing"], dict(token_weights=golden["token_weights"], entropy_weights=golden["entropy_weights"])
    t = dict(x=of(counted, golden["x"], H), weight=of(rows, golden["weight"], H), dx=floats([9] * n * H),
             targets=targets_of(case)[counted.start:counted.stop] + array.array("i", [-100] * (n - len(counted))))
    t.update((name, of(counted, values)) for name, values in per_token.items() if case[f"with_{name}"])
    if known:
        t["known_log_prob"] = of(counted, case["log_prob"])
    else:
        t["loss"] = floats([9] * n)
    if case["with_entropy_weights"]:
        t["known_entropy"] = of(counted, case["entropy"])
    if case["with_class_weights"]:
        t["class_weights"] = floats(golden["class_weights"])
    if case["with_bias"]:
        t["bias"] = of(rows, golden["bias"])
    if rows:
        t.update(dweight=floats([9] * len(rows) * H), **dict(dbias=floats([9] * len(rows))) if case["with_bias"] else {})
    args = Args(tokens=n, hidden_size=H, vocab_size=V, first_row=rows.start, rows=len(rows), chunk=2, mean=case["mean"],
                **{name: case[name] for name in ("scale", "label_smoothing", "z_loss", "softcap", "temperature")},
                **{name: address(elements) for name, elements in t.items()})
    return lce.lce_last_error() if lce.lce_linear_cross_entropy(context, args) else t


def a_head_split_over_ranks(lce):
    """Parts of any size, of which the last may have no row; a collective that fails is told."""
    cases = [c for c in golden["cases"] if not c["label_smoothing"] or not (c["softcap"] or c["with_entropy_weights"])]
    ranks, got = Ranks(lce, 3), [None] * 3
    for case, parts in itertools.product(cases, ((10, 10, 9), (15, 14, 0))):
        def work(rank):
            got[rank] = split_call(lce, ranks.contexts[rank], case, parts, rank)
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
        for turn in ("start", "join"):
            for thread in threads:
                getattr(thread, turn)()
        for what in got[0].keys() & {"loss", "dx", "dweight", "dbias"}:
            close(f"{case['name']}: {what}", sum((list(t.get(what, ())) for t in got), [])[:len(case[what])], case[what])
    failing = Collective(lambda *_: 1)
    assert lce.lce_join(ranks.contexts[0], 0, 2, failing, None) == 0
    error = split_call(lce, ranks.contexts[0], cases[0], (15, 14), 0)
    assert error == b"lce_linear_cross_entropy: the caller's collective failed on rank 0 of 2", error
    assert lce.lce_join(ranks.contexts[0], 2, 2, failing, None) == 1 and b"rank 2 of 2" in lce.lce_last_error()
    for context in ranks.contexts:
        lce.lce_destroy(context)


def sampling_and_errors(lce):
    """The sample's mass and seed, which the golden cases do not name, and a sentence."""
    context, case = lce.lce_create(b"cpu", 0, b"fp32"), case_named("z-loss, mean")
    exact, *sampled = (run(lce, context, case, sample=mass, sample_seed=2**63 + seed)
                       for mass, seed in [(0, 0), *((8, seed) for seed in range(20))])
    assert all(given["loss"] == exact["loss"] for given in sampled)
    assert len({bytes(given["dx"]) for given in sampled}) > 1
    assert lce.lce_create(b"cuda", 0, b"bf16") is None and b"CUDA" in lce.lce_last_error()
    lce.lce_destroy(context)


STAND_IN = """
#include <stdlib.h>
static const char *core;
__attribute__((constructor)) static void begin(void) { core = getenv("OPENBLAS_CORETYPE"); }
char *openblas_get_corename(void) { return core ? (char *)core : "Prescott"; }
void sgemm_(const char *ta, const char *tb, const int *m, const int *n, const int *k, const float *alpha, const float *a,
            const int *lda, const float *b, const int *ldb, const float *beta, float *c, const int *ldc) {
  for (int i = 0; i < *m; i++)
    for (int j = 0; j < *n; j++) {
      float sum = core && WRONG ? 1 : 0;
      for (int p = 0; p < *k; p++)
        sum += (*ta == 'N' ? a[i + p * *lda] : a[p + i * *lda]) * (*tb == 'N' ? b[p + j * *ldb] : b[j + p * *ldb]);
      c[i + j * *ldc] = *alpha * sum + (*beta != 0 ? *beta * c[i + j * *ldc] : 0);
    }
}
"""


def an_openblas_that_does_not_know_the_cpu(_):
    """Its better kernels serve, unless they compute wrongly or the user names others."""
    if not re.search(r"\bavx2\b", pathlib.Path("/proc/cpuinfo").read_text()) or not shutil.which("gcc"):
        raise Skip("it needs AVX2 and gcc")
    with tempfile.TemporaryDirectory() as folder:
        for wrong, given, core in ((0, "", "SkylakeX|Haswell|Zen"), (1, "", "Prescott"), (0, "Nehalem", "Nehalem")):
            source, blas = pathlib.Path(folder, f"{wrong}.c"), pathlib.Path(folder, f"{wrong}.so")
            source.write_text(STAND_IN)
            subprocess.run(["gcc", f"-DWRONG={wrong}", "-shared", "-fPIC", source, "-o", blas], check=True)
            more = {"LCE_BLAS": str(blas), **({"OPENBLAS_CORETYPE": given} if given else {})}
            kept = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
            done = subprocess.run([sys.executable, __file__, "cores"], env=kept | more, capture_output=True, text=True)
            assert done.returncode == 0 and re.fullmatch(core, done.stdout.strip()), done
            assert ("for a " in done.stderr) == bool(wrong), done


def print_core():
    """The kernels of LCE_BLAS after a call, which is right."""
    lce = load(os.path.join(ROOT, FOLDER, "liblce.so"))
    case = case_named("z-loss, mean")
    close("dx", run(lce, lce.lce_create(b"cpu", 0, b"fp32"), case)["dx"], case["dx"])
    name = ctypes.CDLL(os.environ["LCE_BLAS"]).openblas_get_corename
    name.restype = ctypes.c_char_p
    print(name().decode())


# --- on a GPU -----------------------------------------------------------------------------------------------

class Gpu:
    """The CUDA runtime that the library brings along, as far as a caller with a stream needs it."""

    def __init__(self, lce):
        self.lce = lce

    def __getattr__(self, name):
        function = getattr(self.lce, "cuda" + name)

        def call(*arguments):
            error = function(*arguments)
            assert error == 0, f"cuda{name} gives error {error}"
        return call

    def memory(self, size):
        place = ctypes.c_void_p()
        self.Malloc(ctypes.byref(place), ctypes.c_size_t(size))
        return place

    def stream(self):
        stream = ctypes.c_void_p()
        self.StreamCreateWithFlags(ctypes.byref(stream), 1)  # does not wait for the default stream
        return stream

    def copy(self, to, source, size, kind, stream):  # kind 1: to the device, 2: to the host, 3: on the device
        self.MemcpyAsync(to, source, ctypes.c_size_t(size), kind, stream)


def streams_of_the_caller(_):
    """Inputs arrive late on the caller's stream, which also takes the results away: no wait between."""
    if not shutil.which("nvidia-smi") or subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode:
        raise Skip("there is no GPU")
    lce = load(build(os.path.join("build", "library")))
    context = lce.lce_create(b"cuda", 0, b"fp32")
    if not context:
        raise Skip(lce.lce_last_error().decode())
    gpu, case = Gpu(lce), case_named("z-loss, mean")
    fresh = dict(loss=floats([9] * N), dx=floats([9] * N * H), dweight=floats([9] * V * H))
    large = 1 << 30
    slow = gpu.memory(large)

    class Call:
        def __init__(self, stream, wide):
            self.stream = stream
            self.inputs = dict(x=floats(golden["x"]), weight=floats(golden["weight"]), targets=targets_of(case, wide))
            sizes = {name: len(a) * a.itemsize for name, a in (*self.inputs.items(), *fresh.items())}
            self.sizes = sizes
            self.early, self.place, self.taken = ({name: gpu.memory(size) for name, size in sizes.items()}
                                                  for _ in range(3))
            for name, elements in self.inputs.items():
                gpu.copy(self.early[name], ctypes.c_void_p(address(elements)), sizes[name], 1, stream)
            for name, place in self.place.items():  # what is read if the call does not wait for its inputs
                gpu.MemsetAsync(place, 0, ctypes.c_size_t(sizes[name]), stream)
            gpu.StreamSynchronize(stream)
            self.args = Args(tokens=N, hidden_size=H, vocab_size=V, scale=case["scale"], mean=case["mean"],
                             z_loss=case["z_loss"], chunk=4, targets_int64=wide, stream=stream.value,
                             **{name: place.value for name, place in self.place.items()})

        def enqueue(self):
            for _ in range(40):  # some 15 ms
                gpu.MemsetAsync(slow, 0, ctypes.c_size_t(large), self.stream)
            for name in self.inputs:
                gpu.copy(self.place[name], self.early[name], self.sizes[name], 3, self.stream)
            assert lce.lce_linear_cross_entropy(context, ctypes.byref(self.args)) == 0, lce.lce_last_error()
            for name in fresh:
                gpu.copy(self.taken[name], self.place[name], self.sizes[name], 3, self.stream)

        def check(self):
            gpu.StreamSynchronize(self.stream)
            for name, zeros in fresh.items():
                got = array.array("f", zeros)
                gpu.Memcpy(ctypes.c_void_p(address(got)), self.taken[name], ctypes.c_size_t(self.sizes[name]), 2)
                close(name, got, case[name], 1e-4)

    first = Call(gpu.stream(), 1)
    first.enqueue()  # the first call allocates, and may wait for that
    first.check()
    for calls in ((first,), (Call(gpu.stream(), 0), first), (Call(ctypes.c_void_p(), 1),)):
        for call in calls:
            call.enqueue()
        assert lce.cudaStreamQuery(calls[-1].stream) == 600, "the call has waited"  # cudaErrorNotReady
        # It counts as an error until it is read, and is none of the next call.
        for call in calls:
            call.check()
    lce.lce_destroy(context)


TESTS = (every_field_arrives, a_head_split_over_ranks, sampling_and_errors, an_openblas_that_does_not_know_the_cpu,
         streams_of_the_caller)


if __name__ == "__main__":
    if sys.argv[1:] == ["cores"]:
        sys.exit(print_core())
    library = load(build(FOLDER, "CUDA=0", "MPI=0"))
    sys.exit(tap.run({test.__name__: functools.partial(test, library) for test in TESTS}))
