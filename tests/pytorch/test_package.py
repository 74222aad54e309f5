#!/usr/bin/env python3
"""tools/torch installed: from the tree, and as a wheel from the sdist in an empty environment."""
import ast
import glob
import inspect
import os
import platform
import re
import subprocess
import sys
import tempfile
import venv
import zipfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests"))
import tap  # noqa: E402

KEPT_OUT = "PYTHONPATH", "LCE_LIBRARY", "LCE_BLAS", "LCE_MAKE", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in KEPT_OUT}
PROGRAM = """
import torch, lce
x, w, y = torch.randn(7, 8, requires_grad=True), torch.nn.Parameter(torch.randn(40, 8)), torch.randint(40, (7,))
lce.linear_cross_entropy(x, w, y).backward()
want = torch.autograd.grad(torch.nn.functional.cross_entropy(x @ w.T, y), [x, w])
assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip((x.grad, w.grad), want))
print(lce.__version__, lce.__file__)
"""


def output(*words, status=0, **more):
    done = subprocess.run(words, capture_output=True, text=True, env={**ENVIRONMENT, **more})
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def needs():
    """Skips where the package cannot be built or used without a network."""
    for module, least in ("torch", 2), ("setuptools", 77), ("pip", 22):
        program = f"import {module}; print({module}.__version__)"
        found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        if found.returncode or int(found.stdout.split(".")[0]) < least:
            raise tap.Skip(f"{sys.executable} has no {module} from version {least} on")


def types_are_the_functions():
    """Compares each name's parameters, their order and their defaults with __init__.pyi."""
    needs()
    sys.path.insert(0, os.path.join(ROOT, "tools", "torch"))
    import lce
    with open(os.path.join(ROOT, "tools", "torch", "lce", "__init__.pyi")) as file:
        typed = {node.name: node for node in reversed(ast.parse(file.read()).body) if hasattr(node, "name")}
    assert set(typed) == set(lce.__all__), set(typed) ^ set(lce.__all__)
    for name, node in typed.items():
        owner, functions = (lce, [node]) if isinstance(node, ast.FunctionDef) else (getattr(lce, name), node.body)
        for function in functions:
            parameters = inspect.signature(getattr(owner, function.name)).parameters.values()
            want = [(p.name, p.default) for p in parameters]
            given, a = {}, function.args
            given.update(zip([p.arg for p in a.args[len(a.args) - len(a.defaults):] + a.kwonlyargs], a.defaults + a.kw_defaults))
            got = [(p.arg, ast.literal_eval(given[p.arg]) if given.get(p.arg) else inspect.Parameter.empty)
                   for p in a.args + a.kwonlyargs + [a.kwarg] if p]
            assert got == want, (name, set(got) ^ set(want))


def pip_install():
    """From the tree into a folder, with a library that this machine's other CPUs could run."""
    needs()
    with tempfile.TemporaryDirectory() as folder:
        output(sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "--no-index", "--target", folder,
               os.path.join(ROOT, "tools", "torch"), LCE_MAKE="CUDA=0")
        assert os.path.join(folder, "lce", "__init__.py") in output(sys.executable, "-c", PROGRAM, PYTHONPATH=folder)


def wheel_from_sdist():
    needs()
    with tempfile.TemporaryDirectory() as folder:
        output("make", "-C", ROOT, "wheel", "CUDA=0", f"PYTHON={os.path.relpath(sys.executable, ROOT)}", f"DIST={folder}")
        assert len(glob.glob(f"{folder}/lce_torch-*.tar.gz")) == 1
        wheel, = glob.glob(f"{folder}/lce_torch-*-py3-none-*linux*.whl")
        if platform.libc_ver()[0] == "glibc":  # no newer than this machine's, which runs it below
            least = int(re.search(r"-manylinux_2_(\d+)_", wheel)[1])
            assert 5 <= least <= int(platform.libc_ver()[1].split(".")[1]), wheel
        with zipfile.ZipFile(wheel) as packed:
            names = {re.sub("-.*dist-info", "", name) for name in packed.namelist()}
            library = packed.extract("lce/liblce.so", folder)
        assert {"lce/py.typed", "lce/__init__.pyi", "lce_torch/licenses/LICENSE"} < names, names
        names_no_place(library, folder)
        works_where_installed(wheel, os.path.join(folder, "empty"))


def what_is_missing_is_named():
    """In a sentence, without a traceback."""
    said = output("make", "-C", ROOT, "sdist", "PYTHON=/none/python", status=2)
    assert "make sdist: PYTHON=/none/python is no Python with pip and setuptools 77 or later" in said, said
    needs()
    with tempfile.TemporaryDirectory() as folder:
        said = output(sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "--no-index", "--target",
                      folder, os.path.join(ROOT, "tools", "torch"), LCE_MAKE="CUDA=0 CC=/none/gcc", status=1)
    assert "lce-torch: liblce.so cannot be built here: it needs gcc and GNU make" in said and "Traceback" not in said, said


def names_no_place(library, folder):
    dynamic = output("readelf", "-d", library)
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    assert needed and all(re.match("lib(c|m|gomp|dl|pthread)[.]so|ld-linux", name) for name in needed), needed
    assert "PATH)" not in dynamic, dynamic
    with open(library, "rb") as file:
        content = file.read()
    assert not any(place.encode() in content for place in (ROOT, folder, tempfile.gettempdir() + "/"))


def works_where_installed(wheel, empty):
    venv.create(empty, symlinks=True)
    python = os.path.join(empty, "bin", "python")
    site = output(python, "-c", "import site; print(site.getsitepackages()[0])").strip()
    torch = output(sys.executable, "-c", "import torch; print(torch.__file__)").splitlines()[-1]
    with open(os.path.join(site, "torch.pth"), "w") as file:
        file.write(os.path.dirname(os.path.dirname(torch)))
    output(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    said = output(python, "-c", PROGRAM)
    assert os.path.join(site, "lce") in said and f"-{said.split()[0]}-" in wheel, said
    assert "lce: " not in said, said
    output(python, "-c", PROGRAM, LCE_BLAS="")  # plain loops
    assert "LCE_BLAS: /none is no library with" in output(python, "-c", PROGRAM, LCE_BLAS="/none", status=1)


sys.exit(tap.run({test.__name__: test for test in (types_are_the_functions, pip_install, wheel_from_sdist, what_is_missing_is_named)}))
