#include "attributes.h"

#include <vector>

namespace deltafuse::ep {
namespace {

// True when the call succeeded; an attribute that cannot be read counts as absent.
bool Succeeded(const Api& api, OrtStatus* status) {
  if (!status) return true;
  api.ort->ReleaseStatus(status);
  return false;
}

}  // namespace

const OrtOpAttr* NodeAttributes::Find(const char* name, OrtOpAttrType wanted) const {
  const OrtOpAttr* attribute = nullptr;
  OrtOpAttrType type = ORT_OP_ATTR_UNDEFINED;
  if (!Succeeded(api_, api_.ort->Node_GetAttributeByName(node_, name, &attribute)) || !attribute) return nullptr;
  if (!Succeeded(api_, api_.ort->OpAttr_GetType(attribute, &type)) || type != wanted) return nullptr;
  return attribute;
}

bool NodeAttributes::Int(const char* name, int64_t* value) const {
  const OrtOpAttr* attribute = Find(name, ORT_OP_ATTR_INT);
  size_t bytes = 0;
  return attribute && Succeeded(api_, api_.ort->ReadOpAttr(attribute, ORT_OP_ATTR_INT, value, sizeof(*value), &bytes));
}

bool NodeAttributes::Float(const char* name, float* value) const {
  const OrtOpAttr* attribute = Find(name, ORT_OP_ATTR_FLOAT);
  size_t bytes = 0;
  return attribute &&
         Succeeded(api_, api_.ort->ReadOpAttr(attribute, ORT_OP_ATTR_FLOAT, value, sizeof(*value), &bytes));
}

bool NodeAttributes::String(const char* name, std::string* value) const {
  const OrtOpAttr* attribute = Find(name, ORT_OP_ATTR_STRING);
  if (!attribute) return false;
  // With no room for it, the call fails and says how many bytes it needs.
  size_t bytes = 0;
  Succeeded(api_, api_.ort->ReadOpAttr(attribute, ORT_OP_ATTR_STRING, nullptr, 0, &bytes));
  std::string text(bytes, '\0');
  if (bytes && !Succeeded(api_, api_.ort->ReadOpAttr(attribute, ORT_OP_ATTR_STRING, text.data(), bytes, &bytes)))
    return false;
  *value = text.c_str();
  return true;
}

bool KernelAttributes::Int(const char* name, int64_t* value) const {
  return Succeeded(api_, api_.ort->KernelInfoGetAttribute_int64(info_, name, value));
}

bool KernelAttributes::Float(const char* name, float* value) const {
  return Succeeded(api_, api_.ort->KernelInfoGetAttribute_float(info_, name, value));
}

bool KernelAttributes::String(const char* name, std::string* value) const {
  size_t bytes = 0;
  if (!Succeeded(api_, api_.ort->KernelInfoGetAttribute_string(info_, name, nullptr, &bytes))) return false;
  std::string text(bytes, '\0');
  if (bytes && !Succeeded(api_, api_.ort->KernelInfoGetAttribute_string(info_, name, text.data(), &bytes)))
    return false;
  *value = text.c_str();
  return true;
}

OrtStatus* RefuseUnknownAttribute(const Api& api, const OrtNode* node, const AttributeTypes& known,
                                  std::string* reason) {
  size_t count = 0;
  DF_RETURN_IF_ERROR(api.ort->Node_GetNumAttributes(node, &count));
  std::vector<const OrtOpAttr*> attributes(count);
  if (count) DF_RETURN_IF_ERROR(api.ort->Node_GetAttributes(node, attributes.data(), count));
  for (const OrtOpAttr* attribute : attributes) {
    const char* name = nullptr;
    OrtOpAttrType type = ORT_OP_ATTR_UNDEFINED;
    DF_RETURN_IF_ERROR(api.ort->OpAttr_GetName(attribute, &name));
    DF_RETURN_IF_ERROR(api.ort->OpAttr_GetType(attribute, &type));
    const auto found = known.find(name);
    if (found == known.end() || found->second != type) {
      *reason =
          std::string("attribute ") + name + " is not one that this version of deltafuse knows, or not of its type";
      return nullptr;
    }
  }
  return nullptr;
}

}  // namespace deltafuse::ep
