// Which of the decode kernels a call takes, and how much shared memory they need.
#include <algorithm>

#include "moe_decode_first.cuh"
#include "moe_decode_many.cuh"
#include "moe_decode_second.cuh"
#include "moe_logits_few.cuh"

namespace deltafuse::moe {

cudaError_t launch_first_bf16(const DecodeArgs& args, const DeviceInfo& device, cudaStream_t stream);
cudaError_t launch_first_f16(const DecodeArgs& args, const DeviceInfo& device, cudaStream_t stream);
cudaError_t launch_second_bf16(const DecodeArgs& args, const DeviceInfo& device, cudaStream_t stream);
cudaError_t launch_second_f16(const DecodeArgs& args, const DeviceInfo& device, cudaStream_t stream);

int scored_each(const RouterArgs& r) {
  const int each = (r.experts + 31) / 32;
  const bool simple = r.topk_group >= r.n_group || easy_groups(r, each);
  return !r.softmax && r.experts <= kScored && simple ? each : 0;
}

bool second_of_one(const DecodeArgs& a) { return SecondShared::one(a); }

bool keys_polled(const DecodeArgs& a) {
  const RouterArgs& r = a.router;
  const bool at_once = r.weight_type == DType::kFloat32 ? one_at_once<float>(r) : one_at_once<uint16_t>(r);
  return scored_each(r) && r.weight && at_once && chooses_by_parts(r) && !r.masked_weights &&
         FirstShared::operand_here(a) && a.tuning.first_threads > ExpertParts(r).count * 32;
}

size_t decode_shared_bytes(const DecodeArgs& a) {
  const size_t first = FirstShared::bytes(a, a.tuning.first_threads / 32);
  return std::max(first, SecondShared::one(a) ? SecondShared::bytes(a, a.tuning.second_threads / 32)
                                              : ManyShared::bytes(a, a.tuning.many_threads / 32));
}

cudaError_t launch_decode(const DecodeArgs& args, DType dtype, const DeviceInfo& device, cudaStream_t stream) {
  const bool half = dtype == DType::kFloat16;
  const cudaError_t status = half ? launch_first_f16(args, device, stream) : launch_first_bf16(args, device, stream);
  if (status != cudaSuccess) return status;
  return half ? launch_second_f16(args, device, stream) : launch_second_bf16(args, device, stream);
}

}  // namespace deltafuse::moe
