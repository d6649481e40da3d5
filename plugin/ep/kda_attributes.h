// The op's attributes as ORT gives them: on a node of the graph, and when a kernel is created.
#pragma once

#include <string>

#include "kda_binding.h"
#include "ort.h"

namespace deltafuse::ep {

class NodeAttributes final : public AttributeSource {
 public:
  NodeAttributes(const Api& api, const OrtNode* node) : api_(api), node_(node) {}
  bool Int(const char* name, int64_t* value) const override;
  bool Float(const char* name, float* value) const override;
  bool String(const char* name, std::string* value) const override;

 private:
  const OrtOpAttr* Find(const char* name, OrtOpAttrType wanted) const;

  const Api& api_;
  const OrtNode* node_;
};

class KernelAttributes final : public AttributeSource {
 public:
  KernelAttributes(const Api& api, const OrtKernelInfo* info) : api_(api), info_(info) {}
  bool Int(const char* name, int64_t* value) const override;
  bool Float(const char* name, float* value) const override;
  bool String(const char* name, std::string* value) const override;

 private:
  const Api& api_;
  const OrtKernelInfo* info_;
};

// The first attribute of the node that this version of the op does not have, by that name and type, or "".
OrtStatus* FindUnknownAttribute(const Api& api, const OrtNode* node, std::string* unknown);

}  // namespace deltafuse::ep
