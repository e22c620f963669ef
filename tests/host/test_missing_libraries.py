"""A ComfyUI without bitsandbytes and torchao: the pack loads, and says what is missing and how to install it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest


def _test_server():
    spec = importlib.util.spec_from_file_location("quantcore_test_server", Path(__file__).with_name("test_server.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bare_server(make_tiny, tmp_path_factory):
    """A server in whose Python the two libraries cannot be imported."""
    import shutil

    server_tests = _test_server()
    base = tmp_path_factory.mktemp("bare")
    make_tiny.write("flux", base / "models" / "diffusion_models" / "flux.safetensors")
    for part in ("nodes", "quant_core", "web"):
        target = base / "custom_nodes" / server_tests.PACK / part
        shutil.copytree(server_tests.ROOT / part, target, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(server_tests.ROOT / "__init__.py", base / "custom_nodes" / server_tests.PACK)
    # A pack that is loaded with the others, and hides the libraries as if they were not installed.
    (base / "custom_nodes" / "hide_libraries.py").write_text(
        """
import importlib.abc, importlib.util, sys

class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("bitsandbytes", "torchao"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

sys.meta_path.insert(0, Hide())
find_spec = importlib.util.find_spec

def hidden(name, package=None):
    return None if name.partition(".")[0] in ("bitsandbytes", "torchao") else find_spec(name, package)

importlib.util.find_spec = hidden
NODE_CLASS_MAPPINGS = {}
"""
    )
    running = server_tests.Server(base)
    try:
        running.wait_until_up()
        yield running
    finally:
        running.stop()


@pytest.mark.parametrize("method", ["bitsandbytes_nf4", "torchao_int8_w8a8"])
def test_a_method_without_its_library_says_how_to_install_it(bare_server, method):
    node = bare_server.get("/object_info/QuantCore_LoadDiffusionModel")["QuantCore_LoadDiffusionModel"]
    assert method in node["input"]["required"]["method"][1]["options"]
    inputs = {"model_name": "flux.safetensors", "method": method}
    entry = bare_server.run(
        {
            "1": {"class_type": "QuantCore_LoadDiffusionModel", "inputs": inputs},
            "2": {"class_type": "QuantCore_SaveCheckpoint", "inputs": {"model": ["1", 0], "filename_prefix": "x"}},
        }
    )
    (error,) = [data for kind, data in entry["status"]["messages"] if kind == "execution_error"]
    assert "pip install" in error["exception_message"] and method.partition("_")[0] in error["exception_message"]


def test_the_list_says_what_is_missing(bare_server):
    entry = bare_server.run({"1": {"class_type": "QuantCore_ListMethods", "inputs": {}}})
    assert entry["status"]["status_str"] == "success", entry["status"]
    (text,) = entry["outputs"]["1"]["text"]
    assert "pip install bitsandbytes" in text and "pip install torchao" in text
    assert "comfy_kitchen_int8_w8a8" in text


def test_the_other_methods_work(bare_server):
    inputs = {"model_name": "flux.safetensors", "method": "comfy_kitchen_int8_w8a8"}
    entry = bare_server.run(
        {
            "1": {"class_type": "QuantCore_LoadDiffusionModel", "inputs": inputs},
            "2": {"class_type": "QuantCore_SaveCheckpoint", "inputs": {"model": ["1", 0], "filename_prefix": "x"}},
        }
    )
    assert entry["status"]["status_str"] == "success", entry["status"]
    assert os.listdir(bare_server.base / "output") == ["x_00001_.safetensors"]
