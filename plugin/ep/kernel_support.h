// What the kernels of all ops need of ORT: descriptions of operands, the thread pool, errors with the node's name.
#pragma once

#include <string>

#include "operands.h"
#include "ort.h"

namespace deltafuse::ep {

// Element type and shape, as far as they are known.
OrtStatus* DescribeType(const Api& api, const OrtTypeInfo* type_info, Operand* operand);
// What the graph knows of a value before it runs. Null or without a name: an optional operand that is not given.
OrtStatus* DescribeValue(const Api& api, const OrtValueInfo* value, Operand* operand);
// A tensor of a call, and where its data are.
OrtStatus* DescribeValue(const Api& api, const OrtValue* value, Operand* operand, const void** data);

// All inputs and outputs of a node of the graph. `inputs` and `outputs` have room for `max_inputs` and `max_outputs`;
// with more than those, `reason` says so.
OrtStatus* DescribeNode(const Api& api, const OrtNode* node, Operand* inputs, size_t max_inputs, Operand* outputs,
                        size_t max_outputs, std::string* reason);
// Likewise where a kernel is created.
OrtStatus* DescribeKernel(const Api& api, const OrtKernelInfo* info, Operand* inputs, size_t max_inputs,
                          Operand* outputs, size_t max_outputs);

// ORT's thread pool as the kernels ask for it: the user data of RunOnPool.
struct Pool {
  const Api* api;
  const OrtKernelContext* context;
  OrtStatus* status;
};
void RunOnPool(void* user, int64_t count, void (*fn)(void* ctx, int64_t i), void* ctx);

// The name of the node that a kernel is created for.
OrtStatus* NodeName(const Api& api, const OrtKernelInfo* info, std::string* name);
// What an error says first.
std::string NodeText(const char* op_type, const std::string& node);
// The status with the node's name before its message. Takes `status` over.
OrtStatus* WithNode(const Api& api, const char* op_type, const std::string& node, OrtStatus* status);

}  // namespace deltafuse::ep
