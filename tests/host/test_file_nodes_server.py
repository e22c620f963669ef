"""The nodes on recipes and files in a real ComfyUI server: growing inputs, results, caching, errors, cancelling."""

from __future__ import annotations

import asyncio
import json
import os
import shutil

import pytest
from host.test_server import PACK, PROMPT_SECONDS, ROOT, Server, message

INT8, NVFP4 = "comfy_kitchen_int8_w8a8", "comfy_kitchen_nvfp4_w4a4"
NODES = {
    "QuantCore_QuantizationMethod",
    "QuantCore_MixedQuantization",
    "QuantCore_QuantizationPlan",
    "QuantCore_ConvertCheckpoint",
    "QuantCore_CheckpointDoctor",
}
WORKFLOW = {"nodes": [{"id": 4, "type": "QuantCore_ConvertCheckpoint"}]}


@pytest.fixture(scope="module")
def server(make_tiny, tmp_path_factory):
    base = tmp_path_factory.mktemp("comfyui")
    make_tiny.write("flux", base / "models" / "diffusion_models" / "flux.safetensors")
    for part in ("nodes", "quant_core", "web", "example_workflows"):
        target = base / "custom_nodes" / PACK / part
        shutil.copytree(ROOT / part, target, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "__init__.py", base / "custom_nodes" / PACK)
    running = Server(base)
    try:
        running.wait_until_up()
        yield running
    finally:
        running.stop()


def conversion(prefix="diffusion_models/quantized", file="diffusion_models/flux.safetensors", **method) -> dict:
    """Two methods -> mixed -> plan and convert."""
    first = {"method": INT8, "target_layers": "img_mlp.0", **method}
    recipes = {"recipes.recipe0": ["1", 0], "recipes.recipe1": ["2", 0]}
    on_file = {"file": file, "recipe": ["3", 0], "part": "diffusion"}
    return {
        "1": {"class_type": "QuantCore_QuantizationMethod", "inputs": first},
        "2": {"class_type": "QuantCore_QuantizationMethod", "inputs": {"method": NVFP4}},
        "3": {"class_type": "QuantCore_MixedQuantization", "inputs": recipes},
        "4": {"class_type": "QuantCore_ConvertCheckpoint", "inputs": {**on_file, "filename_prefix": prefix}},
        "5": {"class_type": "QuantCore_QuantizationPlan", "inputs": on_file},
    }


def run(server, prompt, client="test") -> dict:
    """Run a prompt as the browser sends it, with its workflow."""
    data = {"prompt": prompt, "client_id": client, "extra_data": {"extra_pnginfo": {"workflow": WORKFLOW}}}
    return server.wait(server.post("/prompt", data)["prompt_id"])


def data_of(tensor):
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def test_the_nodes_describe_themselves(server):
    for node_id in NODES:
        node = server.get(f"/object_info/{node_id}")[node_id]
        assert node["category"] == "quantization" and node["description"] and node["search_aliases"]
        inputs = {**node["input"].get("required", {}), **node["input"].get("optional", {})}
        assert [name for name, (_, options) in inputs.items() if not options.get("tooltip")] == []
        assert len(node["output_tooltips"]) == len(node["output"]) and all(node["output_tooltips"])
        page = server.get(f"/extensions/{PACK}/docs/{node_id}.md")
        assert page.startswith(f"# {node['display_name']}\n")
        assert [name for name in inputs if f"`{name}`" not in page] == []


def test_a_workflow_converts_a_file(server, pack, tmp_path):
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file

    from quant_core import MixedQuantizeConfig, QuantizeConfig
    from quant_core.convert import convert
    from quant_core.plan import plan

    prompt = conversion()
    entry = run(server, prompt)
    assert entry["status"]["status_str"] == "success", entry["status"]
    (path,) = (server.base / "output" / "diffusion_models").iterdir()
    assert path.name == "quantized_00001_.safetensors"
    source = server.base / "models" / "diffusion_models" / "flux.safetensors"
    parts = [QuantizeConfig(method=INT8, target_modules=["img_mlp.0"])]
    parts += [QuantizeConfig(method=NVFP4, exclude_modules=["img_mlp.0"])]
    made = plan(source, MixedQuantizeConfig(configs=parts))
    convert(made, tmp_path / "plain.safetensors")
    ours, plain = load_file(path), load_file(tmp_path / "plain.safetensors")
    assert list(ours) == list(plain)
    assert all(torch.equal(data_of(ours[name]), data_of(plain[name])) for name in plain)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["workflow"]) == WORKFLOW
    assert set(json.loads(metadata["prompt"])) == set(prompt)
    shown = entry["outputs"]["5"]
    assert sum(row["bytes_after"] for row in shown["quantcore_rows"]) == made.bytes_after
    assert f"the file takes {made.file_bytes:,} bytes" in shown["text"][0]
    assert str(path) in entry["outputs"]["4"]["text"][0]


def test_only_a_changed_file_is_converted_again(server):
    def cached(entry):
        assert entry["status"]["status_str"] == "success", entry["status"]
        (data,) = [data["nodes"] for name, data in entry["status"]["messages"] if name == "execution_cached"]
        return data

    copy = server.base / "models" / "diffusion_models" / "copy.safetensors"
    shutil.copy(copy.with_name("flux.safetensors"), copy)
    prompt = conversion("diffusion_models/again", f"diffusion_models/{copy.name}")
    run(server, prompt)
    assert {"4", "5"} <= set(cached(run(server, prompt)))
    os.utime(copy, (1, 1))
    assert not {"4", "5"} & set(cached(run(server, prompt)))
    written = sorted(path.name for path in (server.base / "output" / "diffusion_models").glob("again*"))
    assert written == ["again_00001_.safetensors", "again_00002_.safetensors"]


@pytest.mark.parametrize(
    ("changes", "node", "expected"),
    [
        ({"options": '{"group": 64}'}, "1", "convrot_groupsize"),
        ({"target_layers": ""}, "3", "Name target layers in all of them but one"),
        ({"target_layers": "img_mpl.0"}, ("4", "5"), "diffusion_models/flux.safetensors: target 'img_mpl.0'"),
        ({"prefix": "../../x"}, "4", "output folder"),
    ],
)
def test_an_error_is_in_the_nodes_box(server, changes, node, expected):
    error = message(run(server, conversion(**changes)), "execution_error")
    assert error["node_id"] in node and expected in error["exception_message"]


def test_the_doctor_reports(server):
    inputs = {"file": "diffusion_models/flux.safetensors", "repair": False}
    entry = run(server, {"1": {"class_type": "QuantCore_CheckpointDoctor", "inputs": inputs}})
    assert entry["status"]["status_str"] == "success", entry["status"]
    assert "no findings" in entry["outputs"]["1"]["text"][0]


def test_cancelling_leaves_nothing(server):
    """Interrupt at the first progress message of the node."""
    import aiohttp

    async def cancel() -> str:
        async with aiohttp.ClientSession(server.url) as session, session.ws_connect("/ws?clientId=canceller") as socket:
            prompt = conversion("cancelled/file", method="comfy_kitchen_int4_w4a8")  # the slowest
            async with session.post("/prompt", json={"prompt": prompt, "client_id": "canceller"}) as answer:
                prompt_id = (await answer.json())["prompt_id"]
            async for received in socket:
                if received.type is not aiohttp.WSMsgType.TEXT:
                    continue
                event = json.loads(received.data)
                if event["type"] == "progress" and event["data"]["node"] == "4":
                    await session.post("/interrupt", json={"prompt_id": prompt_id})
                    return prompt_id
        raise AssertionError("no progress message came")

    prompt_id = asyncio.run(asyncio.wait_for(cancel(), PROMPT_SECONDS))
    assert message(server.wait(prompt_id), "execution_interrupted")["node_id"] == "4"
    assert list((server.base / "output" / "cancelled").iterdir()) == []
