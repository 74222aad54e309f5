"""Runs ./train and the tools as a user would, alone or as the ranks of a job, for tests that print TAP.

LCE_TRAIN names the program of another build. mpirun starts jobs, and no program sees a GPU; with LCE_GPU_RANKS=N
tools/launch starts them, on N GPUs.
"""
import array
import collections
import concurrent.futures
import contextlib
import functools
import hashlib
import importlib.util
import json
import operator
import os
import pathlib
import pty
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time

import tap
from tap import Skip

ROOT = pathlib.Path(__file__).resolve().parent.parent
TRAIN = pathlib.Path(os.environ.get("LCE_TRAIN", ROOT / "train")).resolve()
TOOLS = TRAIN.parent / "tools"
LAUNCH = ROOT / "tools" / "launch"
GPUS = int(os.environ.get("LCE_GPU_RANKS", 0))
MPIRUN = "mpirun --allow-run-as-root --oversubscribe --bind-to none -n".split()
DEVICE = "--device cuda " if GPUS else "--device cpu "
DEADLINE = 120  # seconds, as a Deadline counts them
signal.signal(signal.SIGINT, signal.default_int_handler)  # not ignored in a background job, nor in what it starts
keep = tempfile.TemporaryDirectory(prefix="lce-test-")
TEXT = pathlib.Path(keep.name, "words.txt")  # to train on: 16 KB that do not change with the tree
WORDS = "return ", "tensor", " = ", "0", ";\n", "for ", "int ", "i", "++", ") ", "float ", "x[i] ", "+ ", "{\n", "}\n", "sum "
TEXT.write_text("".join(WORDS[hashlib.sha256(b"%d" % i).digest()[0] % 16] for i in range(4096)))
SIZES = ("--model llama-tiny --vocab 300 --hidden-size 16 --intermediate-size 24 --num-attention-heads 2 "
         "--num-key-value-heads 1 --seq-len 16 ")
TINY = "--device cpu --num-layers 2 --batch 3 " + SIZES  # trains in no time


def pace():
    """Returns how many times longer a computation takes now than on an idle machine."""
    began, used = time.monotonic(), time.thread_time()
    hashlib.sha256(bytes(1 << 25))  # does not wait for Python's other threads
    return max(1, (time.monotonic() - began) / (time.thread_time() - used))


class Deadline:
    """Ends a hang: passes after so many seconds of a machine that does nothing else."""

    def __init__(self, seconds):
        self.left, self.before = seconds, time.monotonic()

    def passed(self):
        passed = time.monotonic() - self.before
        if passed > 1:
            self.left, self.before = self.left - passed / pace(), self.before + passed
        return self.left <= 0


def wait_until(condition, seconds=60, otherwise=""):
    deadline = Deadline(seconds)
    while not condition():
        assert not deadline.passed(), otherwise
        time.sleep(0.02)


class Output:
    """Keeps how a program ended (below 0: by that signal), and all that it wrote."""

    def __init__(self, words, status, out, err):
        self.words, self.status, self.out, self.err = words, status, out, err

    def __str__(self):
        return f"{shlex.join(self.words)}: status {self.status}\n{self.out}\n--- stderr\n{self.err}"

    def expect(self, right, text, parts):
        assert right and all(part in text for part in parts), f"expected {parts}: {self}"
        return self

    def ok(self, *parts):
        """Requires that it succeeded and that its output has each of `parts`."""
        return self.expect(self.status == 0, self.out, parts)

    def fails(self, *parts):
        """Requires that it failed and that stderr has each of `parts`."""
        return self.expect(self.status != 0, self.err, parts)

    def refused(self, *parts, status=1):
        """Requires that stderr is one sentence with `parts`."""
        one_line = self.err.startswith("lce: ") and self.err.find("\n") == len(self.err) - 1
        return self.expect(self.status == status and one_line, self.err, parts)


class Process:
    """Runs a program, with `ranks` as that many ranks of a job."""

    def __init__(self, *words, ranks=0, terminal=False, cwd=ROOT, **environment):
        launcher = [] if not ranks else [LAUNCH, ranks] if GPUS else [*MPIRUN, ranks]
        self.words = [str(word) for word in [*launcher, *words]]
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive", **environment}
        if not GPUS:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        if ranks:
            environment["ASAN_OPTIONS"] = "detect_leaks=0"  # MPI never frees what it starts with
        self.out, self.err, self.terminal = tempfile.TemporaryFile(), tempfile.TemporaryFile(), None
        inner = None
        if terminal:
            try:
                self.terminal, inner = pty.openpty()
            except OSError as error:
                raise Skip(f"no pseudo-terminal can be had: {error}") from error
        self.child = subprocess.Popen(self.words, cwd=cwd, env=environment, stdin=subprocess.DEVNULL,
                                      stdout=inner if terminal else self.out, stderr=self.err)
        self.pid = self.child.pid
        if terminal:
            os.close(inner)

    def text(self, file):
        return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")

    def wait_for(self, text):
        """Returns when standard output holds `text`."""
        deadline = Deadline(DEADLINE)
        while text not in self.text(self.out):
            assert self.child.poll() is None and not deadline.passed(), f"no {text!r}: {self.finish(0)}"
            time.sleep(0.005)

    def read_terminal(self):
        text = b""
        try:
            while part := os.read(self.terminal, 4096):
                text += part
        except OSError:  # the program has closed it
            os.close(self.terminal)
        return text.decode()

    def finish(self, seconds=DEADLINE):
        shown = self.read_terminal() if self.terminal else None
        deadline = Deadline(seconds)
        while self.child.poll() is None and not deadline.passed():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(1.1)
        self.child.kill()  # does nothing to one that has ended
        self.child.wait()
        with self.out, self.err:
            return Output(self.words, self.child.returncode, shown or self.text(self.out), self.text(self.err))

    def of_rank(self, rank):
        """Returns the process of a rank."""
        names, proc = {f"RANK={rank}".encode(), f"OMPI_COMM_WORLD_RANK={rank}".encode()}, pathlib.Path("/proc")
        children = (proc / f"{self.pid}/task/{self.pid}/children").read_text().split()
        return next(int(child) for child in children if names & set((proc / child / "environ").read_bytes().split(b"\0")))


def start(line, *words, **how):
    """./train with the options of `line`, which is read as a shell reads it, and `words`."""
    return Process(TRAIN, *shlex.split(line), *words, **how)


def train(line, *words, **how):
    return start(line, *words, **how).finish()


def run(*words, **how):
    return Process(*words, **how).finish()


def once(function):
    """Calls it once for the same arguments, whichever test comes first."""
    guard, made = threading.Lock(), {}

    @functools.wraps(function)
    def call(*arguments):
        with guard:
            lock, results = made.setdefault(arguments, (threading.Lock(), []))
        with lock:
            if not results:
                results.append(function(*arguments))
            return results[0]
    return call


def together(function, cases):
    """Calls it for all cases at the same time: they wait more than they compute."""
    with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
        return list(pool.map(lambda case: function(*case), cases))


def need(*packages):
    for name in packages:
        if not importlib.util.find_spec(name):
            raise Skip(f"{sys.executable} has no {name}: pip install {name}")


@once
def need_ranks():
    if GPUS:  # tools/launch is in the tree, and needs no MPI
        return
    if not shutil.which("mpirun"):
        raise Skip("there is no mpirun")
    if "need MPI" in train(TINY + "--steps 0", ranks=2).err:
        raise Skip("this build has no MPI")


# --- files --------------------------------------------------------------------------------------------------


def write(path, held):
    """Writes a text, bytes, a dict as JSON, or a list as lines of JSON."""
    path.parent.mkdir(exist_ok=True, parents=True)
    if isinstance(held, (dict, list)):
        held = json.dumps(held) if isinstance(held, dict) else "".join(json.dumps(record) + "\n" for record in held)
    path.write_bytes(held if isinstance(held, bytes) else held.encode())
    return path


def read_log(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def column(log, field, event=None):
    """Returns the values of a field, in the lines of an event or in all but the summary."""
    return [line[field] for line in log if field in line and (line["event"] == event or not event and line["event"] != "summary")]


Tensor = collections.namedtuple("Tensor", "dtype shape bytes")


def tensors(path):
    data = pathlib.Path(path).read_bytes()
    length, = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + length])
    return {name: Tensor(t["dtype"], t["shape"], data[8 + length + t["data_offsets"][0]:8 + length + t["data_offsets"][1]])
            for name, t in header.items() if name != "__metadata__"}


def floats(tensor):
    assert tensor.dtype == "F32", tensor.dtype
    return array.array("f", tensor.bytes)


def difference(a, b):
    """Returns the largest difference between two files of tensors, each over the largest number of its tensor."""
    x, y = tensors(a), tensors(b)
    assert x and x.keys() == y.keys(), (a, b)
    return max(max(map(abs, map(operator.sub, floats(x[name]), floats(y[name])))) / max(map(abs, floats(x[name])))
               if x[name].bytes != y[name].bytes else 0 for name in x)


def files_in(folder):
    """Returns what each file holds."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def same_files(a, b):
    """Requires that two folders hold the same files, byte by byte."""
    x, y = files_in(a), files_in(b)
    assert x and x.keys() == y.keys(), (a, b)
    for name in x:
        assert x[name] == y[name], f"{name} of {a} and {b} differs"


def write_shard(path, tokens, magic=20240520, version=1, count=None):
    """Writes a shard of llm.c, with uint16 tokens or bytes."""
    data = tokens if isinstance(tokens, bytes) else array.array("H", tokens).tobytes()
    path.write_bytes(struct.pack("<256i", magic, version, len(tokens) if count is None else count, *[0] * 253) + data)
    return path


def write_mask(path, counts):
    """Writes which tokens of a shard count as targets."""
    bits = bytes(sum(bool(count) << k for k, count in enumerate(counts[i:i + 8])) for i in range(0, len(counts), 8))
    return write_shard(path, bits, magic=20261120, count=len(counts))


def write_manifest(folder, **counts):
    """Writes the manifest of tools/prepare_data.py: of train=COUNT and val=COUNT, a shard of each."""
    splits = {name: {"shards": [{"file": f"{name}_000000.bin", "tokens": count}]} for name, count in counts.items()}
    write(folder / "manifest.json", {"format": "lce.c shards", "masked": False, "splits": splits})


def assert_planned(line, peak):
    """Requires that the plan of these options is `peak` bytes: it fits there, and into no byte less."""
    train(f"{line} --plan --device-memory {peak / 2**30!r}").ok()
    train(f"{line} --plan --device-memory {(peak - 1) / 2**30!r}").fails("this run needs ")


def main(names, at_once=3):
    """Runs the functions called test_* among `names`, each with a temporary folder of its own if it takes one."""
    with tempfile.TemporaryDirectory(prefix="lce-test-") as root:
        def call(name, test):
            folder = pathlib.Path(root, name)
            folder.mkdir()
            test(folder)
        tests = {name: functools.partial(call, name, test) for name, test in names.items() if name.startswith("test_")}
        wanted = sys.argv[1:] or tests
        sys.exit(tap.run({name: tests[name] for name in wanted}, at_once) > 0)
