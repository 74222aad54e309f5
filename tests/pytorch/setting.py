"""Gives all tests of tools/torch PyTorch, if there is one, and the package on a library of its own."""
import contextlib
import importlib
import multiprocessing
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:0] = [os.path.join(ROOT, *parts) for parts in (("tools", "torch"), ("tests",))]
import tap  # noqa: E402
import test_liblce  # noqa: E402

DEVICE = "cpu"
try:
    import torch
    torch.manual_seed(1)
    torch.set_num_threads(2)
    if torch.cuda.is_available():
        DEVICE = "cuda"
    if multiprocessing.parent_process() is None:  # ranks that a test starts have its library
        os.environ["LCE_LIBRARY"] = (test_liblce.build(os.path.join("build", "library")) if DEVICE == "cuda" else
                                     test_liblce.build(test_liblce.FOLDER, "CUDA=0", "MPI=0"))
except ImportError:
    torch = None


def readme_examples():
    with open(os.path.join(ROOT, "tools", "torch", "README.md")) as file:
        return re.findall(r"```python\n(.*?)```", file.read(), re.S)


def run(tests):
    def skipped():
        raise tap.Skip(f"{sys.executable} has no PyTorch; make test PYTHON=... names one that has")
    wanted = {name: test for name, test in tests.items() if not sys.argv[1:] or name in sys.argv[1:]}
    sys.exit(tap.run(wanted if torch else {"PyTorch": skipped}))


def close(what, got, want, most):
    """The largest difference over the largest wanted value. `most` is the CPU's: a GPU's exp is coarser."""
    most *= 20 if DEVICE == "cuda" else 1
    assert got.shape == want.shape, f"{what} has the shape {list(got.shape)}, not {list(want.shape)}"
    got, want = got.detach().double(), want.detach().double()
    off, size = (got - want).abs().max().item(), want.abs().max().item()
    assert off <= most * max(size, 1e-30), f"{what} is off by {off / size:.2e} of {size:.3g}, more than {most:.1e}"


def all_close(what, got, want, most):
    for i, pair in enumerate(zip(got, want, strict=True)):
        close(f"{what}, {i}", *pair, most)


def double(*tensors):
    """The same in float64, also as leaves; integers as they are."""
    return [t if t is None or not t.is_floating_point() else t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


def gradients(output, tensors, upstream=None, **options):
    """Those of the tensors that want one."""
    return torch.autograd.grad(output, [t for t in tensors if t is not None and t.requires_grad], upstream, **options)


@contextlib.contextmanager
def calls_of_the_operator(seen=lambda *_: None, module="functional"):
    """A list to which every call of a module's operator adds what `seen` makes of its arguments."""
    module = importlib.import_module(f"lce.{module}")
    calls, real = [], module.operator
    module.operator = lambda *a: calls.append(seen(*a)) or real(*a)
    try:
        yield calls
    finally:
        module.operator = real


def raises(kind, part, work):
    """Returns what the error says."""
    try:
        work()
    except kind as error:
        assert part in str(error), f"{error!r} does not say {part!r}"
        return str(error)
    raise AssertionError(f"nothing is raised, where {kind.__name__} with {part!r} is expected")
