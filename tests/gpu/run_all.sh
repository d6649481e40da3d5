#!/usr/bin/env bash
# Everything that needs a GPU: kernel tests, plugin EP tests, compute-sanitizer, benchmarks.
#
#   tests/gpu/run_all.sh [RESULTS]        results go to RESULTS, else to $OUT, else to build/gpu
#   STEPS="kernels ep" tests/gpu/run_all.sh
#   ORT_CUDA_PLUGIN_EP_PATH=... STEPS=plugin tests/gpu/run_all.sh      beside that CUDA plugin EP
#
# Uses what is installed. What is not, it takes from the folder $CARRY (default .carry), if that is there:
#   ortgpu*.tar.xz        an onnxruntime package with the CUDA EP
#   libdeltafuse_ep.so*   the built plugin (.so or .so.xz); else it is built here, which takes nvcc and ORT's headers
#   wheels/*.whl          Python packages that are missing here, pytest for example
# Needs Python with PyTorch. Exits with 1 if a step failed; skipped tests are listed by name with their reasons.
set -uo pipefail
cd "$(dirname "$0")/../.."
root=$PWD
results=${1:-${OUT:-build/gpu}}
mkdir -p "$results"
results=$(cd "$results" && pwd)
carry=${CARRY:-.carry}
python=${PYTHON:-python3}
steps=${STEPS:-kernels ep plugin capture sanitizer bench}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
summary=$results/summary.txt
cuda_plugin=${ORT_CUDA_PLUGIN_EP_PATH:-} # for its own step only: the others are about the classic provider
unset ORT_CUDA_PLUGIN_EP_PATH
: >"$summary"
failed=0
say() { echo "$@" | tee -a "$summary"; }

# -- what is here -----------------------------------------------------------------------------------------------------
shopt -s nullglob
wheels=("$carry"/wheels/*.whl)
if [ "${#wheels[@]}" -gt 0 ]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --target "$work/site" "${wheels[@]}" || failed=1
  export PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH}
fi
if ! "$python" -c 'import deltafuse' 2>/dev/null; then
  # The package as it would be installed: one folder out of four.
  mkdir -p "$work/package/deltafuse"
  ln -s "$root"/plugin/deltafuse/* "$work/package/deltafuse/"
  for part in fusions custom_ops registry; do ln -s "$root/$part" "$work/package/deltafuse/$part"; done
  export PYTHONPATH=$work/package${PYTHONPATH:+:$PYTHONPATH}
fi
has_cuda='import onnxruntime as o, sys; sys.exit("CUDAExecutionProvider" not in o.get_available_providers())'
bundles=("$carry"/ortgpu*.tar.xz)
if ! "$python" -c "$has_cuda" 2>/dev/null && [ "${#bundles[@]}" -gt 0 ]; then
  mkdir -p "$work/ort"
  tar xJf "${bundles[0]}" -C "$work/ort"
  export PYTHONPATH=$work/ort${PYTHONPATH:+:$PYTHONPATH}
fi
# CUDA's libraries from PyTorch's wheels, for onnxruntime.
nvidia=$("$python" -c 'import os, torch; print(os.path.join(os.path.dirname(os.path.dirname(torch.__file__)), "nvidia"))')
for folder in "$nvidia"/*/lib; do LD_LIBRARY_PATH=$folder:${LD_LIBRARY_PATH:-}; done
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}

if [ -z "${DELTAFUSE_LIBRARY:-}" ] && ! "$python" -c 'import deltafuse; deltafuse.get_library_path()' 2>/dev/null; then
  if [ -f "$carry/libdeltafuse_ep.so" ]; then
    cp "$carry/libdeltafuse_ep.so" "$work/"
  elif [ -f "$carry/libdeltafuse_ep.so.xz" ]; then
    xz -dc "$carry/libdeltafuse_ep.so.xz" >"$work/libdeltafuse_ep.so"
  else
    cmake -S . -B "$work/build" -DDELTAFUSE_NATIVE=ON -DDELTAFUSE_CUDA=ON >"$results/build.log" 2>&1 &&
      cmake --build "$work/build" -j >>"$results/build.log" 2>&1 &&
      cp "$work/build/plugin/ep/libdeltafuse_ep.so" "$work/" || { tail -n 20 "$results/build.log"; failed=1; }
  fi
  export DELTAFUSE_LIBRARY=$work/libdeltafuse_ep.so
fi
export DELTAFUSE_KDA_LIBRARY=${DELTAFUSE_KDA_LIBRARY:-${DELTAFUSE_LIBRARY:-$("$python" -c 'import deltafuse; print(deltafuse.get_library_path())')}}

"$python" - <<'PYTHON' | tee -a "$summary"
import deltafuse, onnxruntime, sys, torch
from deltafuse.discovery import cuda_status, load_library
path = deltafuse.get_library_path()
library = load_library(path)
print("python", sys.version.split()[0], "torch", torch.__version__, "onnxruntime", onnxruntime.__version__)
print("gpu", torch.cuda.get_device_name() if torch.cuda.is_available() else "none")
print("plugin", library.deltafuse_version().decode(), "kernels for", library.deltafuse_cuda_archs().decode() or "no GPU")
print("plugin on this machine:", cuda_status() or "usable")
PYTHON

# -- the steps --------------------------------------------------------------------------------------------------------
# step NAME SECONDS COMMAND...
step() {
  local name=$1 limit=$2 started=$SECONDS
  shift 2
  timeout "$limit" "$@" >"$results/$name.log" 2>&1
  local code=$?
  local verdict="FAILED ($code)"
  case $code in
    0) verdict=passed ;;
    5) verdict="no test ran" ;;  # pytest's code for that; on a machine without a GPU every test skips
    124) echo "stopped after $limit s" >>"$results/$name.log" ;;
  esac
  say "$name: $verdict in $((SECONDS - started)) s: $(tail -n 1 "$results/$name.log")"
  grep -E '^SKIPPED|^FAILED|^ERROR' "$results/$name.log" | cut -c 1-300 | tee -a "$summary"
  [ "$code" -eq 0 ] || failed=1
}
tests=("$python" -m pytest -q -p no:cacheprovider -rsfE)
sanitizer_flags=
sanitizer() { # NAME TOOL COMMAND...
  local name=$1 tool=$2
  shift 2
  step "$name" 400 compute-sanitizer --tool "$tool" --error-exitcode 9 $sanitizer_flags "$@"
}

for chosen in $steps; do
  case $chosen in
    kernels)
      step kernels 500 "${tests[@]}" tests/gpu/test_kda_cuda.py
      step kernels-mla 500 "${tests[@]}" tests/gpu/test_mla_cuda.py
      step kernels-moe 300 "${tests[@]}" tests/gpu/test_moe_cuda.py tests/gpu/test_moe_decode_cuda.py tests/gpu/test_moe_prompt_cuda.py
      ;;
    ep)
      step ep 420 "${tests[@]}" tests/gpu/test_ep_cuda.py tests/gpu/test_ep_mla_cuda.py tests/gpu/test_ep_moe_cuda.py \
        tests/gpu/test_ep_life_cuda.py
      ;;
    plugin) # beside a CUDA plugin EP, in a process of its own: what is registered stays
      if [ -z "$cuda_plugin" ]; then
        say "plugin: skipped, ORT_CUDA_PLUGIN_EP_PATH names no CUDA plugin EP"
        continue
      fi
      step plugin 300 env ORT_CUDA_PLUGIN_EP_PATH="$cuda_plugin" "${tests[@]}" tests/gpu/test_cuda_plugin.py
      ;;
    capture) step capture 400 "${tests[@]}" tests/gpu/test_capture_cuda.py ;;
    sanitizer)
      if ! command -v compute-sanitizer >/dev/null; then
        say "sanitizer: skipped, compute-sanitizer is not installed"
        continue
      fi
      for tool in memcheck racecheck initcheck synccheck; do
        sanitizer "sanitizer-$tool" "$tool" "$python" tests/gpu/sanitize_kda.py
        sanitizer "sanitizer-mla-$tool" "$tool" "$python" tests/gpu/sanitize_mla.py
        sanitizer "sanitizer-moe-$tool" "$tool" "$python" tests/gpu/sanitize_moe.py
      done
      # The EP alone: its allocator, copies and kernels, without the CUDA EP's own work. No host backtraces: the tool
      # would keep Python's frames for them, and with these the sessions that a test lets go of.
      sanitizer_flags="--show-backtrace device"
      for tool in memcheck racecheck initcheck synccheck; do
        sanitizer "sanitizer-ep-$tool" "$tool" "${tests[@]}" tests/gpu/test_ep_cuda.py \
          -k 'alone and (against_reference and float16 or what_runs_where)'
      done
      sanitizer sanitizer-ep-memory memcheck "${tests[@]}" tests/gpu/test_ep_life_cuda.py \
        -k 'known_shapes or a_limit_is_kept or kernels_in_the_profile and alone'
      # Beside the CUDA EP, on its memory and stream.
      sanitizer sanitizer-ep-beside memcheck "${tests[@]}" tests/gpu/test_ep_cuda.py \
        -k 'cuda and first and (states_pass or what_runs_where) or states_bound_in_place and 70 and layer'
      sanitizer_flags=
      ;;
    bench)
      for bench in tests/bench/bench_*.py; do
        step "$(basename "$bench" .py)" 500 "$python" "$bench"
      done
      ;;
    *) say "$chosen: unknown step" && failed=1 ;;
  esac
done
say "$([ "$failed" -eq 0 ] && echo 'all steps passed' || echo 'some steps failed')"
exit "$failed"
