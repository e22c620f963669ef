"""The disk cache in ComfyUI: its folder and limit, the key of a model, and the node that clears it."""

from __future__ import annotations

import asyncio
import copy
import importlib
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

INT8, NF4 = "comfy_kitchen_int8_w8a8", "bitsandbytes_nf4"
GIGABYTE = 10**9
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def modules(pack):
    package = pack.core.__name__.rpartition(".")[0]
    return SimpleNamespace(
        cache=importlib.import_module(f"{package}.host.cache"),
        node=importlib.import_module(f"{package}.clear_quantization_cache").ClearQuantizationCache,
        saving=importlib.import_module(f"{package}.host.saving"),
    )


@pytest.fixture
def folder(modules, tmp_path, monkeypatch):
    """ComfyUI's user directory is the test's own; the folder that the cache then has."""
    import folder_paths

    before = folder_paths.get_user_directory()
    monkeypatch.delenv("QUANTCORE_CACHE", raising=False)
    monkeypatch.delenv("QUANTCORE_CACHE_GB", raising=False)
    folder_paths.set_user_directory(str(tmp_path / "user"))
    yield tmp_path / "user" / "quantcore_cache"
    folder_paths.set_user_directory(before)


@pytest.fixture
def run(modules):
    """A function that runs the node as ComfyUI does; what it shows."""
    import torch

    def execute(**inputs) -> str:
        modules.node.GET_SCHEMA()
        prepared = modules.node.PREPARE_CLASS_CLONE({"hidden_inputs": {}})
        with torch.inference_mode():
            result = prepared.EXECUTE_NORMALIZED(**inputs)
        assert result.ui == {"text": list(result.args)}
        return result.args[0]

    return execute


def config(method=INT8, **options):
    from quant_core import QuantizeConfig

    return QuantizeConfig(method=method, **options)


def fill(cache, count: int, nbytes: int) -> list[Path]:
    """Entries that take ``nbytes`` each, without taking the disk's space."""
    paths = []
    for number in range(count):
        key = f"{number:064x}"
        with cache.entry(key) as path:
            header = f'{{"w":{{"dtype":"U8","shape":[{nbytes - 200}],"data_offsets":[0,{nbytes - 200}]}}}}'
            path.write_bytes((192).to_bytes(8, "little") + header.encode().ljust(192))
            os.truncate(path, nbytes)
        paths.append(cache.get(key))
    assert all(paths)
    return paths


# ------------------------------------------------------------------ folder and limit


def test_the_folder_is_in_the_user_directory_or_where_the_variable_says(modules, folder, tmp_path, monkeypatch):
    assert modules.cache.disk_cache().folder == folder
    assert not folder.exists()  # nothing is made before there is something to keep
    monkeypatch.setenv("QUANTCORE_CACHE", str(tmp_path / "other"))
    assert modules.cache.disk_cache().folder == tmp_path / "other"
    monkeypatch.setenv("QUANTCORE_CACHE", "  ")
    assert modules.cache.disk_cache().folder == folder
    monkeypatch.setenv("QUANTCORE_CACHE", os.path.join("~", "cache"))
    assert modules.cache.disk_cache().folder == Path.home() / "cache"


@pytest.mark.parametrize("text, gigabytes", [(None, 50), ("", 50), ("12.5", 12.5), (" 3 ", 3), ("0", 0), ("1e6", 1e6)])
def test_the_limit(modules, folder, tmp_path, monkeypatch, text, gigabytes):
    if text is not None:
        monkeypatch.setenv("QUANTCORE_CACHE_GB", text)
    limit = modules.cache.disk_cache().limit_bytes
    free = shutil.disk_usage(tmp_path).free - 5 * GIGABYTE
    assert 0 <= limit <= gigabytes * GIGABYTE
    assert limit == pytest.approx(max(0, min(gigabytes * GIGABYTE, free)), abs=GIGABYTE // 2)


@pytest.mark.parametrize("text", ["fifty", "-1", "nan", "inf", "50 GB"])
def test_a_limit_that_is_no_number_is_refused(modules, folder, monkeypatch, text):
    monkeypatch.setenv("QUANTCORE_CACHE_GB", text)
    with pytest.raises(ValueError, match="QUANTCORE_CACHE_GB is .* expected a number of gigabytes"):
        modules.cache.disk_cache()


def test_five_gigabytes_stay_free(modules, folder, tmp_path, monkeypatch):
    """What the cache holds itself counts as free: otherwise a full cache would shrink without reason."""
    monkeypatch.setenv("QUANTCORE_CACHE_GB", "1e6")
    space = shutil.disk_usage(tmp_path).free - 5 * GIGABYTE
    assert modules.cache.disk_cache().limit_bytes == pytest.approx(max(0, space), abs=GIGABYTE // 2)
    fill(modules.cache.DiskCache(folder, 1 << 50), 3, 20 * GIGABYTE)  # holes: the disk's free space stays
    assert modules.cache.disk_cache().limit_bytes == pytest.approx(60 * GIGABYTE + space, abs=GIGABYTE // 2)


# ------------------------------------------------------------------ the key


def test_the_key_changes_with_the_model_and_the_recipe(modules, tiny_flux, make_tiny, tmp_path):
    import torch

    key = modules.cache.cache_key
    bf16 = torch.bfloat16
    lora = tmp_path / "lora.safetensors"
    lora.write_bytes(b"any bytes")
    wan = make_tiny.write("wan", tmp_path / "wan.safetensors")
    keys = [
        key([str(tiny_flux)], config(), bf16),
        key([str(wan)], config(), bf16),
        key([str(tiny_flux), str(wan)], config(), bf16),
        key([str(tiny_flux)], config("comfy_kitchen_fp8_w8a8"), bf16),
        key([str(tiny_flux)], config(exclude_modules=["img_mlp.0"]), bf16),
        key([str(tiny_flux)], config(backend_config_kwargs={"convrot_groupsize": 64}), bf16),
        key([str(tiny_flux)], config(), torch.float16),
        key([str(tiny_flux)], config(), bf16, [(str(lora), 1.0)]),
        key([str(tiny_flux)], config(), bf16, [(str(lora), 0.5)]),
    ]
    assert len(set(keys)) == len(keys)
    assert key([str(tiny_flux)], config(), bf16) == keys[0]
    assert key([str(tiny_flux)], config(), bf16, [(str(lora), 1)]) == keys[7]
    lora.write_bytes(b"more bytes")
    assert key([str(tiny_flux)], config(), bf16, [(str(lora), 1.0)]) != keys[7]
    moved = tmp_path / "elsewhere" / tiny_flux.name
    moved.parent.mkdir()
    shutil.copy2(tiny_flux, moved)  # with its time
    assert key([str(moved)], config(), bf16) == keys[0]
    os.utime(moved, ns=(0, 0))
    assert key([str(moved)], config(), bf16) != keys[0]


def test_the_key_changes_with_the_code(modules, tmp_path, monkeypatch):
    import quant_core
    from quant_core.registry import QUANT_BACKENDS, find_method

    versions = modules.cache._versions(config())
    assert versions["comfy_kitchen"] and versions["comfyui"] and versions["quant_core"].startswith("0.")

    find_method(INT8)

    class Toy(QUANT_BACKENDS["comfy_kitchen"]):
        """A backend of another pack, in a file of its own."""

    file = tmp_path / "toy.py"
    file.write_text("1")
    monkeypatch.setitem(sys.modules, "quantcore_toy", SimpleNamespace(__file__=str(file)))
    monkeypatch.setitem(QUANT_BACKENDS, "toy", Toy)
    monkeypatch.setattr(Toy, "__module__", "quantcore_toy")
    monkeypatch.setitem(quant_core.QUANT_METHODS, "toy_int9", quant_core.QuantMethodSpec("toy", dict))
    before = modules.cache._versions(SimpleNamespace(parts=lambda: [SimpleNamespace(method="toy_int9")]))
    file.write_text("2")
    after = modules.cache._versions(SimpleNamespace(parts=lambda: [SimpleNamespace(method="toy_int9")]))
    assert {name for name in before if before[name] != after[name]} == {"toy code"}

    other = tmp_path / "quant_core"
    shutil.copytree(Path(quant_core.__file__).parent, other, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(quant_core, "__file__", str(other / "__init__.py"))
    modules.cache._code_digest.cache_clear()
    assert modules.cache._versions(config()) == versions
    with (other / "pipeline.py").open("a") as module:
        module.write("# changed\n")
    modules.cache._code_digest.cache_clear()
    assert modules.cache._versions(config()) != versions
    monkeypatch.undo()
    modules.cache._code_digest.cache_clear()


# ------------------------------------------------------------------ a model


@pytest.mark.parametrize("method", [INT8, NF4])
def test_a_kept_model_is_the_model_that_was_quantized(
    modules, method, folder, online, tiny_flux, flux_output, assert_same, tmp_path
):
    import torch

    cache = modules.cache.DiskCache(folder, 50 * GIGABYTE)
    first = online(method)
    key = modules.cache.cache_key([str(tiny_flux)], config(method), first.model.get_dtype_inference())
    with torch.inference_mode(), cache.entry(key, first.model_size()) as path:
        modules.saving.save_model(path, first)
    again = online(method, path=cache.get(key), dtype=first.model.get_dtype_inference())
    assert_same(first, again)
    assert torch.equal(flux_output(first), flux_output(again))


def test_cancelling_leaves_nothing(modules, folder, online, comfy_idle):
    cache = modules.cache.DiskCache(folder, 50 * GIGABYTE)
    model = online()
    comfy_idle.interrupt_current_processing(True)
    with pytest.raises(comfy_idle.InterruptProcessingException), cache.entry("0" * 64) as path:
        modules.saving.save_model(path, model)
    assert [path.name for path in folder.iterdir()] == ["quantcore-cache.lock"]


# ------------------------------------------------------------------ the node


def test_clearing(modules, folder, run):
    assert run() == f"0.00 GB freed; 0 quantized models of 0.00 GB left in {folder}"
    fill(modules.cache.DiskCache(folder, 1 << 50), 5, GIGABYTE)
    (folder / "mine.safetensors").write_bytes(b"mine")
    assert run(keep_gb=2.5) == f"3.00 GB freed; 2 quantized models of 2.00 GB left in {folder}"
    assert sorted(path.name for path in folder.iterdir() if path.suffix == ".safetensors") == [
        "mine.safetensors",
        *(f"quantcore-{number:064x}.safetensors" for number in (3, 4)),
    ]
    assert run(keep_gb=1.0) == f"1.00 GB freed; 1 quantized model of 1.00 GB left in {folder}"
    assert run() == f"1.00 GB freed; 0 quantized models of 0.00 GB left in {folder}"
    assert (folder / "mine.safetensors").exists()


def test_clearing_works_where_the_cache_is_turned_off(modules, folder, run, monkeypatch):
    fill(modules.cache.DiskCache(folder, 1 << 50), 1, GIGABYTE)
    monkeypatch.setenv("QUANTCORE_CACHE_GB", "0")
    assert run().startswith("1.00 GB freed; 0 ")


@pytest.mark.skipif(os.name == "nt", reason="users and rights of POSIX")
def test_a_folder_that_cannot_be_written_is_said_in_plain_words(modules, folder, run, tmp_path):
    fill(modules.cache.DiskCache(folder, 1 << 50), 1, 1000)
    (folder / "quantcore-cache.lock").chmod(0o444)
    folder.chmod(0o555)
    places = [folder.parent, *tmp_path.parents[:3], tmp_path]
    for place in places:
        if place.stat().st_uid == os.geteuid():
            place.chmod(place.stat().st_mode | 0o055)
    root = not os.geteuid()
    try:
        if root:  # who may write everywhere
            os.seteuid(65534)
        with pytest.raises(PermissionError, match=re.escape(str(folder)) + ".*QUANTCORE_CACHE"):
            run()
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)


def test_the_node_describes_itself_and_runs_every_time(modules):
    schema = modules.node.GET_SCHEMA()
    assert schema.node_id == "QuantCore_ClearCache" and schema.category == "quantization" and schema.is_output_node
    assert schema.description and schema.search_aliases
    assert all(slot.tooltip for slot in [*schema.inputs, *schema.outputs])
    assert modules.node.fingerprint_inputs(keep_gb=1.0) != modules.node.fingerprint_inputs(keep_gb=1.0)
    page = (ROOT / "web" / "docs" / "QuantCore_ClearCache.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {schema.display_name}") and all(f"`{slot.id}`" in page for slot in schema.inputs)
    assert all(name in page for name in (modules.cache.FOLDER_VARIABLE, modules.cache.LIMIT_VARIABLE))


def test_the_node_in_a_workflow(modules, folder, tmp_path):
    """ComfyUI's own executor takes it as an output node, and runs it again though nothing changed."""
    import execution

    import nodes

    server = SimpleNamespace(
        client_id=None,
        last_node_id=None,
        last_prompt_id=None,
        sockets_metadata={},
        send_sync=lambda event, data, sid=None: None,
    )
    nodes.NODE_CLASS_MAPPINGS["QuantCore_ClearCache"] = modules.node
    prompt = {"1": {"class_type": "QuantCore_ClearCache", "inputs": {"keep_gb": 0.0}}}
    try:
        assert asyncio.run(execution.validate_prompt("p", prompt, None))[0]
        arguments = {"cache_type": execution.CacheType.CLASSIC, "cache_args": {"lru": 0, "ram": 0, "ram_inactive": 0}}
        executor = execution.PromptExecutor(server, **arguments)
        for count in (1, 0):
            fill(modules.cache.DiskCache(folder, 1 << 50), count, GIGABYTE)
            executor.execute(copy.deepcopy(prompt), "p", {}, ["1"])  # it leaves its notes in a prompt
            assert executor.success, executor.status_messages
            (output,) = executor.history_result["outputs"].values()
            assert output["text"][0].startswith(f"{count}.00 GB freed")
    finally:
        del nodes.NODE_CLASS_MAPPINGS["QuantCore_ClearCache"]
