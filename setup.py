"""Builds the native kernels when there is a C compiler; everything else about the package is in pyproject.toml.

Without a compiler the installation succeeds all the same, and torch operations take over: `argosy doctor` says which.
After a change of a C file: `make setup`, or `python setup.py build_ext --inplace`.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("src/argosy/native")

# Results must not depend on the compiler's whims: no contraction to fused multiply-add, never fast-math or -march=native.
COMPILE = ["-std=c11", "-O3", "-ffp-contract=off", "-fno-fast-math"]

setup(
    ext_modules=[
        Extension(
            "argosy.native._kernels",
            sources=sorted(str(path) for path in NATIVE.glob("*.c")),
            depends=sorted(str(path) for path in NATIVE.glob("*.h")),
            extra_compile_args=[*COMPILE, "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
