// What a kernel's binding knows of its operands, before a graph runs and at a call, and the checks that all ops make.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <string>

#include "ort.h"

namespace deltafuse::ep {

inline constexpr int64_t kUnknown = -1;
inline constexpr int kMaxRank = 4;

struct Operand {
  bool present = false;
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  int64_t rank = kUnknown;
  std::array<int64_t, kMaxRank> dims{};  // kUnknown where only known at run time

  // Whether its whole shape is known.
  bool Known() const {
    if (rank == kUnknown) return false;
    for (int64_t i = 0; i < rank && i < kMaxRank; ++i)
      if (dims[i] == kUnknown) return false;
    return true;
  }
  // One dimension, or kUnknown.
  int64_t Dim(size_t axis) const { return present && rank > static_cast<int64_t>(axis) ? dims[axis] : kUnknown; }
};

struct Shape {
  std::array<int64_t, kMaxRank> dims{};
  size_t rank = 0;

  size_t Elements() const {
    size_t count = 1;
    for (size_t i = 0; i < rank; ++i) count *= static_cast<size_t>(dims[i]);
    return count;
  }
};

template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

const char* TypeName(ONNXTensorElementDataType type);

// Bytes of one element of the types that the ops take.
size_t BytesOf(ONNXTensorElementDataType type);

// All of these return "" or the reason for a refusal, one sentence.

// Checks an operand against the dimensions that it must have; those given as kUnknown may be anything.
// Dimensions that the operand itself does not know yet pass.
std::string CheckShape(const char* name, const Operand& operand, std::initializer_list<int64_t> expected);
std::string CheckType(const char* name, const Operand& operand, ONNXTensorElementDataType expected);

template <typename Enum>
struct Choice {
  const char* name;
  Enum value;
};

// "" when `text` is one of the choices, else the refusal that lists them.
template <typename Enum>
std::string Choose(const char* attribute, const std::string& text, std::initializer_list<Choice<Enum>> choices,
                   Enum* value) {
  std::string names;
  for (const auto& choice : choices) {
    if (text == choice.name) {
      *value = choice.value;
      return "";
    }
    names += names.empty() ? choice.name : Text(", ", choice.name);
  }
  return Text(attribute, " '", text, "': expected one of ", names);
}

// float32, float16 or bfloat16, in an enum whose values are 0, 1 and 2 for them. False for another type.
template <typename DType>
bool ToDType(ONNXTensorElementDataType type, DType* dtype) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
      *dtype = DType::kFloat32;
      return true;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16:
      *dtype = DType::kFloat16;
      return true;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16:
      *dtype = DType::kBFloat16;
      return true;
    default:
      return false;
  }
}

}  // namespace deltafuse::ep

#define DF_REFUSE_IF(condition, ...)                          \
  do {                                                        \
    if (condition) return ::deltafuse::ep::Text(__VA_ARGS__); \
  } while (false)
#define DF_TRY(expression)                                                             \
  do {                                                                                 \
    if (std::string df_reason_ = (expression); !df_reason_.empty()) return df_reason_; \
  } while (false)
