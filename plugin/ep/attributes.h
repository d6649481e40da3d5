// The attributes of a fused node as ORT gives them: on a node of the graph, and when a kernel is created.
#pragma once

#include <map>
#include <string>

#include "ort.h"

namespace deltafuse::ep {

// Where attributes are read from: a node of the graph, or the information that a kernel is created from.
class AttributeSource {
 public:
  virtual ~AttributeSource() = default;
  // False when there is no such attribute (or it has another type): the value is then left alone.
  virtual bool Int(const char* name, int64_t* value) const = 0;
  virtual bool Float(const char* name, float* value) const = 0;
  virtual bool String(const char* name, std::string* value) const = 0;
};

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

using AttributeTypes = std::map<std::string, OrtOpAttrType>;

// Refuses a node with an attribute that is not `known`, by name and type. "" in `reason` where there is none.
OrtStatus* RefuseUnknownAttribute(const Api& api, const OrtNode* node, const AttributeTypes& known,
                                  std::string* reason);

}  // namespace deltafuse::ep
