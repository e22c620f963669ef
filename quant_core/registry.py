"""The registries of backends and methods, and the description of a method."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from .backend import QuantBackend

_Backend = TypeVar("_Backend", bound=type[QuantBackend])


@dataclass(frozen=True)
class QuantMethodSpec:
    """A method: a backend and how its options are built.

    Attributes:
        backend: name in ``QUANT_BACKENDS``.
        config_factory: turns ``backend_config_kwargs`` into the backend's config object.
        label: a description for people.
    """

    backend: str
    config_factory: Callable[[dict[str, Any]], Any]
    label: str = ""


QUANT_BACKENDS: dict[str, type[QuantBackend]] = {}
"""``{backend name: class}``. Built-in backends appear when a method of theirs is first used."""

QUANT_METHODS: dict[str, QuantMethodSpec] = {}
"""``{method name: QuantMethodSpec}``. ``backends.load_all_backends()`` fills in every built-in one."""


def register_quant_backend(name: str) -> Callable[[_Backend], _Backend]:
    """Class decorator: register a QuantBackend under ``name``.

    Registering a name again replaces the class, so that a module can be reloaded.
    """

    def register(cls: _Backend) -> _Backend:
        if not (isinstance(cls, type) and issubclass(cls, QuantBackend)):
            raise TypeError(f"register_quant_backend({name!r}) expects a QuantBackend subclass, got {cls!r}")
        cls.name = name
        QUANT_BACKENDS[name] = cls
        return cls

    return register


def register_quant_method(
    name: str, backend: str, config_factory: Callable[[dict[str, Any]], Any], label: str = ""
) -> None:
    """Register method ``name`` of ``backend``.

    Args:
        name: by convention ``<backend>_<format>_w<weight bits>a<activation bits>``.
        backend: the name its backend is registered under (before or after this call).
        config_factory: ``dict -> config``; ``MyConfig.from_kwargs`` for a BackendConfig subclass.
        label: a description for people.
    """
    if not callable(config_factory):
        raise TypeError(f"register_quant_method({name!r}): config_factory must be callable, got {config_factory!r}")
    QUANT_METHODS[name] = QuantMethodSpec(backend, config_factory, label)


def find_method(name: str) -> QuantMethodSpec:
    """Return the spec of a method, loading the one built-in backend that it belongs to.

    Raises:
        ValueError: unknown method; the message lists the known ones and the nearest spelling.
    """
    from . import backends

    if not isinstance(name, str) or not name:
        raise ValueError("method is required: the name of a quantization method, e.g. 'comfy_kitchen_int8_w8a8'")
    if name not in QUANT_METHODS:
        backends.load_backend_of_method(name)
    if name not in QUANT_METHODS:
        backends.load_all_backends()
        near = difflib.get_close_matches(name, QUANT_METHODS, n=1, cutoff=0.7)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"unknown quantization method {name!r}.{hint} A method of your own must be registered before it is used: "
            "import the module that registers it (--import MODULE on the command line). "
            f"Known methods: {', '.join(sorted(QUANT_METHODS))}"
        )
    return QUANT_METHODS[name]


def make_backend(method: str, kwargs: Mapping[str, Any] | None = None) -> QuantBackend:
    """Return the backend of ``method``, configured with ``kwargs`` and with its environment validated."""
    spec = find_method(method)
    if spec.backend not in QUANT_BACKENDS:
        raise ValueError(f"method {method!r} names backend {spec.backend!r}, which is not registered")
    cls = QUANT_BACKENDS[spec.backend]
    config = spec.config_factory(dict(kwargs or {}))
    backend = cls(config)
    backend.method = method
    backend.validate_environment()
    return backend


def method_options(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a backend config into ``(user-tunable, pinned)`` options with their values."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        fields = dataclasses.fields(config)
        tunable = {f.name: getattr(config, f.name) for f in fields if f.init}
        pinned = {f.name: getattr(config, f.name) for f in fields if not f.init}
        return tunable, pinned
    return (dict(config), {}) if isinstance(config, Mapping) else ({}, {})


def describe_quant_method(name: str) -> None:
    """Print a method's backend, description and options with their defaults, pinned ones apart."""
    spec = find_method(name)
    config = spec.config_factory({})
    tunable, pinned = method_options(config)
    cls = type(config)
    print(f"method: {name}")
    print(f"backend: {spec.backend}")
    print(f"detail: {spec.label}")
    print(f"backend config: {cls.__module__}.{cls.__qualname__}")
    for title, options in (
        ("backend_config_kwargs (user-tunable):", tunable),
        ("pinned by method (not overridable):", pinned),
    ):
        if not options:
            continue
        print(title)
        width = max(map(len, options))
        for key, value in options.items():
            print(f"  {key:<{width}} = {value!r}")
