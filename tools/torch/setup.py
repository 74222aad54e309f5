"""Builds liblce.so by make, into the package. LCE_MAKE holds make's arguments, as "GPUS='80 90' CUDA=0".

An sdist has what make needs in its folder `source`; the wheel serves every Python 3.
"""
import glob
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = os.path.dirname(os.path.abspath(__file__))
PACKED = os.path.join(HERE, "source")
SOURCE = PACKED if os.path.isdir(PACKED) else os.path.dirname(os.path.dirname(HERE))


class BuildLibrary(build_py):
    def run(self):
        super().run()
        library = os.path.abspath(os.path.join(self.build_lib, "lce", "liblce.so"))
        # Not for this machine's CPU alone, since pip keeps what it has built; x86-64-v3 has AVX2 and FMA.
        march = "x86-64-v3" if platform.machine() == "x86_64" else ""
        words = ["make", "-s", "-C", SOURCE, f"MARCH={march}", *shlex.split(os.environ.get("LCE_MAKE", "")),
                 "LIBLCE_BUILD=build/wheel", f"LIBLCE={library}", "WHEEL=1", "liblce.so"]
        if not shutil.which("make") or subprocess.run(words).returncode:
            sys.exit("lce-torch: liblce.so cannot be built here: it needs gcc and GNU make, and for a GPU nvcc 12.4 or later and g++")


class WithSource(sdist):
    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        shutil.copy(os.path.join(SOURCE, "LICENSE"), base_dir)
        kinds = [os.path.join("kernels", "**", f"*.{kind}") for kind in ("c", "h", "cu", "cuh")]
        for pattern in ("Makefile", *kinds, os.path.join("tools", "torch", "package.mk"), os.path.join("tools", "torch", "liblce", "**", "*.*")):
            for path in sorted(glob.glob(pattern, root_dir=SOURCE, recursive=True)):
                copy = os.path.join(base_dir, "source", path)
                os.makedirs(os.path.dirname(copy), exist_ok=True)
                shutil.copy(os.path.join(SOURCE, path), copy)


class AnyPython(bdist_wheel):
    def get_tag(self):
        """Any Python 3, since ctypes loads the library; a Linux with the newest glibc that the library names."""
        with open(os.path.join(self.get_finalized_command("build_py").build_lib, "lce", "liblce.so"), "rb") as library:
            needed = [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library.read())]
        tag = super().get_tag()[2]
        return "py3", "none", tag.replace("linux_", f"manylinux_2_{max(needed)}_", 1) if needed else tag


class Binary(Distribution):
    def has_ext_modules(self):
        return True  # the wheel is for this platform alone


setup(cmdclass={"build_py": BuildLibrary, "sdist": WithSource, "bdist_wheel": AnyPython}, distclass=Binary)
