"""The pass ``DeltaFuse`` for Olive workflows (olive-ai 0.13): :func:`deltafuse.fuse` between Olive's own passes.

The only module here that imports Olive. ``deltafuse olive-config`` writes the package config that names it
(:mod:`deltafuse.olive_config`).

Olive drops misspelt options of a pass silently and goes on after most errors; both would hide that nothing was fused.
So this pass refuses options that it does not know, and raises errors that stop a workflow.
"""

from __future__ import annotations

import difflib
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from olive.hardware import AcceleratorSpec
from olive.hardware.accelerator import Device
from olive.model import CompositeModelHandler, OliveModelHandler, ONNXModelHandler
from olive.model.utils import resolve_onnx_path
from olive.passes import Pass
from olive.passes.onnx.common import get_external_data_config
from olive.passes.pass_config import PassConfigParam, PassParamDefault
from olive.resource_path import LocalFolder
from olive.search.search_parameter import SearchParameter, SpecialParamValue

from . import __version__, model_save
from .api import check_options, fuse
from .discovery import EP_NAME
from .errors import DeltaFuseError
from .external_data import data_files
from .fusions.result import FusionReport
from .session import register

logger = logging.getLogger("olive.deltafuse")  # below Olive's own, whose level the workflow sets

#: The report's file, beside the model.
REPORT_NAME = "deltafuse_report.json"
#: The model's file in Olive's cache (in the output folder, Olive calls it model.onnx). Olive 0.13 takes the bare name
#: of a model in a folder for a path, and where the working directory holds a file of that name, the next pass reads
#: that one, and Olive may even move it away. So the name is one that nobody else uses.
MODEL_NAME = "deltafuse_model.onnx"

_OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "fusions": (list[str], None, "Keys of the fusions to look for, such as ['kda']. All of them by default."),
    "target": (str, "plugin", "'plugin': calls of deltafuse functions. 'portable': standard ONNX ops only."),
    "quantize": (
        str,
        None,
        "How weights and caches are stored, such as 'experts=int4:128,dense=int8:128,cache=int8'. As they are by "
        "default.",
    ),
    "calibration": (str, None, "A file of `deltafuse calibrate` of this model: `quantize` chooses its scales with it."),
    "algorithm": (str, "auto", "How `quantize` rounds: 'nearest', 'aware', 'gptq', or 'auto'; see `--algorithm`."),
    "latent_cache": (bool, False, "Caches of keys and values become caches of latents: other inputs and outputs."),
    "require": (dict[str, int], None, "Fail unless so many are fused, such as {'kda': 20}."),
    "verify": (bool, True, "Prove each rewrite against the original before it is applied."),
    "proof_memory": (int | str, None, "The most memory for one proof: bytes, or a size such as '8GiB'. Default 4GiB."),
    "proof_seconds": (float, None, "The most time for one proof. Default 60."),
    "use_plugin": (
        bool,
        False,
        "Register the plugin EP and name it in the model's inference settings, so that Olive's evaluator and the "
        "passes after this one run the fused nodes on its kernels.",
    ),
}


class FusionFailed(DeltaFuseError, ValueError):
    """What stops a workflow: Olive goes on after errors that are not, for example, a ``ValueError``."""


class DeltaFuse(Pass):
    """Find the blocks that deltafuse knows in an ONNX model, prove each, and replace it with one fused node."""

    @classmethod
    def _default_config(cls, accelerator_spec: AcceleratorSpec) -> dict[str, PassConfigParam]:
        own = {
            name: PassConfigParam(type_=type_, default_value=default, description=description)
            for name, (type_, default, description) in _OPTIONS.items()
        }
        version = PassConfigParam(
            type_=str,
            default_value=__version__,
            description="Part of Olive's cache key, so that another deltafuse runs anew. Leave it out.",
        )
        return {**own, "package_version": version, **get_external_data_config()}

    @classmethod
    def get_config_params(
        cls,
        accelerator_spec: AcceleratorSpec,
        config: dict[str, Any] | None = None,
        disable_search: bool | None = False,
    ) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """Olive's way from a workflow's options to a configuration, with the options checked.

        Raises:
            FusionFailed: an unknown option, or a value that it does not take.
        """
        known = cls.default_config(accelerator_spec)
        given = config if isinstance(config, Mapping) else {}
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f": did you mean {near[0]!r}?" if near else f": it has {', '.join(known)}"
                raise FusionFailed(f"DeltaFuse has no option {name!r}{hint}")
        params: tuple[Any, dict[str, Any], dict[str, Any]] = super().get_config_params(
            accelerator_spec, config, disable_search
        )
        _check(params[1])
        return params

    @classmethod
    def validate_config(cls, config: Any, accelerator_spec: AcceleratorSpec) -> bool:
        """Called before each run, also one that Olive then takes from its cache: the plugin EP is registered here."""
        if config.use_plugin:
            _register()
        return True

    @staticmethod
    def is_accelerator_agnostic(accelerator_spec: AcceleratorSpec) -> bool:
        """False: with ``use_plugin`` the inference settings depend on the device."""
        return False

    def run(self, model: OliveModelHandler, output_model_path: str) -> OliveModelHandler:
        """Olive's way through a model's components; the reports of several stand beside them by component."""
        made: OliveModelHandler = super().run(model, output_model_path)
        if isinstance(made, CompositeModelHandler):
            attributes = dict(made.model_attributes or {})
            files = set(attributes.get("additional_files") or [])
            for name, component in made.get_model_components():
                report = Path(component.model_path).with_name(REPORT_NAME)
                if report.is_file():
                    kept = Path(made.model_path) / f"{Path(name).stem}_{REPORT_NAME}"
                    shutil.copyfile(report, kept)
                    files.add(str(kept))
            made.model_attributes = {**attributes, "additional_files": sorted(files)}
        return made

    def _run_for_config(self, model: OliveModelHandler, config: Any, output_model_path: str) -> ONNXModelHandler:
        if not isinstance(model, ONNXModelHandler):
            raise FusionFailed(
                f"DeltaFuse takes an ONNX model, got a {type(model).__name__}: put OnnxConversion before it"
            )
        if model.external_initializers_file_name or model.constant_inputs_file_name:
            raise FusionFailed("DeltaFuse takes a model with its own weights: put it before ExtractAdapters")
        options = config.model_dump()
        _check(options)
        inference = (
            _inference_settings(model, self.accelerator_spec) if options["use_plugin"] else model.inference_settings
        )
        output = Path(resolve_onnx_path(output_model_path, MODEL_NAME))
        output.parent.mkdir(parents=True, exist_ok=True)
        report_path = output.with_name(REPORT_NAME)
        try:
            report = fuse(
                _in_order(model.model_path), report=report_path, progress=_log_progress, **_fuse_options(options)
            )
            report.source = model.model_path
            _save(report, Path(model.model_path), output, options)
            model_save.write_text(report_path, report.to_json() + "\n")
        except DeltaFuseError as error:
            raise FusionFailed(str(error)) from error
        for warning in report.warnings:
            logger.warning("%s", warning)
        logger.info("%d nodes before, %d after; report: %s", report.nodes_before, report.nodes_after, report_path)
        attributes = dict(model.model_attributes or {})
        # A folder, never a file alone: of a folder Olive replaces all that an earlier run left in the output folder.
        attributes["additional_files"] = sorted({*attributes.get("additional_files", []), str(report_path)})
        return ONNXModelHandler(
            model_path=LocalFolder({"path": output.parent}),
            onnx_file_name=output.name,
            inference_settings=inference,
            use_ort_extensions=model.use_ort_extensions,
            model_attributes=attributes,
        )


def _fuse_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are those of :func:`deltafuse.fuse`."""
    names = (
        *("fusions", "target", "require", "verify", "proof_memory", "proof_seconds"),
        *("quantize", "calibration", "algorithm", "latent_cache"),
    )
    return {name: options[name] for name in names}


def _check(options: Mapping[str, Any]) -> None:
    """Check the values that are fixed; those that Olive searches over are checked when they are.

    Raises:
        FusionFailed: a value that is not taken.
    """
    loose = (SearchParameter, PassParamDefault, SpecialParamValue)
    fixed = {name: None if isinstance(value, loose) else value for name, value in options.items()}
    version = fixed.get("package_version")
    if version is not None and version != __version__:
        raise FusionFailed(f"package_version {version!r}: this is deltafuse {__version__}; leave the option out")
    wanted = _fuse_options({**dict.fromkeys(_OPTIONS), **fixed})
    wanted["algorithm"] = wanted["algorithm"] or "auto"
    wanted["latent_cache"] = wanted["latent_cache"] or False
    wanted["target"] = wanted["target"] or "plugin"  # None here: searched over, or Olive's own default mark
    try:
        check_options(**wanted)
    except DeltaFuseError as error:
        raise FusionFailed(str(error)) from error


def _register() -> None:
    try:
        register()
    except DeltaFuseError as error:
        raise FusionFailed(f"use_plugin: {error}") from error


def _inference_settings(model: ONNXModelHandler, accelerator: AcceleratorSpec) -> dict[str, Any]:
    """The model's inference settings with the plugin EP among the providers, for the workflow's device."""
    _register()
    on_gpu = str(accelerator.accelerator_type).lower() == Device.GPU
    providers = [*(["CUDAExecutionProvider"] if on_gpu else []), EP_NAME, "CPUExecutionProvider"]
    return {**(model.inference_settings or {}), "execution_provider": providers, "provider_options": None}


def _in_order(path: str) -> str | ir.Model:
    """The model's path, or the model with its nodes in order: OnnxFloatToFloat16 puts some before what they read."""
    proto = onnx.load(path, load_external_data=False)
    known = {value.name for value in (*proto.graph.input, *proto.graph.initializer)}
    made = {name for node in proto.graph.node for name in node.output}
    for node in proto.graph.node:
        if any(name in made and name not in known for name in node.input):
            model = ir.load(path)
            model.graph.sort()
            return model
        known.update(node.output)
    return path


def _save(report: FusionReport, source: Path, output: Path, options: Mapping[str, Any]) -> None:
    """Write the model, with external data as Olive's options say; the report gets to know the files."""
    assert report.model is not None
    split = options["save_as_external_data"] and not options["all_tensors_to_one_file"]
    by_onnx = split or (options["save_as_external_data"] and options["convert_attribute"])
    saved = model_save.save(
        report.model,
        output,
        source=source,
        keep=data_files(report.model),
        external=bool(options["save_as_external_data"]) and not by_onnx,
        data_name=options["external_data_name"],
        size_threshold=options["size_threshold"],
    )
    report.warnings.extend(saved.warnings)
    report.output, report.output_bytes = str(saved.path), saved.bytes
    if saved.data_path is not None:
        report.output_data, report.output_data_bytes = str(saved.data_path), saved.data_bytes
    if by_onnx:  # a file a tensor, or attributes outside: what only onnx's own writer does
        onnx.save_model(
            onnx.load(str(output)),
            str(output),
            save_as_external_data=True,
            all_tensors_to_one_file=not split,
            location=None if split else options["external_data_name"] or f"{output.name}.data",
            size_threshold=options["size_threshold"],
            convert_attribute=options["convert_attribute"],
        )
        report.output_bytes = output.stat().st_size


def _log_progress(stage: str, done: int, total: int) -> None:
    logger.debug("%s %d/%d", stage, done, total)
