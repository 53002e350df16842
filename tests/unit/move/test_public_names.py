"""What `argosy.move` offers by itself: loaded when first used, and never in the way of a module."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

import argosy.move


def test_importing_the_package_imports_neither_torch_nor_its_modules():
    code = "import sys, argosy.move; sys.exit('torch' in sys.modules or 'argosy.move.arenas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_no_public_name_is_also_a_module():
    modules = {module.name for module in pkgutil.iter_modules(argosy.move.__path__)}
    assert set(argosy.move.__all__) & modules == set()


def test_every_public_name_is_there():
    pytest.importorskip("torch")
    for name in argosy.move.__all__:
        found = getattr(argosy.move, name)
        assert getattr(importlib.import_module(found.__module__), name) is found
    assert set(argosy.move.__all__) <= set(dir(argosy.move))
    with pytest.raises(AttributeError, match="no attribute 'arena'"):
        argosy.move.arena  # noqa: B018
