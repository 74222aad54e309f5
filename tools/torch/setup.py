"""Builds liblce.so by make, into the package. LCE_MAKE holds make's arguments, as "GPUS='80 90' CUDA=0"."""
import os
import platform
import shlex
import subprocess

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

HERE = os.path.dirname(os.path.abspath(__file__))


class BuildLibrary(build_py):
    def run(self):
        super().run()
        library = os.path.abspath(os.path.join(self.build_lib, "lce", "liblce.so"))
        # Not for this machine's CPU alone, since pip keeps what it has built; x86-64-v3 has AVX2 and FMA.
        march = "x86-64-v3" if platform.machine() == "x86_64" else ""
        subprocess.check_call(["make", "-s", "-C", os.path.join(HERE, "..", ".."), "VARIANT=library", "MPI=0", f"MARCH={march}",
                               "BUILD=build/wheel", f"LIBLCE={library}", *shlex.split(os.environ.get("LCE_MAKE", "")),
                               "build-library"])


class Binary(Distribution):
    def has_ext_modules(self):
        return True  # the wheel is for this platform alone


setup(cmdclass={"build_py": BuildLibrary}, distclass=Binary)
