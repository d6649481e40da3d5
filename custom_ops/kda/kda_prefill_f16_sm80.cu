// The prefill kernels for one number format; runs on sm_80 and newer, with the bulk copy engine from sm_90 on.
#include "kda_prepare.cuh"
#include "kda_scan.cuh"

namespace deltafuse::kda {

cudaError_t launch_prepare_f16(const PrepareArgs& args, const DeviceInfo& device, cudaStream_t stream) {
  return launch_prepare_as<NumbersF16>(args, device, stream);
}
cudaError_t launch_scan_f16(const ScanArgs& args, int k, const DeviceInfo& device, cudaStream_t stream) {
  return launch_scan_for<NumbersF16>(args, k, device, stream);
}

}  // namespace deltafuse::kda
