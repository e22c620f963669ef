"""There is one ``quant_core`` in a process, whoever imports it first. Each case runs in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

LOAD_CORE = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("pack_core", {str(ROOT / "nodes" / "core.py")!r})
pack_core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pack_core)
"""


def run(code: str, tmp_path, importable: bool) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if importable:
        environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_packs_own_copy_is_provided_when_none_is_installed(tmp_path):
    code = f"""{LOAD_CORE}
assert importlib.util.find_spec("quant_core") is None
module = pack_core.provide_quant_core()
import quant_core, quant_core.registry
assert quant_core is module and quant_core.registry.QUANT_METHODS is quant_core.QUANT_METHODS
assert quant_core.__file__.startswith({str(ROOT)!r})
assert not any(name in sys.modules for name in ("nodes", "tests", "demo"))
assert {str(ROOT)!r} not in sys.path
"""
    run(code, tmp_path, importable=False)


def test_a_backend_registered_before_the_pack_is_seen(tmp_path):
    code = f"""
import quant_core

@quant_core.register_quant_backend("mine")
class Mine(quant_core.QuantBackend):
    pass

quant_core.register_quant_method("mine_w8a16", "mine", dict)
{LOAD_CORE}
module = pack_core.provide_quant_core()
assert module is quant_core
assert type(module.QuantizeConfig(method="mine_w8a16").backend) is Mine
"""
    run(code, tmp_path, importable=True)


def test_a_backend_registered_after_the_pack_is_seen(tmp_path):
    code = f"""{LOAD_CORE}
module = pack_core.provide_quant_core()
import quant_core

@quant_core.register_quant_backend("mine")
class Mine(quant_core.QuantBackend):
    pass

quant_core.register_quant_method("mine_w8a16", "mine", dict)
assert type(module.QuantizeConfig(method="mine_w8a16").backend) is Mine
"""
    run(code, tmp_path, importable=False)


def test_another_version_is_refused_in_words(tmp_path):
    code = f"""{LOAD_CORE}
import types
sys.modules["quant_core"] = types.ModuleType("quant_core")
sys.modules["quant_core"].__version__ = "0.0.1"
try:
    pack_core.provide_quant_core()
except ImportError as error:
    print(error)
"""
    message = run(code, tmp_path, importable=False)
    assert "quant_core 0.0.1 is imported already" in message
    assert "same version" in message


def test_the_nodes_use_it(pack):
    import quant_core

    assert pack.core.provide_quant_core() is quant_core
    assert pack.quantizer.QuantizationError is quant_core.QuantizationError
