#include "kernel_support.h"

#include <algorithm>
#include <atomic>
#include <vector>

namespace deltafuse::ep {

OrtStatus* DescribeType(const Api& api, const OrtTypeInfo* type_info, Operand* operand) {
  const OrtTensorTypeAndShapeInfo* tensor = nullptr;
  if (type_info) DF_RETURN_IF_ERROR(api.ort->CastTypeInfoToTensorInfo(type_info, &tensor));
  if (!tensor) return nullptr;
  DF_RETURN_IF_ERROR(api.ort->GetTensorElementType(tensor, &operand->type));
  if (!api.ort->TensorTypeAndShape_HasShape(tensor)) return nullptr;
  size_t rank = 0;
  DF_RETURN_IF_ERROR(api.ort->GetDimensionsCount(tensor, &rank));
  operand->rank = static_cast<int64_t>(rank);
  std::vector<int64_t> dims(rank);
  if (rank) DF_RETURN_IF_ERROR(api.ort->GetDimensions(tensor, dims.data(), rank));
  for (size_t i = 0; i < std::min<size_t>(rank, kMaxRank); ++i) operand->dims[i] = dims[i] < 0 ? kUnknown : dims[i];
  return nullptr;
}

OrtStatus* DescribeValue(const Api& api, const OrtValueInfo* value, Operand* operand) {
  const char* name = nullptr;
  if (!value) return nullptr;
  DF_RETURN_IF_ERROR(api.ort->GetValueInfoName(value, &name));
  if (!name || !*name) return nullptr;
  operand->present = true;
  const OrtTypeInfo* type_info = nullptr;
  DF_RETURN_IF_ERROR(api.ort->GetValueInfoTypeInfo(value, &type_info));
  return DescribeType(api, type_info, operand);
}

OrtStatus* DescribeValue(const Api& api, const OrtValue* value, Operand* operand, const void** data) {
  *data = nullptr;
  if (!value) return nullptr;
  operand->present = true;
  const int64_t* dims = nullptr;
  size_t rank = 0;
  DF_RETURN_IF_ERROR(api.ort->GetTensorElementTypeAndShapeDataReference(value, &operand->type, &dims, &rank));
  operand->rank = static_cast<int64_t>(rank);
  std::copy_n(dims, std::min<size_t>(rank, kMaxRank), operand->dims.begin());
  return api.ort->GetTensorData(value, data);
}

OrtStatus* DescribeNode(const Api& api, const OrtNode* node, Operand* inputs, size_t max_inputs, Operand* outputs,
                        size_t max_outputs, std::string* reason) {
  size_t input_count = 0, output_count = 0;
  DF_RETURN_IF_ERROR(api.ort->Node_GetNumInputs(node, &input_count));
  DF_RETURN_IF_ERROR(api.ort->Node_GetNumOutputs(node, &output_count));
  if (input_count > max_inputs || output_count > max_outputs) {
    *reason = Text("it has ", input_count, " inputs and ", output_count, " outputs: expected at most ", max_inputs,
                   " and ", max_outputs);
    return nullptr;
  }
  std::vector<const OrtValueInfo*> values(std::max(input_count, output_count));
  DF_RETURN_IF_ERROR(api.ort->Node_GetInputs(node, values.data(), input_count));
  for (size_t i = 0; i < input_count; ++i) DF_RETURN_IF_ERROR(DescribeValue(api, values[i], &inputs[i]));
  DF_RETURN_IF_ERROR(api.ort->Node_GetOutputs(node, values.data(), output_count));
  for (size_t i = 0; i < output_count; ++i) DF_RETURN_IF_ERROR(DescribeValue(api, values[i], &outputs[i]));
  return nullptr;
}

OrtStatus* DescribeKernel(const Api& api, const OrtKernelInfo* info, Operand* inputs, size_t max_inputs,
                          Operand* outputs, size_t max_outputs) {
  size_t count = 0;
  DF_RETURN_IF_ERROR(api.ort->KernelInfo_GetInputCount(info, &count));
  for (size_t i = 0; i < std::min(count, max_inputs); ++i) {
    size_t length = 0;
    DF_RETURN_IF_ERROR(api.ort->KernelInfo_GetInputName(info, i, nullptr, &length));
    if (length <= 1) continue;  // an optional operand that is not given
    OrtTypeInfo* type_info = nullptr;
    DF_RETURN_IF_ERROR(api.ort->KernelInfo_GetInputTypeInfo(info, i, &type_info));
    const Owned<OrtTypeInfo> owned = Own(type_info, api.ort->ReleaseTypeInfo);
    inputs[i].present = true;
    DF_RETURN_IF_ERROR(DescribeType(api, type_info, &inputs[i]));
  }
  DF_RETURN_IF_ERROR(api.ort->KernelInfo_GetOutputCount(info, &count));
  for (size_t i = 0; i < std::min(count, max_outputs); ++i) {
    size_t length = 0;
    DF_RETURN_IF_ERROR(api.ort->KernelInfo_GetOutputName(info, i, nullptr, &length));
    if (length <= 1) continue;
    OrtTypeInfo* type_info = nullptr;
    DF_RETURN_IF_ERROR(api.ort->KernelInfo_GetOutputTypeInfo(info, i, &type_info));
    const Owned<OrtTypeInfo> owned = Own(type_info, api.ort->ReleaseTypeInfo);
    outputs[i].present = true;
    DF_RETURN_IF_ERROR(DescribeType(api, type_info, &outputs[i]));
  }
  return nullptr;
}

namespace {

// What was written before a parallel step is seen in it, and what the step wrote is seen after it. ORT's pool sees to
// that as well, by atomics that ThreadSanitizer does not know of: said once more where it does.
struct PoolTask {
  void (*fn)(void* ctx, int64_t i);
  void* ctx;
  std::atomic<int64_t> done{0};
};

}  // namespace

void RunOnPool(void* user, int64_t count, void (*fn)(void* ctx, int64_t i), void* ctx) {
  auto* pool = static_cast<Pool*>(user);
  if (count <= 0 || pool->status) return;
  if (count == 1) return fn(ctx, 0);
  PoolTask task{fn, ctx};
  task.done.store(0, std::memory_order_release);
  pool->status = pool->api->ort->KernelContext_ParallelFor(
      pool->context,
      [](void* data, size_t i) {
        auto* task = static_cast<PoolTask*>(data);
        static_cast<void>(task->done.load(std::memory_order_acquire));
        task->fn(task->ctx, static_cast<int64_t>(i));
        task->done.fetch_add(1, std::memory_order_release);
      },
      static_cast<size_t>(count), 0, &task);
  static_cast<void>(task.done.load(std::memory_order_acquire));
}

OrtStatus* NodeName(const Api& api, const OrtKernelInfo* info, std::string* name) {
  size_t bytes = 0;
  DF_RETURN_IF_ERROR(api.ort->KernelInfo_GetNodeName(info, nullptr, &bytes));
  std::string text(bytes, '\0');
  if (bytes) DF_RETURN_IF_ERROR(api.ort->KernelInfo_GetNodeName(info, text.data(), &bytes));
  *name = text.c_str();
  return nullptr;
}

std::string NodeText(const char* op_type, const std::string& node) {
  return std::string(op_type) + " node '" + node + "': ";
}

OrtStatus* WithNode(const Api& api, const char* op_type, const std::string& node, OrtStatus* status) {
  if (!status) return nullptr;
  const Owned<OrtStatus> owned = Own(status, api.ort->ReleaseStatus);
  return MakeStatus(api, api.ort->GetErrorCode(status), NodeText(op_type, node) + api.ort->GetErrorMessage(status));
}

}  // namespace deltafuse::ep
