"""Workflows in a real ComfyUI server, with the pack installed the way a user has it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACK = "ComfyUI-QuantCore"
START_SECONDS = 90
PROMPT_SECONDS = 60

# No text encoder is small enough for a test, so a node of the test's own gives random conditioning.
CONDITIONING_NODE = """
import torch

class RandomConditioning:
    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {name: ("INT", {"default": 0}) for name in ("run", "seed", "tokens", "width", "pooled")}}

    def make(self, run, seed, tokens, width, pooled):  # Another run only keeps ComfyUI from reusing a result.
        generator = torch.Generator().manual_seed(seed)
        context = torch.randn(1, tokens, width, generator=generator)
        extra = {"pooled_output": torch.randn(1, pooled, generator=generator), "guidance": 3.5}
        return ([[context, extra]],)

NODE_CLASS_MAPPINGS = {"RandomConditioning": RandomConditioning}
"""


class Server:
    """A running ComfyUI with a base directory of its own."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.log = base / "server.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "main.py", "--cpu", "--listen", "127.0.0.1", "--port", str(port)]
        command += ["--base-directory", str(base), "--disable-auto-launch", "--disable-api-nodes"]
        # The repository must not be importable there: a user's ComfyUI finds the pack in custom_nodes only.
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=os.environ["COMFYUI_PATH"], env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def wait_until_up(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                self.get("/system_stats")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.3)
        raise AssertionError("ComfyUI did not start:\n" + self.log.read_text(errors="replace")[-4000:])

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def get(self, path: str):
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            body = answer.read()
        return json.loads(body) if "json" in answer.headers.get("Content-Type", "") else body.decode()

    def post(self, path: str, data: dict):
        request = urllib.request.Request(
            self.url + path, json.dumps(data).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def run(self, workflow: dict, client: str = "test") -> dict:
        """Run a workflow to its end; return its entry in the history."""
        return self.wait(self.post("/prompt", {"prompt": workflow, "client_id": client})["prompt_id"])

    def wait(self, prompt_id: str) -> dict:
        deadline = time.monotonic() + PROMPT_SECONDS
        while time.monotonic() < deadline:
            history = self.get(f"/history/{prompt_id}")
            if prompt_id in history:
                return history[prompt_id]
            time.sleep(0.1)
        raise AssertionError("the prompt did not end:\n" + self.log.read_text(errors="replace")[-4000:])

    def latent(self, entry: dict):
        """Return the latent that a workflow saved."""
        import safetensors.torch

        assert entry["status"]["status_str"] == "success", entry["status"]
        (saved,) = [file for output in entry["outputs"].values() for file in output.get("latents", [])]
        return safetensors.torch.load_file(self.base / "output" / saved["subfolder"] / saved["filename"])[
            "latent_tensor"
        ]


def message(entry: dict, kind: str) -> dict:
    """Return the data of one message of a failed workflow."""
    assert entry["status"]["status_str"] == "error", entry["status"]
    (data,) = [data for name, data in entry["status"]["messages"] if name == kind]
    return data


def our_loader(model: str, method: str = "comfy_kitchen_int8_w8a8", **options) -> dict:
    inputs = {"model_name": model, "method": method, **options}
    return {"class_type": "QuantCore_LoadDiffusionModel", "inputs": inputs}


def stock_loader(model: str) -> dict:
    return {"class_type": "UNETLoader", "inputs": {"unet_name": model, "weight_dtype": "default"}}


@pytest.fixture(scope="module")
def workflow(make_tiny):
    """A function that returns loader -> KSampler -> SaveLatent."""
    shape = {"tokens": make_tiny.FLUX_TOKENS, "width": make_tiny.FLUX_CONTEXT, "pooled": make_tiny.FLUX_POOLED}

    def build(loader: dict, prefix: str = "test", run: int = 0) -> dict:
        sampler = {"seed": 7, "steps": 2, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
        links = {"model": ["1", 0], "positive": ["2", 0], "negative": ["2", 0], "latent_image": ["3", 0]}
        return {
            "1": loader,
            "2": {"class_type": "RandomConditioning", "inputs": {"run": run, "seed": 3, **shape}},
            "3": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
            "4": {"class_type": "KSampler", "inputs": {**sampler, **links}},
            "5": {"class_type": "SaveLatent", "inputs": {"samples": ["4", 0], "filename_prefix": prefix}},
        }

    return build


@pytest.fixture(scope="module")
def server(make_tiny, tmp_path_factory):
    base = tmp_path_factory.mktemp("comfyui")
    models, custom_nodes = base / "models" / "diffusion_models", base / "custom_nodes"
    make_tiny.write("flux", models / "flux.safetensors")
    convert = [sys.executable, "-m", "quant_core", "quantize", "flux.safetensors", "flux_int8.safetensors"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    subprocess.run([*convert, "--method", "comfy_kitchen_int8_w8a8"], cwd=models, env=environment, check=True)

    (models / "garbage.safetensors").write_bytes(b"<html>404 not found</html>" * 100)
    (models / "cut_off.safetensors").write_bytes((models / "flux.safetensors").read_bytes()[:-1000])
    import safetensors.torch
    import torch

    safetensors.torch.save_file({"tower.weight": torch.zeros(8, 8)}, models / "unknown.safetensors")

    for part in ("nodes", "quant_core", "web", "example_workflows"):
        shutil.copytree(ROOT / part, custom_nodes / PACK / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "__init__.py", custom_nodes / PACK)
    (custom_nodes / "random_conditioning.py").write_text(CONDITIONING_NODE)
    running = Server(base)
    try:
        running.wait_until_up()
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def quantized_latent(server, workflow):
    return server.latent(server.run(workflow(our_loader("flux.safetensors"), "online")))


def test_the_node_describes_itself(server):
    node = server.get("/object_info/QuantCore_LoadDiffusionModel")["QuantCore_LoadDiffusionModel"]
    assert node["category"] == "quantization"
    assert node["description"] and node["search_aliases"] and node["output"] == ["MODEL"]
    inputs = {**node["input"]["required"], **node["input"]["optional"]}
    assert all(options["tooltip"] for _, options in inputs.values())
    assert {name for name, (_, options) in inputs.items() if options.get("advanced")} == {
        "exclude_layers",
        "compute_dtype",
        "quantize_device",
    }
    assert "comfy_kitchen_nvfp4_w4a4" in inputs["method"][1]["options"]
    assert set(inputs["model_name"][1]["options"]) >= {"flux.safetensors", "garbage.safetensors"}


EXAMPLES = sorted(file.stem for file in (ROOT / "example_workflows").glob("*.json"))
WIDGETS = ("COMBO", "STRING", "INT", "FLOAT", "BOOLEAN")


def test_every_example_is_offered(server):
    assert sorted(server.get("/workflow_templates")[PACK]) == EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_fits_the_nodes(name, server):
    """Links of the right types, and for each widget of our nodes a value that it takes, in order."""
    example = server.get(f"/api/workflow_templates/{PACK}/{name}.json")
    nodes = {node["id"]: node for node in example["nodes"]}
    known = server.get("/object_info")
    for _, source, output, target, slot, kind in example["links"]:
        entry = nodes[target]["inputs"][slot]
        groups = known[nodes[target]["type"]]["input"]
        accepted = {**groups.get("required", {}), **groups.get("optional", {})}[entry["name"].partition(".")[0]][0]
        assert known[nodes[source]["type"]]["output"][output] == kind
        assert accepted in (kind, "COMFY_AUTOGROW_V3")
    ours = [node for node in nodes.values() if node["type"].startswith("QuantCore_")]
    assert ours
    for node in ours:
        described = known[node["type"]]
        order = [key for group in described["input_order"].values() for key in group]
        inputs = {**described["input"].get("required", {}), **described["input"].get("optional", {})}
        widgets = [key for key in order if key in inputs and inputs[key][0] in WIDGETS]
        assert len(node["widgets_values"]) == len(widgets), node["type"]
        for key, value in zip(widgets, node["widgets_values"], strict=True):
            kind, options = inputs[key]
            assert type(value) is {"BOOLEAN": bool, "INT": int, "FLOAT": float}.get(kind, str), key
            if kind == "COMBO" and key not in ("model_name", "lora_name", "file"):
                assert value in options["options"], key


def test_every_node_describes_itself_and_has_a_help_page(server):
    """Every input and output says in a tooltip what it is for."""
    ours = {name: node for name, node in server.get("/object_info").items() if name.startswith("QuantCore_")}
    assert len(ours) >= 10
    for name, node in ours.items():
        assert node["category"] == "quantization" and node["description"] and node["search_aliases"], name
        inputs = {**node["input"].get("required", {}), **node["input"].get("optional", {})}
        assert [key for key, (_, *options) in inputs.items() if not (options and options[0].get("tooltip"))] == [], name
        assert all(node.get("output_tooltips") or [None]) or not node["output"], name
        assert sum(not options[0].get("advanced") for _, *options in inputs.values()) <= 9, name
        page = server.get(f"/extensions/{PACK}/docs/{name}.md")
        assert page.startswith(f"# {node['display_name']}"), name
        assert [key for key in inputs if f"`{key}`" not in page] == [], name


def test_quantizing_online_samples_like_the_converted_file_in_the_stock_loader(server, workflow, quantized_latent):
    import torch

    stock = server.latent(server.run(workflow(stock_loader("flux_int8.safetensors"), "stock")))
    assert torch.isfinite(stock).all() and stock.std() > 0.1
    # The weights are the same bytes; the file's are mapped, and a misaligned matmul on a CPU rounds differently.
    assert (stock - quantized_latent).norm() / stock.norm() < 1e-3


def test_saving_from_the_graph_gives_the_command_lines_file(server):
    """Tensor for tensor, and with the workflow in its metadata, as ComfyUI's own savers put it there."""
    import torch
    from safetensors import safe_open

    save = {"model": ["1", 0], "filename_prefix": "diffusion_models/saved"}
    entry = server.run(
        {"1": our_loader("flux.safetensors"), "2": {"class_type": "QuantCore_SaveCheckpoint", "inputs": save}}
    )
    assert entry["status"]["status_str"] == "success", entry["status"]
    path = server.base / "output" / "diffusion_models" / "saved_00001_.safetensors"
    assert str(path) in entry["outputs"]["2"]["text"][0]
    assert "diffusion_models/saved" in stored_prompt(path)
    written = server.base / "models" / "diffusion_models" / "flux_int8.safetensors"
    with safe_open(path, "pt") as ours, safe_open(written, "pt") as cli:
        assert set(ours.keys()) == set(cli.keys())
        assert all(torch.equal(ours.get_tensor(name), cli.get_tensor(name)) for name in ours.keys())  # noqa: SIM118


def stored_prompt(path: Path) -> str:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return file.metadata()["prompt"]


def test_quantizing_a_model_of_the_graph(server, workflow):
    """A stock loader and a recipe, through a sampler; then again, with the model unloaded in between."""
    import torch

    def build(run: int) -> dict:
        graph = workflow({"class_type": "QuantCore_QuantizeModel", "inputs": {"model": ["6", 0], "recipe": ["7", 0]}})
        graph["2"]["inputs"]["run"] = run
        graph["6"] = stock_loader("flux.safetensors")
        graph["7"] = {
            "class_type": "QuantCore_QuantizationPreset",
            "inputs": {"policy": "safe-8bit", "hardware": "any"},
        }
        return graph

    first = server.latent(server.run(build(1)))
    server.post("/free", {"unload_models": True, "free_memory": False})
    assert torch.equal(first, server.latent(server.run(build(2))))
    exact = server.latent(server.run(workflow(stock_loader("flux.safetensors"), "float")))
    assert 0 < (exact - first).norm() / exact.norm() < 0.05


def test_the_disk_cache_serves_the_second_load(server, workflow, quantized_latent):
    import torch

    first = server.latent(server.run(workflow(our_loader("flux.safetensors", disk_cache=True), "cached")))
    server.post("/free", {"unload_models": True, "free_memory": True})
    again = workflow(our_loader("flux.safetensors", disk_cache=True), "cached", run=1)
    assert torch.equal(first, server.latent(server.run(again)))
    assert "loaded from the disk cache" in server.log.read_text(errors="replace")
    assert (first - quantized_latent).norm() / first.norm() < 1e-3


def test_the_quantized_model_samples_close_to_the_float_model(server, workflow, quantized_latent):
    exact = server.latent(server.run(workflow(stock_loader("flux.safetensors"), "float")))
    assert 0 < (exact - quantized_latent).norm() / exact.norm() < 0.05


def test_the_model_survives_unloading(server, workflow, quantized_latent):
    import torch

    server.run(workflow(our_loader("flux.safetensors"), "before_unloading", run=1))
    server.post("/free", {"unload_models": True})
    time.sleep(1.5)
    entry = server.run(workflow(our_loader("flux.safetensors"), "after_unloading", run=2))
    assert torch.equal(server.latent(entry), quantized_latent)
    (cached,) = [data["nodes"] for name, data in entry["status"]["messages"] if name == "execution_cached"]
    assert "1" in cached and "4" not in cached


def test_a_changed_file_is_loaded_again(server, workflow, make_tiny):
    import torch

    path = server.base / "models" / "diffusion_models" / "changing.safetensors"
    make_tiny.write("flux", path, seed=0)
    first = server.latent(server.run(workflow(our_loader(path.name), "changing")))
    make_tiny.write("flux", path, seed=1)
    second = server.latent(server.run(workflow(our_loader(path.name), "changing_again")))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        ("garbage.safetensors", {}, "garbage.safetensors cannot be read"),
        ("cut_off.safetensors", {}, "cut_off.safetensors cannot be read"),
        ("unknown.safetensors", {}, "unknown.safetensors is not a diffusion model"),
        ("flux.safetensors", {"exclude_layers": "img_mpl.0"}, "img_mpl.0"),
    ],
)
def test_an_error_names_the_file(server, workflow, model, options, expected):
    error = message(server.run(workflow(our_loader(model, **options))), "execution_error")
    assert error["node_id"] == "1"
    assert model in error["exception_message"]
    assert expected in error["exception_message"]


def test_cancelling_stops_the_loader(server, workflow):
    """Interrupt at the first progress message that the loader sends."""
    import aiohttp

    async def cancel() -> str:
        async with aiohttp.ClientSession(server.url) as session, session.ws_connect("/ws?clientId=canceller") as socket:
            # The slowest format, so that most layers are still to come.
            prompt = workflow(our_loader("flux.safetensors", "comfy_kitchen_int4_w4a8"), "cancelled")
            body = {"prompt": prompt, "client_id": "canceller"}
            async with session.post("/prompt", json=body) as answer:
                prompt_id = (await answer.json())["prompt_id"]
            async for received in socket:
                if received.type is not aiohttp.WSMsgType.TEXT:
                    continue
                event = json.loads(received.data)
                if event["type"] == "progress" and event["data"]["node"] == "1":
                    await session.post("/interrupt", json={"prompt_id": prompt_id})
                    return prompt_id
        raise AssertionError("no progress message came")

    prompt_id = asyncio.run(asyncio.wait_for(cancel(), PROMPT_SECONDS))
    interrupted = message(server.wait(prompt_id), "execution_interrupted")
    assert interrupted["node_id"] == "1"
    assert interrupted["executed"] == [] or "1" not in interrupted["executed"]


def test_nothing_of_the_pack_went_wrong(server):
    """Runs last: the log has no traceback of the pack's import and no warning about its entry point."""
    log = server.log.read_text(errors="replace")
    assert "IMPORT FAILED" not in log
    assert "comfy_entrypoint" not in log
