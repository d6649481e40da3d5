"""``deltafuse.fuse`` and ``deltafuse.inspect``: from a model of any kind to a report with the new model in it."""

from __future__ import annotations

import gc
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from . import __version__, model_io, model_save, report_html
from .clashes import check_clashes, check_not_read
from .errors import OptionError, OrtError, RequirementError
from .fusions import plugins
from .fusions.result import FusionReport, PassReport
from .quantize_options import quantize_options
from .record import already_fused, record_metadata
from .registry import runtimes, targets
from .registry.ops import OPS

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

ModelSource: TypeAlias = Union[str, "os.PathLike[str]", "onnx.ModelProto", "ir.Model", Any]
Progress: TypeAlias = Callable[[str, int, int], None]


def fuse(
    model: ModelSource,
    output: str | os.PathLike[str] | None = None,
    *,
    fusions: Iterable[str] | None = None,
    target: str = "plugin",
    verify: bool = True,
    require: Mapping[str, int] | None = None,
    report: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    proof_memory: int | str | None = None,
    proof_seconds: float | None = None,
    base_dir: str | os.PathLike[str] | None = None,
    times: Iterable[str | os.PathLike[str]] = (),
    quantize: str | Mapping[str, str] | None = None,
    calibration: str | os.PathLike[str] | None = None,
    algorithm: str = "auto",
    latent_cache: bool = False,
) -> FusionReport:
    """Find the blocks that deltafuse knows, prove each, and replace it with one fused node.

    Args:
        model: a path, ``onnx.ModelProto``, ``onnx_ir.Model`` or onnx-graphsurgeon ``Graph``. It is never changed.
        output: where to write the new model; external weights go to ``<output>.data`` beside it. None: not written.
            It may be the input's own file, not a file of the input's external data.
        fusions: keys of the fusions to look for, for example ``["kda"]`` (default: all that there are).
        target: "plugin" (calls of ``deltafuse::`` functions) or "portable" (standard ONNX ops only).
        verify: prove every rewrite by running it against the original. False is recorded in the model's metadata.
        require: op key -> how many must be fused at least, for example ``{"kda": 20}``.
        report: a file to write the report to, as a page where its name ends in ``.html``, else as JSON; written also
            when ``require`` is not met. None of the files above.
        dry_run: look, and prove if asked to, but change and write no model.
        progress: called as ``progress(stage, done, total)``.
        proof_memory: the most memory that one proof may use, in bytes or as "4GiB" (the default).
        proof_seconds: the most time that one proof may take (default 60).
        base_dir: the folder that a ``ModelProto``'s external data are relative to (default: the current one).
        times: for a report that is a page: files with what ``deltafuse bench --json`` or ``run --json`` printed.
        quantize: how to store weights: ``"experts=int4:128,dense=int8:128"``, or a mapping of the same. Experts are the
            weights of fused mixtures of experts, dense the other large weights of MatMul and Gemm. Formats: ``int4``,
            ``uint4``, ``int8``, ``uint8`` with blocks of ``:128`` columns or ``:channel`` (``:asym`` for zero points),
            ``fp8:128x128``, ``bf16``. Types of activations stay what they are. ``cache=int8`` (with a calibration) or
            ``cache=fp8:128``: caches of latents of fused latent attention become 8-bit ones, which changes the types of
            the model's inputs and outputs: ``report.quantization.caches`` has them.
        calibration: a file that ``deltafuse calibrate`` wrote of this model: scales are chosen with it.
        algorithm: how numbers are rounded: "nearest"; "aware", each block's scale searched for with the channels' mean
            squares; "gptq", errors fed back besides, which needs a calibration with rows; "auto", the last of these
            that the calibration has what for.
        latent_cache: let caches of keys and values of fused latent attention become caches of latents. That changes
            inputs and outputs of the model: the report's pass ``latent-cache`` notes their names and shapes.

    Returns:
        The report. ``report.model`` is the new ``onnx_ir.Model``; ``report.result()`` gives it as the kind that came
        in, ``report.to_proto()`` and ``report.to_graphsurgeon()`` as those.

    Raises:
        DeltaFuseError: bad input, bad option, or the result cannot be written (:mod:`deltafuse.errors` has the
            kinds). :class:`RequirementError`, with the report, where fewer were fused than ``require`` asks for.
    """
    chosen = check_fusions(fusions)
    _check_options(target, require, output, report, base_dir, dry_run)
    _check_looked_for(chosen, require)
    budget = _budget(proof_memory, proof_seconds)
    times = list(times)
    measured = _measured(times, report)
    options: dict[str, Any] = {} if chosen is None else {"fusions": chosen}
    options |= quantize_options(quantize, calibration, algorithm)
    if latent_cache:
        options["latent_cache"] = True
    ort_version = require_ort("recognising and proving")
    for file in (output, report):
        if file is not None:
            model_save.check_target(Path(file))
    source = Path(model) if isinstance(model, (str, os.PathLike)) else None
    check_clashes(source, frozenset(), _path(output), _path(report))
    read = [*times, *([calibration] if calibration is not None else [])]
    check_not_read(_path(output), read, "the model")
    check_not_read(_path(report), read, "the report")
    pipeline = _pipeline()
    from .fusions.quantize import QuantizeError

    def run(loaded: ir.Model) -> FusionReport:
        if calibration is not None:
            from .calibration import check_fits

            check_fits(calibration, loaded)
        too_new = runtimes.model_refusal(loaded.opset_imports.get("", 0), loaded.ir_version or 0, ort_version)
        try:
            done = pipeline(
                loaded, verify=verify, target=target, dry_run=dry_run, proof_budget=budget, progress=progress, **options
            )
        except QuantizeError as error:
            raise OptionError(f"quantize: {error}") from error
        if too_new is not None:
            done.warnings.append(too_new.reason)
        if done.quantization is not None and calibration is not None:
            done.quantization.calibration = os.fspath(calibration)
            done.quantization.algorithm = getattr(options.get("statistics"), "algorithm", "nearest")
        return done

    with relaxed_gc():
        return _fuse(model, output, require or {}, report, base_dir, progress, run, measured)


def _fuse(
    model: ModelSource,
    output: str | os.PathLike[str] | None,
    require: Mapping[str, int],
    report: str | os.PathLike[str] | None,
    base_dir: str | os.PathLike[str] | None,
    progress: Progress | None,
    run: Callable[[ir.Model], FusionReport],
    measured: list[dict[str, Any]],
) -> FusionReport:
    """Load, run the pipeline, hold against the requirements, write."""
    start = time.perf_counter()
    if progress:
        progress("load", 0, 1)
    loaded = model_io.load(model, base_dir)
    load_seconds = time.perf_counter() - start
    check_clashes(loaded.path, loaded.data_files, _path(output), _path(report))
    # now: the output may take the place of the source
    sizes = [sum(map(os.path.getsize, files)) for files in (filter(None, [loaded.path]), loaded.data_files)]
    try:
        done = run(loaded.model)
    except Exception as error:
        explained = model_io.explain_failure(loaded, error)
        if explained is None:
            raise
        raise explained from error
    done.deltafuse_version = __version__
    done.input_kind = loaded.kind
    done.ir_version, done.opsets = loaded.model.ir_version, dict(loaded.model.opset_imports)
    done.source = str(loaded.path) if loaded.path is not None else loaded.model.graph.name or ""
    done.already_fused = already_fused(loaded.model)
    done.source_bytes, done.source_data_bytes = sizes
    done.warnings[:0] = loaded.warnings
    done.passes.insert(0, PassReport("load", seconds=load_seconds))
    missing = missing_from(done, require)
    try:
        if missing:
            raise RequirementError(_missing_text(done, missing), done, missing)
        if done.model is not None and not done.dry_run:
            record_metadata(done)
            if output is not None:
                _write(done, Path(output), loaded, progress)
    finally:
        done.seconds = time.perf_counter() - start
        if report is not None and report_html.is_html(report):
            report_html.write(report, done, loaded.model, measured=measured)
        elif report is not None:
            model_save.write_text(Path(report), done.to_json() + "\n")
    return done


def _measured(times: Iterable[str | os.PathLike[str]], report: str | os.PathLike[str] | None) -> list[dict[str, Any]]:
    files = list(times)
    if files and (report is None or not report_html.is_html(report)):
        raise OptionError("times stand in a report that is a page: give a report whose name ends in .html")
    return report_html.read_measured(files)


@contextmanager
def relaxed_gc() -> Iterator[None]:
    """Collect garbage more rarely: a model is millions of objects that live long, and tracing them takes most time."""
    old = gc.get_threshold()
    gc.set_threshold(200_000, *old[1:])
    try:
        yield
    finally:
        gc.set_threshold(*old)


def inspect(model: ModelSource, *, verify: bool = False, **options: Any) -> FusionReport:
    """What would be fused, what was nearly recognised and why not: :func:`fuse` with ``dry_run=True``.

    ``options`` are those of :func:`fuse`; proofs are off unless ``verify`` is given.
    """
    return fuse(model, verify=verify, dry_run=True, **options)


def found(report: FusionReport, op: str) -> int:
    """How many regions of ``op`` were fused, or would be, after a dry run."""
    good = ("fused", "fused-unproved", "recognised") if report.dry_run else ("fused", "fused-unproved")
    return sum(1 for region in report.regions if region.op == op and region.status in good)


def missing_from(report: FusionReport, require: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Op key -> (asked for, found), for the requirements that the report does not meet."""
    counts = {op: (wanted, found(report, op)) for op, wanted in require.items()}
    return {op: (wanted, got) for op, (wanted, got) in counts.items() if got < wanted}


def require_ort(purpose: str) -> str:
    """The version of the onnxruntime that is installed.

    Raises:
        OrtError: there is none that can be imported, or it is older than 1.27.
    """
    needs = ".".join(map(str, targets.MIN_ORT))
    install = "`pip install onnxruntime` (or onnxruntime-gpu)"
    try:
        import onnxruntime
    except ImportError as error:
        raise OrtError(
            f"{purpose} need onnxruntime {needs} or newer; importing it failed ({error}): {install}"
        ) from error
    version = str(onnxruntime.__version__)
    if targets.parse_version(version) < targets.MIN_ORT:
        raise OrtError(f"{purpose} need onnxruntime {needs} or newer, found {version}: {install}")
    return version


def parse_bytes(value: int | str) -> int:
    """A number of bytes, given as such or as text: "4GiB", "512 MiB", "4G" (binary units; a bare number is bytes).

    Raises:
        OptionError: not a positive size.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise OptionError(f"proof memory {value!r}: expected a number of bytes, or a size such as 4GiB")
    if isinstance(value, str):
        parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:iB|B)?|B)?\s*", value, re.IGNORECASE)
        if parts is None:
            raise OptionError(f"proof memory {value!r}: expected a size such as 4GiB or 512MiB")
        value = int(float(parts[1]) * 1024 ** (" KMGT".index(parts[2].upper()) if parts[2] else 0))
    if value <= 0:
        raise OptionError(f"proof memory {value}: expected more than 0 bytes")
    return value


def _pipeline() -> Callable[..., FusionReport]:
    from .fusions.pipeline import fuse_model

    return fuse_model


def _budget(memory: int | str | None, seconds: float | None) -> Any:
    options: dict[str, Any] = {}
    if memory is not None:
        options["memory"] = parse_bytes(memory)
    if seconds is not None:
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
            raise OptionError(f"proof seconds {seconds!r}: expected a number, more than 0")
        options["seconds"] = float(seconds)
    if not options:
        return None
    from .fusions.proof import ProofBudget

    return ProofBudget(**options)


def check_fusions(fusions: Iterable[str] | None) -> tuple[str, ...] | None:
    """The keys of the chosen fusions, each once; None for all of them.

    Raises:
        OptionError: an unknown one, or none.
    """
    if fusions is None:
        return None
    if isinstance(fusions, str) or not isinstance(fusions, Iterable):
        raise OptionError(f"fusions {fusions!r}: expected a list of keys, such as ['kda']")
    chosen = tuple(dict.fromkeys(fusions))
    outside = plugins.load()
    unknown = [key for key in chosen if key not in OPS]
    if unknown or not chosen:
        found = ", ".join(map(repr, unknown)) or "an empty list"
        raise OptionError("; ".join([f"fusions: expected keys among {', '.join(OPS)}, got {found}", *outside.problems]))
    return chosen


def check_options(
    *,
    fusions: Iterable[str] | None = None,
    target: str = "plugin",
    verify: bool = True,
    require: Mapping[str, int] | None = None,
    proof_memory: int | str | None = None,
    proof_seconds: float | None = None,
    quantize: str | Mapping[str, str] | None = None,
    calibration: str | os.PathLike[str] | None = None,
    algorithm: str = "auto",
    latent_cache: bool = False,
) -> None:
    """Check options of :func:`fuse` without a model, before long work for example.

    Raises:
        OptionError: a value that is not taken.
    """
    if verify is not None and not isinstance(verify, bool):
        raise OptionError(f"verify {verify!r}: expected true or false")
    if not isinstance(latent_cache, bool):
        raise OptionError(f"latent_cache {latent_cache!r}: expected true or false")
    chosen = check_fusions(fusions)
    _check_options(target, require, None, None, None, False)
    _check_looked_for(chosen, require)
    _budget(proof_memory, proof_seconds)
    quantize_options(quantize, calibration, algorithm)


def _check_options(
    target: str,
    require: Mapping[str, int] | None,
    output: str | os.PathLike[str] | None,
    report: str | os.PathLike[str] | None,
    base_dir: str | os.PathLike[str] | None,
    dry_run: bool,
) -> None:
    if target not in tuple(targets.TARGETS):
        raise OptionError(f"target {target!r}: expected one of {', '.join(targets.TARGETS)}")
    for name, path in (("output", output), ("report", report), ("base_dir", base_dir)):
        if path is not None and not (isinstance(path, (str, os.PathLike)) and isinstance(os.fspath(path), str)):
            raise OptionError(f"{name} {path!r}: expected a path")
    if require is not None and not isinstance(require, Mapping):
        raise OptionError(f"require {require!r}: expected a mapping of op and count, such as {{'kda': 1}}")
    outside = plugins.load() if require else plugins.Plugins()
    for op, count in (require or {}).items():
        if op not in OPS:
            problems = [f"require {op}={count}: expected an op among {', '.join(OPS)}", *outside.problems]
            raise OptionError("; ".join(problems))
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise OptionError(f"require {op}={count!r}: expected a whole number, 0 or more")
    if output is not None and dry_run:
        raise OptionError("a dry run writes no model: leave out the output, or dry_run")


def _check_looked_for(chosen: tuple[str, ...] | None, require: Mapping[str, int] | None) -> None:
    for op, count in (require or {}).items():
        if chosen is not None and count and op not in chosen:
            raise OptionError(f"require {op}={count}: of the fusions, {', '.join(chosen)} alone would be looked for")


def _path(given: str | os.PathLike[str] | None) -> Path | None:
    return None if given is None else Path(given)


def _missing_text(report: FusionReport, missing: dict[str, tuple[int, int]]) -> str:
    parts = [
        f"required {op}={wanted}, {'recognised' if report.dry_run else 'fused'} {got}"
        for op, (wanted, got) in missing.items()
    ]
    reasons = [
        f"{region.name}: {region.refusal or (region.proof.reason if region.proof else region.status)}"
        for region in report.regions
        if region.op in missing and region.status == "refused"
    ]
    if not reasons:
        reasons = [
            "nothing that looks like " + " or ".join(OPS[op].op_type for op in missing) + " was found beyond that"
        ]
    had = report.already_fused
    came = [f"what the model came with does not count ({op}={had[op]})" for op in missing if had.get(op)]
    return "; ".join(parts) + ". " + "; ".join([*reasons, *came])


def _write(report: FusionReport, output: Path, source: model_io.LoadedModel, progress: Progress | None) -> None:
    assert report.model is not None
    start = time.perf_counter()
    # weights made anew, as all quantized ones are, are no longer read from the files that they come from
    external = True if source.data_files else None
    saved = model_save.save(
        report.model, output, source=source.path, keep=source.data_files, progress=progress, external=external
    )
    report.output = str(saved.path)
    report.output_bytes = saved.bytes
    report.output_data = str(saved.data_path) if saved.data_path else ""
    report.output_data_bytes = saved.data_bytes
    report.warnings.extend(saved.warnings)
    report.passes.append(PassReport("save", seconds=time.perf_counter() - start))
