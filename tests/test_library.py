#!/usr/bin/env python3
"""liblce.so through ctypes, as any language would use it: one case of PyTorch's golden values, errors, two contexts.

Speaks TAP, as the other tests do. Builds a library of its own, for the CPU.
"""
import array
import ctypes
import json
import os
import resource
import subprocess
import sys
import traceback

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FOLDER = os.path.join("build", "library-cpu")
sys.path.insert(0, os.path.join(ROOT, "tools"))
from liblce import Args, load  # noqa: E402

golden = json.load(open(os.path.join(ROOT, "tests", "golden", "loss.json")))
N, H, V = golden["rows"], golden["hidden"], golden["vocab"]


def floats(values):
    return array.array("f", values)


def address(numbers):
    return numbers.buffer_info()[0]


def build():
    done = subprocess.run(["make", "-s", "VARIANT=library", "CUDA=0", "MPI=0", f"BUILD={FOLDER}",
                           f"LIBLCE={FOLDER}/liblce.so", "build-library"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return load(os.path.join(ROOT, FOLDER, "liblce.so"))


def close(what, got, want, most=2e-5):
    largest = max(map(abs, want))
    for i, (a, b) in enumerate(zip(got, want)):
        assert abs(a - b) <= most * largest, f"{what}[{i}] is {a}, not {b}"


def case_named(name):
    return next(c for c in golden["cases"] if c["name"] == name)


def run(lce, context, case, dweight=None, **more):
    """The tensors of a call that computes the case, and the call itself."""
    t = dict(x=floats(golden["x"]), weight=floats(golden["weight"]), targets=array.array("i", case.get("targets", golden["targets"])),
             loss=floats([0] * N), dx=floats([9] * N * H), dweight=dweight or floats([9] * V * H))
    args = Args(tokens=N, hidden_size=H, vocab_size=V, scale=case["scale"], mean=case["mean"],
                label_smoothing=case["label_smoothing"], z_loss=case["z_loss"], temperature=case["temperature"],
                chunk=4, **{name: address(numbers) for name, numbers in t.items()}, **more)
    assert lce.lce_linear_cross_entropy(context, ctypes.byref(args)) == 0, lce.lce_last_error()
    assert lce.lce_synchronize(context) == 0
    return t


def same_as_pytorch(lce):
    context = lce.lce_create(b"cpu", 0, b"fp32")
    for name in ("mean", "label smoothing", "temperature"):
        case = case_named(name)
        t = run(lce, context, case)
        for what in ("loss", "dx", "dweight"):
            close(f"{name}: {what}", t[what], case[what])
    assert lce.lce_held_bytes(context) > 4 * 4 * V
    lce.lce_destroy(context)


OUTPUTS = ("token_z_loss", "log_prob", "logsumexp", "entropy", "max_logit")


def every_field_arrives(lce):
    """All of PyTorch's golden cases, each with every tensor that the struct can name, materialized too, added up too."""
    context = lce.lce_create(b"cpu", 0, b"fp32")
    zero = {"entropy_weights": 0}
    for case in golden["cases"]:
        given = {name: floats(golden[name]) if case[f"with_{name}"] else floats([zero.get(name, 1)] * size)
                 for name, size in (("class_weights", V), ("token_weights", N), ("entropy_weights", N))}
        given["bias"] = floats(golden["bias"] if case["with_bias"] else [0] * V)
        got = {name: floats([9] * N) for name in OUTPUTS}
        got.update(dbias=floats([9] * V), correct=floats([9] * N), predicted=array.array("i", [9] * N))
        more = {name: address(numbers) for name, numbers in (*given.items(), *got.items())}
        for materialized in (0, 1):
            got.update(run(lce, context, case, softcap=case["softcap"], materialized=materialized, **more))
            for what in ("loss", "dx", "dweight", "predicted", *OUTPUTS, *(["dbias"] if "dbias" in case else [])):
                close(f"{case['name']}: {what}", got[what], case[what])
            targets = case.get("targets", golden["targets"])
            want = [float(y >= 0 and y == p) for y, p in zip(targets, case["predicted"])]
            assert list(got["correct"]) == want, case["name"]
        once = got["dweight"]
        again = run(lce, context, case, once, softcap=case["softcap"], accumulate=1, **more)["dweight"]
        close(f"{case['name']}: dweight twice", again, [2 * number for number in case["dweight"]])
    lce.lce_destroy(context)


def errors_come_back(lce):
    assert lce.lce_create(b"abacus", 0, b"fp32") is None
    assert b"neither" in lce.lce_last_error()
    assert lce.lce_create(b"cpu", 0, b"bf16") is None
    assert b"fp32 only" in lce.lce_last_error()
    assert lce.lce_create(b"cuda", 0, b"bf16") is None and b"CUDA" in lce.lce_last_error()
    context = lce.lce_create(b"cpu", 0, b"fp32")
    for wrong, part in ((Args(tokens=3), b"must be 1 or more"),
                        (Args(tokens=1, hidden_size=1, vocab_size=1), b"must be there")):
        assert lce.lce_linear_cross_entropy(context, ctypes.byref(wrong)) == 1
        assert part in lce.lce_last_error(), lce.lce_last_error()
    numbers = floats([1] * 16)
    wrong = Args(tokens=2, hidden_size=2, vocab_size=2, label_smoothing=7, scale=1,
                 **{name: address(numbers) for name in ("x", "weight", "targets", "loss")})
    assert lce.lce_linear_cross_entropy(context, ctypes.byref(wrong)) == 1
    assert b"label_smoothing is 7" in lce.lce_last_error()
    run(lce, context, case_named("mean"))  # the context still works
    lce.lce_destroy(context)
    assert lce.lce_linear_cross_entropy(None, ctypes.byref(wrong)) == 1 and b"NULL" in lce.lce_last_error()
    assert lce.lce_synchronize(None) == 1 and lce.lce_held_bytes(None) == 0
    assert lce.lce_create(None, 0, None) is None
    lce.lce_destroy(None)


def refusals_leave_nothing_behind(lce):
    """Neither memory, call after call, nor a context that lost its stack to a call that asked for too much."""
    context = lce.lce_create(b"cpu", 0, b"fp32")
    first = run(lce, context, case_named("mean"))
    numbers = floats([1] * 16)
    there = {name: address(numbers) for name in ("x", "weight", "targets", "loss", "dx", "dweight")}
    endless = Args(tokens=1 << 10, hidden_size=1, vocab_size=1 << 36, chunk=1 << 10, scale=1, **there)
    assert lce.lce_linear_cross_entropy(context, ctypes.byref(endless)) == 1
    assert b"out of memory" in lce.lce_last_error(), lce.lce_last_error()
    assert run(lce, context, case_named("mean")) == first
    wrong = Args(tokens=2, hidden_size=2, vocab_size=2, label_smoothing=7, scale=1, **there)
    most = []
    for _ in range(2):  # the first turn is what the allocator grows by
        for _ in range(2000):
            assert lce.lce_linear_cross_entropy(context, ctypes.byref(wrong)) == 1
        most.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert most[1] - most[0] < 1024, f"{most[1] - most[0]} KiB more after 2000 refusals"
    lce.lce_destroy(context)


def contexts_do_not_meet(lce):
    a, b = lce.lce_create(b"cpu", 0, b"fp32"), lce.lce_create(b"cpu", 0, b"fp32")
    first, second = run(lce, a, case_named("mean")), run(lce, b, case_named("z-loss, mean"))
    assert first["dx"] != second["dx"]
    again = run(lce, a, case_named("mean"))
    assert first == again
    lce.lce_destroy(a)
    assert run(lce, b, case_named("z-loss, mean")) == second
    lce.lce_destroy(b)


TESTS = (same_as_pytorch, every_field_arrives, errors_come_back, refusals_leave_nothing_behind, contexts_do_not_meet)


def main():
    print(f"1..{len(TESTS)}")
    failed = 0
    library = build()
    for number, test in enumerate(TESTS, 1):
        try:
            test(library)
            print(f"ok {number} - {test.__name__}")
        except Exception:
            failed += 1
            print(f"not ok {number} - {test.__name__}")
            print("".join("# " + line + "\n" for line in traceback.format_exc().splitlines()), end="")
    return failed


if __name__ == "__main__":
    sys.exit(main())
