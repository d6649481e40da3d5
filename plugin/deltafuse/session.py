"""Registering the plugin EP with onnxruntime, and sessions that use it.

onnxruntime is imported when one of these functions is called, not before.
"""

from __future__ import annotations

import os
import threading
import uuid
import warnings
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from . import cuda_ep, fallback
from .assigned import Assignment, NodeAssignment, model_calls
from .cuda_ep import CUDA_EP, CudaEp
from .discovery import EP_NAME, PluginError, check_library, get_library_path, refusals
from .errors import DeltaFuseError, OptionError, OrtError
from .lifetime import making, other_version
from .model_arg import for_ort, refusal
from .providers import add_providers, as_text
from .registry.targets import STAND_INS

MIN_ORT = (1, 27)
#: The name that the library is registered under in onnxruntime.
REGISTRATION_NAME = "deltafuse"

_TAG = "session_tag"
_TAG_ENTRY = f"ep.{EP_NAME.lower()}.{_TAG}"
_RECORD_ENTRY = "session.record_ep_graph_assignment_info"
_ARENA_ENTRY = "session.use_device_allocator_for_initializers"

_lock = threading.Lock()
#: What session() has to say of a session: why the plugin does not run in it, or why it is not on the GPU.
_notes: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
#: The nodes of a session that the plugin refused and session() looked for another way for.
_steps: WeakKeyDictionary[Any, tuple[fallback.Step, ...]] = WeakKeyDictionary()


def register(library: str | os.PathLike[str] | None = None) -> str:
    """Register the plugin EP's library with onnxruntime. Calling it again does nothing.

    Args:
        library: the library, or a folder that holds it; by default it is looked for (:mod:`deltafuse.discovery`).

    Returns:
        The EP's name.

    Raises:
        OrtError: onnxruntime is not installed, older than 1.27, or refuses the library; or another library is
            registered under the same name.
        PluginError: there is no library, or it is damaged or for another kind of machine.
    """
    ort = _onnxruntime()
    with _lock:
        found = _ep_devices(ort)
        if found and library is None:
            return EP_NAME
        path = get_library_path() if library is None else get_library_path(library)
        if found:
            loaded = found[0].ep_metadata.get("library_path", "")
            if os.path.realpath(loaded) != path:
                raise OrtError(f"{EP_NAME} is already registered from {loaded}: deltafuse.unregister() before {path}")
            return EP_NAME
        check_library(path)
        try:
            ort.register_execution_provider_library(REGISTRATION_NAME, path)
        except Exception as error:  # onnxruntime has no common base for its errors
            if "already registered" in str(error):
                raise OrtError(
                    f"onnxruntime has another library under the name {REGISTRATION_NAME!r}: "
                    f"onnxruntime.unregister_execution_provider_library({REGISTRATION_NAME!r}) first ({error})"
                ) from error
            raise OrtError(f"onnxruntime {ort.__version__} does not take {path}: {error}") from error
    return EP_NAME


def session(
    path_or_bytes: Any,
    device: str = "auto",
    *,
    sess_options: Any = None,
    provider_options: Mapping[str, Mapping[str, Any]] | None = None,
    strict: bool = False,
) -> Any:
    """An ``onnxruntime.InferenceSession`` with the best providers that are here.

    On a CUDA device that is onnxruntime's CUDA EP (:mod:`deltafuse.cuda_ep` says which), then the plugin EP on the same
    device; on the CPU the plugin EP on the CPU device. With "cuda" and no CUDA EP here, the plugin EP runs alone on the
    GPU, all other nodes run on the CPU, and a warning says so. A fused node that the plugin refuses, or all of them
    where its library is not built, runs by onnxruntime's own op, else by its ONNX body (:mod:`deltafuse.fallback`).
    Nothing falls back to the CPU silently: "auto" on a GPU whose CUDA EP does not load warns, all else raises.
    :func:`assignment` tells what runs where, and why.

    TF32 is switched off for models with a router (an operator such as TopK), unless ``use_tf32`` is among the options.

    Args:
        path_or_bytes: the model, as for ``InferenceSession``, or an ``onnx.ModelProto`` or ``onnx_ir.Model``.
        device: "auto" (the first CUDA device that works, else the CPU), "cpu", "cuda" or "cuda:N".
        sess_options: an ``onnxruntime.SessionOptions`` without providers; they are added to it. Without one, ORT
            logs errors only: what it warns of, nodes on the CPU above all, :func:`assignment` tells.
        provider_options: options for ``CUDAExecutionProvider`` by provider name, for example ``user_compute_stream``
            (a stream of the session's device, 0 for the default stream).
        strict: raise unless the plugin EP runs every deltafuse node.

    Raises:
        OptionError: an argument that is not understood.
        ModelFileError, ModelKindError: a file that is missing or no model, or an argument that is no model at all.
        OrtError: onnxruntime is missing or too old, lacks what ``device`` asks for, or does not take the model.
        DeltaFuseError: with ``strict``, a deltafuse node that the plugin EP does not run, with the reason.
    """
    ort = _onnxruntime()
    kind, index = parse_device(device)
    path_or_bytes = for_ort(path_or_bytes)
    if sess_options is not None and (isinstance(sess_options, type) or not hasattr(sess_options, "has_providers")):
        raise OptionError(f"sess_options {sess_options!r}: expected an onnxruntime.SessionOptions")
    if sess_options is not None and sess_options.has_providers():
        raise OptionError("sess_options already has providers: session() adds them itself, to fresh options each time")
    try:
        options = {name: dict(values) for name, values in (provider_options or {}).items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise OptionError(f"provider_options {provider_options!r}: expected options by provider name") from error
    unknown = sorted(set(options) - {CUDA_EP, EP_NAME}, key=str)
    if unknown:
        raise OptionError(
            f"provider_options for {', '.join(map(str, unknown))}: session() uses {CUDA_EP} and {EP_NAME}"
        )

    with making.one():
        return _make(ort, path_or_bytes, device, (kind, index), sess_options, options, strict=strict)


def _make(
    ort: Any,
    path_or_bytes: str | os.PathLike[str] | bytes,
    device: str,
    place: tuple[str, int],
    sess_options: Any,
    options: dict[str, dict[Any, Any]],
    *,
    strict: bool,
) -> Any:
    """The session, of arguments that were checked."""
    kind, index = place
    asked = bool(options.get(CUDA_EP))
    options[CUDA_EP], numbers = fallback.tf32_choice(path_or_bytes, as_text(options.get(CUDA_EP, {})))
    devices, problem = _plugin_devices(ort)
    chosen = sess_options if sess_options is not None else _quiet_options(ort)
    chosen.add_session_config_entry(_RECORD_ENTRY, "1")
    cuda, remark = cuda_ep.find(ort), ""
    auto = kind == "auto"
    if auto:
        kind, index, remark = _best_device(cuda, devices)
    options = {CUDA_EP: options[CUDA_EP], EP_NAME: {**as_text(options.get(EP_NAME, {})), _TAG: uuid.uuid4().hex}}
    try:
        names = add_providers(ort, chosen, cuda, kind, index, devices, options, asked=asked)
    except OrtError as error:
        if not auto or kind == "cpu":
            raise
        kind, remark = "cpu", f"the GPU is not used: {error}"
        warnings.warn(remark, RuntimeWarning, stacklevel=3)
        names = add_providers(ort, chosen, cuda, kind, index, devices, options, asked=asked)
    others = [name for name in names if kind == "cuda" and name != EP_NAME and cuda_ep.is_foreign(name)]
    if others and numbers and not asked:
        numbers = f"the model has a router, and whether {others[0]} rounds to TF32 is not known"
    if EP_NAME not in names and not problem:
        problem = f"the plugin EP does not serve {kind}:{index}: {_why_no_cuda()}"
    if kind == "cuda" and cuda.form == "none":
        remark = f"{cuda.reason}: all nodes but deltafuse's run on the CPU"
        warnings.warn(remark, RuntimeWarning, stacklevel=3)

    remarks = [problem or remark, numbers if kind == "cuda" else ""]
    if kind == "cuda" and fallback.first_op(path_or_bytes, ("GroupedQMoE",)):
        _weights_outside_of_the_arena(chosen)

    def create(model: str | os.PathLike[str] | bytes) -> Any:
        try:
            made = ort.InferenceSession(model, chosen, enable_fallback=0)
        except Exception as error:  # onnxruntime has no common base for its errors
            raise refusal(model, error, ort.__version__) from error
        made.disable_fallback()
        _check_providers(made, device, names)
        _notes[made] = "; ".join(filter(None, remarks))
        return made

    made = create(path_or_bytes)
    refused = assignment(made).refused
    if not refused:
        return made
    if strict:
        _check_strict(made)
    version = tuple(int(part) for part in ort.__version__.split(".")[:2])
    steps = [fallback.Step(node.op_type, node.name, node.reason) for node in refused]
    lowered = fallback.lower(path_or_bytes, steps, (version[0], version[1]), on_gpu=kind == "cuda")
    if not lowered.model:
        _steps[made] = lowered.steps
        return made
    del made  # its memory is wanted for the next one
    return _step_down(create, chosen, path_or_bytes, lowered)


def _weights_outside_of_the_arena(options: Any) -> None:
    """Kernels pack experts' weights when a session is made; an arena would keep the memory of the originals."""
    try:
        options.get_session_config_entry(_ARENA_ENTRY)
    except Exception:  # onnxruntime raises where the caller has not set it
        options.add_session_config_entry(_ARENA_ENTRY, "1")


def _step_down(create: Any, options: Any, model: str | os.PathLike[str] | bytes, lowered: fallback.Lowered) -> Any:
    """The session in which onnxruntime's own op runs those of the refused nodes that it can run."""
    if lowered.folder:
        options.add_session_config_entry(fallback.FOLDER_ENTRY, lowered.folder)
    try:
        made = create(lowered.model)
        _steps[made] = lowered.steps
    except Exception as error:  # onnxruntime has no common base for its errors
        made = create(model)
        why = f"onnxruntime did not take the changed model: {error}"
        _steps[made] = tuple(fallback.Step(step.op_type, step.name, step.reason, why) for step in lowered.steps)
    return made


def assignment(session: Any) -> Assignment:
    """Which node of a session runs on which EP, and for which deltafuse nodes the plugin EP refused and why.

    Args:
        session: from :func:`session`, or any ``InferenceSession`` made with the session configuration entry
            ``session.record_ep_graph_assignment_info`` set to "1".

    Raises:
        OptionError: the session was made without that entry.
    """
    try:
        groups = session.get_provider_graph_assignment_info()
    except Exception as error:  # onnxruntime has no common base for its errors
        raise OptionError(
            f"the session has no record of its assignment: make it with deltafuse.session(), or with the session "
            f"configuration entry {_RECORD_ENTRY} set to 1 ({error})"
        ) from error
    nodes = [
        NodeAssignment(group.ep_name, node.domain, node.op_type, node.name)
        for group in groups
        for node in group.get_nodes()
    ]
    note = _notes.get(session, "")
    if EP_NAME in session.get_providers():
        refused = [
            NodeAssignment("", found["domain"], found["op_type"], found["node"] or found["output"], found["reason"])
            for found in refusals(_tag(session), _loaded_library())
        ]
    else:
        reason = note or f"{EP_NAME} is not among the session's providers"
        refused = [NodeAssignment("", *call, reason) for call in model_calls(session)]
    if refused:
        note = "; ".join(filter(None, (note, other_version(session))))
    return Assignment(nodes + _with_steps(session, nodes, refused), note=note)


def _with_steps(session: Any, nodes: list[NodeAssignment], refused: list[NodeAssignment]) -> list[NodeAssignment]:
    """The refused nodes with what session() found for them."""
    steps = {(step.op_type, step.name): step for step in _steps.get(session, ())}
    found = []
    for node in refused:
        step = steps.get((node.op_type, node.name))
        reason = node.reason if step is None or not step.ort_reason else f"{node.reason}; {step.ort_reason}"
        found.append(NodeAssignment("", node.domain, node.op_type, node.name, reason))
    changed = [step for step in steps.values() if not step.ort_reason]
    runs_as = {op_type: _stand_in(nodes, op_type) for op_type in {step.op_type for step in changed}}
    return found + [
        NodeAssignment("", fallback.DOMAIN, step.op_type, step.name, step.reason, runs_as[step.op_type])
        for step in changed
    ]


def _stand_in(nodes: list[NodeAssignment], op_type: str) -> str:
    """onnxruntime's op that runs in the place of a fused one, and where."""
    own, form = STAND_INS[op_type], f"_inlfunc_{op_type}"
    eps = sorted({node.ep for node in nodes if node.op_type == own and node.name.startswith(form)})
    return f"com.microsoft::{own} on {' and '.join(eps)}"


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise OrtError(
            f"onnxruntime is not installed ({error}): pip install onnxruntime, or onnxruntime-gpu, 1.27 or newer"
        ) from error
    version = str(getattr(onnxruntime, "__version__", "0"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < MIN_ORT:
        raise OrtError(f"onnxruntime {version} is too old: deltafuse needs 1.27 or newer")
    return onnxruntime


def _quiet_options(ort: Any) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 3  # errors
    return options


def _ep_devices(ort: Any) -> list[Any]:
    return [found for found in ort.get_ep_devices() if found.ep_name == EP_NAME]


def _plugin_devices(ort: Any) -> tuple[dict[str, Any], str]:
    """The plugin EP's devices by name ("cpu", "cuda:0"), and why there are none."""
    try:
        register()
    except PluginError as error:
        return {}, str(error)
    return {found.ep_metadata["deltafuse_device"]: found for found in _ep_devices(ort)}, ""


def _loaded_library() -> str | None:
    """The path that onnxruntime loaded the library from."""
    devices = _ep_devices(_onnxruntime())
    return devices[0].ep_metadata.get("library_path") if devices else None


def _why_no_cuda() -> str:
    from .discovery import cuda_status

    try:
        return cuda_status(_loaded_library()) or "there is no such device"
    except PluginError as error:
        return str(error)


def parse_device(device: str) -> tuple[str, int]:
    """A device in words as its kind and ordinal.

    Raises:
        OptionError: it is none.
    """
    kind, colon, number = str(device).partition(":")
    if kind in ("auto", "cpu") and not colon:
        return kind, 0
    if kind == "cuda" and (not colon or (number.isdecimal() and number.isascii())):
        return kind, int(number or 0)
    raise OptionError(f"device {device!r}: expected 'auto', 'cpu', 'cuda' or 'cuda:N'")


def auto_device() -> tuple[str, int]:
    """What the device "auto" is on this machine: "cuda" or "cpu", and the CUDA ordinal."""
    ort = _onnxruntime()
    with making.one():
        kind, index, _ = _best_device(cuda_ep.find(ort), _plugin_devices(ort)[0])
    return kind, index


def _best_device(cuda: CudaEp, devices: Mapping[str, Any]) -> tuple[str, int, str]:
    """The device for "auto", and a remark where a GPU is left alone."""
    gpus = sorted(int(name.partition(":")[2]) for name in devices if name.startswith("cuda:"))
    if not gpus and cuda.form != "none":
        return "cpu", 0, f"{CUDA_EP} is not used: the plugin EP serves no CUDA device here ({_why_no_cuda()})"
    if not gpus:
        return "cpu", 0, ""
    if cuda.form == "none":
        return "cpu", 0, f"the GPU is not used: {cuda.reason}"
    return "cuda", gpus[0], ""


def _check_providers(made: Any, device: str, wanted: list[str]) -> None:
    """onnxruntime drops a provider that does not load, with nothing but a log line."""
    providers = made.get_providers()
    lost = [name for name in wanted if name not in providers]
    if lost:
        raise OrtError(
            f"device {device!r}: onnxruntime made the session without {' and '.join(lost)} (it has "
            f"{', '.join(providers)}); its log says why, most often a CUDA or cuDNN library that was not found"
        )


def _check_strict(made: Any) -> None:
    refused = assignment(made).refused
    if refused:
        lines = "; ".join(f"{node.domain}::{node.op_type} {node.name!r}: {node.reason}" for node in refused[:5])
        more = f"; and {len(refused) - 5} more" if len(refused) > 5 else ""
        raise DeltaFuseError(f"{EP_NAME} does not run {len(refused)} of the model's nodes: {lines}{more}")


def _tag(session: Any) -> str:
    try:
        return str(session.get_session_options().get_session_config_entry(_TAG_ENTRY))
    except Exception:  # no such entry: the session was made by hand
        return ""
