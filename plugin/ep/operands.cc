#include "operands.h"

namespace deltafuse::ep {
namespace {

std::string ShapeText(const Operand& operand) {
  std::string text = "[";
  for (int64_t i = 0; i < operand.rank; ++i) {
    if (i) text += ", ";
    text += i >= kMaxRank ? "..." : operand.dims[i] == kUnknown ? "?" : std::to_string(operand.dims[i]);
    if (i >= kMaxRank) break;
  }
  return text + "]";
}

}  // namespace

const char* TypeName(ONNXTensorElementDataType type) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
      return "float32";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
      return "float16";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
      return "bfloat16";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE:
      return "float64";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8:
      return "int8";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8:
      return "uint8";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32:
      return "int32";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64:
      return "int64";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL:
      return "bool";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN:
      return "float8e4m3fn";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED:
      return "an unknown type";
    default:
      return "another type";
  }
}

size_t BytesOf(ONNXTensorElementDataType type) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64:
      return 8;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32:
      return 4;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
      return 2;
    default:
      return 1;
  }
}

std::string CheckShape(const char* name, const Operand& operand, std::initializer_list<int64_t> expected) {
  if (operand.rank == kUnknown) return "";
  bool fits = operand.rank == static_cast<int64_t>(expected.size());
  size_t axis = 0;
  for (const int64_t dim : expected) {
    if (fits && dim != kUnknown && operand.dims[axis] != kUnknown && operand.dims[axis] != dim) fits = false;
    ++axis;
  }
  if (fits) return "";
  std::string wanted;
  for (const int64_t dim : expected) wanted += (wanted.empty() ? "" : ", ") + (dim == kUnknown ? "any" : Text(dim));
  return Text(name, " has shape ", ShapeText(operand), ": expected [", wanted, "]");
}

std::string CheckType(const char* name, const Operand& operand, ONNXTensorElementDataType expected) {
  if (operand.type == expected) return "";
  return Text(name, " is ", TypeName(operand.type), ": expected ", TypeName(expected));
}

}  // namespace deltafuse::ep
