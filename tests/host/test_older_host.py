"""The pack in the oldest ComfyUI that it runs in: tests of the other files, and cases of what is missing there."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT_SECONDS = 300

ANY = ("comfy_kitchen_int8_w8a8", "comfy_kitchen_fp8_w8a8", "comfy_kitchen_nvfp4_w4a4", "bitsandbytes_nf4")
NATIVE = ("comfy_kitchen_fp8_w8a8", "comfy_kitchen_mxfp8_w8a8", "comfy_kitchen_nvfp4_w4a4")

IN_PROCESS = {
    "older_host_cases.py": None,
    "test_online_quantization.py": {
        "test_equals_the_native_load_of_a_converted_file": NATIVE,
        "test_a_full_checkpoint_gives_the_same_model": None,
        "test_diffusers_names_give_the_same_model": None,
        "test_excluded_layers_stay_float": None,
        "test_an_old_scaled_fp8_file_is_loaded_as_comfyui_does": None,
        "test_cancelling_stops_the_load": None,
    },
    "test_after_loading.py": {
        "test_unloading_between_two_runs": ANY[:3],
        "test_lora_is_applied_and_taken_off": ANY[:3],
        "test_merging_two_quantized_models": None,
    },
    "test_adapter.py": {"test_a_converted_file_is_the_same_model": ("bitsandbytes_nf4", "torchao_int8_w8a8")},
    "test_saving.py": {
        "test_the_file_is_the_one_that_the_command_line_writes": ANY,
        "test_comfyuis_own_loader_opens_it": NATIVE,
        "test_a_lora_is_saved_as_sampled": (ANY[0], *ANY[2:]),
    },
    "test_rebuilding.py": {
        "test_what_is_no_weight_is_carried_over": None,
        "test_patches_upstream_are_added_in_float": None,
    },
    "test_load_lora.py": {
        "test_a_weight_of_another_library": None,
        "test_chained_loras_add_up": None,
        "test_every_linear_kind_lies_beside_the_layer": None,
    },
    "test_text_encoder.py": {
        "test_the_prompt_is_close_to_the_float_encoders": [f"t5-{method}" for method in ANY],
        "test_clip_stays_in_float": None,
        "test_a_clip_without_a_projection": None,
        "test_a_file_of_another_encoder": None,
        "test_a_stock_lora": [f"{method}-low vram" for method in ANY],
    },
    "test_cache_node.py": {"test_a_kept_model_is_the_model_that_was_quantized": None},
}
SERVER = {
    "test_server.py": {
        "test_the_node_describes_itself": None,
        "test_every_node_describes_itself_and_has_a_help_page": None,
        "test_an_example_fits_the_nodes": None,
        "test_saving_from_the_graph_gives_the_command_lines_file": None,
        "test_quantizing_a_model_of_the_graph": None,
        "test_the_disk_cache_serves_the_second_load": None,
        "test_the_model_survives_unloading": None,
    }
}


def node_ids(selection: dict[str, dict[str, Sequence[str] | None] | None]) -> list[str]:
    ids = []
    for file, tests in selection.items():
        for test, cases in (tests or {"": None}).items():
            name = f"{HERE / file}::{test}".removesuffix("::")
            ids += [f"{name}[{case}]" for case in cases] if cases else [name]
    return ids


@pytest.fixture(scope="module")
def older():
    """The older ComfyUI."""
    # Under a name of its own: the repository must not be on sys.path here.
    tools = ModuleType("quantcore_dev_tools")
    tools.__path__ = [str(ROOT / "dev_tools")]
    sys.modules[tools.__name__] = tools
    finder = importlib.import_module("quantcore_dev_tools.comfyui")
    found = finder.find_older_comfyui()
    if found is None:
        pytest.skip(f"tests, because no ComfyUI {finder.OLDER} was found: {finder.OLDER_HOW_TO}")
    return found


@pytest.mark.parametrize("selection", [IN_PROCESS, SERVER], ids=["in process", "server"])
def test_in_the_older_comfyui(selection, older, tmp_path):
    # pytest is borrowed from here where nobody says from where else.
    extras = os.environ.get("QUANTCORE_OLDER_EXTRAS", str(Path(pytest.__file__).parents[1]))
    report = tmp_path / "report.xml"
    command = [older.python, ROOT / "dev_tools" / "run_pytest.py", extras, "-q", "--tb=short", "-p", "no:cacheprovider"]
    command += [f"--rootdir={ROOT}", f"--junitxml={report}", *node_ids(selection)]
    environment = {**os.environ, "COMFYUI_PATH": str(older.folder), "COMFYUI_PYTHON": str(older.python)}
    environment |= {"PYTHONNOUSERSITE": "1"}
    ours = ("PYTEST_", "PYTHONPATH", "QUANTCORE_EXTRA_PATH")  # of the process that runs this test
    environment = {key: value for key, value in environment.items() if not key.startswith(ours)}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=LIMIT_SECONDS,
    )
    assert result.returncode == 0, result.stdout[-8000:]
    skipped = [
        case.get("name") for case in ElementTree.parse(report).iter("testcase") if case.find("skipped") is not None
    ]
    assert not skipped or os.environ.get("QUANTCORE_MISSING_BACKENDS"), result.stdout[-8000:]
