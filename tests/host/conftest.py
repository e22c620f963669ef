"""Fixtures of the tests that run inside ComfyUI. They need ComfyUI's interpreter and COMFYUI_PATH.

ComfyUI is imported by fixtures only, so that these tests can be collected, and counted, where there is none.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_module(name: str, path: Path, package: Path | None = None) -> ModuleType:
    """Import a file under a name of our own, as ComfyUI imports a node pack."""
    locations = None if package is None else [str(package)]
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=locations)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several processes run the tests, those that share models or a server stay in one."""
    for item in items:
        group = item.path.stem
        if group == "test_matrix":  # much of the time: by architecture
            group += item.name.partition("[")[2].partition("-")[0]
        elif group in ("test_other_nodes", "test_training"):
            group += item.name.partition("[")[0]
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def make_tiny() -> ModuleType:
    if "COMFYUI_PATH" not in os.environ:
        pytest.skip("needs a ComfyUI: set COMFYUI_PATH and run with its interpreter")
    module = load_module("quantcore_make_tiny", Path(__file__).parent / "make_tiny.py")
    module.import_comfy()
    return module


@pytest.fixture(scope="session")
def pack(make_tiny):
    """The pack, imported the way ComfyUI does it, with the modules that the tests look at."""
    door = load_module("quantcore_pack_under_test", ROOT / "__init__.py", ROOT)
    extension = asyncio.run(door.comfy_entrypoint())
    nodes = asyncio.run(extension.get_node_list())
    host = door.__name__ + ".nodes.host."
    return SimpleNamespace(
        nodes={node.GET_SCHEMA().node_id: node for node in nodes},
        load=importlib.import_module(host + "loading").load_diffusion_model,
        detection=importlib.import_module(host + "detection"),
        quantizer=importlib.import_module(host + "quantizer"),
        core=importlib.import_module(door.__name__ + ".nodes.core"),
    )


@pytest.fixture(scope="session", autouse=True)
def quant_core_is_the_packs(request):
    """A file that is run alone finds quant_core, too: it is not installed here, the pack brings it."""
    if "COMFYUI_PATH" in os.environ:
        request.getfixturevalue("pack")


@pytest.fixture(scope="session")
def tiny_flux(make_tiny, tmp_path_factory) -> Path:
    return make_tiny.write("flux", tmp_path_factory.mktemp("models") / "tiny_flux.safetensors")


@pytest.fixture(scope="session")
def flux_output(make_tiny):
    """A function that runs one forward of a tiny flux patcher on fixed inputs, as a sampler would."""
    import comfy.model_management
    import torch

    generator = torch.Generator().manual_seed(1)
    latent = torch.randn(1, make_tiny.FLUX_CHANNELS, 16, 16, generator=generator)
    context = torch.randn(1, make_tiny.FLUX_TOKENS, make_tiny.FLUX_CONTEXT, generator=generator)
    pooled = torch.randn(1, make_tiny.FLUX_POOLED, generator=generator)

    def run(patcher) -> torch.Tensor:
        comfy.model_management.load_models_gpu([patcher])
        with torch.inference_mode():
            return patcher.model.apply_model(
                latent, torch.tensor([0.7]), c_crossattn=context, y=pooled, guidance=torch.full((1,), 3.5)
            ).float()

    return run


@pytest.fixture(scope="session")
def stock_load(make_tiny):
    """A function that loads a file with ComfyUI's own loader, its tensors copied out of the file's map.

    A mapped tensor may be misaligned, and a CPU matmul on it then rounds differently.
    """
    import comfy.sd
    import comfy.utils
    import torch

    def load(path: Path):
        with torch.inference_mode():
            tensors, metadata = comfy.utils.load_torch_file(str(path), return_metadata=True)
            tensors = {key: tensor.clone() for key, tensor in tensors.items()}
            return comfy.sd.load_diffusion_model_state_dict(tensors, metadata=metadata)

    return load


@pytest.fixture
def comfy_idle(make_tiny):
    """No model loaded and no interrupt pending, before and after the test."""
    import comfy.model_management

    comfy.model_management.unload_all_models()
    yield comfy.model_management
    comfy.model_management.interrupt_current_processing(False)
    comfy.model_management.unload_all_models()


@pytest.fixture(scope="session")
def weights(make_tiny):
    """A function that returns every tensor of a patcher's diffusion model as the bytes that saving would write."""
    import torch

    def read(patcher) -> dict[str, torch.Tensor]:
        state = patcher.model.diffusion_model.state_dict()
        return {key: tensor.detach().reshape(-1).view(torch.uint8).clone() for key, tensor in state.items()}

    return read


@pytest.fixture(scope="session")
def assert_same(weights):
    """A function that compares two patchers, or what ``weights`` returned for them, byte for byte."""
    import torch

    def check(left, right) -> None:
        left, right = (side if isinstance(side, dict) else weights(side) for side in (left, right))
        assert list(left) == list(right)
        assert [key for key in left if not torch.equal(left[key], right[key])] == []

    return check


@pytest.fixture
def online(pack, tiny_flux):
    """A function that loads the tiny flux, or another file, as the node does."""
    import torch

    from quant_core import QuantizeConfig

    def load(method="comfy_kitchen_int8_w8a8", path=tiny_flux, dtype=None, **options):
        library = method.partition("_")[0]
        if library in os.environ.get("QUANTCORE_MISSING_BACKENDS", "").split(","):
            pytest.skip(f"needs {library}, which has no release for this platform")
        with torch.inference_mode():
            return pack.load(str(path), QuantizeConfig(method=method, **options), dtype)

    return load
