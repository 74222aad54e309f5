#!/usr/bin/env python3
"""liblce.so through ctypes, as any language would use it: PyTorch's golden values, errors, two contexts, and
where there is a GPU a caller's stream. And tools/liblce.py, with PyTorch's tensors where that is there.

Prints TAP, as the other tests do. Builds a library of its own for the CPU, and the usual one for a GPU.
"""
import array
import contextlib
import ctypes
import functools
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import types

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FOLDER = os.path.join("build", "library-cpu")
sys.path[:0] = [os.path.join(ROOT, "tools"), os.path.join(ROOT, "tests")]
import liblce  # noqa: E402
import tap  # noqa: E402
from liblce import Args, Failure, Layer, load  # noqa: E402
from tap import Skip  # noqa: E402

golden = json.load(open(os.path.join(ROOT, "tests", "golden", "loss.json")))
N, H, V = golden["rows"], golden["hidden"], golden["vocab"]


def floats(values):
    return array.array("f", values)


def address(elements):
    return elements.buffer_info()[0]


def build(folder, *settings):
    """The path of a library built in the folder."""
    done = subprocess.run(["make", "-s", "VARIANT=library", *settings, f"BUILD={folder}", f"LIBLCE={folder}/liblce.so",
                           "build-library"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return os.path.join(ROOT, folder, "liblce.so")


def close(what, got, want, most=2e-5):
    largest = max(map(abs, want))
    for i, (a, b) in enumerate(zip(got, want)):
        assert abs(a - b) <= most * largest, f"{what}[{i}] is {a}, not {b}"


def case_named(name):
    return next(c for c in golden["cases"] if c["name"] == name)


def targets_of(case, wide=False):
    return array.array("q" if wide else "i", case.get("targets", golden["targets"]))


def run(lce, context, case, dweight=None, targets=None, **more):
    """The tensors of a call that computes the case, and the call itself."""
    targets = targets or targets_of(case)
    t = dict(x=floats(golden["x"]), weight=floats(golden["weight"]), targets=targets,
             loss=floats([0] * N), dx=floats([9] * N * H), dweight=dweight or floats([9] * V * H))
    args = Args(tokens=N, hidden_size=H, vocab_size=V, scale=case["scale"], mean=case["mean"],
                label_smoothing=case["label_smoothing"], z_loss=case["z_loss"], temperature=case["temperature"],
                chunk=4, targets_int64=targets.itemsize == 8,
                **{name: address(elements) for name, elements in t.items()}, **more)
    assert lce.lce_linear_cross_entropy(context, ctypes.byref(args)) == 0, lce.lce_last_error()
    assert lce.lce_synchronize(context) == 0
    return t


def same_as_pytorch(lce):
    context = lce.lce_create(b"cpu", 0, b"fp32")
    for name in ("mean", "label smoothing", "temperature"):
        for wide in (False, True):
            case = case_named(name)
            t = run(lce, context, case, targets=targets_of(case, wide))
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
        more = {name: address(elements) for name, elements in (*given.items(), *got.items())}
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


def sampling_is_unbiased(lce):
    """The loss to the bit; gradients that another seed changes, and whose mean over many seeds is the exact one."""
    layer, seeds = Layer(lce._name, "cpu", "fp32"), 400
    exact, _ = wrapper_case(chunk=4)
    layer(**exact)
    total = {what: [0] * len(exact[what].elements) for what in ("dx", "dweight")}
    apart = dict(dx=0, dweight=0)
    for seed in range(seeds):
        given, _ = wrapper_case(chunk=4, sample=8, sample_seed=2**63 + seed)
        layer(**given)
        assert given["loss"].elements == exact["loss"].elements
        for what in total:
            apart[what] += math.dist(given[what].elements, exact[what].elements)**2 / seeds
            total[what] = [a + b / seeds for a, b in zip(total[what], given[what].elements)]
    again, _ = wrapper_case(chunk=4, sample=8, sample_seed=2**63 + seeds - 1)
    layer(**again)
    for what, mean in total.items():
        assert again[what].elements == given[what].elements
        assert math.sqrt(apart[what]) > 0.1 * math.hypot(*exact[what].elements)
        off = math.dist(mean, exact[what].elements)
        assert off < 2 * math.sqrt(apart[what] / seeds), f"the mean {what} is off by {off}"
    layer.close()


def targets_out_of_range(lce):
    """Unchecked, such a token counts as ignored, but its loss is not a number."""
    context = lce.lce_create(b"cpu", 0, b"fp32")
    case = case_named("mean")
    for wide, wrong in ((False, V), (False, -1), (True, V), (True, 1 << 32)):
        targets, ignored = targets_of(case, wide), targets_of(case, wide)
        targets[1], ignored[1] = wrong, -100
        got = run(lce, context, case, targets=targets, check_targets=-1)
        want = run(lce, context, case, targets=ignored)
        assert math.isnan(got["loss"][1]) and want["loss"][1] == 0
        got["loss"][1] = 0
        assert all(got[what] == want[what] for what in ("loss", "dx", "dweight"))
    lce.lce_destroy(context)


class FakeTensor:
    """An array with those of a tensor's methods that the wrapper uses."""

    DTYPES = dict(f="torch.float32", i="torch.int32", q="torch.int64")

    def __init__(self, elements, *shape, dtype=None, device=("cpu", None), dense=True):
        self.elements, self.shape = elements, shape or (len(elements),)
        self.dtype = dtype or self.DTYPES[elements.typecode]
        self.device = types.SimpleNamespace(type=device[0], index=device[1])
        self.is_contiguous, self.data_ptr = (lambda: dense), (lambda: address(elements))


def wrapper_case(**more):
    """The arguments of a call that computes a golden case, and the case."""
    case = case_named("z-loss, mean")
    given = dict(x=FakeTensor(floats(golden["x"]), N, H), weight=FakeTensor(floats(golden["weight"]), V, H),
                 targets=FakeTensor(targets_of(case)), loss=FakeTensor(floats([9] * N)),
                 dx=FakeTensor(floats([9] * N * H), N, H), dweight=FakeTensor(floats([9] * V * H), V, H), bias=None,
                 scale=case["scale"], mean=case["mean"], z_loss=case["z_loss"])
    return {**given, **more}, case


def wrapper_takes_tensors(lce):
    layer = Layer(lce._name, "cpu", "fp32")
    for wide in (False, True):
        given, case = wrapper_case(chunk=4, materialized=False)
        given["targets"] = FakeTensor(targets_of(case, wide))
        layer(**given)
        for what in ("loss", "dx", "dweight"):
            close(what, given[what].elements, case[what])
    layer.synchronize()
    assert layer.held_bytes() > 0
    layer.close()


def wrapper_defaults(lce):
    """Without `scale` the gradients are plain ones; targets out of range are refused, unless they are not checked."""
    layer = Layer(lce._name, "cpu", "fp32")
    plain, named = wrapper_case()[0], wrapper_case(scale=1)[0]
    del plain["scale"]
    layer(**plain)
    layer(**named)
    assert plain["dx"].elements == named["dx"].elements and any(plain["dx"].elements)
    plain["targets"].elements[2] = V
    for check in (None, True):
        try:
            layer(**plain, check_targets=check)
        except Failure as refusal:
            assert f"targets[2] is {V}, which is neither in [0, {V}) nor -100" in str(refusal), refusal
        else:
            raise AssertionError("a target out of range is not refused")
    layer(**plain, check_targets=False)
    assert math.isnan(plain["loss"].elements[2])
    layer.close()


def wrapper_refuses(lce):
    """Everything about an argument that the library cannot see, each in a sentence that names it."""
    layer = Layer(lce._name, "cpu", "fp32")
    x, shorts = floats([1] * N * H), array.array("i", [1] * N)
    n, v, w = floats([9] * N), floats([9] * V), floats([9] * V * H)
    wrong = (
        (TypeError, "x is None", dict(x=None)),
        (TypeError, "loss is None", dict(loss=None)),
        (TypeError, "weight is int, where a tensor", dict(weight=1 << 40)),
        (TypeError, "dx is float, where a tensor", dict(dx=1.5)),
        (ValueError, f"x has the shape [{N * H}], where 2 axes", dict(x=FakeTensor(x))),
        (ValueError, "where 2 axes", dict(weight=FakeTensor(w, V, H, 1))),
        (ValueError, "weight has the shape", dict(weight=FakeTensor(w, H, V))),
        (ValueError, "targets has the shape", dict(targets=FakeTensor(shorts[1:]))),
        (ValueError, "targets has the shape", dict(targets=FakeTensor(shorts, N, 1))),
        (ValueError, "loss has the shape", dict(loss=FakeTensor(n[1:]))),
        (ValueError, "dx has the shape", dict(dx=FakeTensor(x, H, N))),
        (ValueError, "dweight has the shape", dict(dweight=FakeTensor(w))),
        (ValueError, "token_weights has the shape", dict(token_weights=FakeTensor(v))),
        (ValueError, "class_weights has the shape", dict(class_weights=FakeTensor(n))),
        (ValueError, "log_prob has the shape", dict(log_prob=FakeTensor(n[1:]))),
        (TypeError, "x is bfloat16, where float32", dict(x=FakeTensor(x, N, H, dtype="torch.bfloat16"))),
        (TypeError, "weight is float64", dict(weight=FakeTensor(w, V, H, dtype="torch.float64"))),
        (TypeError, "targets is float32, where int32 or int64", dict(targets=FakeTensor(n))),
        (TypeError, "targets is int16", dict(targets=FakeTensor(shorts, dtype="torch.int16"))),
        (TypeError, "loss is bfloat16, where float32", dict(loss=FakeTensor(n, dtype="torch.bfloat16"))),
        (TypeError, "dx is float16", dict(dx=FakeTensor(x, N, H, dtype="torch.float16"))),
        (TypeError, "dweight is bfloat16, where float32", dict(dweight=FakeTensor(w, V, H, dtype="bfloat16"))),
        (TypeError, "predicted is int64, where int32", dict(predicted=FakeTensor(array.array("q", [9] * N)))),
        (TypeError, "correct is int32, where float32", dict(correct=FakeTensor(shorts))),
        (ValueError, "x is on", dict(x=FakeTensor(x, N, H, device=("cuda", 0)))),
        (ValueError, "loss is on", dict(loss=FakeTensor(n, device=("cuda", 0)))),
        (ValueError, "dweight is on", dict(dweight=FakeTensor(w, V, H, device=("meta", None)))),
        (ValueError, "x has gaps", dict(x=FakeTensor(x, N, H, dense=False))),
        (ValueError, "entropy has gaps", dict(entropy=FakeTensor(n, dense=False))),
        (TypeError, "no argument label_smothing", dict(label_smothing=0.1)),
        (TypeError, "no argument tokens", dict(tokens=1)),
        (TypeError, "no argument stream", dict(stream=1)),
        (TypeError, "scale is FakeTensor, where a number", dict(scale=FakeTensor(n[:1]))),
        (TypeError, "scale is str", dict(scale="1")),
        (TypeError, "scale is NoneType", dict(scale=None)),
        (TypeError, "integer", dict(chunk=1.5)),
        (ValueError, "64 bits", dict(chunk=1 << 64)),
        (TypeError, "sample is str", dict(sample="1")),
        (TypeError, "integer", dict(sample_seed=1.5)),
        (ValueError, "sample_seed is -1, where 64 bits", dict(sample_seed=-1)),
        (ValueError, "64 bits", dict(sample_seed=1 << 64)),
        (Failure, "chunk of -1", dict(chunk=-1)),
        (Failure, "full_mass is -1", dict(sample=-1)),
        (Failure, "full_mass is nan", dict(sample=math.nan)),
        (Failure, "sampling acts on exponentials", dict(sample=1, softcap=30)),
        (Failure, "sampling acts on exponentials", dict(sample=1, materialized=True)),
        (Failure, "sampling acts on exponentials", dict(sample=1, entropy=FakeTensor(n))),
        (Failure, "both, or neither", dict(dx=None)),
        (Failure, "bias has a gradient", dict(bias=FakeTensor(v))),
    )
    for kind, part, more in wrong:
        given, _ = wrapper_case(**more)
        try:
            layer(**given)
        except (TypeError, ValueError, Failure) as refusal:
            assert type(refusal) is kind and part in str(refusal), f"{more} gives {refusal!r}, not {part!r}"
        else:
            raise AssertionError(f"{more} is not refused")
        assert all(set(given[what].elements) == {9} for what in ("loss", "dx", "dweight") if what not in more)
    given, case = wrapper_case(mean=1 << 32)  # a flag is not cut off to 32 bits
    layer(**given)
    close("dx", given["dx"].elements, case["dx"])
    layer.close()
    for call in (lambda: layer(**given), layer.synchronize):
        try:
            call()
        except (ValueError, Failure) as refusal:
            assert "closed" in str(refusal) or "NULL" in str(refusal)
        else:
            raise AssertionError("a closed layer works")
    layer.close()


class TwoGpus:
    """What the wrapper uses of PyTorch's module, with two GPUs, and a library that notes its calls."""

    def __init__(self):
        self.current, self.notes = 0, []
        self.cuda = types.SimpleNamespace(
            device=self.device, device_count=lambda: 2,
            current_stream=lambda: types.SimpleNamespace(cuda_stream=1000 + self.current))

    @contextlib.contextmanager
    def device(self, ordinal):
        before, self.current = self.current, ordinal
        yield
        self.current = before

    def lce_create(self, device, ordinal, dtype):
        self.notes.append(("create", ordinal, self.current))
        self.current = ordinal  # as the library does it
        return 1

    def lce_linear_cross_entropy(self, context, args):
        self.notes.append(("call", args._obj.stream, self.current))
        return 0

    def lce_destroy(self, context):
        self.notes.append(("destroy", self.current))


def wrapper_calls_on_the_tensors_device(_):
    """The context's device is current during a call and no longer, and the stream is that device's."""
    gpus = TwoGpus()
    real_load, real_torch = liblce.load, sys.modules.get("torch")
    liblce.load, sys.modules["torch"] = (lambda path: gpus), gpus
    try:
        def given_on(ordinal):
            given, _ = wrapper_case()
            for tensor in given.values():
                if isinstance(tensor, FakeTensor):
                    tensor.device = types.SimpleNamespace(type="cuda", index=ordinal)
            return given
        layer = Layer("", "cuda", "fp32", ordinal=1)
        layer(**given_on(1))
        assert gpus.current == 0
        try:
            layer(**given_on(0))
        except ValueError as refusal:
            assert "the layer is on cuda:1" in str(refusal)
        else:
            raise AssertionError("tensors of another GPU are taken")
        layer.close()
        assert gpus.notes == [("create", 1, 1), ("call", 1001, 1), ("destroy", 1)], gpus.notes
        assert gpus.current == 0
    finally:
        liblce.load = real_load
        sys.modules.pop("torch")
        if real_torch:
            sys.modules["torch"] = real_torch


def tensors_of_pytorch(lce):
    """On the CPU, and on the last GPU there is, on a stream of its own, while the first is current."""
    try:
        import torch
    except ImportError:
        raise Skip("there is no PyTorch") from None
    case = case_named("z-loss, mean")
    places = [("cpu", lce._name, 0)]
    if torch.cuda.is_available():
        places.append(("cuda", build(os.path.join("build", "library")), torch.cuda.device_count() - 1))
    for kind, path, ordinal in places:
        layer = Layer(path, kind, "fp32", ordinal)
        device = torch.device(kind, ordinal) if kind == "cuda" else torch.device("cpu")
        ours, first = contextlib.nullcontext(), contextlib.nullcontext()
        if kind == "cuda":
            ours, first = torch.cuda.stream(torch.cuda.Stream(device)), torch.cuda.device(0)
        for wide in (torch.int32, torch.int64):
            with ours, first:
                x = torch.tensor(golden["x"], device=device).view(N, H)
                weight = torch.tensor(golden["weight"], device=device).view(V, H)
                targets = torch.tensor(list(targets_of(case)), dtype=wide, device=device)
                loss, dx = torch.empty(N, device=device), torch.empty_like(x)
                dweight = torch.empty_like(weight)
                layer(x, weight, targets, loss, dx=dx, dweight=dweight, scale=case["scale"],
                      mean=case["mean"], z_loss=case["z_loss"])
            layer.synchronize()
            for what, got in (("loss", loss), ("dx", dx), ("dweight", dweight)):
                close(what, got.flatten().tolist(), case[what], 1e-4)
            with ours, first:
                noisy, same_loss, mean = torch.empty_like(dx), torch.empty_like(loss), torch.zeros_like(dx)
                for seed in range(400):
                    layer(x, weight, targets, same_loss, dx=noisy, dweight=dweight, scale=case["scale"],
                          mean=case["mean"], z_loss=case["z_loss"], chunk=4, sample=8.0, sample_seed=seed)
                    assert torch.equal(loss, same_loss)
                    mean += noisy / 400
                assert (noisy - dx).norm() > 0.1 * dx.norm() > 0
                assert (mean - dx).norm() < 0.2 * dx.norm()
            try:
                layer(x.T.contiguous().T, weight, targets, loss)
            except ValueError as refusal:
                assert "gaps" in str(refusal)
            else:
                raise AssertionError("a transposed tensor is taken")
        layer.close()


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
    elements = {name: floats([1] * 4) for name in ("x", "weight", "targets", "loss")}
    wrong = Args(tokens=2, hidden_size=2, vocab_size=2, label_smoothing=7, scale=1,
                 **{name: address(four) for name, four in elements.items()})
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
    names = ("x", "weight", "targets", "loss", "dx", "dweight")
    # Nearly all the addresses that there are, at tensors that are never read.
    endless = Args(tokens=1 << 14, hidden_size=1, vocab_size=(1 << 31) - (1 << 16), chunk=1 << 14, scale=1,
                   **{name: 1 << 60 | i << 52 for i, name in enumerate(names)})
    assert lce.lce_linear_cross_entropy(context, ctypes.byref(endless)) == 1
    assert b"out of memory" in lce.lce_last_error(), lce.lce_last_error()
    assert run(lce, context, case_named("mean")) == first
    elements = {name: floats([1] * 4) for name in names}
    wrong = Args(tokens=2, hidden_size=2, vocab_size=2, label_smoothing=7, scale=1,
                 **{name: address(four) for name, four in elements.items()})
    most = []
    for _ in range(2):  # the first turn is what the allocator grows by
        for _ in range(2000):
            assert lce.lce_linear_cross_entropy(context, ctypes.byref(wrong)) == 1
        most.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert most[1] - most[0] < 1024, f"{most[1] - most[0]} KiB more after 2000 refusals"
    lce.lce_destroy(context)


def contexts_are_independent(lce):
    a, b = lce.lce_create(b"cpu", 0, b"fp32"), lce.lce_create(b"cpu", 0, b"fp32")
    first, second = run(lce, a, case_named("mean")), run(lce, b, case_named("z-loss, mean"))
    assert first["dx"] != second["dx"]
    again = run(lce, a, case_named("mean"))
    assert first == again
    lce.lce_destroy(a)
    assert run(lce, b, case_named("z-loss, mean")) == second
    lce.lce_destroy(b)


# --- on a GPU ---------------------------------------------------------------------------------------------------

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
    """Inputs that arrive late on the caller's stream, results that the same stream takes away: no wait between."""
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


TESTS = (same_as_pytorch, every_field_arrives, targets_out_of_range, sampling_is_unbiased, wrapper_takes_tensors,
         wrapper_defaults, wrapper_refuses, wrapper_calls_on_the_tensors_device, tensors_of_pytorch, errors_come_back,
         refusals_leave_nothing_behind, contexts_are_independent, streams_of_the_caller)


if __name__ == "__main__":
    library = load(build(FOLDER, "CUDA=0", "MPI=0"))
    sys.exit(tap.run({test.__name__: functools.partial(test, library) for test in TESTS}))
