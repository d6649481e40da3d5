"""Which CUDA EP a session uses and in which order providers stand: the decision for every combination, with fakes."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deltafuse import cuda_ep, providers
from deltafuse.cuda_ep import CUDA_EP, CudaEp
from deltafuse.discovery import EP_NAME
from deltafuse.errors import OptionError, OrtError
from deltafuse.session import session as make_session


def device(ep_name: str, bus_id: str = "", **metadata: str) -> Any:
    place = {"pci_bus_id": bus_id} if bus_id else {}
    return SimpleNamespace(ep_name=ep_name, ep_metadata=metadata, device=SimpleNamespace(metadata=place))


class FakeOrt:
    """An onnxruntime with or without the classic provider, and with libraries that can be registered."""

    def __init__(self, folder: Path, *, classic: bool, plugin_build: bool = False, ep_name: str = CUDA_EP) -> None:
        self.__version__ = "1.32.0"
        self.__file__ = str(folder / "onnxruntime" / "__init__.py")
        self.classic, self.ep_name = classic, ep_name
        self.build = "ORT Build Info: " + (", cuda-plugin-ep=1" if plugin_build else "") + ", build type=Release"
        self.devices: list[Any] = []
        self.registered: list[tuple[str, str]] = []
        self.refuses = ""

    def get_build_info(self) -> str:
        return self.build

    def get_available_providers(self) -> list[str]:
        names = {found.ep_name for found in self.devices} | ({CUDA_EP} if self.classic else set())
        return [*sorted(names), "CPUExecutionProvider"]

    def get_ep_devices(self) -> list[Any]:
        return self.devices

    def register_execution_provider_library(self, name: str, path: str) -> None:
        if self.refuses:
            raise RuntimeError(self.refuses)
        self.registered.append((name, path))
        for number, bus_id in enumerate(("0000:41:00.0", "0000:01:00.0")):  # not in the order of bus ids
            self.devices.append(device(self.ep_name, bus_id, library_path=str(path), cuda_device_id=str(number)))


class FakeOptions:
    def __init__(self, refuses: str = "") -> None:
        self.added: list[tuple[Any, dict[str, str]]] = []
        self.refuses = refuses

    def add_provider(self, name: str, options: dict[str, str]) -> None:
        if self.refuses and name == CUDA_EP:
            raise RuntimeError(self.refuses)
        self.added.append((name, options))

    def add_provider_for_devices(self, devices: list[Any], options: dict[str, str]) -> None:
        self.added.append((devices[0], options))


OURS = {
    "cpu": device(EP_NAME, deltafuse_device="cpu"),
    "cuda:0": device(EP_NAME, "0000:01:00.0", deltafuse_device="cuda:0"),
    "cuda:1": device(EP_NAME, "0000:41:00.0", deltafuse_device="cuda:1"),
}
CASES = list(
    itertools.product((None, "/x/explicit.so"), (False, True), ((), ("/x/registered.so",)), ((), ("/x/beside.so",)))
)


@pytest.mark.parametrize(("explicit", "classic", "registered", "beside"), CASES)
def test_every_combination(
    explicit: str | None, classic: bool, registered: tuple[str, ...], beside: tuple[str, ...]
) -> None:
    """Explicit, then registered, then classic, then found beside; the others are named and left alone."""
    found = cuda_ep.decide(explicit=explicit, classic=classic, registered=registered, beside=beside)
    present = [
        *([("plugin", explicit)] if explicit else []),
        *[("plugin", path) for path in registered],
        *([("classic", "")] if classic else []),
        *[("plugin", path) for path in beside],
    ]
    assert (found.form, found.library) == (present[0] if present else ("none", ""))
    assert len(found.unused) == max(0, len(present) - 1)
    assert found.registered is (not explicit and bool(registered))
    assert found.reason
    for kind, ours in itertools.product(("cuda", "cpu"), (False, True)):
        order = cuda_ep.provider_order(kind, found.form, ours)
        assert len(set(order) & {"classic", "plugin"}) <= 1, "never two CUDA EPs in one session"
        if kind == "cpu":
            assert order == (("deltafuse",) if ours else ("cpu",))
        elif "deltafuse" in order:
            assert order[-1] == "deltafuse", "the CUDA EP must come first: its kernels crash on another EP's streams"
        if kind == "cuda":
            assert ("deltafuse" in order) is ours and (found.form in order or found.form == "none")


def test_one_library_under_two_names_is_one(tmp_path: Path) -> None:
    library = tmp_path / "cuda.so"
    library.write_text("")
    link = tmp_path / "link.so"
    link.symlink_to(library)
    found = cuda_ep.decide(explicit=str(link), classic=False, registered=[str(library)], beside=[str(library)])
    assert found.registered and found.unused == ()


@pytest.mark.parametrize("plugin_build", [False, True])
def test_libraries_beside_the_runtime(tmp_path: Path, plugin_build: bool) -> None:
    """A classic build's provider library has the file name of a plugin build's: only the build tells them apart."""
    capi = tmp_path / "onnxruntime" / "capi"
    capi.mkdir(parents=True)
    (capi / "libonnxruntime_providers_cuda.so").write_text("")
    ort = FakeOrt(tmp_path, classic=not plugin_build, plugin_build=plugin_build)
    found = cuda_ep.find(ort)
    assert found.form == ("plugin" if plugin_build else "classic")
    assert found.unused == ()
    package = tmp_path / "onnxruntime_ep_cuda"
    package.mkdir()
    (package / "libonnxruntime_providers_cuda.so").write_text("")
    assert len(cuda_ep.libraries_beside(tmp_path / "onnxruntime", plugin_build)) == 1 + plugin_build
    assert cuda_ep.find(ort).unused == (f"the plugin {package}/libonnxruntime_providers_cuda.so",)


def test_find_reads_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cuda_ep.PATH_VARIABLE, raising=False)
    assert cuda_ep.find(FakeOrt(tmp_path, classic=True)).form == "classic"
    assert cuda_ep.find(FakeOrt(tmp_path, classic=False)).form == "none"
    monkeypatch.setenv(cuda_ep.PATH_VARIABLE, "/x/cuda.so")
    found = cuda_ep.find(FakeOrt(tmp_path, classic=True))
    assert (found.form, found.library) == ("plugin", "/x/cuda.so")
    with pytest.raises(OrtError, match=r"ORT_CUDA_PLUGIN_EP_PATH is /x/cuda\.so: there is no such file"):
        cuda_ep.activate(FakeOrt(tmp_path, classic=True), found)


@pytest.mark.parametrize("ep_name", [*cuda_ep.PLUGIN_EP_NAMES, "another_ep"])
@pytest.mark.parametrize("classic", [False, True])
def test_an_explicit_plugin_is_registered_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, classic: bool, ep_name: str
) -> None:
    library = tmp_path / "cuda.so"
    library.write_text("")
    monkeypatch.setenv(cuda_ep.PATH_VARIABLE, str(library))
    ort = FakeOrt(tmp_path, classic=classic, ep_name=ep_name)
    for _ in range(2):
        chosen = FakeOptions()
        names = providers.add_providers(
            ort, chosen, cuda_ep.find(ort), "cuda", 1, OURS, {CUDA_EP: {"use_tf32": "0"}, EP_NAME: {}}, asked=True
        )
        added = chosen.added
        if ep_name == "another_ep":  # of another maker: the copies at the CPU's border must be ours
            assert names == [EP_NAME, ep_name]
            added = added[::-1]
        else:
            assert names == [ep_name, EP_NAME]
        (first, options), (second, _) = added
        assert first.device.metadata["pci_bus_id"] == "0000:41:00.0", "matched by PCI bus id"
        assert options == {"use_tf32": "0"} and second is OURS["cuda:1"]
    assert ort.registered == [(cuda_ep.REGISTRATION_NAME, str(library))]


def test_a_plugin_of_another_maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named explicitly it is used whatever its EP is called, but takes none of ONNX Runtime's options on trust."""
    library = tmp_path / "cuda.so"
    library.write_text("")
    ort = FakeOrt(tmp_path, classic=False, ep_name="another_ep")
    ort.register_execution_provider_library("by the program", str(library))
    assert cuda_ep.find(ort).form == "none", "a registered EP of an unknown name is not taken for a CUDA EP"
    monkeypatch.setenv(cuda_ep.PATH_VARIABLE, str(library))
    found = cuda_ep.find(ort)
    assert (found.form, found.registered) == ("plugin", True)
    assert cuda_ep.of_session(ort, [EP_NAME, "another_ep", "CPUExecutionProvider"]) == "another_ep"
    assert cuda_ep.of_session(ort, [EP_NAME, "CPUExecutionProvider"]) == ""
    assert "another_ep is not ONNX Runtime's CUDA EP" in cuda_ep.stream_refusal(ort, found)

    def add(given: dict[str, str], *, asked: bool) -> FakeOptions:
        chosen = FakeOptions()
        providers.add_providers(ort, chosen, found, "cuda", 1, OURS, {CUDA_EP: given}, asked=asked)
        return chosen

    assert add({"use_tf32": "0"}, asked=False).added[1][1] == {}, "our own choice for routers is not forced on it"
    assert add({"a": "b"}, asked=True).added[1][1] == {"a": "b"}
    with pytest.raises(OptionError, match="user_compute_stream: another_ep is not ONNX Runtime's CUDA EP and may"):
        add({"user_compute_stream": "0"}, asked=True)
    assert cuda_ep.provider_order("cuda", "plugin", False, foreign=True) == ("plugin",)


@pytest.mark.parametrize(("declared", "works"), [(0, False), (1, True), (None, True)])
def test_a_plugin_that_knows_one_device_only(tmp_path: Path, declared: int | None, works: bool) -> None:
    """By the memory that it declares for the device: a plugin that works on cuda:0 whichever GPU it is given."""
    ort, chosen = FakeOrt(tmp_path, classic=False), FakeOptions()
    ort.register_execution_provider_library("by the program", "/x/cuda.so")
    place = None if declared is None else SimpleNamespace(device_id=declared)
    for found in ort.devices:
        found.memory_info = lambda kind: place
    if works:
        providers.add_providers(ort, chosen, cuda_ep.find(ort), "cuda", 1, OURS, {}, asked=False)
        assert len(chosen.added) == 2
        return
    with pytest.raises(
        OrtError, match="does not serve that device: CUDAExecutionProvider works with the memory of cuda:0"
    ):
        providers.add_providers(ort, chosen, cuda_ep.find(ort), "cuda", 1, OURS, {}, asked=False)
    assert not chosen.added


def test_a_plugin_that_does_not_work(tmp_path: Path) -> None:
    library = tmp_path / "cuda.so"
    library.write_text("")
    ort = FakeOrt(tmp_path, classic=False)
    ort.refuses = "libcudnn.so.9: cannot open shared object file"
    with pytest.raises(OrtError, match=r"does not take the CUDA plugin EP .*libcudnn\.so\.9"):
        cuda_ep.activate(ort, CudaEp("plugin", str(library)))
    with pytest.raises(OrtError, match="offers no device here"):
        cuda_ep.activate(ort, CudaEp("plugin", str(library), registered=True))


def test_device_without_a_bus_id() -> None:
    two = [device(CUDA_EP, cuda_device_id="0"), device(CUDA_EP, cuda_device_id="1")]
    assert cuda_ep.device_for(two, None, 1) is two[1]
    assert cuda_ep.device_for([device(CUDA_EP)], None, 1) is None
    assert cuda_ep.device_for([device(CUDA_EP, "0000:01:00.0")], "0000:02:00.0", 0) is None


@pytest.mark.parametrize("served", [False, True])
def test_classic(tmp_path: Path, served: bool) -> None:
    chosen, ort = FakeOptions(), FakeOrt(tmp_path, classic=True)
    ours = OURS if served else {}
    names = providers.add_providers(ort, chosen, cuda_ep.find(ort), "cuda", 1, ours, {}, asked=False)
    assert names == [CUDA_EP, EP_NAME][: 1 + served]
    assert chosen.added[0] == (CUDA_EP, {"device_id": "1"})


def test_classic_that_does_not_load(tmp_path: Path) -> None:
    chosen, ort = FakeOptions("no libcublasLt.so.13"), FakeOrt(tmp_path, classic=True)
    with pytest.raises(OrtError, match="a CUDA or cuDNN library was not found: no libcublasLt"):
        providers.add_providers(ort, chosen, cuda_ep.find(ort), "cuda", 0, OURS, {}, asked=False)
    assert not chosen.added
    with pytest.raises(OptionError, match="device_id 1: expected 0"):
        options = {CUDA_EP: {"device_id": "1"}}
        providers.add_providers(ort, FakeOptions(), cuda_ep.find(ort), "cuda", 0, OURS, options, asked=True)
    with pytest.raises(OrtError, match="cuda:7: there is no such device here: there is cuda:0, cuda:1"):
        providers.add_providers(ort, FakeOptions(), cuda_ep.find(ort), "cuda", 7, OURS, {}, asked=False)


def test_alone_on_the_gpu(tmp_path: Path) -> None:
    """No CUDA EP: ours alone, unless options for a CUDA EP were given, or ours does not serve the device either."""
    ort, chosen = FakeOrt(tmp_path, classic=False), FakeOptions()
    none = cuda_ep.find(ort)
    assert providers.add_providers(ort, chosen, none, "cuda", 0, OURS, {}, asked=False) == [EP_NAME]
    assert [entry for entry, _ in chosen.added] == [OURS["cuda:0"]]
    for ours, asked in ((OURS, True), ({}, False)):
        with pytest.raises(OrtError, match="cuda:0: this onnxruntime has no CUDAExecutionProvider; onnxruntime-gpu"):
            providers.add_providers(ort, FakeOptions(), none, "cuda", 0, ours, {}, asked=asked)
    assert providers.add_providers(ort, FakeOptions(), none, "cpu", 0, {}, {}, asked=False) == ["CPUExecutionProvider"]


def test_alone_on_the_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """session() warns that all other nodes run on the CPU, and the assignment's note says it."""
    import sys

    from .call import SMALL, call_model, draw, quiet

    module = sys.modules[make_session.__module__]
    monkeypatch.setattr(module.cuda_ep, "find", lambda ort: CudaEp("none", reason="there is no CUDA EP"))
    monkeypatch.setattr(module, "add_providers", lambda *_, **__: [])
    model = call_model(SMALL, draw(SMALL, 1, 3)).SerializeToString()
    with pytest.warns(RuntimeWarning, match="there is no CUDA EP: all nodes but deltafuse's run on the CPU") as said:
        make_session(model, "cuda:0", sess_options=quiet())
    assert said[0].filename == __file__, "the warning names the caller's line"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_session(model, "cpu", sess_options=quiet())
