// The execution provider of one session, on one device.
#pragma once

#include <string>

#include "device.h"
#include "ort.h"

namespace deltafuse::ep {

class Ep final : public OrtEp {
 public:
  // `registry` and `device` belong to the factory. `tag` names the session for those who ask for refusals.
  Ep(const Api& api, const Device& device, const OrtKernelRegistry* registry, const OrtLogger* logger, std::string tag);
  ~Ep();
  Ep(const Ep&) = delete;
  Ep& operator=(const Ep&) = delete;

 private:
  OrtStatus* FindNodes(const OrtGraph* graph, OrtEpGraphSupportInfo* support);
  OrtStatus* ConsiderNode(const OrtNode* node, OrtEpGraphSupportInfo* support);
  OrtStatus* Refuse(const OrtNode* node, const std::string& reason);

  const Api& api_;
  const Device& device_;
  const OrtKernelRegistry* registry_;
  const OrtLogger* logger_;
  const std::string tag_;
};

}  // namespace deltafuse::ep
